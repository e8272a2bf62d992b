"""The NumPy truth of FP8: which e4m3 numbers and scales stand for an array, bit for bit.

The rules of `moe_pallas.quant`, one plain step after another. NumPy and ml_dtypes only; shares no code with
any implementation. Scales and codes are computed in float32, because they are results that have to agree in
every bit; what they stand for is float64, exactly.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_pallas.spec import ActivationScales, GateUp, QuantScheme

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
Float64s = NDArray[np.float64]
Float32s = NDArray[np.float32]

_LARGEST = np.float32(448)  # of e4m3
_PER_LARGEST = np.float32(1 / 448)
_SMALLEST_SCALE = np.float32(2.0**-126)  # float32's smallest normal number
# Of each code, 0 … 255: a look-up takes a tenth of ml_dtypes' conversion, and weights have 1e9 codes.
_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float64)


def quantize(
    weights: ArrayLike, scheme: QuantScheme | str, gate_up: GateUp | str | None = None
) -> tuple[NDArray[Any], Float32s]:
    """Quantise matrices.

    Args:
      weights: (..., N, K) float. Rounded to float32 first.
      scheme: Its block shape counts.
      gate_up: None: the N rows are one matrix. Else they are a gate and an up matrix in this order.

    Returns:
      values: (..., N, K) float8_e4m3fn.
      scale: float32, of shape ``scheme.scale_shape``.

    Example:
      >>> from moe_pallas import reference_fp8
      >>> values, scale = reference_fp8.quantize([[-448.0, 33.0]], "fp8_tensor")
      >>> values.tolist(), scale.tolist()
      ([[-448.0, 32.0]], [[1.0]])
    """
    scheme = QuantScheme.named(scheme)
    array = _float32(weights)
    values, scale = np.empty(array.shape, E4M3), np.empty(_scale_shape(array, scheme, gate_up), np.float32)
    parts = (_matrices(part, gate_up) for part in (array, values, scale))
    for matrices, codes, scales in zip(*parts, strict=True):
        for i, j in np.ndindex(scales.shape[-2:]):
            block = _block(scheme, i, j)
            scales[..., i, j] = _scale_of(matrices[block], axis=(-2, -1))
            codes[block] = _codes(matrices[block], scales[..., i : i + 1, j : j + 1])
    return values, scale


def dequantize(
    values: ArrayLike, scale: ArrayLike, scheme: QuantScheme | str, gate_up: GateUp | str | None = None
) -> Float64s:
    """Give (..., N, K) float64: each value times the scale of its block, exactly."""
    scheme = QuantScheme.named(scheme)
    codes, scale = np.asarray(values, E4M3), np.asarray(scale).astype(np.float64)
    if scale.shape != (need := _scale_shape(codes, scheme, gate_up)):
        raise ValueError(f"scale has shape {scale.shape}; {scheme.name} of {codes.shape} needs {need}.")
    result = _VALUES[codes.view(np.uint8)]
    for matrices, scales in zip(_matrices(result, gate_up), _matrices(scale, gate_up), strict=True):
        for i, j in np.ndindex(scales.shape[-2:]):
            matrices[_block(scheme, i, j)] *= scales[..., i : i + 1, j : j + 1]
    return result


def quantize_activations(
    x: ArrayLike, activations: ActivationScales | str, input_scale: ArrayLike | None = None
) -> tuple[NDArray[Any], Float32s]:
    """Quantise the rows that enter a product.

    Args:
      x: (R, K) float. Rounded to float32 first. Real rows only.
      activations: What shares a scale.
      input_scale: () or (R, 1) float32, of each row, exactly if STATIC.

    Returns:
      values: (R, K) float8_e4m3fn.
      scale: float32; (1, 1) if TENSOR, (R, ceil(K / 128)) if GROUP, (R, 1) else.
    """
    x = _float32(x)
    activations = ActivationScales(activations)
    if activations is ActivationScales.STATIC:
        assert input_scale is not None
        scale = np.broadcast_to(np.asarray(input_scale, np.float32), (len(x), 1))
        scale = np.maximum(scale, _SMALLEST_SCALE)  # a NaN stays one
    elif activations is ActivationScales.TENSOR:
        scale = _scale_of(x, axis=(0, 1)).reshape(1, 1)
    elif activations is ActivationScales.TOKEN:
        scale = _scale_of(x, axis=1)[:, np.newaxis]
    else:
        starts = range(0, x.shape[1], QuantScheme.BLOCK)
        groups = [_scale_of(x[:, at : at + QuantScheme.BLOCK], axis=1) for at in starts]
        scale = np.stack(groups, axis=1)
    return _codes(x, _of_columns(scale, x.shape[1])), scale


def round_activations(
    x: ArrayLike, activations: ActivationScales | str, input_scale: ArrayLike | None = None
) -> Float64s:
    """Give what the codes of `quantize_activations` stand for: (R, K) float64."""
    values, scale = quantize_activations(x, activations, input_scale)
    return values.astype(np.float64) * _of_columns(scale, values.shape[1]).astype(np.float64)


def _of_columns(scale: Float32s, columns: int) -> Float32s:
    return scale if scale.shape[1] == 1 else np.repeat(scale, QuantScheme.BLOCK, axis=1)[:, :columns]


def _scale_of(x: Float32s, axis: int | tuple[int, ...]) -> Float32s:
    """The scale that takes the largest finite magnitude to 448; 1 if there is none but 0."""
    size = np.abs(_flushed(x))
    amax = np.max(np.where(np.isfinite(size), size, np.float32(0)), axis=axis, initial=np.float32(0))
    return np.where(amax == 0, np.float32(1), np.maximum(amax * _PER_LARGEST, _SMALLEST_SCALE))


def _codes(x: Float32s, scale: Float32s) -> NDArray[Any]:
    with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
        scaled = np.clip(_flushed(x) * (np.float32(1) / scale), -_LARGEST, _LARGEST)
    return np.where(np.isfinite(x), scaled, np.float32(np.nan)).astype(E4M3)


def _flushed(x: Float32s) -> Float32s:
    """Subnormal float32 numbers count as 0: most hardware that runs XLA has it so."""
    return np.where(np.abs(x) < _SMALLEST_SCALE, np.float32(0), x)


def _float32(array: ArrayLike) -> Float32s:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return np.asarray(array).astype(np.float32)


def _scale_shape(array: NDArray[Any], scheme: QuantScheme, gate_up: GateUp | str | None) -> tuple[int, ...]:
    return scheme.scale_shape(array.shape, 1 if gate_up is None else 2)


def _matrices(array: NDArray[Any], gate_up: GateUp | str | None) -> list[NDArray[Any]]:
    """Views of the matrices whose rows, or whose scales' rows, stand in (..., N, K)."""
    if gate_up is None:
        return [array]
    if GateUp(gate_up) is GateUp.INTERLEAVED:
        return [array[..., 0::2, :], array[..., 1::2, :]]
    half = array.shape[-2] // 2
    return [array[..., :half, :], array[..., half:, :]]


def _block(scheme: QuantScheme, i: int, j: int) -> tuple[Any, ...]:
    """The index of block (i, j) of a matrix."""
    at = [
        slice(None) if size is None else slice(n * size, (n + 1) * size)
        for n, size in zip((i, j), scheme.block_shape, strict=True)
    ]
    return (..., *at)
