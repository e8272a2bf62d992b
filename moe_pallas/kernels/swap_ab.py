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
warpgroup of each CTA quantises a part of x and raises a flag, which the loads of tokens wait for. A tile of
256 rows, for as many bytes, makes whole groups of 128 columns of h, which are quantised in the epilogue
(`moe_pallas.kernels._quantise`). With other tiles, which may come out more even over the SMs, h is float32,
and the tokens' warpgroup quantises what it reads of it. Rows of x and of h's codes come by cp.async together
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
from moe_pallas.kernels import _mgpu, _plan, _routing
from moe_pallas.kernels._combine import combine
from moe_pallas.kernels._launch import CONSUMER, TOKENS, WEIGHTS, Buffers, Launch, Operands, Scratch
from moe_pallas.kernels._swap_ab_roles import compute, load_tokens, load_weights
from moe_pallas.kernels._weights import flat_scales, take_apart
from moe_pallas.quant import QTensor, quantize_activations
from moe_pallas.routing import Routing
from moe_pallas.spec import (
    ActivationScales,
    MoESpec,
    Problem,
    QuantScheme,
)

_SLAB = SwapABConfig.SLAB

# Registers of a thread: 3 warpgroups share 504 for 3 threads, 168 each before they are dealt out.
_CONSUMER_REGISTERS, _WEIGHTS_REGISTERS, _TOKENS_REGISTERS = 232, 40, 152


def _kernel(*refs: Any, unflatten: Callable[..., Any], **statics: Any) -> None:
    launch = Launch(*unflatten(refs), **statics)
    warpgroup = lax.axis_index("wg")

    # ptxas gives a branch no more than those before it had left: falling numbers, then the one that takes.
    @pl.when(warpgroup == TOKENS)
    def _() -> None:
        plgpu.set_max_registers(_TOKENS_REGISTERS, action="decrease")
        load_tokens(launch)

    @pl.when(warpgroup == WEIGHTS)
    def _() -> None:
        plgpu.set_max_registers(_WEIGHTS_REGISTERS, action="decrease")
        load_weights(launch)

    @pl.when(warpgroup == CONSUMER)
    def _() -> None:
        plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        if launch.is_fused and launch.scheme is None:
            _mgpu.draw_ticket(launch.operands.flags, launch.scratch.epoch, launch.num_ctas)
            plgpu.barrier_arrive(launch.scratch.drawn)
        elif launch.is_fused:
            plgpu.barrier_wait(launch.scratch.drawn)
        compute(launch)
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
        s13, s2 = flat_scales(w13), flat_scales(w2)
        scales: Any = {"s13": s13, "s2": s2, "input13": w13.input_scale, "input2": w2.input_scale}
        operands = Operands(x, w13.values, w2.values, b13, b2, **scales)
    if spec.gated:
        operands = operands._replace(w13=take_apart(operands.w13, spec))
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
    buffers = Buffers(
        h=struct((rows, spec.intermediate_size), operands.w13.dtype),
        slots=struct((config.down_splits * rows, hidden_size), jnp.float32),
    )
    if config.up_splits > 1:
        parts = struct((items, 2 * config.slabs, _SLAB, config.block_m), jnp.float32)
        buffers = buffers._replace(parts=parts)
    if scheme is not None:
        per_token = config.up_steps(spec) if scheme.activations is ActivationScales.GROUP else 1
        buffers = buffers._replace(
            x=struct((num_tokens, hidden_size), operands.w13.dtype),
            x_scale=struct((num_tokens, per_token), jnp.float32),
        )
        if config.reads_floats(scheme.activations):
            buffers = buffers._replace(h=struct(buffers.h.shape, jnp.float32))
        elif scheme.hidden is ActivationScales.GROUP:
            buffers = buffers._replace(h_scale=struct((rows, config.down_steps(spec)), jnp.float32))
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
