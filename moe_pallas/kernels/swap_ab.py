"""Swap-AB: a whole MoE layer for few tokens in one launch, weights on the 64-row side of WGMMA.

Past 128 tokens or 32,768 logits, and with weights on the input, two launches before it make the plan.

    h[r]  = activation(w13[e] @ x[token of r] (+ b13[e]))     for each row r of expert e, in x's dtype
    s[r]  = w2[e] @ h[r] (+ b2[e])                            float32
    y[t]  = sum over slots j of weight[t, j] * s[row of (t, j)]   float32, in slot order, rounded once

WGMMA multiplies 64 rows of its left operand at least. Decode has few tokens and many weights, so the weights
are the left operand and up to 64 tokens of one expert (a block, `moe_pallas.plan.BlockPlan`) the right one:
8, 16, 32 or 64 columns, as many as the block needs, and no row is multiplied in vain.

The grid has a CTA for each SM. Work is cut into items: tiles of 128 weight rows (64 gate and 64 up) of one
block in the first GEMM, 128 rows of w2 in the second, each over the whole contraction or a fixed part of it.
CTA c takes items c, c + num_ctas, ... of the first GEMM and goes on with the second. Inside a CTA three
warpgroups work on their own:

    weights   | w13 tiles by TMA ........................ | w2 tiles by TMA, before h is there ...... |
    tokens    | x rows by cp.async ...................... | wait for h | h rows by TMA .............. |
    consumer  | ... | WGMMA | activation, h, flag | WGMMA ... | ... | WGMMA | s ... | flag | combine |

`num_stages` tiles of weights (128 x 128) and tokens (block_m x 128) are on their way in one ring that runs on
across items and GEMMs. Barriers in shared memory:

    name      arrivals   who arrives                         who waits
    w_full    2          TMA, each half of a weight tile     consumer
    x_full    1          tokens (cp.async) or TMA (h)        consumer
    empty     1          consumer, one step late             weights and tokens
    drawn     1          consumer, launch number is known    tokens

Between CTAs there are flags in global memory (`moe_pallas.kernels._mgpu`): one for each item of the first
GEMM and one for each CTA. An item waits only for items with lower numbers, and every CTA takes its items in
order, so nobody waits in a circle as long as all CTAs are resident: the grid is no larger than the number of
SMs, and a CTA fits on an SM. A wait that takes seconds is a fault and ends the kernel with an error.

Every number is computed by the same instructions in the same order whatever else is in the batch: results are
bitwise repeatable and, for one configuration, independent of the other tokens.

Operands: weights K-major as they are (w13 (E, 2F, D), w2 (E, D, F)), x (T, D); bfloat16 or float16; D and F
multiples of 64, from 128 on. The last tile of 64 or 128 rows is moved back to end with the matrix, the
hardware fills the contraction's last tile with zeros.

With weights in FP8 (D and F multiples of 128) products are of FP8 codes. While the others route, the tokens'
warpgroup of each CTA quantises a part of x and raises a flag, which the loads of tokens wait for; h is
quantised in the epilogue (`moe_pallas.kernels._quantise`). A tile has 256 rows, for as many bytes: 128 of
gate and of up, so that it makes whole groups of 128 columns of h. Rows of x and h come by cp.async together
with the scales that go with a stage, and the products of a stage are added up in float32 with these.
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

from moe_pallas.configs.lists import supports_logits
from moe_pallas.configs.schema import SwapABConfig
from moe_pallas.kernels import _gather, _mgpu, _plan, _quantise, _routing
from moe_pallas.kernels._activation import activate
from moe_pallas.kernels._combine import combine, keep_if
from moe_pallas.kernels._launch import CONSUMER, TOKENS, WEIGHTS, Buffers, Launch, Operands, Scratch
from moe_pallas.kernels._schedule import Item
from moe_pallas.quant import QTensor, quantize_activations
from moe_pallas.routing import Routing
from moe_pallas.spec import (
    ActivationScales,
    GateUp,
    MoESpec,
    Problem,
    QuantScheme,
    WeightOn,
    WeightScales,
)

_SLAB = SwapABConfig.SLAB

# Registers of a thread: 3 warpgroups share 504 for 3 threads, 168 each before they are dealt out.
_CONSUMER_REGISTERS, _WEIGHTS_REGISTERS, _TOKENS_REGISTERS = 232, 40, 72


def _load_weights(launch: Launch) -> None:
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


def _load_tokens(launch: Launch) -> None:
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

    def down(i: jax.Array, state: State) -> State:
        item = launch.schedule.down(i)
        row = plan.block_row[item.block]
        if launch.is_fused:
            await_h(item)
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
                plgpu.barrier_arrive(scratch.empty.at[launch.stage(step + k + config.num_stages - 1)])

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


def _compute(launch: Launch) -> None:
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
            results = [activate(gate, up, spec) for gate, up in zip(slabs[:half], slabs[half:], strict=True)]
        else:
            results = [activate(slab, None, spec) for slab in slabs]
        column, size = launch.up_row(item.tile), plan.block_size[item.block]
        if launch.scheme is not None:
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
                h.astype(operands.x.dtype),
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


def _kernel(*refs: Any, unflatten: Callable[..., Any], **statics: Any) -> None:
    launch = Launch(*unflatten(refs), **statics)
    warpgroup = lax.axis_index("wg")

    @pl.when(warpgroup == WEIGHTS)
    def _() -> None:
        plgpu.set_max_registers(_WEIGHTS_REGISTERS, action="decrease")
        _load_weights(launch)

    @pl.when(warpgroup == TOKENS)
    def _() -> None:
        plgpu.set_max_registers(_TOKENS_REGISTERS, action="decrease")
        _load_tokens(launch)

    @pl.when(warpgroup == CONSUMER)
    def _() -> None:
        plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        if launch.is_fused and launch.scheme is None:
            _mgpu.draw_ticket(launch.operands.flags, launch.scratch.epoch, launch.num_ctas)
            plgpu.barrier_arrive(launch.scratch.drawn)
        elif launch.is_fused:
            plgpu.barrier_wait(launch.scratch.drawn)
        _compute(launch)
        if launch.is_fused:
            _mgpu.raise_flag(launch.operands.flags, launch.flag_of_cta + launch.cta, launch.scratch.epoch)
        if "combine" in launch.phases:
            combine(launch)
        if launch.is_fused:
            _mgpu.leave(launch.operands.flags, launch.num_ctas)


def routes(problem: Problem, config: SwapABConfig) -> bool:
    """Whether `fused_moe` can route the problem's tokens itself."""
    if config.makes_lists(problem):
        return supports_logits(problem.spec, problem.num_tokens) is None
    return _plan.supports_logits(problem.spec, problem.num_tokens, _mgpu.num_sms()) is None


