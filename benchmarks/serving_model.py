"""Models of real shapes with random weights, and the MoE layers that `benchmarks.serving` puts into them.

The model and its steps are those of the examples (``examples/decoder.py``, ``examples/engine.py``). Router
weights are random, so routing is close to uniform.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import cases, variants
from benchmarks.cases import Cell
from benchmarks.inputs import LARGEST, scaled_normal
from benchmarks.search import label
from moe_pallas import GroupedGemmConfig, MoE, MoESpec, QuantScheme, select_backend

sys.path.append(str(Path(__file__).parent.parent / "examples"))
import decoder as decoder
import engine as engine

DTYPE = jnp.dtype("bfloat16")


def _model(
    family: str,
    spec: MoESpec,
    *,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    positions: int = 32768,
) -> decoder.DecoderConfig:
    return decoder.DecoderConfig(
        family=family,
        vocab_size=vocab,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=positions,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_embeddings=False,
        eos_token_ids=(),  # no sequence ends before the measurement does
        moe=MoE(spec),
    )


# As their config.json files on the Hugging Face hub say.
MODELS = {
    "qwen3-30b-a3b": _model(
        "qwen3_moe",
        cases.MODELS["qwen3-30b-a3b"],
        layers=48,
        heads=32,
        kv_heads=4,
        head_dim=128,
        vocab=151936,
    ),
    "mixtral-8x7b": _model(
        "mixtral", cases.MODELS["mixtral-8x7b"], layers=32, heads=32, kv_heads=8, head_dim=128, vocab=32000
    ),
}
TINY_MODELS = {
    "tiny": _model(
        "qwen3_moe",
        MoESpec(num_experts=8, top_k=2, hidden_size=32, intermediate_size=48),
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        vocab=64,
        positions=256,
    )
}


def make_params(config: decoder.DecoderConfig, scheme: QuantScheme | None) -> decoder.Params:
    """Random weights in bfloat16, experts quantised where there is a scheme; block by block.

    Logits are N(0, 1), so that sampled tokens, and with them the experts hit, are as diverse as the prompts'.
    """
    embed, head, *blocks = jax.random.split(jax.random.key(0), config.num_layers + 2)
    return {
        "embed": _table(config, embed, 1.0),
        "layers": [_block(config, scheme, key) for key in blocks],
        "norm": jnp.ones(config.hidden_size, DTYPE),
        "lm_head": _table(config, head, config.hidden_size**-0.5),
    }


@functools.partial(jax.jit, static_argnums=(0, 2))
def _table(config: decoder.DecoderConfig, key: jax.Array, std: float) -> jax.Array:
    return std * jax.random.normal(key, (config.vocab_size, config.hidden_size), DTYPE)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _block(config: decoder.DecoderConfig, scheme: QuantScheme | None, key: jax.Array) -> decoder.Params:
    """One block. Its experts in float32, which are given up, are never computed."""
    own, *experts = jax.random.split(key, 3)
    block = jax.tree.map(lambda x: x.astype(DTYPE), decoder.init_block(config, own))
    spec = config.moe.spec
    for name, expert_key in zip(("w13", "w2"), experts, strict=True):
        gate_up = spec.gate_up if name == "w13" and spec.gated else None
        shape = spec.param_shapes[name]
        # Embeddings are N(0, 1), and all blocks together add about as little to them. With outputs of full
        # size each rounding would decide what experts later blocks choose, and logits could not be compared.
        std = (2 * config.num_layers) ** -0.5 if name == "w2" else 1.0
        block["moe"][name] = scaled_normal(expert_key, shape, DTYPE, scheme, gate_up, LARGEST[name], std)
    return block


def transpose_experts(params: decoder.Params) -> decoder.Params:
    """Lay every expert's matrices out as the baselines want them; block by block, the old ones are freed."""
    turn = jax.jit(lambda w: w.mT)
    for block in params["layers"]:
        for name in ("w13", "w2"):
            block["moe"][name] = turn(block["moe"][name])
    return params


@dataclasses.dataclass(frozen=True)
class BaselineLayer:
    """A baseline of `benchmarks.variants` where a `MoE` stands; takes transposed experts."""

    spec: MoESpec
    name: str
    config: str

    def apply(
        self, params: Mapping[str, Any], x: jax.Array, *, mask: jax.Array | None, return_aux: bool
    ) -> tuple[jax.Array, None]:
        """As `MoE.apply`; padding comes out as 0."""
        rows = x.reshape(-1, x.shape[-1])
        cell = Cell(case="", spec=self.spec, tokens=len(rows), dtype=DTYPE.name)
        logits = rows.astype(jnp.float32) @ params["router"].astype(jnp.float32).T
        layer = variants.VARIANTS[self.name].layer(cell, self.config)
        y = layer(rows, logits, params["w13"], params["w2"]).reshape(x.shape)
        return (y if mask is None else jnp.where(mask[..., None], y, 0)), None


class Variant(NamedTuple):
    """What takes the MoE layers' place.

    Attributes:
      what: In words.
      layer: ``layer(cell)`` → the layer for so many tokens, with all choices made; raises UnsupportedError.
      is_transposed: Whether it takes transposed experts.
    """

    what: str
    layer: Callable[[Cell], Any]
    is_transposed: bool = False


def _ours(backend: str, config: Any = None) -> Callable[[Cell], MoE]:
    def layer(cell: Cell) -> MoE:
        chosen = select_backend(cell.problem, backend, config=config)
        return MoE(cell.spec, backend=chosen.backend, config=chosen.config)

    return layer


def _baseline(name: str) -> Callable[[Cell], BaselineLayer]:
    def layer(cell: Cell) -> BaselineLayer:
        if reason := variants.VARIANTS[name].supports(cell, jax.default_backend()):
            raise NotImplementedError(reason)
        return BaselineLayer(cell.spec, name, variants.VARIANTS[name].configs(cell)[0])

    return layer


PORTABLE = "xla"
VARIANTS = {
    "auto": Variant("what a user gets: kernel and configuration chosen for each size", _ours("auto")),
    "no_swap_ab": Variant("the oracle without Swap-AB: grouped_gemm for all", _ours("grouped_gemm")),
    "no_oracle": Variant(
        "one kernel in one configuration for all sizes: grouped_gemm in GroupedGemmConfig()",
        _ours("grouped_gemm", GroupedGemmConfig()),
    ),
    PORTABLE: Variant("the portable backend", _ours("xla")),
    "tokamax": Variant("tokamax.ragged_dot with routing in XLA", _baseline("tokamax"), is_transposed=True),
}


def name_of(layer: Any) -> str:
    """What a layer runs on, and how that cuts the problem up."""
    if isinstance(layer, BaselineLayer):
        return f"{layer.name} {layer.config}".strip()
    return layer.backend if layer.config is None else f"{layer.backend} {label(layer.config)}"
