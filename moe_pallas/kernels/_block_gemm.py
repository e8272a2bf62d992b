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

Shared memory of a CTA: num_stages * (128 + 256) * 128 bytes for the ring, 2 * 2 * 64 * 64 * 2 for results.

In FP8 a step has 128 columns. Its products are added up in float32, with the scales of rows (and of blocks of
weights) that come to shared memory beside it; results that are multiplied once more are quantised here.

The last tile of weight rows is moved back to end with the matrix; what the tile before has computed too is
not stored again. Rows are computed by the same instructions in the same order wherever they stand in a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_pallas.configs.schema import GroupedGemmConfig
from moe_pallas.kernels import _gather, _mgpu
from moe_pallas.kernels._block_launch import (
    BLOCK_M,
    HALF,
    RUN,
    Item,
    Launch,
    Operands,
    Outputs,
    Scratch,
    num_columns,
    tile_width,
)
from moe_pallas.kernels._block_results import Results
from moe_pallas.kernels._persistent import ring_scratch, run_roles
from moe_pallas.spec import ActivationScales, GateUp, QuantScheme, WeightScales


def _produce(launch: Launch) -> jax.Array:
    """Load what the consumers need; returns the number of steps."""
    operands, scratch = launch.operands, launch.scratch
    gathers, width = launch.gathers, launch.width

    def load_weights(item: Item, columns: Any, stage: jax.Array) -> None:
        for i, source in enumerate(launch.weight_tiles(item, columns)):
            tile = scratch.weights.at[stage]
            target = tile.at[pl.ds(i * width, width)] if launch.contract_last else tile
            plgpu.copy_gmem_to_smem(operands.weights.at[source], target, scratch.full.at[stage])

    def load_scales(item: Item, k: jax.Array, stage: jax.Array) -> None:
        first = operands.block_first[item.block] if gathers else item.row
        tokens = operands.token_of if gathers else None
        at = (first, item.size, k, stage, launch.block_scales(item))
        _gather.gather_scales(
            launch.row_scales(item), tokens, scratch.scales, *at, interpret=launch.interpret
        )

    def prefetch(item: Item) -> None:
        """Have what the epilogue reads brought to the L2 cache while there are products to be made."""
        rows, column = pl.ds(item.row, BLOCK_M), launch.first_column(item.tile)
        for branch in range(launch.branches):
            first = pl.multiple_of(column + branch * launch.columns, RUN)
            plgpu.async_prefetch(operands.products.at[rows, pl.ds(first, width)])

    def produce(item: Item, first_step: jax.Array) -> None:
        if operands.products is not None:
            prefetch(item)
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
            stage = launch.await_empty(step)
            columns = pl.ds(k * launch.block_k, launch.block_k)
            load_weights(item, columns, stage)
            if launch.scheme is not None:
                load_scales(item, k, stage)
                if launch.interpret and not gathers:
                    plgpu.barrier_arrive(scratch.full.at[stage])
                elif not gathers:
                    _gather.arrive_landed(scratch.landed, stage)
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

            pl.when(item.size <= RUN)(functools.partial(copy_block, RUN))
            pl.when(item.size > RUN)(functools.partial(copy_block, BLOCK_M))

        lax.fori_loop(0, launch.steps, copy, None)

    if launch.interpret:
        launch.numbers[0] = launch.cta
    total = launch.walk(produce, launch.draw)
    launch.drain(total)
    return total