def fused_moe(
    x: jax.Array,
    logits: jax.Array,
    w13: jax.Array | QTensor,
    w2: jax.Array | QTensor,
    b13: jax.Array | None,
    b2: jax.Array | None,
    spec: MoESpec,
    *,
    config: SwapABConfig,
    correction_bias: jax.Array | None = None,
    real: jax.Array | None = None,
    num_ctas: int | None = None,
) -> jax.Array:
    """Compute a layer from router logits, in one launch if its lists fit, else after two for the plan.

    Args:
      x: (T, D) bfloat16 | float16.
      logits: (T, E) float32 | bfloat16 | float16.
      w13: (E, 2F, D) or (E, F, D) in x's dtype, or quantised.
      w2: (E, D, F) in x's dtype, or quantised like w13.
      b13: (E, 2F) or (E, F) float, or None.
      b2: (E, D) float, or None.
      spec: The layer.
      config: How it is cut up.
      correction_bias: (E,) float, exactly when ``spec.correction_bias``.
      real: int32, (1,): the number of real tokens, which come first, or (T,): not 0 for a real token. The
        others are routed nowhere, and their rows of y are 0. None: all are real.
      num_ctas: CTAs, at most one for each SM; as many as there are SMs if None.

    Returns:
      (T, D) in x's dtype.
    """
    operands, scheme = _operands(x, w13, w2, b13, b2, spec)
    num_ctas = num_ctas or _mgpu.num_sms()
    problem = _problem(operands, spec, scheme)
    if config.makes_lists(problem):
        operands = operands._replace(logits=logits, correction_bias=correction_bias, real=real)
    else:
        cut = {"block_m": config.block_m, "num_rows": config.plan_rows(problem), "num_ctas": num_ctas}
        operands = operands._replace(plan=_plan.plan_logits(logits, correction_bias, real, spec, **cut))
    return _run(operands, problem, scheme, config, num_ctas, None)


