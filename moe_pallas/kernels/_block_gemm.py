"""Blocks of rows times the weights of their experts: the kernel of the grouped GEMM.

A block is up to 128 rows of one expert (`moe_pallas.plan.BlockPlan`). An item is a block times 256 weight
rows (or 128: the figures below are for 256), over the whole contraction. The grid has a CTA for each SM. A
CTA begins with the item of its own number and then draws the next that no other has: short blocks would else
let CTAs run apart, and what they share would have left the L2 cache when the last of them comes to it. The
order keeps a band of blocks and their weights together. Inside a CTA three warpgroups work on their own:

    producer    | weights by TMA, rows by cp.async if they are gathered, else by TMA .................... |
    consumer 0  | wait | WGMMA 64 x 256 ............. | epilogue | WGMMA ............. | epilogue | ...
    consumer 1  | wait | WGMMA 64 x 256 ............. | epilogue | WGMMA ............. | epilogue | ...

A consumer multiplies its 64 rows of the block, if the block has them, with all 256 weight rows: gate and up
of the same 128 features, which so meet in one thread, or the only branch there is. Results leave through
shared memory, by TMA.

`num_stages` tiles of 128 rows and of 256 weight rows, 64 columns each, are on their way in one ring that
runs on across items. Barriers in shared memory:

    name    arrivals   who arrives                                               who waits
    full    2 (1)      TMA, gate and up (or the only branch); one more for        both consumers
            + 1        rows that come by TMA
    landed  128        cp.async, of each thread of the producer, for a tile of    consumers that have rows
                       gathered rows
    empty   2          each consumer, one step late                              producer
    drawn   1          producer: the next item's number is in shared memory      both consumers

The numbers stand in a ring of their own, which has room for more items than the producer can be ahead. Pallas
has no word for an arrival by cp.async, so `landed` is a barrier of our own (`moe_pallas.kernels._mgpu`).

Shared memory of a CTA: num_stages * (128 + 256) * 64 * 2 bytes for the ring, 2 * 2 * 64 * 64 * 2 for results.

The last tile of weight rows is moved back to end with the matrix; what the tile before has computed too is
not stored again. Rows are computed by the same instructions in the same order wherever they stand in a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_pallas.configs.schema import GroupedGemmConfig
from moe_pallas.kernels import _gather, _mgpu
from moe_pallas.spec import GateUp

_PRODUCER = 2  # warpgroup; 0 and 1 are the consumers
_RUN = 64  # rows and columns of a result that are stored together
_BLOCK_M, _BLOCK_K = GroupedGemmConfig.BLOCK_M, GroupedGemmConfig.BLOCK_K

# Registers of a thread: 3 warpgroups share 504 for 3 threads, 168 each before they are dealt out.
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 216, 72
_NUMBERS = 8  # items whose numbers are kept; the producer is up to num_stages items ahead, if they are short


class Operands(NamedTuple):
    """What a launch reads."""

    rows: Any  # (T, K), to be gathered, or (rows of the plan, K)
    weights: Any  # (E, N, K) or (E, K, N), or with gate and up apart (E, 2, N, K) or (E, N, 2, K)
    bias: Any  # (E, N) or (E, 2, N); or None
    num_blocks: Any
    block_expert: Any
    block_row: Any
    block_size: Any
    block_first: Any = None  # where a block's tokens start in token_of; given if rows are gathered
    token_of: Any = None
    weight_of_row: Any = None  # (rows of the plan,) float32: factors of the product, before the bias
    flags: Any = None  # of which only the counters are used; None if interpreted
    grouped_rows: Any = None  # (2,): the first row of any group, and the first after; the others become 0


class _Scratch(NamedTuple):
    """Shared memory."""

    rows: Any
    weights: Any
    results: Any
    words: Any  # numbers of items, then the launch's: each array takes a kilobyte
    landed: Any
    full: Any
    empty: Any
    drawn: Any


class _Item(NamedTuple):
    """A block of rows times a tile of weight rows."""

    block: jax.Array
    tile: jax.Array
    expert: jax.Array
    row: jax.Array
    size: jax.Array


class _Launch:
    """What the roles of a CTA share: statics, references, and which items are this CTA's."""

    def __init__(
        self,
        operands: Operands,
        out: Any,
        scratch: _Scratch,
        *,
        gate_up: GateUp | None,
        activate: Callable[..., jax.Array] | None,
        contract_last: bool,
        config: GroupedGemmConfig,
        block_n: int,
        num_ctas: int,
        interpret: bool,
    ):
        self.operands, self.out, self.scratch = operands, out, scratch
        self.gate_up, self.activate, self.config = gate_up, activate, config
        self.contract_last, self.num_ctas, self.interpret = contract_last, num_ctas, interpret
        self.gathers = operands.block_first is not None
        self.is_compact = operands.grouped_rows is not None  # no rows between blocks
        self.columns = out.shape[1]
        self.width = _width(self.columns, gate_up, block_n)
        self.tiles = -(-self.columns // self.width)
        self.steps = operands.rows.shape[1] // _BLOCK_K
        self.numbers, self.epoch = (scratch.words.at[pl.ds(*at)] for at in ((0, _NUMBERS), (_NUMBERS, 2)))
        self.cta = lax.axis_index("cta")
        self.blocks = operands.num_blocks[0]
        self.items = self.blocks * self.tiles

    def walk(
        self, body: Callable[[_Item, jax.Array], None], next_number: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """``body(item, its first step)`` for each item of this CTA; return the number of all its steps.

        ``next_number(slot)`` gives an item's number, with its place in the ring of numbers.
        """

        def turn(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            turns, number = state
            body(self.item(number), turns * self.steps)
            return turns + 1, next_number(lax.rem(turns + 1, jnp.int32(_NUMBERS)))

        turns, _ = lax.while_loop(lambda state: state[1] < self.items, turn, (jnp.int32(0), self.cta))
        return turns * self.steps

    def item(self, number: jax.Array) -> _Item:
        """What an item's number stands for."""
        block, tile = plgpu.planar_snake(number, (self.blocks, self.tiles), 0, self.config.band)
        operands = self.operands
        row = operands.block_row[block]
        row = row if self.is_compact else pl.multiple_of(row, 8)
        return _Item(block, tile, operands.block_expert[block], row, operands.block_size[block])

    def first_column(self, tile: jax.Array) -> jax.Array:
        """First column of the result that a tile makes; the last tile ends with the matrix."""
        return pl.multiple_of(jnp.minimum(tile * self.width, self.columns - self.width), _RUN)

    def weight_tiles(self, item: _Item, contracted: Any) -> list[tuple[Any, ...]]:
        """Where the weights of an item stand: gate and up, or the only branch."""
        rows = pl.ds(self.first_column(item.tile), self.width)
        if self.gate_up is None:
            at = (rows, contracted) if self.contract_last else (contracted, rows)
            return [(item.expert, *at)]
        halves = [(half, rows) if self.gate_up is GateUp.STACKED else (rows, half) for half in range(2)]
        return [(item.expert, *half, contracted) for half in halves]

    def stage(self, step: jax.Array) -> jax.Array:
        """Place in the ring."""
        return lax.rem(step, jnp.int32(self.config.num_stages))


def _width(columns: int, gate_up: GateUp | None, block_n: int) -> int:
    """Columns of the result that a tile makes."""
    return min(block_n // (1 if gate_up is None else 2), columns)


def _produce(launch: _Launch) -> jax.Array:
    """Load what the consumers need; returns the number of steps."""
    operands, scratch, stages = launch.operands, launch.scratch, launch.config.num_stages
    gathers, width = launch.gathers, launch.width

    def load_weights(item: _Item, columns: Any, stage: jax.Array) -> None:
        for i, source in enumerate(launch.weight_tiles(item, columns)):
            tile = scratch.weights.at[stage]
            target = tile.at[pl.ds(i * width, width)] if launch.contract_last else tile
            plgpu.copy_gmem_to_smem(operands.weights.at[source], target, scratch.full.at[stage])

    def produce(item: _Item, first_step: jax.Array) -> None:
        if gathers:
            copy_rows = _gather.gather_tile(
                operands.rows,
                operands.token_of,
                scratch.rows,
                operands.block_first[item.block],
                item.size,
                scratch.landed,
                interpret=launch.interpret,
            )

        def copy(k: jax.Array, _: None) -> None:
            step = first_step + k
            stage = launch.stage(step)

            @pl.when(step >= stages)
            def _await_empty() -> None:
                plgpu.barrier_wait(scratch.empty.at[stage])  # what it held is multiplied

            columns = pl.ds(k * _BLOCK_K, _BLOCK_K)
            load_weights(item, columns, stage)
            if gathers:
                copy_rows(k, stage)
                if launch.interpret:
                    plgpu.barrier_arrive(scratch.full.at[stage])
                return

            def copy_block(count: int) -> None:
                plgpu.copy_gmem_to_smem(
                    operands.rows.at[pl.ds(item.row, count), columns],
                    scratch.rows.at[stage, pl.ds(0, count)],
                    scratch.full.at[stage],
                )

            pl.when(item.size <= _RUN)(functools.partial(copy_block, _RUN))
            pl.when(item.size > _RUN)(functools.partial(copy_block, _BLOCK_M))

        lax.fori_loop(0, launch.steps, copy, None)

    def draw(slot: jax.Array) -> jax.Array:
        _mgpu.draw_item(
            operands.flags, launch.numbers, slot, launch.num_ctas, launch.items, interpret=launch.interpret
        )
        plgpu.barrier_arrive(scratch.drawn.at[slot])
        return launch.numbers[slot]

    if launch.interpret:
        launch.numbers[0] = launch.cta
    total = launch.walk(produce, draw)
    # A barrier may go when all its completions were seen.
    last = jnp.minimum(total, stages)

    @pl.loop(0, last)
    def _(i: jax.Array) -> None:
        plgpu.barrier_wait(scratch.empty.at[launch.stage(total - last + i)])

    return total


def _multiply(launch: _Launch, consumer: jax.Array, first_step: jax.Array) -> jax.Array:
    """A consumer's rows of a block times the weights of a tile: (64, weight rows) float32."""
    scratch = launch.scratch
    mine = pl.ds(pl.multiple_of(consumer * _RUN, _RUN), _RUN)

    def accumulate(accumulator: Any) -> jax.Array:
        def multiply(k: jax.Array, _: None) -> None:
            stage = launch.stage(first_step + k)
            plgpu.barrier_wait(scratch.full.at[stage])  # rows and weights are there
            if scratch.landed is not None:
                _gather.await_landed(scratch.landed, first_step + k)
            weights = scratch.weights.at[stage]
            weights = weights.transpose((1, 0)) if launch.contract_last else weights
            plgpu.wgmma(accumulator, scratch.rows.at[stage, mine], weights)
            plgpu.wgmma_wait(1)  # that of the stage before is done

            @pl.when(k > 0)
            def _free() -> None:
                before = first_step + k + launch.config.num_stages - 1
                plgpu.barrier_arrive(scratch.empty.at[launch.stage(before)])

        lax.fori_loop(0, launch.steps, multiply, None)
        value = accumulator[...]
        plgpu.barrier_arrive(scratch.empty.at[launch.stage(first_step + launch.steps - 1)])
        return value

    branches = 1 if launch.gate_up is None else 2
    return pl.run_scoped(accumulate, plgpu.ACC((_RUN, branches * launch.width), jnp.float32))


def _consume(launch: _Launch, consumer: jax.Array) -> None:
    operands, scratch, gated = launch.operands, launch.scratch, launch.gate_up is not None

    def consume(item: _Item, first_step: jax.Array) -> None:
        rows_left = item.size - consumer * _RUN

        @pl.when(rows_left > 0)
        def _multiply_and_store() -> None:
            product = _multiply(launch, consumer, first_step)
            runs = range(0, launch.width, _RUN)
            for pair in (runs[j : j + 2] for j in range(0, len(runs), 2)):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was here before has left
                for tile, first in enumerate(pair):
                    branches = range(first, product.shape[1], launch.width)
                    values = [product[:, at : at + _RUN] for at in branches]
                    scratch.results.at[consumer, tile][...] = finish(item, values, first)
                plgpu.commit_smem()  # TMA sees it
                for tile, first in enumerate(pair):
                    # Columns of a tile that was moved back are stored by the tile before.
                    pl.when(launch.first_column(item.tile) + first >= item.tile * launch.width)(
                        functools.partial(store, item, tile, first, rows_left)
                    )

        @pl.when(rows_left <= 0)
        def _pass() -> None:
            @pl.loop(0, launch.steps)
            def _free(k: jax.Array) -> None:
                stage = launch.stage(first_step + k)
                plgpu.barrier_wait(scratch.full.at[stage])  # not before the other consumer's turn
                plgpu.barrier_arrive(scratch.empty.at[stage])

    def finish(item: _Item, branches: list[jax.Array], first: int) -> jax.Array:
        """A result (64, 64), columns of the tile from ``first`` on: from gate and up, or the only branch."""
        if operands.weight_of_row is not None:
            weights = plgpu.load(
                operands.weight_of_row.at[pl.ds(pl.multiple_of(item.row + consumer * _RUN, 8), _RUN)],
                layout=plgpu.Layout.WGMMA.reduce(1),
                optimized=False,
            )
            branches = [value * lax.broadcast_in_dim(weights, value.shape, (0,)) for value in branches]
        if operands.bias is not None:
            columns = pl.ds(pl.multiple_of(launch.first_column(item.tile) + first, _RUN), _RUN)
            for i, value in enumerate(branches):
                bias = plgpu.load(
                    operands.bias.at[(item.expert, i, columns) if gated else (item.expert, columns)],
                    layout=plgpu.Layout.WGMMA.reduce(0),
                    optimized=False,
                ).astype(jnp.float32)
                branches[i] = value + lax.broadcast_in_dim(bias, value.shape, (1,))
        if launch.activate is not None:
            branches = [launch.activate(*branches) if gated else launch.activate(branches[0], None)]
        return branches[0].astype(launch.out.dtype)

    def store(item: _Item, tile: int, first: int, size: jax.Array) -> None:
        """Send a result on its way, as many rows of it as there are in the block."""
        row, column = item.row + consumer * _RUN, launch.first_column(item.tile) + first
        if launch.is_compact:
            store_rows(tile, row, column, size)
            return
        columns = pl.ds(pl.multiple_of(column, _RUN), _RUN)

        def copy(start: Any, rows: int) -> None:
            plgpu.copy_smem_to_gmem(
                scratch.results.at[consumer, tile, pl.ds(start, rows)],
                launch.out.at[pl.ds(pl.multiple_of(row + start, 8), rows), columns],
            )

        @pl.when(size >= _RUN)
        def _all() -> None:
            copy(0, _RUN)

        @pl.when(size < _RUN)
        def _some() -> None:
            # Eight at a time: the next block starts at the next multiple of 8.
            @pl.loop(0, lax.div(size + 7, jnp.int32(8)))
            def _(i: jax.Array) -> None:
                copy(pl.multiple_of(8 * i, 8), 8)

    def store_rows(tile: int, row: jax.Array, column: jax.Array, size: jax.Array) -> None:
        _mgpu.store_tile(
            scratch.results, (consumer, tile), launch.out, row, column, size, interpret=launch.interpret
        )

    def clear(first: Any, end: Any) -> None:
        """Set rows to 0, 64 by 64 of them at a time."""
        runs = jnp.int32(launch.columns // _RUN)
        pieces = lax.div(end - first + _RUN - 1, jnp.int32(_RUN)) * runs
        me, all_ = 2 * launch.cta + consumer, 2 * launch.num_ctas

        @pl.loop(0, lax.div(jnp.maximum(pieces - me + all_ - 1, 0), jnp.int32(all_)))
        def _(i: jax.Array) -> None:
            piece = me + i * all_
            row = first + lax.div(piece, runs) * _RUN
            store_rows(0, row, lax.rem(piece, runs) * _RUN, end - row)

    def drawn(slot: jax.Array) -> jax.Array:
        plgpu.barrier_wait(scratch.drawn.at[slot])
        return launch.numbers[slot]

    launch.walk(consume, drawn)
    if launch.is_compact:
        scratch.results.at[consumer, 0][...] = jnp.zeros((_RUN, _RUN), launch.out.dtype)
        clear(jnp.int32(0), operands.grouped_rows[0])
        clear(operands.grouped_rows[1], jnp.int32(launch.out.shape[0]))
    plgpu.wait_smem_to_gmem(0)  # the block outlives its stores


def _kernel(*refs: Any, unflatten: Callable[..., Any], **statics: Any) -> None:
    launch = _Launch(*unflatten(refs), **statics)
    if launch.scratch.landed is not None:
        _gather.init_landed(launch.scratch.landed)
    warpgroup = lax.axis_index("wg")

    @pl.when(warpgroup == _PRODUCER)
    def _() -> None:
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
        steps = _produce(launch)
        if not launch.interpret:
            # With no step there was no barrier to wait for the launch's number.
            pl.when(steps > 0)(functools.partial(_mgpu.check_alone, launch.epoch))
            _mgpu.leave(launch.operands.flags, launch.num_ctas)

    @pl.when(warpgroup < _PRODUCER)
    def _() -> None:
        plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        if not launch.interpret:

            @pl.when(warpgroup == 0)
            def _() -> None:
                _mgpu.draw_ticket(launch.operands.flags, launch.epoch, launch.num_ctas)

        _consume(launch, warpgroup)


def multiply_blocks(
    operands: Operands,
    out: jax.ShapeDtypeStruct,
    *,
    config: GroupedGemmConfig,
    block_n: int,
    num_ctas: int,
    interpret: Any,
    name: str,
    gate_up: GateUp | None = None,
    activate: Callable[..., jax.Array] | None = None,
    contract_last: bool = True,
) -> jax.Array:
    """Launch the kernel: each block of rows times the weights of its expert."""
    dtype, stages = operands.rows.dtype, config.num_stages
    assert stages < _NUMBERS, stages
    tile = _mgpu.operand_transforms(dtype)
    branches = 1 if gate_up is None else 2
    lands = operands.block_first is not None and interpret is None  # rows come by cp.async
    weight_rows = branches * _width(out.shape[1], gate_up, block_n)
    weights_tile = (weight_rows, _BLOCK_K) if contract_last else (_BLOCK_K, weight_rows)
    scratch = _Scratch(
        rows=plgpu.SMEM((stages, _BLOCK_M, _BLOCK_K), dtype, transforms=tile),
        weights=plgpu.SMEM((stages, *weights_tile), dtype, transforms=tile),
        results=plgpu.SMEM((2, 2, _RUN, _RUN), out.dtype, transforms=_mgpu.operand_transforms(out.dtype)),
        words=plgpu.SMEM((_NUMBERS + 2,), jnp.int32),
        landed=plgpu.SMEM((stages, 2), jnp.int32) if lands else None,
        full=plgpu.Barrier(num_arrivals=branches + (not lands), num_barriers=stages),
        empty=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        drawn=plgpu.Barrier(num_arrivals=1, num_barriers=_NUMBERS),
    )
    if interpret is None:
        operands = operands._replace(flags=_mgpu.new_flags(0))
    leaves, tree = jax.tree.flatten(operands)
    scratch_leaves, scratch_tree = jax.tree.flatten(scratch)

    def unflatten(refs: tuple[Any, ...]) -> tuple[Any, ...]:
        count = len(leaves)
        given, held = jax.tree.unflatten(tree, refs[:count]), refs[count + 1 :]
        return given, refs[count], jax.tree.unflatten(scratch_tree, held)

    return plgpu.kernel(
        functools.partial(
            _kernel,
            unflatten=unflatten,
            gate_up=gate_up,
            activate=activate,
            contract_last=contract_last,
            config=config,
            block_n=block_n,
            num_ctas=num_ctas,
            interpret=interpret is not None,
        ),
        out_type=out,
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="wg",
        scratch_types=scratch_leaves,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        kernel_name=name,
        interpret=interpret,
    )(*leaves)
