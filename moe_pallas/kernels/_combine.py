"""The combine of the Swap-AB kernel: ``y[t] = sum over slots j of weight[t, j] * row of (t, j)``, float32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_pallas.kernels import _mgpu
from moe_pallas.kernels._launch import CONSUMER, Launch
from moe_pallas.kernels._schedule import divmod_static
from moe_pallas.spec import WeightOn


def combine(launch: Launch) -> None:
    """Add up the slots of each token, in their order; pieces of rows go round the CTAs."""
    spec, plan, slots = launch.spec, launch.plan, launch.buffers.slots
    width = _piece_width(spec.hidden_size, launch.num_tokens, launch.num_ctas)
    per_token = -(-spec.hidden_size // width)
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=min(4, width // 128))
    pieces = launch.num_tokens * per_token

    def value(slot: jax.Array, column: jax.Array) -> jax.Array:
        row = plan.row_of_slot[slot]
        total = functools.reduce(
            jnp.add,
            [
                plgpu.load(
                    slots.at[s * launch.max_rows + jnp.maximum(row, 0), pl.ds(column, width)],
                    layout=layout,
                    optimized=False,
                )
                for s in range(launch.config.down_splits)
            ],
        )
        if spec.weight_on is WeightOn.OUTPUT:
            total = total * plan.weight_of_slot[slot]
        return keep_if(row >= 0, total)

    @pl.when(launch.cta < pieces)
    def _() -> None:
        if launch.is_fused:
            _mgpu.await_flags(
                launch.operands.flags,
                jnp.int32(launch.flag_of_cta),
                jnp.int32(launch.num_ctas),
                launch.scratch.epoch,
                warpgroup=CONSUMER,
            )

        @pl.loop(0, lax.div(pieces - launch.cta + launch.num_ctas - 1, jnp.int32(launch.num_ctas)))
        def _(i: jax.Array) -> None:
            token, piece = divmod_static(launch.cta + i * launch.num_ctas, per_token)
            column = jnp.minimum(piece * width, spec.hidden_size - width)
            first = token * spec.top_k
            if spec.top_k * launch.config.down_splits <= 16:
                # Unrolled, all loads start before the first is needed.
                total = functools.reduce(jnp.add, [value(first + j, column) for j in range(spec.top_k)])
            else:
                zero = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout)
                total = lax.fori_loop(0, spec.top_k, lambda j, sum_: sum_ + value(first + j, column), zero)
            _mgpu.store(
                launch.y.at[token, pl.ds(column, width)],
                total.astype(launch.y.dtype),
                interpret=launch.interpret,
            )


def _piece_width(hidden_size: int, num_tokens: int, num_ctas: int) -> int:
    """Columns that are combined at once: as few as still leave every CTA one piece at most."""
    width = 128
    while width < 1024 and 2 * width <= hidden_size and num_tokens * -(-hidden_size // width) > num_ctas:
        width *= 2
    return width


def keep_if(condition: jax.Array, value: jax.Array) -> jax.Array:
    """``value`` if a scalar condition holds, else zeros."""
    return jnp.where(lax.broadcast(condition, value.shape), value, 0.0)
