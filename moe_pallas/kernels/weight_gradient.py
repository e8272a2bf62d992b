"""Gradients of expert weights: a grouped GEMM whose contraction is over each expert's rows.

    out[e] = sum over rows r of expert e of left[r].T @ right[r]      (M, N) for each expert, float32 inside

An item is a tile of 128 columns of ``left`` times 256 columns of ``right``, over all rows of one expert, 64
rows a step. Both operands stand in shared memory as their rows do, which WGMMA calls MN-major on both sides:
nothing is transposed on the way. An expert without rows has items of one step of zeros. Roles, ring, drawing
of items and registers: `moe_pallas.kernels._block_gemm`.

    producer    | 64 rows of both operands a step: TMA where they stand in order, else cp.async ......... |
    consumer 0  | wait | WGMMA 64 x 256 ............. | epilogue | WGMMA ............. | epilogue | ...
    consumer 1  | wait | WGMMA 64 x 256 ............. | epilogue | WGMMA ............. | epilogue | ...

The rows of an operand are (`Rows`) those of a plan, of an expert one after the other from a multiple of 8 on;
or those of the tokens that a plan names; or sorted by group without gaps. In the last step of an expert there
may be fewer than 64. What stands behind them is another expert's, or nothing, NaN perhaps, and 0 times NaN is
none of ours: both operands then come by cp.async, which writes zeros for rows that are not there.

    name    arrivals   who arrives                                               who waits
    full    1 or 2     TMA, for each operand in order; in an expert's last step  both consumers
                       the producer itself
    landed  128        cp.async, of each thread of the producer                  both consumers
    empty, drawn       as in `_block_gemm`

Shared memory of a CTA: num_stages * 64 * (128 + 256) * 2 bytes for the ring, 32 KiB for results.

Operands are bfloat16 or float16, the columns of either multiples of 64 from 128 on. Results are bitwise
repeatable: an expert's rows are added up in their order. They are stored in the operands' dtype or float32.
"""

from __future__ import annotations

import enum
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_pallas.configs.schema import GroupedGemmConfig
from moe_pallas.kernels import _gather, _mgpu
from moe_pallas.kernels._persistent import NUMBERS, Persistent, ring_scratch, run_roles

_RUN = 64  # rows of a step; rows and columns of a result that are stored together
_TILE_M, _TILE_N = 128, 256


class Rows(enum.Enum):
    """Where the rows of an operand stand."""

    PLANNED = "planned"  # those of a plan: an expert's from a multiple of 8 on
    TOKENS = "tokens"  # what `Groups.token_of` names
    SORTED = "sorted"  # an expert's from anywhere on


class Groups(NamedTuple):
    """The rows of each expert; arrays of (E,) int32.

    Attributes:
      row: The first of them where rows are planned.
      first: The first in ``token_of``, or of rows that are sorted.
      size: How many they are.
      token_of: Tokens of all rows, group by group without gaps; or None.
    """

    row: Any
    first: Any
    size: Any
    token_of: Any = None


class _Operands(NamedTuple):
    left: Any  # (rows, M)
    right: Any  # (rows, N)
    groups: Groups
    flags: Any = None


class _Scratch(NamedTuple):
    left: Any
    right: Any
    results: Any
    words: Any
    landed: Any
    full: Any
    empty: Any
    drawn: Any


class _Item(NamedTuple):
    """A tile of one expert's matrix."""

    expert: jax.Array
    tile_m: jax.Array
    tile_n: jax.Array
    size: jax.Array