def fused_experts(
    x: jax.Array,
    routing: Routing,
    w13: jax.Array | QTensor,
    w2: jax.Array | QTensor,
    b13: jax.Array | None,
    b2: jax.Array | None,
    spec: MoESpec,
    *,
    config: SwapABConfig,
    num_ctas: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Compute the experts of a given routing, in one launch if its lists fit, else after two for the plan.

    Args:
      x: (T, D), as all other operands as in `fused_moe`.
      routing: ids (T, top_k) int32, outside [0, E) = dropped, and weights (T, top_k) float32.
      w13: As in `fused_moe`.
      w2: Likewise.
      b13: Likewise.
      b2: Likewise.
      spec: Likewise.
      config: Likewise.
      num_ctas: Likewise.
      interpret: ``plgpu.InterpretGPUParams``, to run on a CPU, one phase after the other. D and F are then
        multiples of 128.

    Returns:
      (T, D) in x's dtype.
    """
    operands, scheme = _operands(x, w13, w2, b13, b2, spec)
    num_ctas = num_ctas or _mgpu.num_sms()
    problem = _problem(operands, spec, scheme)
    if interpret is None and config.makes_lists(problem):
        operands = operands._replace(ids=routing.topk_ids, weights=routing.topk_weights)
    else:
        cut: Any = {"block_m": config.block_m, "num_rows": config.plan_rows(problem), "num_ctas": num_ctas}
        operands = operands._replace(plan=_plan.plan_ids(routing, spec, **cut, interpret=interpret))
    return _run(operands, problem, scheme, config, num_ctas, interpret)


def _operands(
    x: jax.Array,
    w13: jax.Array | QTensor,
    w2: jax.Array | QTensor,
    b13: jax.Array | None,
    b2: jax.Array | None,
    spec: MoESpec,
) -> tuple[Operands, QuantScheme | None]:
    """Take weights apart: values with gate and up on an axis of their own, scales, scheme."""
    operands, scheme = Operands(x, w13, w2, b13, b2), None
    if isinstance(w13, QTensor) and isinstance(w2, QTensor):
        scheme = w13.scheme
        in_blocks = scheme.weights is WeightScales.BLOCK
        s13, s2 = (
            (q.scale.reshape(-1, q.scale.shape[-1]) if in_blocks else q.scale[..., 0]) for q in (w13, w2)
        )
        scales: Any = {"s13": s13, "s2": s2, "input13": w13.input_scale, "input2": w2.input_scale}
        operands = Operands(x, w13.values, w2.values, b13, b2, **scales)
    if spec.gated:
        branches = (2, -1) if spec.gate_up is GateUp.STACKED else (-1, 2)
        values = operands.w13.reshape(spec.num_experts, *branches, spec.hidden_size)
        operands = operands._replace(w13=values)
    return operands, scheme


def _problem(operands: Operands, spec: MoESpec, scheme: QuantScheme | None) -> Problem:
    quant: Any = {} if scheme is None else {"quant": scheme.name, "activation_scales": scheme.activations}
    return Problem(spec=spec, num_tokens=len(operands.x), dtype=operands.x.dtype.name, **quant)


def _run(
    operands: Operands,
    problem: Problem,
    scheme: QuantScheme | None,
    config: SwapABConfig,
    num_ctas: int,
    interpret: Any,
) -> jax.Array:
    x, spec = operands.x, problem.spec
    num_tokens, hidden_size = x.shape
    rows, items = config.max_rows(problem), config.max_up_items(problem)
    struct = jax.ShapeDtypeStruct
    codes = operands.w13.dtype
    buffers = Buffers(
        h=struct((rows, spec.intermediate_size), codes),
        slots=struct((config.down_splits * rows, hidden_size), jnp.float32),
    )
    if config.up_splits > 1:
        parts = struct((items, 2 * config.slabs, _SLAB, config.block_m), jnp.float32)
        buffers = buffers._replace(parts=parts)
    if scheme is not None:
        per_token = config.up_steps(spec) if scheme.activations is ActivationScales.GROUP else 1
        in_groups = scheme.hidden is ActivationScales.GROUP
        buffers = buffers._replace(
            x=struct((num_tokens, hidden_size), codes),
            x_scale=struct((num_tokens, per_token), jnp.float32),
            h_scale=struct((rows, config.down_steps(spec)), jnp.float32) if in_groups else None,
        )
    y = struct((num_tokens, hidden_size), x.dtype)
    run = functools.partial(
        _call, spec=spec, config=config, scheme=scheme, num_ctas=num_ctas, interpret=interpret
    )
    if interpret is None:
        operands = operands._replace(flags=_mgpu.new_flags(items + 2 * num_ctas))
        return run(operands, y, buffers, phases=frozenset({"up", "down", "combine"}))[0]
    # The interpreter has no flags: one launch a phase.
    if scheme is not None:
        input_scale = None if operands.input13 is None else jnp.max(operands.input13)
        made_x = quantize_activations(x, scheme.activations, input_scale)
        buffers = buffers._replace(x=made_x[0], x_scale=made_x[1])
    _, made = run(operands, None, buffers._replace(slots=None), phases=frozenset({"up"}))
    kept = made._replace(x=None, x_scale=None, parts=None)
    _, made = run(operands, None, kept._replace(slots=buffers.slots), phases=frozenset({"down"}))
    return run(operands, y, Buffers(slots=made.slots), phases=frozenset({"combine"}))[0]


def _call(
    operands: Operands,
    y: Any,
    buffers: Buffers,
    *,
    spec: MoESpec,
    config: SwapABConfig,
    scheme: QuantScheme | None,
    num_ctas: int,
    phases: frozenset[str],
    interpret: Any,
) -> tuple[Any, Buffers]:
    """Launch the kernel: of y and the buffers it makes those that are shapes, and takes the arrays."""

    def is_made(leaf: Any) -> bool:
        return isinstance(leaf, jax.ShapeDtypeStruct)

    leaves, tree = jax.tree.flatten((operands, y, buffers), is_leaf=is_made)
    inputs = [leaf for leaf in leaves if not is_made(leaf)]
    outputs = [leaf for leaf in leaves if is_made(leaf)]
    x, stages, dtype = operands.x, config.num_stages, operands.w13.dtype
    tile = _mgpu.operand_transforms(dtype)
    scratch = Scratch(
        w=plgpu.SMEM((stages, 2 * config.slabs * _SLAB, config.BLOCK_K), dtype, transforms=tile),
        x=plgpu.SMEM((stages, config.block_m, config.BLOCK_K), dtype, transforms=tile),
        epoch=plgpu.SMEM((2,), jnp.int32),
        w_full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        x_full=plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        empty=plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        drawn=plgpu.Barrier(),
    )
    if scheme is not None:
        scales = plgpu.SMEM((stages, config.scales_of_stage()), jnp.float32)
        scratch = scratch._replace(scales=scales, maxima=plgpu.SMEM((4 * config.block_m,), jnp.float32))
    if operands.plan is None:
        lists, routing = _routing.list_scratch(x.shape[0], spec, config.block_m)
        scratch = scratch._replace(lists=lists, routing=routing)
    scratch_leaves, scratch_tree = jax.tree.flatten(scratch)

    def unflatten(refs: tuple[Any, ...]) -> tuple[Any, ...]:
        given, made = iter(refs[: len(inputs)]), iter(refs[len(inputs) : len(leaves)])
        filled = [next(made) if is_made(leaf) else next(given) for leaf in leaves]
        return (*jax.tree.unflatten(tree, filled), jax.tree.unflatten(scratch_tree, refs[len(leaves) :]))

    kernel = plgpu.kernel(
        functools.partial(
            _kernel,
            unflatten=unflatten,
            spec=spec,
            config=config,
            scheme=scheme,
            num_tokens=x.shape[0],
            num_ctas=num_ctas,
            phases=phases,
            interpret=interpret is not None,
        ),
        out_type=outputs,
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="wg",
        scratch_types=scratch_leaves,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        kernel_name="swap_ab",
        interpret=interpret,
    )
    made = iter(kernel(*inputs))
    _, y, buffers = jax.tree.unflatten(tree, [next(made) if is_made(leaf) else leaf for leaf in leaves])
    return y, buffers
