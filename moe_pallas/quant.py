"""FP8 weights and activations: what is stored, what it stands for, and how arrays are rounded to it.

A number is stored as a *code*, float8_e4m3fn, and stands for code · scale, the scale a float32 that it shares
with its block. Which numbers make a block is the `QuantScheme`'s to say; ``block_shape`` is counted within
one matrix, and gate and up are two:

    weights   block_shape    scale of w13 (E, 2F, D)               of w2 (E, D, F)
    TENSOR    (None, None)   (E, 2, 1)                             (E, 1, 1)
    CHANNEL   (1, None)      (E, 2F, 1)                            (E, D, 1)
    BLOCK     (128, 128)     (E, 2 · ceil(F / 128), ceil(D / 128)) (E, ceil(D / 128), ceil(F / 128))

Scales of w13 follow each other as its rows do: gate's, then up's if STACKED; gate 0, up 0, gate 1, … if
INTERLEAVED. The last blocks of a matrix may be smaller: F = 192 has two blocks of rows for the gate (128 and
64) and two of its own for the up projection. The contraction axis is last, as everywhere.

    activations  scale of rows (R, K)                        made of
    STATIC       input_scale, stored with the weights        a calibration
    TENSOR       one for all real rows of the call           amax
    TOKEN        (R, 1), of h as GROUP                       amax of the row
    GROUP        (R, ceil(K / 128))                          amax of 128 columns of the row

Rules, the same in NumPy (`moe_pallas.reference_fp8`), on every backend, for weights and activations:

    amax         the largest magnitude among the finite elements; float32 numbers below 2**-126 count as 0
    scale        max(amax · float32(1/448), 2**-126), and 1 if amax is 0; so neither it nor 1/scale is ever 0,
                 subnormal or infinite
    code         x · (1/scale) in float32, clipped to ±448, rounded to the nearest e4m3, ties to even:
                 a finite x never overflows to NaN, zeros stay zeros (+0)
    NaN and Inf  get a NaN code and have no part in amax: the token that holds one is NaN, no other is
    STATIC       the same with scale = max(input_scale, 2**-126); values past 448 · scale saturate
    odd scales   a NaN scale makes all that it covers NaN, and nothing else; a stored scale below 2**-126 may
                 count as 0

A layer with quantised experts: the rows that enter w13 (x, or weight · x where weights go on the input) are
quantised by the scheme, multiplied with float32 accumulation, scaled; bias and activation are float32; h is
quantised by the scheme from float32 and multiplied likewise; bias and sum over experts are float32. "All real
rows" are those that experts compute: padding and dropped slots have no part in a scale. On a mesh they are a
device's own rows, as the experts whose largest input_scale x is quantised by are its own experts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_pallas.spec import (
    FP8,
    ActivationScales,
    GateUp,
    MoESpec,
    QuantScheme,
    check_array,
    check_dtype,
    check_spec,
)

E4M3_MAX = 448.0
PER_LARGEST = np.float32(1 / E4M3_MAX)
SMALLEST_SCALE = np.float32(2.0**-126)  # float32's smallest normal number


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QTensor:
    """Matrices in FP8. A pytree: leaves ``values``, ``scale`` and, if there is one, ``input_scale``.

    Leading axes (experts, layers) are the same in all leaves, so that ``scan``, ``vmap`` and ``q[i]`` work,
    and one sharding spec of leading axes fits all.

    Attributes:
      values: (..., N, K) float8_e4m3fn. Contraction axis last.
      scale: float32, of shape ``scheme.scale_shape``.
      input_scale: (..., P) float32 if the scheme's activations are STATIC, else None; P is 2 with ``gate_up``
        (gate's, up's), else 1. x is quantised once for a layer, by the largest of w13's; what enters expert
        e's w2 by that expert's own.
      scheme: The conventions. Static.
      gate_up: The N rows are a gate and an up matrix, in this order; None: one matrix. Static.

    Example:
      >>> import jax.numpy as jnp
      >>> from moe_pallas import quantize
      >>> q = quantize(jnp.ones((4, 192, 256)), "fp8_block")
      >>> q.scale.shape, q.block_shape
      ((4, 2, 2), (128, 128))
    """

    values: jax.Array
    scale: jax.Array
    input_scale: jax.Array | None = None
    scheme: QuantScheme = dataclasses.field(metadata={"static": True})
    gate_up: GateUp | None = dataclasses.field(default=None, metadata={"static": True})

    def __getitem__(self, index: Any) -> QTensor:
        """Index leading axes, of all leaves alike: ``q[layer]``, ``q[:4]``; ``q[...]`` is all of it."""
        if index is Ellipsis:
            return self
        used = index if isinstance(index, tuple) else (index,)
        if len(used) > self.ndim - 2 or any(at is Ellipsis for at in used):
            raise IndexError(
                f"q[{index}] of a QTensor {self.shape}: only its {self.ndim - 2} leading axes can be "
                "indexed, as rows and columns share scales. dequantize(q) gives an array."
            )
        return jax.tree.map(lambda leaf: leaf[index], self)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return tuple(self.values.shape)

    @property
    def ndim(self) -> int:
        """Axes of the values."""
        return len(self.values.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the values."""
        return self.values.dtype

    @property
    def block_shape(self) -> tuple[int | None, int | None]:
        """Rows and columns that share a scale; None: all of a matrix."""
        return self.scheme.block_shape


