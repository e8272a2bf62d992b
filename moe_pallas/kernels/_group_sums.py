"""Sums over the rows of groups, for the gradients of biases: a launch that waits for memory alone."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_pallas.kernels._schedule import divmod_static

_AT_ONCE = 8  # rows that are waited for together


class RowGroups(NamedTuple):
    """Which rows are summed up, with which factors; arrays of int32 unless said otherwise.

    Attributes:
      row, size: (G,). The rows of a group: ``row[g]`` … ``row[g] + size[g] - 1``.
      first, token_of: (G,), (S,). If given, such a row is not row r of the values, but of the i-th row of a
        group ``token_of[first[g] + i]``.
      weight_of_row: (rows,) float32. Factors of rows, by r; or None.
    """

    row: Any
    size: Any
    first: Any = None
    token_of: Any = None
    weight_of_row: Any = None


def _kernel(*refs: Any, unflatten: Any, width: int) -> None:
    values, groups, out = unflatten(refs)
    columns = out.shape[1]
    group, piece = divmod_static(lax.axis_index("piece"), -(-columns // width))
    column = jnp.minimum(piece * width, columns - width)
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=width // 128)
    size = groups.size[group]

    def value(i: jax.Array) -> jax.Array:
        is_row = i < size
        i = jnp.minimum(i, size - 1)
        row = groups.row[group] + i
        source = row if groups.token_of is None else groups.token_of[groups.first[group] + i]
        part = plgpu.load(values.at[source, pl.ds(column, width)], layout=layout, optimized=False)
        part = part.astype(jnp.float32)
        if groups.weight_of_row is not None:
            part = part * groups.weight_of_row[row]
        return jnp.where(lax.broadcast(is_row, part.shape), part, 0.0)

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        return functools.reduce(jnp.add, [value(i * _AT_ONCE + j) for j in range(_AT_ONCE)], total)

    zero = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout)
    steps = lax.div(size + _AT_ONCE - 1, jnp.int32(_AT_ONCE))
    out[group, pl.ds(column, width)] = lax.fori_loop(0, steps, add, zero)


def sum_groups(values: jax.Array, groups: RowGroups, interpret: Any = None) -> jax.Array:
    """Compute ``out[g] = Σ_r weight[r] · values[r]`` over the rows of each group, a warpgroup for each piece.

    Args:
      values: (rows, C) float. Rows of no group are not read.
      groups: Which rows.
      interpret: ``plgpu.InterpretGPUParams``, to run on a CPU.

    Returns:
      (G, C) float32: the sum in the order of rows; 0 for groups without rows.
    """
    columns, num_groups = values.shape[1], len(groups.size)
    widths = [w for w in (128, 256, 512, 1024) if w <= columns]
    # Pieces that come out even, where there are such: the last one is else moved back.
    width = max([w for w in widths if columns % w == 0] or widths)
    leaves, tree = jax.tree.flatten((values, groups))

    def unflatten(refs: tuple[Any, ...]) -> tuple[Any, ...]:
        return *jax.tree.unflatten(tree, refs[:-1]), refs[-1]

    return plgpu.kernel(
        functools.partial(_kernel, unflatten=unflatten, width=width),
        out_type=jax.ShapeDtypeStruct((num_groups, columns), jnp.float32),
        grid=(num_groups * -(-columns // width),),
        grid_names=("piece",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name="sum_groups",
        interpret=interpret,
    )(*leaves)
