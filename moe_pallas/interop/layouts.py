"""Exact conversions between the two orders of gate and up, for weights, biases and scales alike.

An array has an axis of length 2F that holds F gate entries and F up entries, in one of two orders::

    STACKED      g0 g1 g2 … u0 u1 u2 …
    INTERLEAVED  g0 u0 g1 u1 g2 u2 …

Everything here only moves entries: no arithmetic, so results are bit for bit. What belongs to one
projection has to move together: its weight, its bias and its scales. A scale that covers a *block* of
rows moves with them only if no block holds both gate and up rows, which an interleaved array can't
have; convert before quantising, or keep the order.

NumPy arrays in, NumPy arrays out; JAX arrays (tracers too) likewise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_pallas.quant import QTensor
from moe_pallas.spec import GateUp, MoESpec


def convert_gate_up[A: (np.ndarray, jax.Array)](
    array: A, source: GateUp | str, target: GateUp | str, axis: int = -2
) -> A:
    """Reorder the 2F entries along ``axis`` from one gate/up order to the other.

    Args:
      array: (…, 2F, …), any dtype. The default axis fits weights (…, 2F, D); a bias or a scale per
        column (…, 2F) needs ``axis=-1``.
      source: The order it is in.
      target: The order it should have; the same one gives ``array`` itself.
      axis: Where gate and up lie.

    Returns:
      An array of the same shape, dtype and kind (NumPy or JAX).

    Raises:
      ValueError: The axis is odd in length, or not there.

    Example:
      >>> import numpy as np
      >>> from moe_pallas.interop import convert_gate_up
      >>> convert_gate_up(np.array([1, 10, 2, 20]), "interleaved", "stacked", axis=-1)
      array([ 1,  2, 10, 20])
    """
    source, target = GateUp(source), GateUp(target)
    axis = _gate_up_axis(array, axis)
    if source is target:
        return array
    head, f, tail = array.shape[:axis], array.shape[axis] // 2, array.shape[axis + 1 :]
    split = (2, f) if source is GateUp.STACKED else (f, 2)
    return array.reshape(*head, *split, *tail).swapaxes(axis, axis + 1).reshape(array.shape)


def with_gate_up(
    spec: MoESpec, params: Mapping[str, Any], order: GateUp | str
) -> tuple[MoESpec, dict[str, Any]]:
    """Give a layer's spec and parameters another gate/up order: the same layer, the same numbers.

    Args:
      spec: The layer.
      params: Its parameters, as ``spec.param_shapes``; NumPy or JAX arrays, or `QTensor`s.
      order: The order to have; ``"interleaved"`` is what a tensor axis needs (see `moe_pallas.Sharding`).

    Returns:
      The spec and parameters in that order. A spec whose activation has no gate comes back as it is.
    """
    if not spec.gated:
        return spec, dict(params)
    axes, order = {"w13": -2, "b13": -1, "shared_w13": -2}, GateUp(order)

    def convert(value: Any, axis: int) -> Any:
        if not isinstance(value, QTensor):
            return convert_gate_up(value, spec.gate_up, order, axis)
        # Gate and up have scales of their own, which follow each other as the rows do.
        values, scale = (convert_gate_up(part, spec.gate_up, order) for part in (value.values, value.scale))
        return dataclasses.replace(value, values=values, scale=scale, gate_up=order)

    converted = {
        name: convert(value, axes[name]) if name in axes else value for name, value in params.items()
    }
    return dataclasses.replace(spec, gate_up=order), converted


def split_gate_up[A: (np.ndarray, jax.Array)](array: A, order: GateUp | str, axis: int = -2) -> tuple[A, A]:
    """Take an array of 2F entries along ``axis`` apart into gate and up.

    Args:
      array: (…, 2F, …), any dtype.
      order: The order it is in.
      axis: Where gate and up lie; -1 for biases and scales per column.

    Returns:
      gate, up: (…, F, …) each. Of a NumPy array they are views.

    Raises:
      ValueError: The axis is odd in length, or not there.
    """
    axis = _gate_up_axis(array, axis)
    if GateUp(order) is GateUp.STACKED:
        f = array.shape[axis] // 2
        gate, up = slice(f), slice(f, None)
    else:
        gate, up = slice(None, None, 2), slice(1, None, 2)
    before: tuple[slice, ...] = (slice(None),) * axis
    return array[(*before, gate)], array[(*before, up)]


def join_gate_up[A: (np.ndarray, jax.Array)](gate: A, up: A, order: GateUp | str, axis: int = -2) -> A:
    """Put gate and up together along ``axis``; the inverse of `split_gate_up`.

    Args:
      gate: (…, F, …), any dtype.
      up: Of the same shape and dtype.
      order: The order to give them.
      axis: Where gate and up lie; -1 for biases and scales per column.

    Returns:
      (…, 2F, …). A JAX array if either input is one.

    Raises:
      ValueError: gate and up differ in shape or dtype, or have no such axis.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate and up have one shape and dtype; got gate {gate.dtype}{list(gate.shape)} and up "
            f"{up.dtype}{list(up.shape)}."
        )
    axis = _checked_axis(gate, axis)
    order = GateUp(order)
    xp = np if isinstance(gate, np.ndarray) and isinstance(up, np.ndarray) else jnp
    if order is GateUp.STACKED:
        return xp.concatenate([gate, up], axis=axis)
    shape = (*gate.shape[:axis], 2 * gate.shape[axis], *gate.shape[axis + 1 :])
    return xp.stack([gate, up], axis=axis + 1).reshape(shape)


def _gate_up_axis(array: np.ndarray | jax.Array, axis: int) -> int:
    axis = _checked_axis(array, axis)
    if array.shape[axis] % 2:
        raise ValueError(
            f"Gate and up share axis {axis} of an array of shape {tuple(array.shape)}; it holds 2F entries "
            f"and can't be {array.shape[axis]}, which is odd. Check axis (-2 for weights, -1 for biases)."
        )
    return axis


def _checked_axis(array: np.ndarray | jax.Array, axis: int) -> int:
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(
            f"An array of shape {tuple(array.shape)} has no axis {axis}. Biases and scales per column need "
            "axis=-1."
        )
    return axis % array.ndim