def quantize(
    weights: jax.Array,
    scheme: QuantScheme | str,
    *,
    gate_up: GateUp | str | None = None,
    input_scale: jax.Array | float | None = None,
) -> QTensor:
    """Round matrices to FP8 by the rules above.

    Args:
      weights: (..., N, K) bfloat16 | float16 | float32.
      scheme: A `QuantScheme`, or "fp8_tensor", "fp8_channel", "fp8_block".
      gate_up: None: the N rows are one matrix. Else a gate and an up matrix in this order.
      input_scale: Exactly if the activations are STATIC: positive, of a shape that broadcasts to (..., P).

    Returns:
      `QTensor`.

    Raises:
      ValueError: An odd number of gate and up rows, or input_scale missing, not wanted or misshaped.
      TypeError: weights of another dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> from moe_pallas import quantize
      >>> matrix = quantize(jnp.ones((256, 384)), "fp8_block")
      >>> matrix.values.dtype.name, matrix.scale.shape
      ('float8_e4m3fn', (2, 3))
    """
    scheme = QuantScheme.named(scheme)
    check_array("weights", weights)
    check_dtype("weights", weights.dtype.name)
    if weights.ndim < 2:
        raise ValueError(f"weights has shape {weights.shape}; need matrices (..., N, K).")
    order = None if gate_up is None else GateUp(gate_up)
    if order is not None and weights.shape[-2] % 2:
        raise ValueError(
            f"weights has shape {weights.shape}; gate and up share its {weights.shape[-2]} rows, which must "
            "be even. Leave gate_up out for a single matrix."
        )
    values, scale = _quantize(weights, scheme.block_shape, order)
    return QTensor(
        values=values,
        scale=scale,
        input_scale=_input_scale(input_scale, (*weights.shape[:-2], 1 if order is None else 2), scheme),
        scheme=scheme,
        gate_up=order,
    )


@functools.partial(jax.jit, static_argnums=(1, 2))  # fused, so that no float32 copy is made
def _quantize(
    weights: jax.Array, block_shape: tuple[int | None, int | None], order: GateUp | None
) -> tuple[jax.Array, jax.Array]:
    parts = _take_apart(weights, order)
    blocks = _blocks(parts, block_shape).astype(jnp.float32)
    scale = _scale_of(blocks, axis=(-3, -1))
    codes = _codes(blocks, scale[..., :, None, :, None]).reshape(_padded_shape(blocks))
    codes = codes[..., : parts.shape[-2], : parts.shape[-1]]
    return _put_together(codes, order), _put_together(scale, order)


