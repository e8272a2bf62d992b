"""Frozen descriptions of what is computed: the layer (MoESpec) and one call of it (Problem).

A leaf: standard library only, so that the reference, the oracle and tools that run without JAX can
all read it.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
from typing import Any, ClassVar

# Activations and weights; everything between the products is float32.
DTYPES = ("bfloat16", "float16", "float32")
FP8 = "float8_e4m3fn"  # the values of quantised weights
QUANTS = ("none", "fp8_tensor", "fp8_channel", "fp8_block")


class _Choice(enum.StrEnum):
    """An enum whose members also go by their lower-case value and whose repr evaluates to itself."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class Activation(_Choice):
    """What stands between the two GEMMs of an expert. ``g`` is gate, ``u`` is up, ``z`` the only branch.

    Gated (w13 has 2F rows):
      SWIGLU: ``g' * sigmoid(alpha * g') * (u' + up_offset)`` with ``g' = min(g, limit)`` and
        ``u' = clip(u, -limit, limit)``; the clamp comes before the activation, and there is no lower
        clamp on the gate. The defaults (alpha 1, no limit, offset 0) are plain ``silu(g) * u``;
        gpt-oss has alpha 1.702, limit 7, offset 1.
      GEGLU: ``gelu(g) * u`` with the exact (erf) GELU.
      GEGLU_TANH: the same with GELU's tanh approximation.
    Not gated (w13 has F rows):
      RELU2: ``max(z, 0) ** 2``.
      SILU: ``z * sigmoid(z)``.
      GELU: exact. GELU_TANH: the tanh approximation.

    Example:
      >>> from moe_pallas import Activation
      >>> Activation("geglu"), Activation.GEGLU.gated, Activation.RELU2.gated
      (Activation.GEGLU, True, False)
    """

    SWIGLU = "swiglu"
    GEGLU = "geglu"
    GEGLU_TANH = "geglu_tanh"
    RELU2 = "relu2"
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"

    @property
    def gated(self) -> bool:
        """Whether it has a gate and an up branch."""
        return self in (Activation.SWIGLU, Activation.GEGLU, Activation.GEGLU_TANH)


class GateUp(_Choice):
    """Order of the 2F rows of ``w13``, ``b13`` and ``shared_w13``.

    STACKED: F gate rows, then F up rows. INTERLEAVED: gate 0, up 0, gate 1, up 1, …

    Example:
      >>> from moe_pallas import GateUp, MoESpec
      >>> sizes = dict(num_experts=8, top_k=2, hidden_size=64, intermediate_size=96)
      >>> MoESpec(**sizes, gate_up="interleaved").gate_up is GateUp.INTERLEAVED
      True
    """

    STACKED = "stacked"
    INTERLEAVED = "interleaved"


class Scoring(_Choice):
    """How logits become scores.

    SOFTMAX: over all experts, before the choice. SOFTMAX_AFTER_TOPK: over the chosen logits only.
    SIGMOID: each logit by itself.

    Example:
      >>> from moe_pallas import MoESpec, Scoring
      >>> sizes = dict(num_experts=8, top_k=2, hidden_size=64, intermediate_size=96)
      >>> MoESpec(**sizes, scoring="sigmoid").scoring is Scoring.SIGMOID
      True
    """

    SOFTMAX = "softmax"
    SOFTMAX_AFTER_TOPK = "softmax_after_topk"
    SIGMOID = "sigmoid"


class GroupScore(_Choice):
    """What ranks an expert group: its best expert, or the sum of its best two (of one, if it has one)."""

    MAX = "max"
    TOP2_SUM = "top2_sum"


class WeightOn(_Choice):
    """Where the routing weight goes: ``w * f(x)`` (OUTPUT) or ``f(w * x)`` (INPUT)."""

    OUTPUT = "output"
    INPUT = "input"


class WeightScales(_Choice):
    """Which weights share one float32 scale; gate and up are two matrices, each with scales of its own.

    TENSOR: all of a matrix. CHANNEL: a row, that is one output. BLOCK: 128 rows by 128 columns, counted
    from the matrix's first row and column; the last blocks may be smaller.
    """

    TENSOR = "tensor"
    CHANNEL = "channel"
    BLOCK = "block"


