"""Swap-AB: a whole MoE layer for few tokens in one launch, weights on the 64-row side of WGMMA.

TODO docstring
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_pallas.activations import activate_branches
from moe_pallas.configs.schema import SwapABConfig
from moe_pallas.kernels import _mgpu
from moe_pallas.plan import BlockPlan, make_blocks
from moe_pallas.routing import Routing
from moe_pallas.spec import GateUp, MoESpec, Problem, WeightOn

_CONSUMER, _WEIGHTS, _TOKENS = range(3)  # warpgroups
_HALF = 64  # rows of one WGMMA


class _Shape(NamedTuple):
    """The work of a launch, as far as it is static."""

    up_tiles: int
    up_width: int
    up_steps: int  # of a whole tile; a split has `up_part`
    up_part: int
    down_tiles: int
    down_steps: int
    down_part: int


def _shape(spec: MoESpec, config: SwapABConfig) -> _Shape:
    up, down = config.up_steps(spec), config.down_steps(spec)
    return _Shape(
        up_tiles=config.up_tiles(spec),
        up_width=config.up_width(spec),
        up_steps=up,
        up_part=-(-up // config.up_splits),
        down_tiles=config.down_tiles(spec),
        down_steps=down,
        down_part=-(-down // config.down_splits),
    )


class _Operands(NamedTuple):
    """Everything a launch reads."""

    x: Any
    w13: Any
    w2: Any
    b13: Any
    b2: Any
    plan: BlockPlan
    flags: Any


class _Buffers(NamedTuple):
    """What passes from one phase to the next, in global memory."""

    h: Any  # (rows, F)
    slots: Any  # (down_splits, rows, D) float32
    parts: Any  # (items of the first GEMM, 2, 64, block_m) float32, of its splits but the last


class _Scratch(NamedTuple):
    w: Any
    x: Any
    h: Any
    epoch: Any
    w_full: Any
    x_full: Any
    empty: Any


def _div_up(a: jax.Array, b: int) -> jax.Array:
    return lax.div(a + (b - 1), jnp.int32(b))


def _kernel(
    *refs: Any,
    spec: MoESpec,
    config: SwapABConfig,
    num_tokens: int,
    num_ctas: int,
    phases: frozenset[str],
    unflatten: Any,
    interpret: bool,
) -> None:
    operands, y_gmem, buffers, scratch = unflatten(refs)
    plan = operands.plan
    shape = _shape(spec, config)
    stages, block_m = config.num_stages, config.block_m
    fused = len(phases) > 1
    dtype = operands.x.dtype
    cta, warpgroup = lax.axis_index("cta"), lax.axis_index("wg")
    if fused:
        _mgpu.draw_ticket(operands.flags, scratch.epoch, num_ctas)
        _mgpu.cta_barrier()
    num_blocks = plan.num_blocks[0]

    # Items are numbered through: tiles of the first GEMM, then of the second. CTA c takes c, c + num_ctas, …
    # and waits only for items with lower numbers.
    ups = num_blocks * (shape.up_tiles * config.up_splits) if "up" in phases else jnp.int32(0)
    downs = num_blocks * (shape.down_tiles * config.down_splits) if "down" in phases else jnp.int32(0)
    my_ups = lax.div(jnp.maximum(ups - cta + num_ctas - 1, 0), jnp.int32(num_ctas))
    first_down = cta + my_ups * num_ctas - ups
    my_downs = lax.div(jnp.maximum(downs - first_down + num_ctas - 1, 0), jnp.int32(num_ctas))

    def up_item(i: jax.Array) -> tuple[jax.Array, ...]:
        """block, tile, first step, steps, split, item"""
        item = cta + i * num_ctas
        tile, split = _divmod(item, config.up_splits)
        block, tile = _divmod(tile, shape.up_tiles)
        step = split * shape.up_part
        return block, tile, step, jnp.minimum(shape.up_part, shape.up_steps - step), split, item

    def down_item(i: jax.Array) -> tuple[jax.Array, ...]:
        item = first_down + i * num_ctas
        tile, split = _divmod(item, config.down_splits)
        block, tile = _divmod(tile, shape.down_tiles)
        step = split * shape.down_part
        return block, tile, step, jnp.minimum(shape.down_part, shape.down_steps - step), split, item

    # Flags: parts of the first GEMM and h (one an item), then the second GEMM's items.
    max_ups = buffers_items(config, spec, num_tokens)
    flag_of_down = max_ups

    def loop(phase: str, count: jax.Array, body: Any, step: jax.Array) -> jax.Array:
        return lax.fori_loop(0, count, body, step) if phase in phases else step

    def wait_empty(step: jax.Array) -> jax.Array:
        stage = lax.rem(step, jnp.int32(stages))

        @pl.when(step >= stages)
        def _() -> None:
            plgpu.barrier_wait(scratch.empty.at[stage])  # the tile before it is multiplied

        return stage

    def drain(total: jax.Array) -> None:
        # Barriers may go only when each of their completions was waited for.
        tail = jnp.minimum(total, stages)

        @pl.loop(0, tail)
        def _(i: jax.Array) -> None:
            plgpu.barrier_wait(scratch.empty.at[lax.rem(total - tail + i, jnp.int32(stages))])

    @pl.when(warpgroup == _WEIGHTS)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")

        def load(step: jax.Array, source: Any, rows: tuple[Any, Any], k: jax.Array) -> None:
            stage = wait_empty(step)
            for half, row in enumerate(rows):
                plgpu.copy_gmem_to_smem(
                    source.at[(*row, pl.ds(k * config.BLOCK_K, config.BLOCK_K))],
                    scratch.w.at[stage, pl.ds(half * _HALF, _HALF)],
                    scratch.w_full.at[stage],
                )

        def ups_loop(i: jax.Array, step: jax.Array) -> jax.Array:
            block, tile, first, steps, _, _ = up_item(i)
            expert = plan.block_expert[block]
            row = jnp.minimum(tile * shape.up_width, spec.intermediate_size - shape.up_width)
            rows: tuple[Any, Any]
            if not spec.gated:
                rows = ((expert, pl.ds(row, _HALF)), (expert, pl.ds(row + _HALF, _HALF)))
            elif spec.gate_up is GateUp.STACKED:
                rows = ((expert, 0, pl.ds(row, _HALF)), (expert, 1, pl.ds(row, _HALF)))
            else:
                rows = ((expert, pl.ds(row, _HALF), 0), (expert, pl.ds(row, _HALF), 1))

            def k_loop(k: jax.Array, step: jax.Array) -> jax.Array:
                load(step, operands.w13, rows, first + k)
                return step + 1

            return lax.fori_loop(0, steps, k_loop, step)

        def downs_loop(i: jax.Array, step: jax.Array) -> jax.Array:
            block, tile, first, steps, _, _ = down_item(i)
            expert = plan.block_expert[block]
            row = jnp.minimum(tile * config.BLOCK_N, spec.hidden_size - config.BLOCK_N)
            rows = ((expert, pl.ds(row, _HALF)), (expert, pl.ds(row + _HALF, _HALF)))

            def k_loop(k: jax.Array, step: jax.Array) -> jax.Array:
                load(step, operands.w2, rows, first + k)
                return step + 1

            return lax.fori_loop(0, steps, k_loop, step)

        step = loop("up", my_ups, ups_loop, jnp.int32(0))
        drain(loop("down", my_downs, downs_loop, step))

    @pl.when(warpgroup == _TOKENS)
    def _() -> None:
        plgpu.set_max_registers(56, action="decrease")
        lag = min(3, stages - 2)  # gathers on their way; the consumer frees a stage one step late

        def ups_loop(i: jax.Array, step: jax.Array) -> jax.Array:
            block, _, first, steps, _, _ = up_item(i)
            start, size = plan.block_first[block], plan.block_size[block]

            def k_loop(k: jax.Array, step: jax.Array) -> jax.Array:
                stage = wait_empty(step)
                _mgpu.gather_rows(
                    operands.x, plan.token_of, scratch.x, start, size, first + k, stage, interpret=interpret
                )

                @pl.when(step >= lag)
                def _() -> None:
                    _mgpu.await_gather(lag, interpret=interpret)
                    plgpu.barrier_arrive(scratch.x_full.at[lax.rem(step - lag, jnp.int32(stages))])

                return step + 1

            return lax.fori_loop(0, steps, k_loop, step)

        step = loop("up", my_ups, ups_loop, jnp.int32(0))
        _mgpu.await_gather(0, interpret=interpret)
        late = jnp.minimum(step, lag)

        @pl.loop(0, late)
        def _(i: jax.Array) -> None:
            plgpu.barrier_arrive(scratch.x_full.at[lax.rem(step - late + i, jnp.int32(stages))])

        def downs_loop(i: jax.Array, step: jax.Array) -> jax.Array:
            block, _, first, steps, _, _ = down_item(i)
            row, size = plan.block_row[block], plan.block_size[block]
            if fused:
                # Columns 128 * first … of h are made by these tiles of the first GEMM; the last split of
                # each holds the flag.
                per_step = config.BLOCK_K // shape.up_width
                tile = first * per_step
                tiles = jnp.minimum(steps * per_step, shape.up_tiles - tile)
                flag = (block * shape.up_tiles + tile) * config.up_splits
                _mgpu.await_flags(
                    operands.flags, flag, tiles * config.up_splits, scratch.epoch, warpgroup=_TOKENS
                )
                _mgpu.proxy_fence()  # h was seen by ordinary loads, TMA reads it

            def k_loop(k: jax.Array, step: jax.Array) -> jax.Array:
                stage = wait_empty(step)
                cols = pl.ds((first + k) * config.BLOCK_K, config.BLOCK_K)

                def copy(width: int) -> None:
                    plgpu.copy_gmem_to_smem(
                        buffers.h.at[pl.ds(pl.multiple_of(row, 8), width), cols],
                        scratch.x.at[stage, pl.ds(0, width)],
                        scratch.x_full.at[stage],
                    )

                _by_width(size, block_m, copy)
                return step + 1

            return lax.fori_loop(0, steps, k_loop, step)

        drain(loop("down", my_downs, downs_loop, step))

    @pl.when(warpgroup == _CONSUMER)
    def _() -> None:
        plgpu.set_max_registers(216, action="increase")

        def multiply(step: jax.Array, steps: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
            """Both halves of a tile, (64, width) float32 each."""

            def accumulate(acc0: Any, acc1: Any) -> tuple[jax.Array, jax.Array]:
                def k_loop(k: jax.Array, _: None) -> None:
                    stage = lax.rem(step + k, jnp.int32(stages))
                    plgpu.barrier_wait(scratch.w_full.at[stage])
                    plgpu.barrier_wait(scratch.x_full.at[stage])
                    tokens = scratch.x.at[stage, pl.ds(0, width)].transpose((1, 0))
                    plgpu.wgmma(acc0, scratch.w.at[stage, pl.ds(0, _HALF)], tokens)
                    plgpu.wgmma(acc1, scratch.w.at[stage, pl.ds(_HALF, _HALF)], tokens)
                    plgpu.wgmma_wait(2)  # those of the stage before are done

                    @pl.when(k > 0)
                    def _() -> None:
                        plgpu.barrier_arrive(
                            scratch.empty.at[lax.rem(step + k + stages - 1, jnp.int32(stages))]
                        )

                lax.fori_loop(0, steps, k_loop, None)
                values = acc0[...], acc1[...]
                plgpu.barrier_arrive(scratch.empty.at[lax.rem(step + steps - 1, jnp.int32(stages))])
                return values

            return pl.run_scoped(
                accumulate, plgpu.ACC((_HALF, width), jnp.float32), plgpu.ACC((_HALF, width), jnp.float32)
            )

        def bias(ref: Any, at: tuple[Any, ...], width: int) -> jax.Array:
            rows = plgpu.load(ref.at[at], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            return lax.broadcast_in_dim(rows.astype(jnp.float32), (_HALF, width), (0,))

        def finish_up(block: jax.Array, tile: jax.Array, halves: Any, width: int) -> None:
            """Activate and send to h."""
            expert, row = plan.block_expert[block], plan.block_row[block]
            col = jnp.minimum(tile * shape.up_width, spec.intermediate_size - shape.up_width)
            if spec.weight_on is WeightOn.INPUT:
                weights = plgpu.load(
                    plan.weight_of_row.at[pl.ds(pl.multiple_of(row, 8), width)],
                    layout=plgpu.Layout.WGMMA.reduce(0),
                    optimized=False,
                )
                weights = lax.broadcast_in_dim(weights, (_HALF, width), (1,))
                halves = tuple(v * weights for v in halves)
            if spec.expert_bias:
                if not spec.gated:
                    at = [(expert, pl.ds(col, _HALF)), (expert, pl.ds(col + _HALF, _HALF))]
                elif spec.gate_up is GateUp.STACKED:
                    at = [(expert, 0, pl.ds(col, _HALF)), (expert, 1, pl.ds(col, _HALF))]
                else:
                    at = [(expert, pl.ds(col, _HALF), 0), (expert, pl.ds(col, _HALF), 1)]
                halves = tuple(v + bias(operands.b13, a, width) for v, a in zip(halves, at, strict=True))
            if spec.gated:
                results = [activate_branches(*halves, spec)]
            else:
                results = [activate_branches(v, None, spec) for v in halves]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # h_smem has left
            for i, h in enumerate(results):
                scratch.h.at[i, pl.ds(0, width)].transpose((1, 0))[...] = h.astype(dtype)
            plgpu.commit_smem()
            for i in range(len(results)):
                for group in range(0, width, 8):
                    # Rows past the block's last group of 8 are the next block's.
                    @pl.when(group < plan.block_size[block])
                    def _(i: int = i, group: int = group) -> None:
                        plgpu.copy_smem_to_gmem(
                            scratch.h.at[i, pl.ds(group, 8)],
                            buffers.h.at[
                                pl.ds(pl.multiple_of(row + group, 8), 8), pl.ds(col + i * _HALF, _HALF)
                            ],
                        )

        def ups_loop(i: jax.Array, step: jax.Array) -> jax.Array:
            block, tile, _, steps, split, item = up_item(i)

            def run(width: int) -> None:
                halves = multiply(step, steps, width)
                if config.up_splits == 1:
                    finish_up(block, tile, halves, width)
                    return

                @pl.when(split < config.up_splits - 1)
                def _() -> None:
                    for half, value in enumerate(halves):
                        buffers.parts[item, half, :, pl.ds(0, width)] = value

                @pl.when(split == config.up_splits - 1)
                def _() -> None:
                    if fused:
                        _mgpu.await_flags(
                            operands.flags,
                            item - (config.up_splits - 1),
                            jnp.int32(config.up_splits - 1),
                            scratch.epoch,
                            warpgroup=_CONSUMER,
                        )
                    total = []
                    for half, value in enumerate(halves):
                        parts = [
                            plgpu.load(
                                buffers.parts.at[item - (config.up_splits - 1) + s, half, :, pl.ds(0, width)],
                                layout=plgpu.Layout.WGMMA,
                                optimized=False,
                            )
                            for s in range(config.up_splits - 1)
                        ]
                        total.append(functools.reduce(jnp.add, [*parts, value]))
                    finish_up(block, tile, tuple(total), width)

            _by_width(plan.block_size[block], block_m, run)
            if fused:
                plgpu.wait_smem_to_gmem(0)  # h is in global memory
                _mgpu.proxy_fence()  # written by TMA, published by an ordinary store
                _mgpu.raise_flag(operands.flags, item, scratch.epoch)
            return step + steps

        def downs_loop(i: jax.Array, step: jax.Array) -> jax.Array:
            block, tile, _, steps, split, item = down_item(i)
            row, size, expert = plan.block_row[block], plan.block_size[block], plan.block_expert[block]
            col = jnp.minimum(tile * config.BLOCK_N, spec.hidden_size - config.BLOCK_N)

            def run(width: int) -> None:
                for half, value in enumerate(multiply(step, steps, width)):
                    start = col + half * _HALF
                    if spec.expert_bias:
                        b = bias(operands.b2, (expert, pl.ds(start, _HALF)), width)
                        value = value + _keep_if(split == 0, b)
                    _mgpu.store_columns(buffers.slots, value, split, row, start, size, interpret=interpret)

            _by_width(size, block_m, run)
            if fused:
                _mgpu.raise_flag(operands.flags, flag_of_down + item, scratch.epoch)
            return step + steps

        step = loop("up", my_ups, ups_loop, jnp.int32(0))
        loop("down", my_downs, downs_loop, step)
        plgpu.wait_smem_to_gmem(0)
        if "combine" in phases:
            _combine(
                operands,
                buffers,
                y_gmem,
                scratch,
                shape,
                cta,
                spec=spec,
                config=config,
                num_tokens=num_tokens,
                num_ctas=num_ctas,
                fused=fused,
                flag_of_down=flag_of_down,
            )


def _combine(
    operands: _Operands,
    buffers: _Buffers,
    y_gmem: Any,
    scratch: _Scratch,
    shape: _Shape,
    cta: jax.Array,
    *,
    spec: MoESpec,
    config: SwapABConfig,
    num_tokens: int,
    num_ctas: int,
    fused: bool,
    flag_of_down: int,
) -> None:
    """y[t] = sum over slots of weight * row, in the order of the slots."""
    plan = operands.plan
    chunk = combine_chunk(spec.hidden_size, num_tokens, num_ctas)
    chunks = -(-spec.hidden_size // chunk)
    tiles = min(shape.down_tiles, chunk // config.BLOCK_N + (1 if spec.hidden_size % config.BLOCK_N else 0))
    layout = plgpu.Layout.WG_STRIDED((chunk,), vec_size=min(4, chunk // 128))

    @pl.loop(0, lax.div(jnp.maximum(num_tokens * chunks - cta + num_ctas - 1, 0), jnp.int32(num_ctas)))
    def _(i: jax.Array) -> None:
        token, part = _divmod(cta + i * num_ctas, chunks)
        col = jnp.minimum(part * chunk, spec.hidden_size - chunk)
        slot = token * spec.top_k
        if fused:
            _mgpu.await_slots(
                operands.flags,
                plan.row_of_slot,
                plan.block_of_slot,
                slot,
                jnp.minimum(lax.div(col, jnp.int32(config.BLOCK_N)), shape.down_tiles - tiles),
                scratch.epoch,
                num_slots=spec.top_k,
                num_tiles=tiles,
                num_splits=config.down_splits,
                flags_per_block=shape.down_tiles * config.down_splits,
                first_flag=flag_of_down,
                warpgroup=_CONSUMER,
            )

        def value(j: Any) -> jax.Array:
            row = plan.row_of_slot[slot + j]
            at = jnp.maximum(row, 0)
            total = functools.reduce(
                jnp.add,
                [
                    plgpu.load(buffers.slots.at[s, at, pl.ds(col, chunk)], layout=layout, optimized=False)
                    for s in range(config.down_splits)
                ],
            )
            if spec.weight_on is WeightOn.OUTPUT:
                total = total * plan.weight_of_slot[slot + j]
            return _keep_if(row >= 0, total)

        if spec.top_k * config.down_splits <= 16:
            # All loads start before the first is needed.
            total = functools.reduce(jnp.add, [value(j) for j in range(spec.top_k)])
        else:
            zero = plgpu.layout_cast(jnp.zeros((chunk,), jnp.float32), layout)
            total = lax.fori_loop(0, spec.top_k, lambda j, acc: acc + value(j), zero)
        y_gmem[token, pl.ds(col, chunk)] = total.astype(y_gmem.dtype)


def combine_chunk(hidden_size: int, num_tokens: int, num_ctas: int) -> int:
    """Columns of y that a CTA makes at once: as few as still give every CTA one piece at most."""
    chunk = 128
    while chunk < 1024 and 2 * chunk <= hidden_size and num_tokens * -(-hidden_size // chunk) > num_ctas:
        chunk *= 2
    return chunk


def _divmod(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    quotient = lax.div(a, jnp.int32(b))
    return quotient, a - quotient * b


def _keep_if(condition: jax.Array, value: jax.Array) -> jax.Array:
    return jnp.where(lax.broadcast(condition, value.shape), value, 0.0)


def _by_width(size: jax.Array, block_m: int, run: Any) -> None:
    """``run(width)`` for the least of 8, 16, … block_m that holds ``size`` tokens."""
    width = 8
    while width <= block_m:
        low = 0 if width == 8 else width // 2

        @pl.when(jnp.logical_and(size > low, size <= width))
        def _(width: int = width) -> None:
            run(width)

        width *= 2


def buffers_items(config: SwapABConfig, spec: MoESpec, num_tokens: int) -> int:
    problem = Problem(spec=spec, num_tokens=num_tokens, dtype="bfloat16")
    return config.max_blocks(problem) * config.up_tiles(spec) * config.up_splits


def fused_experts(
    x: jax.Array,
    routing: Routing,
    w13: jax.Array,
    w2: jax.Array,
    b13: jax.Array | None,
    b2: jax.Array | None,
    spec: MoESpec,
    *,
    config: SwapABConfig,
    num_ctas: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """(T, D), routing (T, top_k) → (T, D)."""
    plan = make_blocks(routing, spec.num_experts, config.block_m)
    return run_plan(x, plan, w13, w2, b13, b2, spec, config=config, num_ctas=num_ctas, interpret=interpret)


def run_plan(
    x: jax.Array,
    plan: BlockPlan,
    w13: jax.Array,
    w2: jax.Array,
    b13: jax.Array | None,
    b2: jax.Array | None,
    spec: MoESpec,
    *,
    config: SwapABConfig,
    num_ctas: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    num_tokens, hidden_size = x.shape
    num_ctas = num_ctas or _mgpu.num_sms()
    experts, inner = spec.num_experts, spec.intermediate_size
    if spec.gated:
        branches = (2, inner) if spec.gate_up is GateUp.STACKED else (inner, 2)
        w13 = w13.reshape(experts, *branches, hidden_size)
        b13 = None if b13 is None else b13.reshape(experts, *branches)
    problem = Problem(spec=spec, num_tokens=num_tokens, dtype=x.dtype.name)
    rows, items = config.max_rows(problem), buffers_items(config, spec, num_tokens)
    max_downs = config.max_blocks(problem) * config.down_tiles(spec) * config.down_splits
    flags = _mgpu.new_flags(items + max_downs)
    parts = items if config.up_splits > 1 else 1
    struct = jax.ShapeDtypeStruct
    buffers = _Buffers(
        h=struct((rows, inner), x.dtype),
        slots=struct((config.down_splits, rows, hidden_size), jnp.float32),
        parts=struct((parts, 2, _HALF, config.block_m), jnp.float32),
    )
    y = struct((num_tokens, hidden_size), x.dtype)
    operands = _Operands(x=x, w13=w13, w2=w2, b13=b13, b2=b2, plan=plan, flags=flags)
    run = functools.partial(
        _launch, spec=spec, config=config, num_tokens=num_tokens, num_ctas=num_ctas, interpret=interpret
    )
    if interpret is None:
        return run(operands, y, buffers, phases=frozenset({"up", "down", "combine"}))[0]
    # The interpreter has no flags: one launch a phase.
    _, up = run(operands, None, buffers._replace(slots=None), phases=frozenset({"up"}))
    _, down = run(
        operands, None, _Buffers(h=up.h, slots=buffers.slots, parts=None), phases=frozenset({"down"})
    )
    return run(operands, y, _Buffers(h=None, slots=down.slots, parts=None), phases=frozenset({"combine"}))[0]


def _launch(
    operands: _Operands,
    y: Any,
    buffers: _Buffers,
    *,
    spec: MoESpec,
    config: SwapABConfig,
    num_tokens: int,
    num_ctas: int,
    phases: frozenset[str],
    interpret: Any,
) -> tuple[Any, _Buffers]:
    is_struct = lambda a: isinstance(a, jax.ShapeDtypeStruct)  # noqa: E731
    leaves, tree = jax.tree.flatten((operands, y, buffers), is_leaf=lambda a: a is None or is_struct(a))
    inputs = [a for a in leaves if a is not None and not is_struct(a)]
    outputs = [a for a in leaves if is_struct(a)]
    operand = _mgpu.operand_transforms(operands.x.dtype)
    dtype, stages, block_m = operands.x.dtype, config.num_stages, config.block_m
    scratch = _Scratch(
        w=plgpu.SMEM((stages, config.BLOCK_N, config.BLOCK_K), dtype, transforms=operand),
        x=plgpu.SMEM((stages, block_m, config.BLOCK_K), dtype, transforms=operand),
        h=plgpu.SMEM((1 if spec.gated else 2, block_m, _HALF), dtype),
        epoch=plgpu.SMEM((2,), jnp.int32),
        w_full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        x_full=plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        empty=plgpu.Barrier(num_arrivals=1, num_barriers=stages),
    )

    def unflatten(refs: tuple[Any, ...]) -> tuple[Any, ...]:
        ins, rest = list(refs[: len(inputs)]), refs[len(inputs) :]
        outs, scr = list(rest[: len(outputs)]), rest[len(outputs) :]
        filled = [None if a is None else (outs.pop(0) if is_struct(a) else ins.pop(0)) for a in leaves]
        return (*jax.tree.unflatten(tree, filled), _Scratch(*scr))

    kernel = plgpu.kernel(
        functools.partial(
            _kernel,
            spec=spec,
            config=config,
            num_tokens=num_tokens,
            num_ctas=num_ctas,
            phases=phases,
            unflatten=unflatten,
            interpret=interpret is not None,
        ),
        out_type=outputs,
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="wg",
        scratch_types=list(scratch),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        kernel_name="swap_ab",
        **({} if interpret is None else {"interpret": interpret}),
    )
    results = iter(kernel(*inputs))
    done = [next(results) if is_struct(a) else a for a in leaves]
    _, y, buffers = jax.tree.unflatten(tree, done)
    return y, buffers
