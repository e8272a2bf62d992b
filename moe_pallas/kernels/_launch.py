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
from moe_pallas.kernels import _mgpu, _quantise, _routing
from moe_pallas.kernels._ring import Ring
from moe_pallas.kernels._schedule import Item, Schedule
from moe_pallas.kernels._weights import block_start
from moe_pallas.plan import BlockPlan
from moe_pallas.spec import ActivationScales, GateUp, MoESpec, Problem, QuantScheme, WeightScales

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
    s13: Any = None  # scales of FP8 weights, a matrix of them for TENSOR (E, P), CHANNEL (E, 2F) or ...
    s2: Any = None  # ... BLOCK: (E * scales of rows, scales of columns)
    input13: Any = None  # (E, P): STATIC scales of x and h
    input2: Any = None  # (E, 1)


class Buffers(NamedTuple):
    """What one phase leaves to the next in global memory."""

    x: Any = None  # (T, D) codes, of FP8 weights
    x_scale: Any = None  # (T, D / 128) or (T, 1)
    h: Any = None  # (rows, F); of FP8 weights codes, or float32
    h_scale: Any = None  # (rows, F / 128), of codes in groups
    slots: Any = None  # (down_splits * rows, D) float32
    parts: Any = None  # (items of the first GEMM, slabs, 64, block_m) float32, of all its splits but the last


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
    scales: Any = None  # (stages, tokens + slabs): scales that go with a stage
    maxima: Any = None  # (4 * block_m,): what each warp found of a block's tokens