def dequantize(weights: QTensor, dtype: Any = jnp.float32) -> jax.Array:
    """Give (..., N, K): each code times its scale, in float32, then rounded to ``dtype``.

    Example:
      >>> import jax.numpy as jnp
      >>> from moe_pallas import dequantize, quantize
      >>> dequantize(quantize(jnp.array([[1.0, -2.0, 4.0]]), "fp8_channel"))
      Array([[ 1., -2.,  4.]], dtype=float32)
    """
    scale = _repeat(_of_rows(weights), weights.block_shape[1], weights.shape[-1])
    return (weights.values.astype(jnp.float32) * scale).astype(dtype)


def quantize_experts(
    params: Mapping[str, jax.Array],
    spec: MoESpec,
    scheme: QuantScheme | str,
    *,
    input_scales: Mapping[str, jax.Array | float] | None = None,
) -> dict[str, Any]:
    """Round the routed experts' matrices of a layer's parameters to FP8.

    Args:
      params: As `MoE.init` makes them.
      spec: The layer.
      scheme: A `QuantScheme`, or "fp8_tensor", "fp8_channel", "fp8_block".
      input_scales: ``{"w13": …, "w2": …}`` exactly if the activations are STATIC, see `quantize`.

    Returns:
      The same dict with `QTensor`s for w13 and w2. Router, biases and shared expert stay as they are: small,
      and read for every token.

    Raises:
      ValueError: params are not this layer's, or see `quantize`.
      TypeError: w13 or w2 are quantised already, or see `quantize`.

    Example:
      >>> import jax
      >>> from moe_pallas import MoE, MoESpec, quantize_experts
      >>> spec = MoESpec(num_experts=8, top_k=2, hidden_size=64, intermediate_size=96)
      >>> layer = MoE(spec)
      >>> params = quantize_experts(layer.init(jax.random.key(0)), spec, "fp8_block")
      >>> params["w13"].scale.shape
      (8, 2, 1)
      >>> layer.apply(params, jax.numpy.ones((3, 64))).shape
      (3, 64)
    """
    check_spec(spec)
    scheme = QuantScheme.named(scheme)
    result: dict[str, Any] = dict(params)
    for name in ("w13", "w2"):
        if name not in params:
            raise ValueError(f"params has no {name!r}, but {sorted(params)}; need a layer's parameters.")
        weights, need = params[name], spec.param_shapes[name]
        if isinstance(weights, QTensor):
            raise TypeError(f"params[{name!r}] is quantised already, to {weights.scheme.name}.")
        check_array(f"params[{name!r}]", weights)
        if tuple(weights.shape) != need:
            raise ValueError(f"params[{name!r}] has shape {weights.shape}; need {need}.")
        result[name] = quantize(
            weights,
            scheme,
            gate_up=spec.gate_up if name == "w13" and spec.gated else None,
            input_scale=None if input_scales is None else input_scales.get(name),
        )
    return result


