"""What the roles of a CTA of the Swap-AB kernel share: references, this CTA's items, addresses, the ring."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_pallas.configs.schema import SwapABConfig
from moe_pallas.kernels import _mgpu, _routing
from moe_pallas.kernels._schedule import Schedule
from moe_pallas.plan import BlockPlan
from moe_pallas.spec import GateUp, MoESpec, Problem

CONSUMER, WEIGHTS, TOKENS = range(3)  # warpgroups


class Operands(NamedTuple):
    """What a launch reads. Of ``plan``, ``ids`` and ``logits`` one says where tokens go."""

    x: Any  # (T, D)
    w13: Any  # (E, 2, F, D), (E, F, 2, D) or (E, F, D)
    w2: Any  # (E, D, F)
    b13: Any = None  # (E, 2F) or (E, F)
    b2: Any = None  # (E, D)
    flags: Any = None
    plan: BlockPlan | None = None
    ids: Any = None  # (T, top_k) int32
    weights: Any = None  # (T, top_k) float32
    logits: Any = None  # (T, E)
    correction_bias: Any = None  # (E,)
    real: Any = None  # (1,) or (T,) int32


class Buffers(NamedTuple):
    """What one phase leaves to the next in global memory."""

    h: Any = None  # (rows, F)
    slots: Any = None  # (down_splits * rows, D) float32
    parts: Any = None  # (items of the first GEMM, 2, 64, block_m) float32, of all its splits but the last


class Scratch(NamedTuple):
    """Shared memory."""

    w: Any
    x: Any
    epoch: Any
    w_full: Any
    x_full: Any
    empty: Any
    drawn: Any
    lists: Any = None
    routing: Any = None


class Launch:
    """What the roles of a CTA share: statics, references, and which items are this CTA's."""

    def __init__(
        self,
        operands: Operands,
        y: Any,
        buffers: Buffers,
        scratch: Scratch,
        *,
        spec: MoESpec,
        config: SwapABConfig,
        num_tokens: int,
        num_ctas: int,
        phases: frozenset[str],
        interpret: bool,
    ):
        self.operands, self.y, self.buffers, self.scratch = operands, y, buffers, scratch
        self.spec, self.config, self.num_tokens, self.num_ctas = spec, config, num_tokens, num_ctas
        self.phases, self.interpret = phases, interpret
        self.is_fused = len(phases) > 1
        self.cta = lax.axis_index("cta")
        problem = Problem(spec=spec, num_tokens=num_tokens, dtype="bfloat16")
        self.max_rows = config.max_rows(problem)
        self.flag_of_cta = config.max_up_items(problem)  # after those of the first GEMM's items
        self.plan: Any = self._route()
        self.schedule = Schedule(config, spec, num_ctas, self.cta, self.plan.num_blocks[0], phases)

    def _route(self) -> Any:
        """Find out where tokens go: given as a plan, or written to shared memory by this CTA."""
        operands, lists = self.operands, self.scratch.lists
        statics: Any = {"spec": self.spec, "num_tokens": self.num_tokens, "block_m": self.config.block_m}
        if operands.plan is not None:
            return operands.plan
        if operands.logits is not None:
            _routing.route_logits(
                operands.logits,
                operands.correction_bias,
                operands.real,
                lists,
                self.scratch.routing,
                **statics,
            )
        else:
            _routing.route_ids(operands.ids, operands.weights, lists, self.scratch.routing, **statics)
        return lists

    def up_row(self, tile: jax.Array) -> jax.Array:
        """First column of h that a tile makes; the last tile is moved back to end with the matrix."""
        width = self.config.up_width(self.spec)
        return jnp.minimum(tile * width, self.spec.intermediate_size - width)

    def down_row(self, tile: jax.Array) -> jax.Array:
        """First column of y that a tile makes."""
        width = self.config.down_width()
        return jnp.minimum(tile * width, self.spec.hidden_size - width)

    def up_halves(self, expert: jax.Array, tile: jax.Array) -> tuple[tuple[Any, ...], ...]:
        """Where the two halves of a tile stand in w13: gate and up, or two runs of the only branch."""
        row, count = self.up_row(tile), self.config.up_rows
        rows = pl.ds(row, count)
        if not self.spec.gated:
            return (expert, rows), (expert, pl.ds(row + count, count))
        if self.spec.gate_up is GateUp.STACKED:
            return (expert, 0, rows), (expert, 1, rows)
        return (expert, rows, 0), (expert, rows, 1)

    def up_biases(self, expert: jax.Array, tile: jax.Array, width: int) -> list[jax.Array]:
        """Biases of the two halves, (64, width) float32 each."""
        row = self.up_row(tile)
        stride = 1
        if not self.spec.gated:
            firsts = (row, row + self.config.up_rows)
        elif self.spec.gate_up is GateUp.STACKED:
            firsts = (row, row + self.spec.intermediate_size)
        else:
            firsts, stride = (2 * row, 2 * row + 1), 2
        return [
            self._bias(self.operands.b13, expert, first, stride, self.config.up_rows, width)
            for first in firsts
        ]

    def down_halves(self, expert: jax.Array, tile: jax.Array) -> tuple[tuple[Any, ...], ...]:
        """Where the two halves of a tile stand in w2."""
        row, count = self.down_row(tile), self.config.down_rows
        return (expert, pl.ds(row, count)), (expert, pl.ds(row + count, count))

    def down_biases(self, expert: jax.Array, tile: jax.Array, width: int) -> list[jax.Array]:
        """Biases of the two halves, (64, width) float32 each."""
        row, count = self.down_row(tile), self.config.down_rows
        return [self._bias(self.operands.b2, expert, first, 1, count, width) for first in (row, row + count)]

    def _bias(
        self, ref: Any, expert: jax.Array, first: jax.Array, stride: int, count: int, width: int
    ) -> jax.Array:
        return _mgpu.load_column(
            ref, expert, first, stride=stride, num_rows=count, width=width, interpret=self.interpret
        )

    def by_width(self, block: jax.Array, run: Callable[[int], None]) -> None:
        """``run(width)`` for the least of 8, 16, ... block_m columns that hold the block's tokens."""
        if self.config.block_m == 8:
            run(8)
            return
        size = self.plan.block_size[block]
        width = 8
        while width <= self.config.block_m:
            least = 0 if width == 8 else width // 2
            pl.when(jnp.logical_and(size > least, size <= width))(functools.partial(run, width))
            width *= 2

    def walk(self, phase: str, body: Callable[[jax.Array, jax.Array], jax.Array], step: Any) -> Any:
        """``step = body(i, step)`` for each item i of this CTA in a phase, if this launch has the phase."""
        count = {"up": self.schedule.num_ups, "down": self.schedule.num_downs}[phase]
        return lax.fori_loop(0, count, body, step) if phase in self.phases else step

    def stage(self, step: jax.Array) -> jax.Array:
        """Place in the ring."""
        return lax.rem(step, jnp.int32(self.config.num_stages))

    def await_empty(self, step: jax.Array) -> jax.Array:
        """Wait until the stage of a step is free; return the stage."""
        stage = self.stage(step)

        @pl.when(step >= self.config.num_stages)
        def _() -> None:
            plgpu.barrier_wait(self.scratch.empty.at[stage])  # what it held is multiplied

        return stage

    def drain(self, steps: jax.Array) -> None:
        """Wait for what `await_empty` did not: a barrier may go when all its completions were seen."""
        late = jnp.minimum(steps, self.config.num_stages)

        @pl.loop(0, late)
        def _(i: jax.Array) -> None:
            plgpu.barrier_wait(self.scratch.empty.at[self.stage(steps - late + i)])
