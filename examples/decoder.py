"""A decoder-only mixture-of-experts transformer: Mixtral, Qwen3-MoE and OLMoE, with a KV cache.

The three families differ in little: where queries and keys are normalised (`QKNorm`) and how the router
turns logits into weights (`MoESpec`). Everything here is a pure function of a `DecoderConfig` (static), a
pytree of parameters and arrays; the feed-forward part of a block is `moe_pallas.MoE.apply` and nothing else.

Sizes: B sequences, T tokens of each in this call, S slots of the cache, D hidden, H query heads, G key and
value heads, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from moe_pallas import MoE, QTensor, Sharding, UnsupportedError, quantize_experts
from moe_pallas.interop import (
    SafetensorsFolder,
    from_huggingface,
    quantization_config,
    read_dequantised,
    to_huggingface,
    with_gate_up,
)

Params = dict[str, Any]

# What a bfloat16 or float16 product accumulates in is XLA's choice (float32); for float32 this keeps GPUs
# from rounding the operands to TF32.
_PRECISION = jax.lax.Precision.HIGHEST


class QKNorm(enum.StrEnum):
    """Where queries and keys pass an RMSNorm before the rotary embedding."""

    NONE = "none"
    HEAD = "head"  # each head by itself, weight (head_dim,)
    PROJECTION = "projection"  # all heads together, weight (heads * head_dim,)


_FAMILIES = {"mixtral": QKNorm.NONE, "qwen3_moe": QKNorm.HEAD, "olmoe": QKNorm.PROJECTION}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What the model is, apart from its weights; hashable, so it can be a static argument of ``jax.jit``.

    Args:
      family: ``"mixtral"``, ``"qwen3_moe"`` or ``"olmoe"``: Hugging Face's ``model_type``.
      vocab_size: V.
      num_layers: Number of blocks, all alike.
      num_heads: H, query heads.
      num_kv_heads: G, key and value heads; each serves H / G query heads.
      head_dim: Width of a head, even.
      max_positions: Longest sequence, prompt and continuation together.
      rope_theta: Base of the rotary embedding's wavelengths.
      rms_norm_eps: Added to the mean square in every RMSNorm.
      tie_embeddings: The output projection is the embedding table.
      eos_token_ids: A sequence ends after any of these.
      moe: The MoE layer that every block has.
    """

    family: str
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float
    rms_norm_eps: float
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]
    moe: MoE

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_positions"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ValueError(f"{name} is an int >= 1; got {value!r:.100}.")
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is a finite number > 0; got {value!r:.100}.")
        if type(self.tie_embeddings) is not bool:
            raise ValueError(f"tie_embeddings is True or False; got {self.tie_embeddings!r:.100}.")
        if any(type(token) is not int for token in self.eos_token_ids):
            raise ValueError(f"eos_token_ids are ints; got {self.eos_token_ids!r:.100}.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads divides num_heads, each serves as many query heads; got {self.num_kv_heads} "
                f"and {self.num_heads}."
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim is even, at least 2, for the rotary embedding; got {self.head_dim}.")

    @property
    def hidden_size(self) -> int:
        return self.moe.spec.hidden_size

    @property
    def qk_norm(self) -> QKNorm:
        return _FAMILIES[self.family]

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """Rows of ``qkv`` that make queries, keys and values."""
        kv_rows = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, kv_rows, kv_rows

    @classmethod
    def from_huggingface(cls, config: Mapping[str, Any], moe: MoE) -> DecoderConfig:
        """Reads the contents of a ``config.json``.

        Raises:
          UnsupportedError: Another architecture, or a variation of one that isn't computed here.
          ValueError: A field that the architecture needs is missing, or of the wrong type or range.
        """
        check_supported(config)
        rope = config.get("rope_parameters") or {}
        eos = config.get("eos_token_id")
        try:
            heads: Any = config["num_attention_heads"]
            head_dim: Any = config.get("head_dim")
            if head_dim is None and isinstance(heads, int) and heads > 0:
                head_dim = moe.spec.hidden_size // heads
            return cls(
                family=config["model_type"],
                vocab_size=config["vocab_size"],
                num_layers=config["num_hidden_layers"],
                num_heads=heads,
                num_kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=head_dim,
                max_positions=config["max_position_embeddings"],
                rope_theta=rope.get("rope_theta") or config["rope_theta"],
                rms_norm_eps=config["rms_norm_eps"],
                tie_embeddings=config.get("tie_word_embeddings", False),
                eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
                moe=moe,
            )
        except KeyError as missing:
            raise ValueError(
                f"config.json of model_type {config['model_type']!r} needs the field {missing}; it has "
                f"{', '.join(sorted(config))}."
            ) from None
        except ValueError as error:
            raise ValueError(
                f"config.json of model_type {config['model_type']!r} makes no sense: {error}"
            ) from error

    def to_huggingface(self) -> dict[str, Any]:
        """The contents of a ``config.json`` from which `from_huggingface` makes the same config."""
        spec = self.moe.spec
        mixtral = self.family == "mixtral"
        architectures = {
            "mixtral": "MixtralForCausalLM",
            "qwen3_moe": "Qwen3MoeForCausalLM",
            "olmoe": "OlmoeForCausalLM",
        }
        fields: dict[str, Any] = {
            "architectures": [architectures[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "hidden_act": "silu",
            "intermediate_size": spec.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "eos_token_id": list(self.eos_token_ids) or None,
            "num_local_experts" if mixtral else "num_experts": spec.num_experts,
            "num_experts_per_tok": spec.top_k,
        }
        if not mixtral:
            fields["norm_topk_prob"] = spec.renormalize
        if self.family == "qwen3_moe":
            fields |= {"moe_intermediate_size": spec.intermediate_size, "decoder_sparse_step": 1}
        return fields


def check_supported(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedError, with the field that is to blame, unless `forward` computes this model."""
    families = ", ".join(_FAMILIES)
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise UnsupportedError(
            "decoder", f"config.json has model_type {family!r:.100}.", f"a checkpoint of {families}."
        )
    sliding = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope_parameters of config.json is an object; got {rope!r:.100}.")
    variations = {
        "sliding_window": sliding,
        "attention_bias": config.get("attention_bias"),
        "clip_qkv": config.get("clip_qkv"),
        "rope_type": None if (kind := rope.get("rope_type", "default")) == "default" else kind,
        "mlp_only_layers": config.get("mlp_only_layers"),
        "decoder_sparse_step": None if config.get("decoder_sparse_step", 1) == 1 else "not 1",
    }
    for name, value in variations.items():
        if value:
            raise UnsupportedError(
                "decoder",
                f"config.json of model_type {family!r} sets {name} = {value!r:.100}.",
                "full attention without biases or clipping, plain rotary embeddings, an MoE in every block.",
            )


class KVCache(NamedTuple):
    """Keys (rotated) and values of one block, both (B, G, S, head_dim): slot = position in the sequence."""

    keys: jax.Array
    values: jax.Array


class MoERecord(NamedTuple):
    """What one MoE layer saw and did in a call: inputs and outputs (B, T, D), and its `MoEAux`.

    Under ``jax.jit`` whatever the caller does not use of it costs nothing.
    """

    inputs: jax.Array
    outputs: jax.Array
    aux: Any


def init_cache(config: DecoderConfig, batch: int, slots: int, dtype: Any) -> tuple[KVCache, ...]:
    """An empty cache for every block."""
    shape = (batch, config.num_kv_heads, slots, config.head_dim)
    return tuple(KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers))


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """``x @ weight.T``: (..., in) and (out, in), as checkpoints store it, to (..., out)."""
    return jnp.einsum("...i,oi->...o", x, weight, precision=_PRECISION)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, computed in float32."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight


def rotary_angles(config: DecoderConfig, positions: jax.Array) -> jax.Array:
    """Angles (B, T, head_dim / 2) float32, ``position / theta^(2i / head_dim)`` for pair i."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    frequencies = jnp.asarray(config.rope_theta**-exponents, jnp.float32)
    return positions.astype(jnp.float32)[..., None] * frequencies


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotary embedding of x (B, T, heads, head_dim): pair i is the elements i and i + head_dim / 2."""
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attention(
    config: DecoderConfig, params: Params, x: jax.Array, positions: jax.Array, cache: KVCache | None
) -> tuple[jax.Array, KVCache | None]:
    """Causal grouped-query attention.

    Position p's key and value go to slot p of the cache, and a query at position p sees the slots 0 … p.
    So a prompt may be padded at its end: what padding writes lies ahead of every real query, until the
    token that belongs there overwrites it. Positions past the last slot are not written.

    Args:
      config: The model.
      params: This block's attention weights.
      x: (B, T, D) normalised input.
      positions: (B, T) int32.
      cache: Earlier keys and values, or None if this call holds the whole sequences.

    Returns:
      (B, T, D), and the cache with this call's keys and values (None if there was none).
    """
    heads, groups, width = config.num_heads, config.num_kv_heads, config.head_dim
    batch, tokens, _ = x.shape
    q, k, v = jnp.split(linear(x, params["qkv"]), np.cumsum(config.qkv_rows)[:2].tolist(), axis=-1)
    if config.qk_norm is QKNorm.PROJECTION:
        q = rms_norm(q, params["q_norm"], config.rms_norm_eps)
        k = rms_norm(k, params["k_norm"], config.rms_norm_eps)
    q = q.reshape(batch, tokens, heads, width)
    k, v = (y.reshape(batch, tokens, groups, width) for y in (k, v))
    if config.qk_norm is QKNorm.HEAD:
        q = rms_norm(q, params["q_norm"], config.rms_norm_eps)
        k = rms_norm(k, params["k_norm"], config.rms_norm_eps)
    angles = rotary_angles(config, positions)
    q, k = rotate(q, angles), rotate(k, angles)

    if cache is None:
        keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
    else:
        row = jnp.arange(batch)[:, None]
        keys = cache.keys.at[row, :, positions].set(k, mode="drop")
        values = cache.values.at[row, :, positions].set(v, mode="drop")
        cache = KVCache(keys, values)

    # Sequences and heads first: products over (T, head_dim) and (S, head_dim) that need no transposed copy.
    q = q.reshape(batch, tokens, groups, heads // groups, width).transpose(0, 2, 3, 1, 4)
    scores = jnp.einsum(
        "bghtd,bgsd->bghts", q, keys, precision=_PRECISION, preferred_element_type=jnp.float32
    ) / np.sqrt(width).astype(np.float32)
    visible = jnp.arange(keys.shape[2]) <= positions[:, :, None]  # (B, T, S)
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    mixed = jnp.einsum("bghts,bgsd->bghtd", weights, values, precision=_PRECISION)
    mixed = mixed.transpose(0, 3, 1, 2, 4).reshape(batch, tokens, heads * width)
    return linear(mixed, params["o"]), cache


# Blocks are alike, so jit traces one of them once and calls it again for the others.
@functools.partial(jax.jit, static_argnums=0)
def block(
    config: DecoderConfig,
    params: Params,
    x: jax.Array,
    positions: jax.Array,
    cache: KVCache | None,
    mask: jax.Array | None,
) -> tuple[jax.Array, KVCache | None, MoERecord]:
    """One transformer block: ``x + attention(norm(x))``, then ``x + moe(norm(x))``."""
    mixed, cache = attention(
        config, params, rms_norm(x, params["attention_norm"], config.rms_norm_eps), positions, cache
    )
    x = x + mixed
    moe_in = rms_norm(x, params["moe_norm"], config.rms_norm_eps)
    moe_out, aux = config.moe.apply(params["moe"], moe_in, mask=mask, return_aux=True)
    return x + moe_out, cache, MoERecord(moe_in, moe_out, aux)


def forward(
    config: DecoderConfig,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array | None = None,
    cache: tuple[KVCache, ...] | None = None,
    mask: jax.Array | None = None,
) -> tuple[jax.Array, tuple[KVCache, ...] | None, tuple[MoERecord, ...]]:
    """Runs all blocks.

    A Python loop, not ``lax.scan`` over stacked weights: on the portable backend a scan would copy each
    block's expert weights out of the stack in every decode step, all E of them, of which a token needs top_k.

    Args:
      config: The model.
      params: As `load_checkpoint` or `init_params` return them.
      tokens: (B, T) int32.
      positions: (B, T) int32; 0 … T - 1 if None.
      cache: From `init_cache` or the call before; None if this call holds the whole sequences.
      mask: (B, T) bool, False for padding: the MoE layers leave those tokens out. None: all are real.

    Returns:
      Hidden states (B, T, D) after the last norm (see `unembed`), the new cache, each block's `MoERecord`.
    """
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    x = params["embed"][tokens]
    new_cache, records = [], []
    for i, layer in enumerate(params["layers"]):
        x, layer_cache, record = block(config, layer, x, positions, cache and cache[i], mask)
        new_cache.append(layer_cache)
        records.append(record)
    x = rms_norm(x, params["norm"], config.rms_norm_eps)
    return x, None if cache is None else tuple(new_cache), tuple(records)


def unembed(config: DecoderConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """Logits (..., V) float32 of hidden states (..., D)."""
    table = params["embed" if config.tie_embeddings else "lm_head"]
    return linear(hidden, table).astype(jnp.float32)


def init_params(config: DecoderConfig, key: jax.Array) -> Params:
    """Random float32 parameters for training from scratch."""
    hidden = config.hidden_size
    embed, head, *blocks = jax.random.split(key, config.num_layers + 2)
    params = {
        "embed": _normal(embed, config.vocab_size, hidden, std=0.02),
        "layers": [init_block(config, key) for key in blocks],
        "norm": jnp.ones(hidden),
    }
    if not config.tie_embeddings:
        params["lm_head"] = _normal(head, config.vocab_size, hidden, std=0.02)
    return params


def init_block(config: DecoderConfig, key: jax.Array) -> Params:
    """Random float32 parameters of one block."""
    hidden, (inner, kv_inner, _) = config.hidden_size, config.qkv_rows
    *qkv, o, moe = jax.random.split(key, 5)
    params = {
        "attention_norm": jnp.ones(hidden),
        "qkv": jnp.concatenate(
            [
                _normal(key, rows, hidden, std=hidden**-0.5)
                for key, rows in zip(qkv, config.qkv_rows, strict=True)
            ]
        ),
        # Every block adds two terms to the residual stream; together they shall not outgrow it.
        "o": _normal(o, hidden, inner, std=(2 * config.num_layers * inner) ** -0.5),
        "moe_norm": jnp.ones(hidden),
        "moe": config.moe.init(moe),
    }
    if config.qk_norm is QKNorm.HEAD:
        params |= {"q_norm": jnp.ones(config.head_dim), "k_norm": jnp.ones(config.head_dim)}
    elif config.qk_norm is QKNorm.PROJECTION:
        params |= {"q_norm": jnp.ones(inner), "k_norm": jnp.ones(kv_inner)}
    return params


def _normal(key: jax.Array, *shape: int, std: float) -> jax.Array:
    return std * jax.random.normal(key, shape, jnp.float32)


# Our names for what stands in a block, the MoE layer aside, and the hub's below "model.layers.{i}.".
_LAYER_TENSORS = {
    "attention_norm": "input_layernorm",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "moe_norm": "post_attention_layernorm",
}
# Ours is one matrix, as XLA would make it of the three in every step.
_QKV_TENSORS = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"}
_MODEL_TENSORS = {"embed": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"}


def _dense_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, (inner, kv_inner, _) = config.hidden_size, config.qkv_rows
    per_head = config.qk_norm is QKNorm.HEAD
    return {
        **dict.fromkeys(("attention_norm", "moe_norm", "norm"), (hidden,)),
        **dict.fromkeys(("embed", "lm_head"), (config.vocab_size, hidden)),
        "q": (inner, hidden),
        "k": (kv_inner, hidden),
        "v": (kv_inner, hidden),
        "o": (hidden, inner),
        "q_norm": (config.head_dim if per_head else inner,),
        "k_norm": (config.head_dim if per_head else kv_inner,),
    }


def load_checkpoint(
    folder: str | pathlib.Path, *, dtype: Any = None, backend: str = "auto"
) -> tuple[DecoderConfig, Params]:
    """Reads a Hugging Face checkpoint folder: ``config.json`` and the safetensors files.

    Args:
      folder: The folder.
      dtype: What weights are cast to and the model computes in; None keeps the checkpoint's dtype. Experts
        in FP8 stay so; other matrices in FP8 are dequantised.
      backend: Of the MoE layers, see `moe_pallas.MoE`.

    Raises:
      FileNotFoundError: No such folder, or a file that has to be in it is missing.
      ValueError: A broken file, a config that makes no sense, a tensor of another shape than it says.
      UnsupportedError: See `check_supported`.
    """
    checkpoint = SafetensorsFolder(folder)
    check_supported(checkpoint.config)
    spec, _ = from_huggingface(folder, 0)
    config = DecoderConfig.from_huggingface(
        checkpoint.config | _generation_config(checkpoint), MoE(spec, backend=backend)
    )

    def cast(x: Any) -> Any:
        return x if isinstance(x, QTensor) else jnp.asarray(x, dtype)

    shapes = _dense_shapes(config)

    def read(ours: str, name: str) -> jax.Array:
        if (shape := checkpoint.shape(name)) != shapes[ours]:
            raise ValueError(f"{name} in {checkpoint.folder} is {shape}, need {shapes[ours]} by config.json.")
        weight = read_dequantised(checkpoint, name)
        # Dequantised ones are float32: the norms next to them say what the model is to compute in.
        own = (
            weight.dtype
            if checkpoint.dtype(name) != "F8_E4M3"
            else checkpoint.read("model.norm.weight").dtype
        )
        return jnp.asarray(weight, own if dtype is None else dtype)

    def layer(i: int) -> Params:
        _, moe = from_huggingface(folder, i)
        params: Params = {"moe": {name: cast(param) for name, param in moe.items()}}
        params["qkv"] = jnp.concatenate(
            [read(ours, f"model.layers.{i}.{theirs}.weight") for ours, theirs in _QKV_TENSORS.items()]
        )
        for ours, theirs in _LAYER_TENSORS.items():
            if config.qk_norm is not QKNorm.NONE or ours not in ("q_norm", "k_norm"):
                params[ours] = read(ours, f"model.layers.{i}.{theirs}.weight")
        return params

    params: Params = {"layers": [layer(i) for i in range(config.num_layers)]}
    for ours, theirs in _MODEL_TENSORS.items():
        if ours != "lm_head" or not config.tie_embeddings:
            params[ours] = read(ours, f"{theirs}.weight")
    return config, params


def quantize(config: DecoderConfig, params: Params, scheme: str) -> Params:
    """Rounds the experts of every block to FP8, see `moe_pallas.quantize_experts`; the rest is shared."""
    layers = [
        {**layer, "moe": quantize_experts(layer["moe"], config.moe.spec, scheme)}
        for layer in params["layers"]
    ]
    return {**params, "layers": layers}


def shard(config: DecoderConfig, params: Params, mesh: jax.sharding.Mesh) -> tuple[DecoderConfig, Params]:
    """Lays a model on a mesh: tokens over "data", experts over "expert", their width over "tensor".

    All but the experts is on every device.

    Raises:
      ValueError: The mesh has none of these axes, or the experts can't be split so.
      UnsupportedError: See `moe_pallas.Sharding`.
    """
    sharding = Sharding(mesh)
    spec, layers = config.moe.spec, params["layers"]
    if sharding.size(sharding.tensor) > 1:
        converted = [with_gate_up(config.moe.spec, layer["moe"], "interleaved") for layer in layers]
        spec = converted[0][0]
        layers = [{**layer, "moe": moe} for layer, (_, moe) in zip(layers, converted, strict=True)]
    config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, spec=spec, sharding=sharding))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    experts = sharding.param_shardings(spec)

    def place(layer: Params) -> Params:
        rest = {name: value for name, value in layer.items() if name != "moe"}
        return {**jax.device_put(rest, everywhere), "moe": jax.device_put(layer["moe"], experts)}

    rest = {name: value for name, value in params.items() if name != "layers"}
    return config, {**jax.device_put(rest, everywhere), "layers": [place(layer) for layer in layers]}


def quant_of(params: Params) -> str:
    """How the experts are quantised: ``"none"``, ``"fp8_tensor"``, ``"fp8_channel"`` or ``"fp8_block"``."""
    w13 = params["layers"][0]["moe"]["w13"]
    return w13.scheme.name if isinstance(w13, QTensor) else "none"


def _generation_config(checkpoint: SafetensorsFolder) -> dict[str, Any]:
    """End-of-sequence ids of ``generation_config.json``, where there is one: they go before config.json's."""
    file = "generation_config.json"
    fields = checkpoint.json(file) if (checkpoint.folder / file).is_file() else {}
    return {name: fields[name] for name in ("eos_token_id",) if fields.get(name) is not None}


def save_checkpoint(folder: str | pathlib.Path, config: DecoderConfig, params: Params, dtype: Any) -> None:
    """Writes what `load_checkpoint` reads, with the hub's names and every weight but FP8 cast to dtype."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)

    def is_fp8(x: Any) -> bool:
        return isinstance(x, QTensor)

    cast = jax.tree.map(lambda x: x if is_fp8(x) else np.asarray(x.astype(dtype)), params, is_leaf=is_fp8)
    tensors = {f"{_MODEL_TENSORS[n]}.weight": cast[n] for n in _MODEL_TENSORS if n in cast}
    for i, layer in enumerate(cast["layers"]):
        for ours, theirs in _LAYER_TENSORS.items():
            if ours in layer:
                tensors[f"model.layers.{i}.{theirs}.weight"] = layer[ours]
        parts = np.split(layer["qkv"], np.cumsum(config.qkv_rows)[:2])
        for theirs, part in zip(_QKV_TENSORS.values(), parts, strict=True):
            tensors[f"model.layers.{i}.{theirs}.weight"] = np.ascontiguousarray(part)
        tensors |= to_huggingface(config.moe.spec, layer["moe"], i, family=config.family)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = config.to_huggingface() | {"dtype": jnp.dtype(dtype).name}
    if is_fp8(w13 := cast["layers"][0]["moe"]["w13"]):
        fields["quantization_config"] = quantization_config(w13.scheme)
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