class _Launch(Persistent):
    """What the roles of a CTA share."""

    def __init__(
        self,
        operands: _Operands,
        out: Any,
        scratch: _Scratch,
        *,
        rows: tuple[Rows, Rows],
        branches: int,
        config: GroupedGemmConfig,
        num_ctas: int,
        interpret: bool,
    ):
        self.operands, self.out, self.config = operands, out, config
        self.rows, self.branches = rows, branches
        self.shape = operands.left.shape[1], operands.right.shape[1]
        self.tile = scratch.left.shape[2], scratch.right.shape[2]
        self.tiles = tuple(-(-n // width) for n, width in zip(self.shape, self.tile, strict=True))
        per_expert = self.tiles[0] * self.tiles[1]
        super().__init__(
            operands.flags,
            scratch,
            num_stages=config.num_stages,
            items=jnp.int32(operands.groups.size.shape[0] * per_expert),
            num_ctas=num_ctas,
            interpret=interpret,
        )

    def item(self, number: jax.Array) -> _Item:
        """What an item's number stands for: experts one after the other."""
        per_expert = jnp.int32(self.tiles[0] * self.tiles[1])
        expert = lax.div(number, per_expert)
        m, n = plgpu.planar_snake(number - expert * per_expert, self.tiles, 0, self.config.band)
        return _Item(expert, m, n, self.operands.groups.size[expert])

    def first_column(self, side: int, tile: jax.Array) -> jax.Array:
        """First column of an operand's tile; the last ends with the matrix."""
        width = self.tile[side]
        return pl.multiple_of(jnp.minimum(tile * width, self.shape[side] - width), _RUN)

    def walk(self, body: Any, next_number: Any) -> jax.Array:
        """``body(item, first step, steps)`` for each item of this CTA; return the number of all steps."""

        def turn(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            turns, number, first_step = state
            item = self.item(number)
            # One at least: with no step the producer would not wait for anybody, and lose its lead's bound.
            steps = lax.div(jnp.maximum(item.size, 1) + _RUN - 1, jnp.int32(_RUN))
            body(item, first_step, steps)
            return turns + 1, next_number(lax.rem(turns + 1, jnp.int32(NUMBERS))), first_step + steps

        start = (jnp.int32(0), self.cta, jnp.int32(0))
        return lax.while_loop(lambda state: state[1] < self.items, turn, start)[2]


def _produce(launch: _Launch) -> jax.Array:
    groups, scratch = launch.operands.groups, launch.scratch
    operands: tuple[Any, Any] = launch.operands[:2]

    def produce(item: _Item, first_step: jax.Array, steps: jax.Array) -> None:
        columns = [launch.first_column(side, at) for side, at in enumerate((item.tile_m, item.tile_n))]

        def load(k: jax.Array, _: None) -> None:
            done = k * _RUN
            size = item.size - done  # of this step and all that follow

            def finder(side: int) -> Any:
                is_planned = launch.rows[side] is Rows.PLANNED
                first = (groups.row if is_planned else groups.first)[item.expert] + done
                return _gather.gather_panel(
                    operands[side],
                    groups.token_of if launch.rows[side] is Rows.TOKENS else None,
                    scratch[side],
                    first,
                    size,
                    interpret=launch.interpret,
                )

            # Where tokens stand is read while the stage is still in use.
            found = [None if rows is Rows.PLANNED else finder(side) for side, rows in enumerate(launch.rows)]
            stage = launch.await_empty(first_step + k)
            for side in range(2):
                if (copy := found[side]) is not None:
                    copy(columns[side], stage)
                    continue

                @pl.when(size >= _RUN)
                def _in_order(side: int = side) -> None:
                    row = pl.multiple_of(groups.row[item.expert] + done, 8)
                    plgpu.copy_gmem_to_smem(
                        operands[side].at[pl.ds(row, _RUN), pl.ds(columns[side], launch.tile[side])],
                        scratch[side].at[stage],
                        scratch.full.at[stage],
                    )

                @pl.when(size < _RUN)
                def _last(side: int = side) -> None:
                    finder(side)(columns[side], stage)
                    plgpu.barrier_arrive(scratch.full.at[stage])

            if launch.interpret:
                plgpu.commit_smem()  # as consumers do behind `landed`: WGMMA reads, TMA writes next
                plgpu.barrier_arrive(scratch.full.at[stage])
            else:
                _gather.arrive_landed(scratch.landed, stage)

        lax.fori_loop(0, steps, load, None)

    if launch.interpret:
        launch.numbers[0] = launch.cta
    total = launch.walk(produce, launch.draw)
    launch.drain(total)
    return total


def _consume(launch: _Launch, consumer: jax.Array) -> None:
    scratch, out = launch.scratch, launch.out
    mine = pl.ds(pl.multiple_of(consumer * _RUN, _RUN), _RUN)

    def multiply(first_step: jax.Array, steps: jax.Array) -> jax.Array:
        def accumulate(accumulator: Any) -> jax.Array:
            def add(k: jax.Array, _: None) -> None:
                stage = launch.stage(first_step + k)
                if scratch.full is not None:
                    plgpu.barrier_wait(scratch.full.at[stage])  # what came by TMA is there
                if scratch.landed is not None:
                    _gather.await_landed(scratch.landed, first_step + k)
                left = scratch.left.at[stage, :, mine].transpose((1, 0))
                plgpu.wgmma(accumulator, left, scratch.right.at[stage])
                plgpu.wgmma_wait(1)  # that of the stage before is done

                @pl.when(k > 0)
                def _free() -> None:
                    launch.free_before(first_step + k)

            lax.fori_loop(0, steps, add, None)
            value = accumulator[...]
            launch.free_before(first_step + steps)
            return value

        return pl.run_scoped(accumulate, plgpu.ACC((_RUN, launch.tile[1]), jnp.float32))

    def consume(item: _Item, first_step: jax.Array, steps: jax.Array) -> None:
        value = multiply(first_step, steps)
        row = launch.first_column(0, item.tile_m) + consumer * _RUN
        # Rows and columns of a tile that was moved back are stored by the tile before.
        is_mine = row >= item.tile_m * launch.tile[0]
        together = scratch.results.shape[1]
        runs = range(0, launch.tile[1], _RUN)
        for some in (runs[i : i + together] for i in range(0, len(runs), together)):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was here before has left
            for i, first in enumerate(some):
                result = value[:, first : first + _RUN].astype(out.dtype)
                scratch.results.at[consumer, i][...] = result
            plgpu.commit_smem()  # TMA sees it
            for i, first in enumerate(some):
                column = launch.first_column(1, item.tile_n) + first
                is_new = jnp.logical_and(is_mine, column >= item.tile_n * launch.tile[1])
                pl.when(is_new)(functools.partial(store, item.expert, i, row, column))

    def store(expert: jax.Array, i: int, row: jax.Array, column: jax.Array) -> None:
        row, column = pl.multiple_of(row, _RUN), pl.multiple_of(column, _RUN)
        at: tuple[Any, ...] = (pl.ds(row, _RUN),)
        if launch.branches > 1:
            size = jnp.int32(launch.shape[0] // launch.branches)
            branch = lax.div(row, size)
            at = (pl.ds(pl.multiple_of(row - branch * size, _RUN), _RUN), branch)
        plgpu.copy_smem_to_gmem(scratch.results.at[consumer, i], out.at[(expert, *at, pl.ds(column, _RUN))])

    launch.walk(consume, launch.drawn)
    plgpu.wait_smem_to_gmem(0)  # the block outlives its stores


def _kernel(*trees: Any, **statics: Any) -> None:
    launch = _Launch(*trees, **statics)
    launch.run(functools.partial(_produce, launch), functools.partial(_consume, launch))


def supports(*columns: int) -> str | None:
    """Say why operands of so many columns can't be multiplied; None if they can."""
    if any(n % _RUN or n < _TILE_M for n in columns):
        return f"needs multiples of {_RUN} from {_TILE_M} on as sizes of a matrix; got {columns}."
    return None


def weight_gradient(
    left: jax.Array,
    right: jax.Array,
    groups: Groups,
    rows: tuple[Rows, Rows],
    *,
    name: str,
    out_dtype: Any = None,
    is_interleaved: bool = False,
    config: GroupedGemmConfig,
    num_ctas: int,
    interpret: Any = None,
) -> jax.Array:
    """Sum ``left[r].T @ right[r]`` over the rows r of each expert: one launch.

    Args:
      left: (rows, M) bfloat16 | float16.
      right: (rows, N) in left's dtype.
      groups: The rows of each expert.
      rows: Where the rows of left and of right stand.
      name: Of the launch.
      out_dtype: Of the result, float32 or left's; left's if None.
      is_interleaved: Left's columns are those of gate and then those of up, but the rows of the result take
        turns.
      config: How the ring and the order of tiles are; a tile is always 128 by 256.
      num_ctas: CTAs, at most one for each SM.
      interpret: ``plgpu.InterpretGPUParams``, to run on a CPU.

    Returns:
      (E, M, N), accumulated in float32; exactly 0 for experts without rows.
    """
    dtype, num_experts, stages = left.dtype, len(groups.size), config.num_stages
    out_dtype = jnp.dtype(dtype if out_dtype is None else out_dtype)
    num_columns = left.shape[1], right.shape[1]
    assert (objection := supports(*num_columns)) is None, objection
    branches = 2 if is_interleaved else 1
    tile = _mgpu.operand_transforms(dtype)
    by_tma = sum(x is Rows.PLANNED for x in rows)
    arrivals = by_tma + (interpret is not None)
    together = 2 if out_dtype.itemsize == 2 else 1
    scratch = _Scratch(
        left=plgpu.SMEM((stages, _RUN, _TILE_M), dtype, transforms=tile),
        right=plgpu.SMEM((stages, _RUN, min(_TILE_N, num_columns[1])), dtype, transforms=tile),
        results=plgpu.SMEM(
            (2, together, _RUN, _RUN), out_dtype, transforms=_mgpu.operand_transforms(out_dtype)
        ),
        full=plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages) if arrivals else None,
        **ring_scratch(stages, interpret is None),
    )
    operands = _Operands(left, right, groups, _mgpu.new_flags(0) if interpret is None else None)
    m, n = num_columns
    shape = (num_experts, m // 2, 2, n) if is_interleaved else (num_experts, m, n)
    body = functools.partial(
        _kernel,
        rows=rows,
        branches=branches,
        config=config,
        num_ctas=num_ctas,
        interpret=interpret is not None,
    )
    made = jax.ShapeDtypeStruct(shape, out_dtype)
    found: jax.Array = run_roles(
        body, operands, made, scratch, num_ctas=num_ctas, name=name, interpret=interpret
    )
    return found.reshape(num_experts, m, n)