def _add_products(launch: Launch, consumer: jax.Array, first_step: jax.Array) -> tuple[jax.Array, ...]:
    """In FP8, a consumer's rows of a block times the weights of a tile: (64, 128) float32 a half.

    Products come with the scales of their rows, and of blocks. The accumulators of FP8 products keep some 14
    bits: no sum in them is longer than a step, or two where all steps have the same scales. While a consumer
    adds up, the other one multiplies.
    """
    scratch, scheme = launch.scratch, launch.scheme
    assert scheme is not None
    mine = pl.ds(pl.multiple_of(consumer * RUN, RUN), RUN)
    halves = range(scratch.weights.shape[1] // HALF)
    in_blocks = scheme.weights is WeightScales.BLOCK
    varies = (scheme.activations if launch.gathers else scheme.hidden) is ActivationScales.GROUP
    together = 1 if varies else 2  # steps

    def add(k: jax.Array, sums: tuple[jax.Array, ...], count: int) -> tuple[jax.Array, ...]:
        """The products of ``count`` steps from k on."""
        stages = [launch.stage(first_step + k + i) for i in range(count)]
        for i, stage in enumerate(stages):
            plgpu.barrier_wait(scratch.full.at[stage])  # rows and weights are there
            if scratch.landed is not None:
                _gather.await_landed(scratch.landed, first_step + k + i, for_wgmma=launch.gathers)
        scales = plgpu.load(
            scratch.scales.at[stages[0], mine], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
        )
        results = []
        for half in halves:

            def product(accumulator: Any, half: int = half) -> jax.Array:
                for stage in stages:
                    weights = scratch.weights.at[stage, pl.ds(half * HALF, HALF)].transpose((1, 0))
                    plgpu.wgmma(accumulator, scratch.rows.at[stage, mine], weights)
                plgpu.wgmma_wait(0)
                return accumulator[...]

            value = pl.run_scoped(product, plgpu.ACC((RUN, HALF), jnp.float32))
            factor = scales * scratch.scales[stages[0], BLOCK_M + half] if in_blocks else scales
            results.append(sums[half] + value * lax.broadcast_in_dim(factor, value.shape, (0,)))
        for stage in stages:
            plgpu.barrier_arrive(scratch.empty.at[stage])
        return tuple(results)

    zero = plgpu.layout_cast(jnp.zeros((RUN, HALF), jnp.float32), plgpu.Layout.WGMMA)
    sums = lax.fori_loop(
        0, launch.steps // together, lambda i, sums: add(i * together, sums, together), (zero,) * len(halves)
    )
    rest = launch.steps % together
    return add(jnp.int32(launch.steps - rest), sums, rest) if rest else sums


def _multiply(launch: Launch, consumer: jax.Array, first_step: jax.Array) -> jax.Array:
    """A consumer's rows of a block times the weights of a tile: (64, weight rows) float32."""
    scratch = launch.scratch
    mine = pl.ds(pl.multiple_of(consumer * RUN, RUN), RUN)

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
                launch.free_before(first_step + k)

        lax.fori_loop(0, launch.steps, multiply, None)
        value = accumulator[...]
        plgpu.barrier_arrive(scratch.empty.at[launch.stage(first_step + launch.steps - 1)])
        return value

    branches = 1 if launch.gate_up is None else 2
    return pl.run_scoped(accumulate, plgpu.ACC((RUN, branches * launch.width), jnp.float32))


def _consume(launch: Launch, consumer: jax.Array) -> None:
    scratch, results = launch.scratch, Results(launch, consumer)

    def consume(item: Item, first_step: jax.Array) -> None:
        rows_left = item.size - consumer * RUN

        @pl.when(rows_left > 0)
        def _multiply_and_store() -> None:
            if launch.scheme is None:
                products: tuple[jax.Array, ...] = (_multiply(launch, consumer, first_step),)
            else:
                products = _add_products(launch, consumer, first_step)
            results.make(item, products)

        @pl.when(rows_left <= 0)
        def _pass() -> None:
            @pl.loop(0, launch.steps)
            def _free(k: jax.Array) -> None:
                stage = launch.stage(first_step + k)
                plgpu.barrier_wait(scratch.full.at[stage])  # not before the other consumer's turn
                plgpu.barrier_arrive(scratch.empty.at[stage])

    launch.walk(consume, launch.drawn)
    results.end()


def _kernel(*trees: Any, **statics: Any) -> None:
    launch = Launch(*trees, **statics)
    launch.run(functools.partial(_produce, launch), functools.partial(_consume, launch))


def multiply_blocks(
    operands: Operands,
    make: Outputs,
    *,
    config: GroupedGemmConfig,
    block_n: int,
    num_ctas: int,
    interpret: Any,
    name: str,
    gate_up: GateUp | None = None,
    activate: Callable[..., Any] | None = None,
    limit: float | None = None,
    contract_last: bool = True,
    scheme: QuantScheme | None = None,
) -> Outputs:
    """Launch the kernel: each block of rows times the weights of its expert.

    ``activate`` is `activate` or, to make gradients, `activate_with_slopes`; ``limit`` is where it clamps.
    Returns what there is in ``make``, a `jax.ShapeDtypeStruct` each.
    """
    dtype, stages = operands.rows.dtype, config.num_stages
    columns = num_columns(operands.weights.shape, gate_up, contract_last)
    tile = _mgpu.operand_transforms(dtype)
    block_k = 128 // dtype.itemsize
    branches = 1 if gate_up is None else 2
    made = next(struct for struct in make if struct is not None)  # all results have one dtype
    gathers, makes_codes = operands.block_first is not None, made.dtype == jnp.float8_e4m3fn
    lands = interpret is None and (gathers or scheme is not None)  # something comes by cp.async
    # Of what comes by TMA, and, interpreted, of what else the producer does.
    arrivals = branches + (not gathers) + (interpret is not None and (gathers or scheme is not None))
    weight_rows = branches * tile_width(columns, gate_up, block_n)
    weights_tile = (weight_rows, block_k) if contract_last else (block_k, weight_rows)
    # Of FP8 there is room for one tile of results a consumer, because of the scales.
    results = (2, 1, RUN, 2 * RUN) if makes_codes else (2, 2 if scheme is None else 1, RUN, RUN)
    scales = (stages, BLOCK_M + weight_rows // HALF)
    scratch = Scratch(
        rows=plgpu.SMEM((stages, BLOCK_M, block_k), dtype, transforms=tile),
        weights=plgpu.SMEM((stages, *weights_tile), dtype, transforms=tile),
        results=plgpu.SMEM(results, made.dtype, transforms=_mgpu.operand_transforms(made.dtype)),
        scales=plgpu.SMEM(scales, jnp.float32) if scheme is not None else None,
        full=plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
        **ring_scratch(stages, lands),
    )
    if interpret is None:
        operands = operands._replace(flags=_mgpu.new_flags(0))
    body = functools.partial(
        _kernel,
        gate_up=gate_up,
        activate=activate,
        limit=limit,
        contract_last=contract_last,
        scheme=scheme,
        config=config,
        block_n=block_n,
        num_ctas=num_ctas,
        interpret=interpret is not None,
    )
    outputs: Outputs = run_roles(
        body, operands, make, scratch, num_ctas=num_ctas, name=name, interpret=interpret
    )
    return outputs