class ActivationScales(_Choice):
    """Which activations that enter a product share one float32 scale, and where it comes from.

    STATIC: all, and the scale is stored with the weights (``input_scale``). TENSOR: all of a call's real
    rows. TOKEN: a row of x; of h, what enters w2, 128 columns of a row. GROUP: 128 columns of a row. The last
    128 may be fewer. But for STATIC the scale is computed in the call.
    """

    STATIC = "static"
    TENSOR = "tensor"
    TOKEN = "token"
    GROUP = "group"


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantScheme:
    """How weights and activations are quantised to FP8 (e4m3); the rules are those of `moe_pallas.quant`.

    Args:
      weights: See `WeightScales`.
      activations: See `ActivationScales`. GROUP belongs to BLOCK weights, and only to them.

    Raises:
      ValueError: A value that is none of the choices, or two that don't go together.

    Example:
      >>> from moe_pallas import QuantScheme
      >>> QuantScheme.named("fp8_block")
      QuantScheme(weights=WeightScales.BLOCK, activations=ActivationScales.GROUP)
      >>> QuantScheme(weights="tensor", activations="static").name
      'fp8_tensor'
    """

    weights: WeightScales
    activations: ActivationScales

    BLOCK: ClassVar[int] = 128

    def __post_init__(self) -> None:
        for name, choice in (("weights", WeightScales), ("activations", ActivationScales)):
            checked = _checked_choice(name, getattr(self, name), choice, "QuantScheme")
            object.__setattr__(self, name, checked)
        if (self.weights is WeightScales.BLOCK) != (self.activations is ActivationScales.GROUP):
            raise ValueError(
                "Weights in blocks and activations in groups go together; got weights="
                f"{self.weights.value!r}, activations={self.activations.value!r}. Use ('block', 'group'), or "
                "'tensor' or 'channel' with 'static', 'tensor' or 'token'."
            )

    @classmethod
    def named(cls, scheme: QuantScheme | str) -> QuantScheme:
        """Look up "fp8_tensor", "fp8_channel" (both with scales by TOKEN) or "fp8_block" (GROUP)."""
        if isinstance(scheme, QuantScheme):
            return scheme
        if scheme not in _SCHEMES:
            options = ", ".join(map(repr, _SCHEMES))
            raise ValueError(f"A scheme is one of {options}, or a QuantScheme; got {scheme!r}.")
        return _SCHEMES[scheme]

    @property
    def name(self) -> str:
        """One of `QUANTS`: how weights are stored, whatever the activations' scales are."""
        return f"fp8_{self.weights.value}"

    @property
    def hidden(self) -> ActivationScales:
        """How h, which enters w2, is quantised: like x, but in groups where x is by tokens.

        Scales of 128 columns are made where these columns are; a row's would wait for all of the row.
        """
        return ActivationScales.GROUP if self.activations is ActivationScales.TOKEN else self.activations

    @property
    def block_shape(self) -> tuple[int | None, int | None]:
        """Rows and columns of a matrix that share a scale; None: all of them."""
        return {
            WeightScales.TENSOR: (None, None),
            WeightScales.CHANNEL: (1, None),
            WeightScales.BLOCK: (self.BLOCK, self.BLOCK),
        }[self.weights]

    def scale_shape(self, shape: tuple[int, ...], parts: int = 1) -> tuple[int, ...]:
        """Shape of the scales of (..., N, K) values: (..., scales of the N rows, scales of the K columns).

        ``parts``: 2 if the rows are those of a gate and an up matrix, whose scales follow each other as the
        rows do.
        """
        *lead, rows, columns = shape
        block_rows, block_columns = self.block_shape
        per_part = 1 if block_rows is None else -(-(rows // parts) // block_rows)
        return (*lead, parts * per_part, 1 if block_columns is None else -(-columns // block_columns))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoESpec:
    """Everything about an MoE layer that is not an array: sizes, expert function, router.

    Hashable, so it can be a static argument of ``jax.jit``; ``eval(repr(spec)) == spec``. Enum fields
    also take their lower-case value (``scoring="sigmoid"``).

    Args:
      num_experts: E.
      top_k: Experts a token is sent to, 1 … E.
      hidden_size: D, the width of a token.
      intermediate_size: F, the width inside one expert (before doubling for gate and up).
      activation: See `Activation`.
      swiglu_alpha: Factor inside SWIGLU's sigmoid.
      swiglu_limit: SWIGLU's clamp, > 0, or None for no clamp.
      swiglu_up_offset: Added to SWIGLU's up branch after the clamp.
      gate_up: Row order of w13, see `GateUp`.
      expert_bias: Experts have biases ``b13`` (E, 2F) and ``b2`` (E, D).
      scoring: See `Scoring`.
      renormalize: Divide the chosen scores by their sum + 1e-20 (no effect on SOFTMAX_AFTER_TOPK).
      router_bias: The router's linear map has a bias (E,).
      correction_bias: A bias (E,) is added to the scores for the choice only, never to the weights.
      num_expert_groups: Experts form this many equal, contiguous groups …
      top_k_groups: … of which only so many best ones may be chosen from.
      group_score: How groups are ranked (on score + correction bias).
      routed_scaling_factor: Multiplies the routing weights last; shared experts are not scaled.
      weight_on: See `WeightOn`.
      shared_intermediate_size: Width of the shared expert that every token visits; 0 = none. Several
        shared experts of width F are one of width n * F.
      shared_expert_gate: The shared expert's output is multiplied by ``sigmoid(x @ shared_gate)``.

    Raises:
      ValueError: A value out of range or two that contradict each other.
      TypeError: A value of the wrong class.

    Example:
      >>> from moe_pallas import MoESpec
      >>> spec = MoESpec(num_experts=8, top_k=2, hidden_size=64, intermediate_size=96)
      >>> spec.param_shapes["w13"]
      (8, 192, 64)
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: Activation = Activation.SWIGLU
    swiglu_alpha: float = 1.0
    swiglu_limit: float | None = None
    swiglu_up_offset: float = 0.0
    gate_up: GateUp = GateUp.STACKED
    expert_bias: bool = False
    scoring: Scoring = Scoring.SOFTMAX
    renormalize: bool = True
    router_bias: bool = False
    correction_bias: bool = False
    num_expert_groups: int = 1
    top_k_groups: int = 1
    group_score: GroupScore = GroupScore.TOP2_SUM
    routed_scaling_factor: float = 1.0
    weight_on: WeightOn = WeightOn.OUTPUT
    shared_intermediate_size: int = 0
    shared_expert_gate: bool = False

    def __post_init__(self) -> None:
        for name, low in (
            ("num_experts", 1),
            ("top_k", 1),
            ("hidden_size", 1),
            ("intermediate_size", 1),
            ("num_expert_groups", 1),
            ("top_k_groups", 1),
            ("shared_intermediate_size", 0),
        ):
            self._set(name, _checked_int("MoESpec", name, getattr(self, name), low))
        for name in ("expert_bias", "renormalize", "router_bias", "correction_bias", "shared_expert_gate"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"MoESpec.{name} is True or False; got {getattr(self, name)!r}.")
        for name in ("swiglu_alpha", "swiglu_up_offset", "routed_scaling_factor"):
            self._set(name, _checked_float(name, getattr(self, name)))
        for name, choice in (
            ("activation", Activation),
            ("gate_up", GateUp),
            ("scoring", Scoring),
            ("group_score", GroupScore),
            ("weight_on", WeightOn),
        ):
            self._set(name, _checked_choice(name, getattr(self, name), choice))
        self._check_activation()
        self._check_router()
        if self.shared_expert_gate and not self.shared_intermediate_size:
            raise ValueError(
                "MoESpec.shared_expert_gate=True needs a shared expert; got shared_intermediate_size=0. "
                "Set shared_intermediate_size, or drop the gate."
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_activation(self) -> None:
        if self.swiglu_limit is not None:
            self._set("swiglu_limit", _checked_float("swiglu_limit", self.swiglu_limit))
            if self.swiglu_limit <= 0:
                raise ValueError(
                    f"MoESpec.swiglu_limit is > 0, or None for no clamp; got {self.swiglu_limit}."
                )
        shaped = (self.swiglu_alpha, self.swiglu_limit, self.swiglu_up_offset) != (1.0, None, 0.0)
        if shaped and self.activation is not Activation.SWIGLU:
            raise ValueError(
                f"swiglu_alpha, swiglu_limit and swiglu_up_offset shape SWIGLU only; got activation="
                f"{self.activation.value!r}. Leave them at their defaults or use activation='swiglu'."
            )

    def _check_router(self) -> None:
        if self.top_k > self.num_experts:
            raise ValueError(
                f"MoESpec.top_k={self.top_k} is more than num_experts={self.num_experts}; a token visits "
                f"an expert at most once. Use top_k <= {self.num_experts}."
            )
        groups, kept = self.num_expert_groups, self.top_k_groups
        if self.num_experts % groups:
            raise ValueError(
                f"num_expert_groups={groups} does not divide num_experts={self.num_experts}; "
                "groups are equal in size."
            )
        if kept > groups:
            raise ValueError(f"top_k_groups={kept} is more than num_expert_groups={groups}.")
        available = kept * (self.num_experts // groups)
        if self.top_k > available:
            raise ValueError(
                f"top_k={self.top_k} experts can't come from {kept} of {groups} groups, which hold "
                f"{available}. Raise top_k_groups or lower top_k."
            )

    @property
    def gated(self) -> bool:
        """Whether w13 holds gate and up rows (2F) or only one branch (F)."""
        return self.activation.gated

    @property
    def w13_rows(self) -> int:
        """Rows of one expert's w13: 2F if gated, else F."""
        return self.intermediate_size * (2 if self.gated else 1)

    @property
    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of every array this layer has; the contraction axis is last in each matrix."""
        e, d, f, n13 = self.num_experts, self.hidden_size, self.intermediate_size, self.w13_rows
        shapes: dict[str, tuple[int, ...]] = {"router": (e, d), "w13": (e, n13, d), "w2": (e, d, f)}
        if self.router_bias:
            shapes["router_bias"] = (e,)
        if self.correction_bias:
            shapes["correction_bias"] = (e,)
        if self.expert_bias:
            shapes |= {"b13": (e, n13), "b2": (e, d)}
        if fs := self.shared_intermediate_size:
            shapes |= {"shared_w13": (fs * (2 if self.gated else 1), d), "shared_w2": (d, fs)}
            if self.shared_expert_gate:
                shapes["shared_gate"] = (d,)
        return shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One call, as far as it is known before it runs: what a backend is chosen by.

    Args:
      spec: The layer.
      num_tokens: T, the (padded) number of tokens of the call, >= 0.
      dtype: Name of the activations' dtype, ``"bfloat16"``, ``"float16"`` or ``"float32"``.
      weight_dtype: Name of the expert weights' dtype; if None the activations', or FP8's if quantised.
      quant: How the expert weights are quantised: "none", "fp8_tensor", "fp8_channel" or "fp8_block".
      activation_scales: How activations are quantised, see `ActivationScales`; if None as the scheme of that
        name has it (`QuantScheme.named`). None if nothing is quantised.

    Example:
      >>> from moe_pallas import MoESpec, Problem
      >>> spec = MoESpec(num_experts=8, top_k=2, hidden_size=64, intermediate_size=96)
      >>> Problem(spec=spec, num_tokens=16, dtype="bfloat16", quant="fp8_block").weight_dtype
      'float8_e4m3fn'
    """

    spec: MoESpec
    num_tokens: int
    dtype: str
    weight_dtype: str | None = None
    quant: str = "none"
    activation_scales: ActivationScales | None = None

    def __post_init__(self) -> None:
        tokens = _checked_int("Problem", "num_tokens", self.num_tokens, 0)
        object.__setattr__(self, "num_tokens", tokens)
        check_spec(self.spec)
        check_dtype("Problem.dtype", self.dtype)
        if self.quant not in QUANTS:
            raise ValueError(f"Problem.quant is one of {', '.join(map(repr, QUANTS))}; got {self.quant!r}.")
        if self.quant == "none":
            object.__setattr__(self, "weight_dtype", self.weight_dtype or self.dtype)
            check_dtype("Problem.weight_dtype", self.weight_dtype)
            if self.activation_scales is not None:
                raise ValueError(
                    f"Problem.activation_scales={self.activation_scales!r} needs quantised weights; got "
                    "quant='none'."
                )
            return
        object.__setattr__(self, "weight_dtype", self.weight_dtype or FP8)
        if self.weight_dtype != FP8:
            raise TypeError(
                f"Problem.weight_dtype is {FP8!r} with quant={self.quant!r}; got {self.weight_dtype!r}."
            )
        scheme = QuantScheme.named(self.quant)
        if self.activation_scales is not None:
            scheme = dataclasses.replace(scheme, activations=self.activation_scales)
        object.__setattr__(self, "activation_scales", scheme.activations)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """What the choice of a backend needs to know of a device.

    Args:
      platform: ``"cpu"``, ``"gpu"``, ``"tpu"``, ...
      name: As the device calls itself, for example ``"NVIDIA H200"``.
      compute_capability: For NVIDIA GPUs, for example ``"9.0"``.
      num_sms: For NVIDIA GPUs, its multiprocessors.
    """

    platform: str
    name: str = ""
    compute_capability: str = ""
    num_sms: int = 0

    @property
    def is_hopper(self) -> bool:
        """Whether it has Hopper's WGMMA and TMA (compute capability 9.0; later ones have others)."""
        return self.platform == "gpu" and self.compute_capability == "9.0"


H200 = DeviceInfo(platform="gpu", name="NVIDIA H200", compute_capability="9.0", num_sms=132)


def check_array(name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is an array, of any library."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise TypeError(f"{name} is an array; got {type(value).__name__}. Convert it: jnp.asarray({name}).")


def check_spec(spec: Any) -> None:
    """Raise TypeError unless ``spec`` is a `MoESpec`."""
    if not isinstance(spec, MoESpec):
        raise TypeError(f"spec is a MoESpec; got {spec!r} ({type(spec).__name__}).")


def check_dtype(name: str, dtype: Any) -> None:
    """Raise TypeError unless ``dtype`` (by its name) is one that layers compute in."""
    if dtype not in DTYPES:
        raise TypeError(f"{name} is one of {', '.join(map(repr, DTYPES))}; got {dtype!r}.")


def _checked_int(owner: str, name: str, value: Any, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{owner}.{name} is an int >= {low}; got {value!r} ({type(value).__name__}).")
    if value < low:
        raise ValueError(f"{owner}.{name} is an int >= {low}; got {value}.")
    return int(value)


def _checked_float(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"MoESpec.{name} is a finite float; got {value!r} ({type(value).__name__}).")
    try:
        number = float(value)
    except OverflowError:  # an int past the range of floats
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"MoESpec.{name} is a finite float; got {number}.")
    return number


def _checked_choice(name: str, value: Any, choice: type[_Choice], owner: str = "MoESpec") -> _Choice:
    try:
        return choice(value)
    except ValueError:
        options = ", ".join(repr(c.value) for c in choice)
        raise ValueError(f"{owner}.{name} is one of {options}; got {value!r}.") from None


_SCHEMES = {
    f"fp8_{weights.value}": QuantScheme(weights=weights, activations=activations)
    for weights, activations in (
        (WeightScales.TENSOR, ActivationScales.TOKEN),
        (WeightScales.CHANNEL, ActivationScales.TOKEN),
        (WeightScales.BLOCK, ActivationScales.GROUP),
    )
}
