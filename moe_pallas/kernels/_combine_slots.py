"""The weighted sum over a token's slots, as a launch of its own: it waits for memory alone."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_pallas.kernels._schedule import divmod_static
from moe_pallas.plan import BlockPlan
from moe_pallas.spec import MoESpec

_UNROLLED_SLOTS = 16


def _kernel(
    slots: Any, row_of_slot: Any, weight_of_slot: Any, y: Any, *, top_k: int, weighted: bool, width: int
) -> None:
    """Add up a piece of ``width`` columns of the slots of a token."""
    hidden_size = y.shape[1]
    token, piece = divmod_static(lax.axis_index("piece"), -(-hidden_size // width))
    column = jnp.minimum(piece * width, hidden_size - width)
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=width // 128)

    def value(j: Any) -> jax.Array:
        slot = token * top_k + j
        row = row_of_slot[slot]
        part = plgpu.load(
            slots.at[jnp.maximum(row, 0), pl.ds(column, width)], layout=layout, optimized=False
        ).astype(jnp.float32)
        if weighted:
            part = part * weight_of_slot[slot]
        return jnp.where(lax.broadcast(row >= 0, part.shape), part, 0.0)

    if top_k <= _UNROLLED_SLOTS:
        # All loads start before the first is needed.
        total = functools.reduce(jnp.add, [value(j) for j in range(top_k)])
    else:
        zero = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout)
        total = lax.fori_loop(0, top_k, lambda j, sum_: sum_ + value(j), zero)
    y[token, pl.ds(column, width)] = total.astype(y.dtype)


def combine_slots(
    slots: jax.Array, plan: BlockPlan, spec: MoESpec, num_tokens: int, weighted: bool, interpret: Any = None
) -> jax.Array:
    """Compute ``y[t] = Σ_j weight[t, j] · slots[row of (t, j)]``, a warpgroup for each piece of a token.

    Args:
      slots: (rows, D) bfloat16 | float16. Rows of no slot are not read.
      plan: Says which row a slot has, if any, and its weight.
      spec: The layer.
      num_tokens: T.
      weighted: Whether there are weights; else they are all 1.
      interpret: ``plgpu.InterpretGPUParams``, to run on a CPU.

    Returns:
      (T, D) in slots' dtype: the sum in float32, in slot order, rounded once.
    """
    hidden_size = spec.hidden_size
    width = max(w for w in (128, 256, 512, 1024) if w <= hidden_size)
    return plgpu.kernel(
        functools.partial(_kernel, top_k=spec.top_k, weighted=weighted, width=width),
        out_type=jax.ShapeDtypeStruct((num_tokens, hidden_size), slots.dtype),
        grid=(num_tokens * -(-hidden_size // width),),
        grid_names=("piece",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name="combine_slots",
        interpret=interpret,
    )(slots, plan.row_of_slot, plan.weight_of_slot)