def quantize_activations(
    x: jax.Array, activations: ActivationScales | str, input_scale: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Round the rows that enter a product to FP8 by the rules above.

    Args:
      x: (R, K) bfloat16 | float16 | float32. Rows that nobody is to see must be 0.
      activations: What shares a scale.
      input_scale: () or (R, 1) float32, the scale of each row, exactly if STATIC.

    Returns:
      values: (R, K) float8_e4m3fn.
      scale: float32; (1, 1) if TENSOR, (R, ceil(K / 128)) if GROUP, (R, 1) else.
    """
    x = x.astype(jnp.float32)
    activations = ActivationScales(activations)
    if activations is ActivationScales.STATIC:
        assert input_scale is not None, "STATIC activations have a scale"
        scale = jnp.broadcast_to(input_scale.astype(jnp.float32), (x.shape[0], 1))
        scale = jnp.maximum(scale, SMALLEST_SCALE)
    elif activations is ActivationScales.TENSOR:
        scale = _scale_of(x, axis=(0, 1)).reshape(1, 1)
    elif activations is ActivationScales.TOKEN:
        scale = _scale_of(x, axis=1)[:, None]
    else:
        scale = _scale_of(_blocks(x, (1, QuantScheme.BLOCK)), axis=(-3, -1))
    return _codes(x, _of_columns(scale, x.shape[1])), scale


@jax.custom_vjp
def _straight_through(x: jax.Array, rounded: jax.Array) -> jax.Array:
    """``rounded``, with the gradient of x."""
    return rounded


def _straight_through_fwd(x: jax.Array, rounded: jax.Array) -> tuple[jax.Array, jax.Array]:
    return rounded, jnp.zeros((0,), x.dtype)


def _straight_through_bwd(like: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None]:
    return cotangent.astype(like.dtype), None


_straight_through.defvjp(_straight_through_fwd, _straight_through_bwd)


def round_activations(
    x: jax.Array, activations: ActivationScales | str, input_scale: jax.Array | None = None
) -> jax.Array:
    """Give what the codes of `quantize_activations` stand for: (R, K) float32, code times scale.

    The gradient goes straight through to x, as if nothing had been rounded or clipped; none goes to
    input_scale.
    """
    values, scale = quantize_activations(x, activations, input_scale)
    rounded = values.astype(jnp.float32) * _of_columns(scale, x.shape[1])
    return _straight_through(x, lax.stop_gradient(rounded))


def scale_of_x(w13: QTensor) -> jax.Array | None:
    """The scale () that x is quantised by: the largest that w13's matrices want; None if it is dynamic."""
    return None if w13.input_scale is None else jnp.max(w13.input_scale)


def check_qtensor(name: str, weights: QTensor, gate_up: GateUp | None) -> None:
    """Raise TypeError or ValueError unless the parts of ``weights`` fit each other and ``gate_up``."""
    for part, array, dtype in (
        ("values", weights.values, FP8),
        ("scale", weights.scale, "float32"),
        ("input_scale", weights.input_scale, "float32"),
    ):
        if array is None and part == "input_scale":
            continue
        check_array(f"{name}.{part}", array)
        assert array is not None
        if array.dtype.name != dtype:
            raise TypeError(
                f"{name}.{part} is {array.dtype}; need {dtype}."
                + (f" Convert it once, at load: {part}.astype(jnp.float32)." if part != "values" else "")
            )
    if not isinstance(weights.scheme, QuantScheme):
        raise TypeError(f"{name}.scheme is a QuantScheme; got {weights.scheme!r}.")
    if weights.gate_up is not gate_up:
        raise ValueError(
            f"{name}.gate_up is {weights.gate_up!r}; the layer needs {gate_up!r}. Quantise {name} for this "
            "layer: quantize_experts, or quantize(…, gate_up=spec.gate_up) for a gated w13."
        )
    parts = 1 if gate_up is None else 2
    need = weights.scheme.scale_shape(weights.shape, parts)
    if tuple(weights.scale.shape) != need:
        raise ValueError(
            f"{name}.scale has shape {tuple(weights.scale.shape)}; {weights.scheme.name} of values "
            f"{weights.shape} needs {need}: scales of rows, then of columns"
            + (", those of gate and up each for themselves." if gate_up is not None else ".")
        )
    is_static = weights.scheme.activations is ActivationScales.STATIC
    if is_static != (weights.input_scale is not None):
        raise ValueError(
            f"{name}.scheme has activations {weights.scheme.activations.value!r}, but input_scale was "
            f"{'not given' if is_static else 'given'}; it belongs to 'static', and only to it."
        )
    need = (*weights.shape[:-2], parts)
    if weights.input_scale is not None and tuple(weights.input_scale.shape) != need:
        raise ValueError(f"{name}.input_scale has shape {tuple(weights.input_scale.shape)}; need {need}.")


def _input_scale(
    value: jax.Array | float | None, shape: tuple[int, ...], scheme: QuantScheme
) -> jax.Array | None:
    is_static = scheme.activations is ActivationScales.STATIC
    if is_static != (value is not None):
        raise ValueError(
            f"activations={scheme.activations.value!r}, but input_scale was "
            f"{'not given' if is_static else 'given'}; it belongs to 'static', and only to it."
        )
    if value is None:
        return None
    scale = jnp.asarray(value, jnp.float32)
    try:
        return jnp.broadcast_to(scale, shape)
    except ValueError:
        raise ValueError(
            f"input_scale has shape {scale.shape}; need one that broadcasts to {shape}."
        ) from None


def _take_apart(rows: jax.Array, order: GateUp | None) -> jax.Array:
    """(..., N, K) → (..., P, N / P, K): the matrices that the rows belong to."""
    *lead, n, k = rows.shape
    if order is GateUp.INTERLEAVED:
        return rows.reshape(*lead, n // 2, 2, k).swapaxes(-2, -3)
    parts = 1 if order is None else 2
    return rows.reshape(*lead, parts, n // parts, k)


def _put_together(parts: jax.Array, order: GateUp | None) -> jax.Array:
    """Undo `_take_apart`, of rows or of their scales."""
    *lead, count, n, k = parts.shape
    if order is GateUp.INTERLEAVED:
        parts = parts.swapaxes(-2, -3)
    return parts.reshape(*lead, count * n, k)


def _blocks(rows: jax.Array, block_shape: tuple[int | None, int | None]) -> jax.Array:
    """(..., N, K) → (..., blocks, rows of one, blocks, columns of one), padded with zeros."""
    *lead, n, k = rows.shape
    block_n, block_k = block_shape[0] or max(n, 1), block_shape[1] or max(k, 1)
    padding = [(0, 0)] * len(lead) + [(0, -n % block_n), (0, -k % block_k)]
    rows = jnp.pad(rows, padding)
    return rows.reshape(*lead, rows.shape[-2] // block_n, block_n, rows.shape[-1] // block_k, block_k)


def _padded_shape(blocks: jax.Array) -> tuple[int, ...]:
    *lead, n, block_n, k, block_k = blocks.shape
    return (*lead, n * block_n, k * block_k)


def _of_rows(weights: QTensor) -> jax.Array:
    """(..., scales of rows, scales of columns) → (..., N, scales of columns): the scales of each row."""
    parts = _take_apart(weights.scale, weights.gate_up)
    count = weights.shape[-2] // parts.shape[-3]
    rows = jnp.repeat(parts, weights.block_shape[0] or count, axis=-2)[..., :count, :]
    return _put_together(rows, weights.gate_up)


def _of_columns(scale: jax.Array, columns: int) -> jax.Array:
    return _repeat(scale, None if scale.shape[1] == 1 else QuantScheme.BLOCK, columns)


def _repeat(scale: jax.Array, block: int | None, size: int) -> jax.Array:
    """(..., blocks) → (..., size), or (..., 1) if one scale serves all."""
    return scale if block is None else jnp.repeat(scale, block, axis=-1)[..., :size]


def _scale_of(x: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    size = jnp.abs(_flushed(x))
    amax = jnp.max(jnp.where(size < jnp.inf, size, 0.0), axis=axis, initial=0.0)
    return jnp.where(amax == 0, 1.0, jnp.maximum(amax * PER_LARGEST, SMALLEST_SCALE))


def _codes(x: jax.Array, scale: jax.Array) -> jax.Array:
    scaled = jnp.clip(_flushed(x) * (1.0 / scale), -E4M3_MAX, E4M3_MAX)
    return jnp.where(jnp.abs(x) < jnp.inf, _round_to_e4m3(scaled), jnp.nan).astype(jnp.float8_e4m3fn)


def _flushed(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.abs(x) < SMALLEST_SCALE, 0.0, x)


def _round_to_e4m3(x: jax.Array) -> jax.Array:
    """Float32 numbers within ±448 → the nearest e4m3 number, still in float32, ties to even.

    In arithmetic that XLA can't drop: it may take a conversion to a narrow type and back for the identity.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    exponent = jnp.maximum((bits >> 23) & 255, 127 - 6)  # biased; -6 is that of e4m3's subnormal numbers
    ulp = lax.bitcast_convert_type((exponent - 3) << 23, jnp.float32)
    per_ulp = lax.bitcast_convert_type((254 + 3 - exponent) << 23, jnp.float32)
    return lax.round(x * per_ulp, lax.RoundingMethod.TO_NEAREST_EVEN) * ulp
