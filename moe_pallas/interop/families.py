"""The model families on the Hugging Face hub: their config keys and their tensors' names.

A family's MoE block comes in one of two forms. *Per expert*, as on the hub, every expert has matrices
of its own (``…experts.3.gate_proj.weight``). *Packed*, as newer transformers hold it, there are
``mlp.experts.gate_up_proj`` (E, 2F, D) and ``mlp.experts.down_proj`` (E, D, F). gpt-oss is always
packed, and the other way round: gate_up_proj (E, D, 2F) with gate and up columns interleaved, down_proj
(E, F, D).

`Family.tensors` states once, for reading and writing, which tensor is which part of which parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from moe_pallas.errors import UnsupportedError
from moe_pallas.spec import Activation, GateUp, GroupScore, MoESpec, Scoring
from moe_pallas.untrusted import clipped

Config = Mapping[str, Any]

_ACTIVATIONS = {
    "silu": Activation.SWIGLU,
    "swish": Activation.SWIGLU,
    "gelu": Activation.GEGLU,
    "gelu_new": Activation.GEGLU_TANH,
    "gelu_pytorch_tanh": Activation.GEGLU_TANH,
}
# Bounds the walk over the layers when config.json is nonsense; the deepest known models have about 130.
_MAX_LAYERS = 10_000


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint, and the part of a parameter that it is.

    Args:
      name: Its full name.
      shape: Its shape in the checkpoint.
      param: The parameter's name in `MoESpec.param_shapes`.
      index: ``param[index]`` is the part.
      transposed: The checkpoint holds the part with its last two axes swapped.
      other_shape: Another shape that some checkpoints have it in, with the same entries.
    """

    name: str
    shape: tuple[int, ...]
    param: str
    index: tuple[Any, ...] = ()
    transposed: bool = False
    other_shape: tuple[int, ...] | None = None

    def view(self, param: np.ndarray) -> np.ndarray:
        """Give this tensor's part of its parameter, shaped as in the checkpoint; writable if that is."""
        part = param[self.index]
        return part.swapaxes(-1, -2) if self.transposed else part


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How one model family is written down.

    Args:
      name: ``model_type`` in config.json.
      read_spec: Makes the spec from config.json.
      with_experts: Which of so many layers are MoE layers (config, number of layers).
      params: The parameters its checkpoints hold.
      optional_params: Those which some of them lack.
      block: The module that holds router and experts, per expert.
      expert: Names of gate, up and down projection, per expert.
      router: Name of the router's module.
      shared: Name of the shared expert's module.
      gate_up: The order of gate and up that its parameters have.
      always_packed: There is no form per expert, and the packed one is transposed.
    """

    name: str
    read_spec: Callable[[Config], MoESpec]
    with_experts: Callable[[Config, int], list[int]] = lambda config, layers: list(range(layers))
    params: frozenset[str] = frozenset({"router", "w13", "w2"})
    optional_params: frozenset[str] = frozenset()
    block: str = "mlp"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    shared: str = ""
    gate_up: GateUp = GateUp.STACKED
    always_packed: bool = False

    def prefixes(self, layer: int) -> tuple[str, ...]:
        """Give what the names of a layer's MoE tensors may begin with, the hub's first."""
        return tuple(f"model.layers.{layer}.{block}." for block in dict.fromkeys((self.block, "mlp")))

    def tensors(self, spec: MoESpec, prefix: str, *, packed: bool) -> Iterator[Tensor]:
        """Give the tensors of one MoE layer, the small ones first.

        An iterator, because ``spec.num_experts`` may come from a config that nobody has checked yet.
        """
        e, d, f = spec.num_experts, spec.hidden_size, spec.intermediate_size
        yield Tensor(f"{prefix}{self.router}.weight", (e, d), "router")
        if spec.router_bias:
            yield Tensor(f"{prefix}{self.router}.bias", (e,), "router_bias")
        if spec.correction_bias:
            yield Tensor(f"{prefix}{self.router}.e_score_correction_bias", (e,), "correction_bias")
        if fs := spec.shared_intermediate_size:
            yield Tensor(f"{prefix}{self.shared}.gate_proj.weight", (fs, d), "shared_w13", (slice(fs),))
            yield Tensor(f"{prefix}{self.shared}.up_proj.weight", (fs, d), "shared_w13", (slice(fs, None),))
            yield Tensor(f"{prefix}{self.shared}.down_proj.weight", (d, fs), "shared_w2")
        if spec.shared_expert_gate:
            yield Tensor(f"{prefix}{self.shared}_gate.weight", (1, d), "shared_gate", (None,))
        if packed or self.always_packed:
            yield from self._packed_experts(spec, f"{prefix}experts")
            return
        gate, up, down = self.expert
        for i in range(e):
            yield Tensor(f"{prefix}experts.{i}.{gate}.weight", (f, d), "w13", (i, slice(f)))
            yield Tensor(f"{prefix}experts.{i}.{up}.weight", (f, d), "w13", (i, slice(f, None)))
            yield Tensor(f"{prefix}experts.{i}.{down}.weight", (d, f), "w2", (i,))

    def _packed_experts(self, spec: MoESpec, prefix: str) -> Iterator[Tensor]:
        e, d, f, n13 = spec.num_experts, spec.hidden_size, spec.intermediate_size, spec.w13_rows
        if self.always_packed:
            yield Tensor(f"{prefix}.gate_up_proj", (e, d, n13), "w13", transposed=True)
            yield Tensor(f"{prefix}.down_proj", (e, f, d), "w2", transposed=True)
        else:
            yield Tensor(f"{prefix}.gate_up_proj", (e, n13, d), "w13")
            yield Tensor(f"{prefix}.down_proj", (e, d, f), "w2")
        if spec.expert_bias:
            yield Tensor(f"{prefix}.gate_up_proj_bias", (e, n13), "b13")
            yield Tensor(f"{prefix}.down_proj_bias", (e, d), "b2")


def find_family(model_type: Any, caller: str) -> Family:
    """Look a family up by its ``model_type``; UnsupportedError lists the known ones."""
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise UnsupportedError(
            caller, f"no model family {clipped(repr(model_type))} is known.", f"{', '.join(_FAMILIES)}."
        )
    return _FAMILIES[model_type]


def moe_layers(family: Family, config: Config) -> tuple[int, list[int]]:
    """Read how many layers a model has, and which of them have experts."""
    layers = _integer(config, "num_hidden_layers", low=1)
    if layers > _MAX_LAYERS:
        raise ValueError(f"num_hidden_layers={layers} is more than {_MAX_LAYERS}, the most that is read.")
    return layers, family.with_experts(config, layers)


def _required(config: Config, *spellings: str) -> Any:
    found = {key: config[key] for key in spellings if config.get(key) is not None}
    if not found:
        raise ValueError(f"{' or '.join(repr(key) for key in spellings)} is missing.")
    if any(value != next(iter(found.values())) for value in found.values()):
        raise ValueError(f"{found} contradict each other.")
    return next(iter(found.values()))


def _integer(config: Config, key: str, *, low: int, default: int | None = None) -> int:
    value = _required(config, key) if default is None else config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{key!r} is an int >= {low}; got {value!r}.")
    return value


def _common(config: Config, *, width: str, experts: tuple[str, ...]) -> dict[str, Any]:
    """Read the fields that every family has; ``width`` is its key for F, ``experts`` those for E."""
    act = config.get("hidden_act", "silu")
    if not isinstance(act, str) or act not in _ACTIVATIONS:
        raise UnsupportedError(
            "from_huggingface",
            f"hidden_act={clipped(repr(act))} has no counterpart here.",
            f"{', '.join(_ACTIVATIONS)}.",
        )
    return {
        "num_experts": _required(config, *experts),
        "top_k": _required(config, "num_experts_per_tok"),
        "hidden_size": _required(config, "hidden_size"),
        "intermediate_size": _required(config, width),
        "activation": _ACTIVATIONS[act],
    }


_EXPERTS = ("num_experts", "num_local_experts")


def _mixtral(config: Config) -> MoESpec:
    return MoESpec(**_common(config, width="intermediate_size", experts=_EXPERTS), renormalize=True)


def _olmoe(config: Config) -> MoESpec:
    common = _common(config, width="intermediate_size", experts=_EXPERTS)
    return MoESpec(**common, renormalize=config.get("norm_topk_prob", False))


def _qwen3(config: Config) -> MoESpec:
    common = _common(config, width="moe_intermediate_size", experts=_EXPERTS)
    return MoESpec(**common, renormalize=config.get("norm_topk_prob", False))


def _qwen2(config: Config) -> MoESpec:
    return dataclasses.replace(
        _qwen3(config),
        shared_intermediate_size=_required(config, "shared_expert_intermediate_size"),
        shared_expert_gate=True,
    )


def _qwen_with_experts(config: Config, layers: int) -> list[int]:
    step = _integer(config, "decoder_sparse_step", low=1, default=1)
    dense = config.get("mlp_only_layers")
    if dense is None:
        dense = []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise ValueError(f"'mlp_only_layers' is a list of layers; got {clipped(repr(dense))}.")
    return sorted(set(range(step - 1, layers, step)) - set(dense))


def _deepseek(config: Config) -> MoESpec:
    # transformers implements these two only; the original code's others choose experts differently.
    for key, known in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if config.get(key, known) != known:
            raise UnsupportedError(
                "from_huggingface", f"{key}={clipped(repr(config[key]))} of deepseek_v3.", f"{known!r}."
            )
    common = _common(
        config,
        width="moe_intermediate_size",
        experts=("n_routed_experts", "num_experts", "num_local_experts"),
    )
    none_shared = "n_shared_experts" in config and config["n_shared_experts"] is None
    shared = 0 if none_shared else _integer(config, "n_shared_experts", low=0, default=1)
    return MoESpec(
        **common,
        scoring=Scoring.SIGMOID,
        correction_bias=True,
        renormalize=config.get("norm_topk_prob", True),
        num_expert_groups=config.get("n_group", 8),
        top_k_groups=config.get("topk_group", 4),
        group_score=GroupScore.TOP2_SUM,
        routed_scaling_factor=config.get("routed_scaling_factor", 2.5),
        shared_intermediate_size=shared * _integer(config, "moe_intermediate_size", low=1),
    )


def _deepseek_with_experts(config: Config, layers: int) -> list[int]:
    dense = _integer(config, "first_k_dense_replace", low=0, default=3)
    freq = _integer(config, "moe_layer_freq", low=1, default=1)
    return [layer for layer in range(0, layers, freq) if layer >= dense]


def _gpt_oss(config: Config) -> MoESpec:
    common = _common(config, width="intermediate_size", experts=_EXPERTS)
    if common["activation"] is not Activation.SWIGLU:
        raise UnsupportedError(
            "from_huggingface", f"hidden_act={config['hidden_act']!r} of gpt_oss.", "'silu'."
        )
    return MoESpec(
        **common,
        swiglu_alpha=config.get("swiglu_alpha", 1.702),
        swiglu_limit=config.get("swiglu_limit", 7.0),
        swiglu_up_offset=1.0,
        gate_up=GateUp.INTERLEAVED,
        expert_bias=True,
        scoring=Scoring.SOFTMAX_AFTER_TOPK,
        router_bias=True,
    )


_EXPERT_PARAMS = frozenset({"router", "w13", "w2"})
_SHARED_PARAMS = frozenset({"shared_w13", "shared_w2"})
_FAMILIES = {
    family.name: family
    for family in (
        Family(name="mixtral", read_spec=_mixtral, block="block_sparse_moe", expert=("w1", "w3", "w2")),
        Family(
            name="qwen2_moe",
            read_spec=_qwen2,
            with_experts=_qwen_with_experts,
            params=_EXPERT_PARAMS | _SHARED_PARAMS | {"shared_gate"},
            shared="shared_expert",
        ),
        Family(name="qwen3_moe", read_spec=_qwen3, with_experts=_qwen_with_experts),
        Family(name="olmoe", read_spec=_olmoe),
        Family(
            name="deepseek_v3",
            read_spec=_deepseek,
            with_experts=_deepseek_with_experts,
            params=_EXPERT_PARAMS | {"correction_bias"},
            optional_params=_SHARED_PARAMS,
            shared="shared_experts",
        ),
        Family(
            name="gpt_oss",
            read_spec=_gpt_oss,
            params=_EXPERT_PARAMS | {"router_bias", "b13", "b2"},
            router="router",
            gate_up=GateUp.INTERLEAVED,
            always_packed=True,
        ),
    )
}
