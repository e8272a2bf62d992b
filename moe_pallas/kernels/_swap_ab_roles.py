"""What the three warpgroups of a CTA of the Swap-AB kernel do; `swap_ab` has the picture."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_pallas.configs.schema import SwapABConfig
from moe_pallas.kernels import _gather, _mgpu, _quantise
from moe_pallas.kernels._activation import activate
from moe_pallas.kernels._combine import keep_if
from moe_pallas.kernels._launch import CONSUMER, TOKENS, Launch
from moe_pallas.kernels._schedule import Item
from moe_pallas.spec import WeightOn

_SLAB = SwapABConfig.SLAB
_WORDS_IN_FLIGHT = 64  # of h, that a thread reads before it quantises them


def load_weights(launch: Launch) -> None:
    """Bring tiles of weights to shared memory, those of both GEMMs."""
    operands, scratch, config = launch.operands, launch.scratch, launch.config

    def load(source: Any, halves: tuple[Any, ...], count: int, item: Item, step: jax.Array) -> jax.Array:
        def copy(k: jax.Array, step: jax.Array) -> jax.Array:
            stage = launch.await_empty(step)
            columns = pl.ds((item.first_step + k) * config.BLOCK_K, config.BLOCK_K)
            for i, rows in enumerate(halves):
                plgpu.copy_gmem_to_smem(
                    source.at[(*rows, columns)],
                    scratch.w.at[stage, pl.ds(i * config.slabs * _SLAB, config.slabs * count)],
                    scratch.w_full.at[stage],
                )
            return step + 1

        return lax.fori_loop(0, item.num_steps, copy, step)

    def up(i: jax.Array, step: jax.Array) -> jax.Array:
        item = launch.schedule.up(i)
        expert = launch.plan.block_expert[item.block]
        rows = launch.up_halves(expert, item.tile)
        return load(operands.w13, rows, config.up_rows, item, step)

    def down(i: jax.Array, step: jax.Array) -> jax.Array:
        item = launch.schedule.down(i)
        expert = launch.plan.block_expert[item.block]
        rows = launch.down_halves(expert, item.tile)
        return load(operands.w2, rows, config.down_rows, item, step)

    launch.drain(launch.walk("down", down, launch.walk("up", up, jnp.int32(0))))


def load_tokens(launch: Launch) -> None:
    """Bring rows of x, and of h when it is there, to shared memory."""
    operands, scratch, plan, config = launch.operands, launch.scratch, launch.plan, launch.config
    buffers, is_quantised = launch.buffers, launch.scheme is not None
    width, tiles = config.up_width(launch.spec), config.up_tiles(launch.spec)
    lag = min(3, config.num_stages - 2)  # gathers on their way; the consumer frees a stage one step late

    State = tuple[jax.Array, jax.Array]  # steps begun, and of these those whose rows have arrived

    def gather(item: Item, rows: Any, token_of: Any, first: Any, state: State, scales: Any) -> State:
        size = plan.block_size[item.block]

        def copy(k: jax.Array, state: State) -> State:
            step, arrived = state
            stage = launch.await_empty(step)
            at = (first, size, item.first_step + k, stage)
            if scales is not None:
                of_rows, blocks = scales
                _gather.gather_scales(
                    of_rows, token_of, scratch.scales, *at, blocks, interpret=launch.interpret
                )
            _gather.gather_rows(rows, token_of, scratch.x, *at, interpret=launch.interpret)

            @pl.when(step - arrived == lag)
            def _() -> None:
                _gather.await_gather(lag, interpret=launch.interpret)
                plgpu.barrier_arrive(scratch.x_full.at[launch.stage(arrived)])

            return step + 1, jnp.maximum(arrived, step + 1 - lag)

        return lax.fori_loop(0, item.num_steps, copy, state)

    def flush(state: State) -> State:
        step, arrived = state
        _gather.await_gather(0, interpret=launch.interpret)

        @pl.loop(0, step - arrived)
        def _(i: jax.Array) -> None:
            plgpu.barrier_arrive(scratch.x_full.at[launch.stage(arrived + i)])

        return step, step

    def up(i: jax.Array, state: State) -> State:
        item = launch.schedule.up(i)
        rows, scales = operands.x, None
        if is_quantised:
            blocks = launch.up_blocks(item, plan.block_expert[item.block])
            per_row = buffers.x_scale.shape[1]
            rows = buffers.x
            scales = _gather.Scales(buffers.x_scale, per_row, by_step=per_row > 1), blocks
        return gather(item, rows, plan.token_of, plan.block_first[item.block], state, scales)

    if launch.is_fused and is_quantised:
        launch.await_x()
    state = flush(launch.walk("up", up, (jnp.int32(0), jnp.int32(0))))
    if launch.is_fused and not is_quantised:
        plgpu.barrier_wait(scratch.drawn)  # the launch's number is in shared memory

    def await_h(item: Item) -> None:
        # Those tiles of the first GEMM that make columns of this part.
        first = lax.div(item.first_step * config.BLOCK_K, jnp.int32(width))
        end = (item.first_step + item.num_steps) * config.BLOCK_K
        last = jnp.minimum(lax.div(end + width - 1, jnp.int32(width)), tiles)
        _mgpu.await_flags(
            operands.flags,
            (item.block * tiles + first) * config.up_splits,
            (last - first) * config.up_splits,
            scratch.epoch,
            warpgroup=TOKENS,
        )

    def quantise(item: Item, step: jax.Array, width: int) -> None:
        end = item.first_step + item.num_steps
        some = min(config.down_part(launch.spec), max(1, _WORDS_IN_FLIGHT // width))
        blocks = launch.down_blocks(item, plan.block_expert[item.block])
        of_h = buffers.h, blocks, plan.block_row[item.block], plan.block_size[item.block]
        if launch.interpret:

            @pl.loop(0, item.num_steps)
            def _(k: jax.Array) -> None:
                stage = launch.await_empty(step + k)
                _quantise.interpret_operand(*of_h, item.first_step + k, scratch.x, scratch.scales, stage)
                plgpu.barrier_arrive(scratch.x_full.at[stage])

            return

        @pl.loop(0, lax.div(item.num_steps + (some - 1), jnp.int32(some)))
        def _(i: jax.Array) -> None:
            rows = _quantise.load_rows(*of_h, item.first_step + i * some, end, width=width, num_steps=some)
            for j in range(some):

                @pl.when(i * some + j < item.num_steps)
                def _(j: int = j) -> None:
                    stage = launch.await_empty(step + i * some + j)
                    _quantise.store_operand(
                        rows,
                        j,
                        scratch.x,
                        scratch.scales,
                        stage,
                        width=width,
                        num_blocks=2 * config.slabs if launch.in_blocks else 0,
                    )
                    plgpu.barrier_arrive(scratch.x_full.at[stage])

    def down(i: jax.Array, state: State) -> State:
        item = launch.schedule.down(i)
        row = plan.block_row[item.block]
        if launch.is_fused:
            await_h(item)
        if launch.reads_floats:
            launch.by_width(item.block, functools.partial(quantise, item, state[0]))
            return state[0] + item.num_steps, state[0] + item.num_steps
        if is_quantised:
            expert = plan.block_expert[item.block]
            if launch.h_in_groups:
                of_rows = _gather.Scales(buffers.h_scale, buffers.h_scale.shape[1], by_step=True)
            else:
                of_rows = _gather.Scales(operands.input2, 0, expert)
            blocks = launch.down_blocks(item, expert)
            return flush(gather(item, buffers.h, None, row, state, (of_rows, blocks)))
        if launch.is_fused:
            _mgpu.proxy_fence()  # h was written by ordinary stores, TMA reads it

        def copy(k: jax.Array, step: jax.Array) -> jax.Array:
            stage = launch.await_empty(step)
            columns = pl.ds((item.first_step + k) * config.BLOCK_K, config.BLOCK_K)

            def copy_rows(width: int) -> None:
                plgpu.copy_gmem_to_smem(
                    buffers.h.at[pl.ds(pl.multiple_of(row, 8), width), columns],
                    scratch.x.at[stage, pl.ds(0, width)],
                    scratch.x_full.at[stage],
                )

            launch.by_width(item.block, copy_rows)
            return step + 1

        step = lax.fori_loop(0, item.num_steps, copy, state[0])
        return step, step

    launch.drain(launch.walk("down", down, state)[0])


def _multiply(
    launch: Launch, step: jax.Array, num_steps: jax.Array, width: int, rows: int
) -> tuple[jax.Array, ...]:
    """The slabs of a tile, ``rows`` apart in each half, times ``width`` tokens: (64, width) float32 each.

    In FP8 products come with the scales of their tokens, and of blocks.
    """
    scratch, config = launch.scratch, launch.config
    slabs = [(half * config.slabs * _SLAB + i * rows) for half in range(2) for i in range(config.slabs)]

    def await_full(k: jax.Array) -> jax.Array:
        stage = launch.stage(step + k)
        plgpu.barrier_wait(scratch.w_full.at[stage])
        plgpu.barrier_wait(scratch.x_full.at[stage])
        return stage

    def issue(stage: jax.Array, accumulators: tuple[Any, ...]) -> None:
        tokens = scratch.x.at[stage, pl.ds(0, width)].transpose((1, 0))
        for first, accumulator in zip(slabs, accumulators, strict=True):
            plgpu.wgmma(accumulator, scratch.w.at[stage, pl.ds(first, _SLAB)], tokens)

    def token_scales(stage: jax.Array) -> jax.Array:
        scales = plgpu.load(
            scratch.scales.at[stage, pl.ds(0, width)], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False
        )
        return lax.broadcast_in_dim(scales, (_SLAB, width), (1,))

    def accumulate(*accumulators: Any) -> tuple[jax.Array, ...]:
        def multiply(k: jax.Array, _: None) -> None:
            issue(await_full(k), accumulators)
            plgpu.wgmma_wait(len(slabs))  # those of the stage before are done

            @pl.when(k > 0)
            def _free() -> None:
                launch.free_before(step + k)

        lax.fori_loop(0, num_steps, multiply, None)
        values = tuple(accumulator[...] for accumulator in accumulators)
        plgpu.barrier_arrive(scratch.empty.at[launch.stage(step + num_steps - 1)])
        return values

    def add_products(k: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        stage = await_full(k)

        def products(*accumulators: Any) -> tuple[jax.Array, ...]:
            issue(stage, accumulators)
            plgpu.wgmma_wait(0)
            return tuple(accumulator[...] for accumulator in accumulators)

        values = pl.run_scoped(products, *accumulators_of_slabs)
        scales = token_scales(stage)
        factors = [scales] * len(slabs)
        if launch.in_blocks:
            factors = [scales * scratch.scales[stage, config.block_m + i] for i in range(len(slabs))]
        plgpu.barrier_arrive(scratch.empty.at[stage])
        return tuple(
            total + value * factor for total, value, factor in zip(sums, values, factors, strict=True)
        )

    accumulators_of_slabs = [plgpu.ACC((_SLAB, width), jnp.float32)] * len(slabs)
    if launch.scheme is not None:
        # The accumulators of FP8 products keep some 14 bits: no sum in them is longer than a step.
        zero = plgpu.layout_cast(jnp.zeros((_SLAB, width), jnp.float32), plgpu.Layout.WGMMA)
        return lax.fori_loop(0, num_steps, add_products, (zero,) * len(slabs))
    return pl.run_scoped(accumulate, *accumulators_of_slabs)


def compute(launch: Launch) -> None:
    """Multiply, and make h and the slots' results of the products."""
    operands, scratch, buffers, plan = launch.operands, launch.scratch, launch.buffers, launch.plan
    spec, config = launch.spec, launch.config

    def add_parts(item: Item, slabs: tuple[jax.Array, ...], width: int) -> tuple[jax.Array, ...]:
        """The other splits' results before this one's, in their order."""
        others = config.up_splits - 1
        first = item.number - others
        if launch.is_fused:
            _mgpu.await_flags(operands.flags, first, jnp.int32(others), scratch.epoch, warpgroup=CONSUMER)
        return tuple(
            functools.reduce(
                jnp.add,
                [
                    plgpu.load(
                        buffers.parts.at[first + s, i, :, pl.ds(0, width)],
                        layout=plgpu.Layout.WGMMA,
                        optimized=False,
                    )
                    for s in range(others)
                ]
                + [slab],
            )
            for i, slab in enumerate(slabs)
        )

    def finish_up(item: Item, slabs: tuple[jax.Array, ...], width: int) -> None:
        expert, row = plan.block_expert[item.block], plan.block_row[item.block]
        if (scales := launch.up_scales(expert, item.tile, width)) is not None:
            slabs = tuple(slab * scale for slab, scale in zip(slabs, scales, strict=True))
        if spec.weight_on is WeightOn.INPUT:
            weights = plgpu.load(
                plan.weight_of_row.at[pl.ds(pl.multiple_of(row, 8), width)],
                layout=plgpu.Layout.WGMMA.reduce(0),
                optimized=False,
            )
            slabs = tuple(slab * lax.broadcast_in_dim(weights, slab.shape, (1,)) for slab in slabs)
        if spec.expert_bias:
            biases = launch.up_biases(expert, item.tile, width)
            slabs = tuple(slab + bias for slab, bias in zip(slabs, biases, strict=True))
        half = config.slabs
        if spec.gated:
            pairs = zip(slabs[:half], slabs[half:], strict=True)
            results = [activate(gate, up, spec=spec) for gate, up in pairs]
        else:
            results = [activate(slab, spec=spec) for slab in slabs]
        column, size = launch.up_row(item.tile), plan.block_size[item.block]
        if launch.scheme is not None and not launch.reads_floats:
            scales = buffers.h_scale if launch.h_in_groups else operands.input2
            for i in range(0, len(results), half):
                _quantise.store_codes(
                    buffers.h,
                    scales,
                    scratch.maxima,
                    results[i : i + half],
                    row,
                    column + i * config.up_rows,
                    size,
                    expert,
                    activations=launch.scheme.hidden,
                    num_rows=config.up_rows,
                    interpret=launch.interpret,
                )
            return
        for i, h in enumerate(results):
            _mgpu.store_columns(
                buffers.h,
                h.astype(buffers.h.dtype),
                row,
                column + i * config.up_rows,
                size,
                num_rows=config.up_rows,
                interpret=launch.interpret,
            )

    def up(i: jax.Array, step: jax.Array) -> jax.Array:
        item = launch.schedule.up(i)

        def run(width: int) -> None:
            slabs = _multiply(launch, step, item.num_steps, width, config.up_rows)
            if config.up_splits == 1:
                finish_up(item, slabs, width)
                return

            @pl.when(item.split < config.up_splits - 1)
            def _leave() -> None:
                for i, slab in enumerate(slabs):
                    _mgpu.store(
                        buffers.parts.at[item.number, i, :, pl.ds(0, width)],
                        slab,
                        interpret=launch.interpret,
                    )

            @pl.when(item.split == config.up_splits - 1)
            def _collect() -> None:
                finish_up(item, add_parts(item, slabs, width), width)

        launch.by_width(item.block, run)
        if launch.is_fused:
            _mgpu.raise_flag(operands.flags, item.number, scratch.epoch)
        return step + item.num_steps

    def down(i: jax.Array, step: jax.Array) -> jax.Array:
        item = launch.schedule.down(i)

        def run(width: int) -> None:
            slabs = _multiply(launch, step, item.num_steps, width, config.down_rows)
            expert = plan.block_expert[item.block]
            if (scales := launch.down_scales(expert, item.tile, width)) is not None:
                slabs = tuple(slab * scale for slab, scale in zip(slabs, scales, strict=True))
            if spec.expert_bias:
                biases = launch.down_biases(expert, item.tile, width)
                slabs = tuple(
                    slab + keep_if(item.split == 0, bias) for slab, bias in zip(slabs, biases, strict=True)
                )
            for i, slab in enumerate(slabs):
                _mgpu.store_columns(
                    buffers.slots,
                    slab,
                    item.split * launch.max_rows + plan.block_row[item.block],
                    launch.down_row(item.tile) + i * config.down_rows,
                    plan.block_size[item.block],
                    num_rows=config.down_rows,
                    interpret=launch.interpret,
                )

        launch.by_width(item.block, run)
        return step + item.num_steps

    launch.walk("down", down, launch.walk("up", up, jnp.int32(0)))