class Launch(Ring):
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
        scheme: QuantScheme | None,
        num_tokens: int,
        num_ctas: int,
        phases: frozenset[str],
        interpret: bool,
    ):
        super().__init__(scratch.empty, config.num_stages)
        self.operands, self.y, self.buffers, self.scratch = operands, y, buffers, scratch
        self.spec, self.config, self.num_tokens, self.num_ctas = spec, config, num_tokens, num_ctas
        self.scheme, self.phases, self.interpret = scheme, phases, interpret
        self.in_blocks = scheme is not None and scheme.weights is WeightScales.BLOCK
        self.h_in_groups = scheme is not None and scheme.hidden is ActivationScales.GROUP
        self.reads_floats = config.reads_floats(None if scheme is None else scheme.activations)
        self.is_fused = len(phases) > 1
        self.cta = lax.axis_index("cta")
        problem = Problem(spec=spec, num_tokens=num_tokens, dtype="bfloat16")
        self.max_rows = config.max_rows(problem)
        self.flag_of_cta = config.max_up_items(problem)  # after those of the first GEMM's items
        self.flag_of_x = self.flag_of_cta + num_ctas
        if scheme is not None and self.is_fused:
            pl.when(lax.axis_index("wg") == TOKENS)(self._quantise)
        self.plan: Any = self._route()
        self.schedule = Schedule(config, spec, num_ctas, self.cta, self.plan.num_blocks[0], phases)

    def _quantise(self) -> None:
        """Make this CTA's part of the codes of x, and raise its flag, while others route."""
        assert self.scheme is not None
        operands, buffers = self.operands, self.buffers
        _quantise.quantise_tokens(
            operands.x,
            buffers.x,
            buffers.x_scale,
            operands.input13,
            self.scratch.maxima,
            self.scheme.activations,
            self.num_ctas,
        )
        _mgpu.draw_ticket(operands.flags, self.scratch.epoch, self.num_ctas)
        plgpu.barrier_arrive(self.scratch.drawn)
        _mgpu.raise_flag(operands.flags, self.flag_of_x + self.cta, self.scratch.epoch)

    def await_x(self) -> None:
        """Wait for the codes of x, in the warpgroup of tokens."""
        assert self.scheme is not None
        count = min(self.num_ctas, _quantise.num_pieces(self.operands.x, self.scheme.activations))
        flags, first = self.operands.flags, jnp.int32(self.flag_of_x)
        _mgpu.await_flags(flags, first, jnp.int32(count), self.scratch.epoch, warpgroup=TOKENS)

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
        row, count = self.up_row(tile), self.config.slabs * self.config.up_rows
        rows = pl.ds(row, count)
        if not self.spec.gated:
            return (expert, rows), (expert, pl.ds(row + count, count))
        if self.spec.gate_up is GateUp.STACKED:
            return (expert, 0, rows), (expert, 1, rows)
        return (expert, rows, 0), (expert, rows, 1)

    def down_halves(self, expert: jax.Array, tile: jax.Array) -> tuple[tuple[Any, ...], ...]:
        """Where the two halves of a tile stand in w2."""
        row, count = self.down_row(tile), self.config.slabs * self.config.down_rows
        return (expert, pl.ds(row, count)), (expert, pl.ds(row + count, count))

    def _up_slabs(self, tile: jax.Array) -> list[tuple[int, jax.Array]]:
        """The slabs of a tile's two halves: which branch, and the first row in it."""
        config, row = self.config, self.up_row(tile)
        slabs = range(2 * config.slabs)
        if not self.spec.gated:
            return [(0, row + i * config.up_rows) for i in slabs]
        return [(i // config.slabs, row + i % config.slabs * config.up_rows) for i in slabs]

    def _down_slabs(self, tile: jax.Array) -> list[jax.Array]:
        """The first row of each slab of a tile."""
        return [self.down_row(tile) + i * self.config.down_rows for i in range(2 * self.config.slabs)]

    def up_biases(self, expert: jax.Array, tile: jax.Array, width: int) -> list[jax.Array]:
        """Biases of the slabs, (64, width) float32 each."""
        return self._of_up_rows(self.operands.b13, expert, tile, width)

    def _of_up_rows(self, ref: Any, expert: jax.Array, tile: jax.Array, width: int) -> list[jax.Array]:
        """What (E, 2F) has for the rows of a tile of the first GEMM, (64, width) float32 a slab."""
        size, values = self.spec.intermediate_size, []
        for branch, row in self._up_slabs(tile):
            is_stacked = not self.spec.gated or self.spec.gate_up is GateUp.STACKED
            first, stride = (branch * size + row, 1) if is_stacked else (2 * row + branch, 2)
            values.append(self._column(ref, expert, first, stride, self.config.up_rows, width))
        return values

    def down_biases(self, expert: jax.Array, tile: jax.Array, width: int) -> list[jax.Array]:
        """Biases of the slabs, (64, width) float32 each."""
        return self._of_down_rows(self.operands.b2, expert, tile, width)

    def _of_down_rows(self, ref: Any, expert: jax.Array, tile: jax.Array, width: int) -> list[jax.Array]:
        count = self.config.down_rows
        return [self._column(ref, expert, row, 1, count, width) for row in self._down_slabs(tile)]

    def up_scales(self, expert: jax.Array, tile: jax.Array, width: int) -> list[jax.Array] | None:
        """Factors of the slabs' products, if they are not those of blocks: scalars or (64, width) each."""
        if self.scheme is None or self.in_blocks:
            return None
        if self.scheme.weights is WeightScales.CHANNEL:
            return self._of_up_rows(self.operands.s13, expert, tile, width)
        return [self.operands.s13[expert, branch] for branch, _ in self._up_slabs(tile)]

    def down_scales(self, expert: jax.Array, tile: jax.Array, width: int) -> list[jax.Array] | None:
        """The same in the second GEMM."""
        if self.scheme is None or self.in_blocks:
            return None
        if self.scheme.weights is WeightScales.CHANNEL:
            return self._of_down_rows(self.operands.s2, expert, tile, width)
        return [self.operands.s2[expert, 0]] * (2 * self.config.slabs)

    def up_blocks(self, item: Item, expert: jax.Array) -> tuple[Any, list[jax.Array]] | None:
        """Scales of blocks, and where those of step 0 stand for each slab; None without blocks."""
        if not self.in_blocks:
            return None
        scales, size = self.operands.s13, self.spec.intermediate_size
        gate_up = self.spec.gate_up if self.spec.gated else None
        slabs = self._up_slabs(item.tile)
        return scales, [block_start(scales, expert, branch, row, size, gate_up) for branch, row in slabs]

    def down_blocks(self, item: Item, expert: jax.Array) -> tuple[Any, list[jax.Array]] | None:
        """The same in the second GEMM."""
        if not self.in_blocks:
            return None
        scales, size = self.operands.s2, self.spec.hidden_size
        rows = self._down_slabs(item.tile)
        return scales, [block_start(scales, expert, 0, row, size, None) for row in rows]

    def _column(
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

    def walk(self, phase: str, body: Callable[[jax.Array, Any], Any], step: Any) -> Any:
        """``step = body(i, step)`` for each item i of this CTA in a phase, if this launch has the phase."""
        count = {"up": self.schedule.num_ups, "down": self.schedule.num_downs}[phase]
        return lax.fori_loop(0, count, body, step) if phase in self.phases else step
