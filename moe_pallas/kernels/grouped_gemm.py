"""Grouped GEMM: an MoE layer for many tokens in three launches, rows on the 64-row side of WGMMA.

    h[r]  = activation(w13[e] @ x[token of r] (+ b13[e]))     for each row r of expert e, in x's dtype
    s[r]  = w2[e] @ h[r] (+ b2[e])                            in x's dtype
    y[t]  = sum over slots j of weight[t, j] * s[row of (t, j)]   float32, in slot order, rounded once

Rows are sorted by expert and cut into blocks of up to 128 rows of one expert (`moe_pallas.plan.BlockPlan`).
The first two launches run one kernel (`moe_pallas.kernels._block_gemm`), the third is
`moe_pallas.kernels._combine_slots`. Two launches before them make the plan (`moe_pallas.kernels._plan`).

A block starts at a multiple of 8 rows in h and s. What stands between two blocks is computed from whatever
was in memory, NaN perhaps, and read by nobody: a row of a product depends on its own row alone. Results are
bitwise repeatable, and do not depend on the other tokens: every row is computed by the same instructions in
the same order wherever it stands in a block.

Operands: weights K-major as they are (w13 (E, 2F, D), w2 (E, D, F)), x (T, D); bfloat16 or float16; D and F
multiples of 64, from 128 on. With weights in FP8 (multiples of 128) products are of FP8 codes: a launch of
its own quantises x, the epilogue of the first GEMM h (`moe_pallas.kernels._quantise`).

`multiply_groups` is a launch by itself: rows as they stand, gathered in order and stored one by one.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moe_pallas.configs.schema import GroupedGemmConfig
from moe_pallas.kernels import _mgpu, _plan, _quantise
from moe_pallas.kernels._activation import activate
from moe_pallas.kernels._block_gemm import Operands, Outputs, multiply_blocks
from moe_pallas.kernels._combine_slots import combine_slots
from moe_pallas.kernels._weights import flat_scales, take_apart
from moe_pallas.plan import BlockPlan, cut_groups
from moe_pallas.quant import QTensor, quantize_activations, scale_of_x
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

_DEFAULT = GroupedGemmConfig()


def routes(problem: Problem, config: GroupedGemmConfig) -> bool:
    """Whether `fused_moe` can route the problem's tokens itself."""
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
    config: GroupedGemmConfig,
    correction_bias: jax.Array | None = None,
    real: jax.Array | None = None,
) -> jax.Array:
    """Compute a layer from router logits: two launches for the plan, then three.

    Args:
      x: (T, D), as all weights and biases as in `fused_experts`.
      logits: (T, E) float32 | bfloat16 | float16.
      w13: As in `fused_experts`.
      w2: Likewise.
      b13: Likewise.
      b2: Likewise.
      spec: The layer.
      config: How it is cut up.
      correction_bias: (E,) float, exactly when ``spec.correction_bias``.
      real: Which tokens are real, as `moe_pallas.kernels._plan.plan_logits` has it; y is 0 for the others.

    Returns:
      (T, D) in x's dtype.
    """
    rows, num_ctas = _max_rows(x, spec, config), _mgpu.num_sms()
    cut: Any = {"block_m": config.BLOCK_M, "num_rows": rows, "num_ctas": num_ctas}
    plan = _plan.plan_logits(logits, correction_bias, real, spec, **cut)
    return _layer(x, plan, w13, w2, b13, b2, spec, rows, config=config, num_ctas=num_ctas)[0]


def fused_experts(
    x: jax.Array,
    routing: Routing,
    w13: jax.Array | QTensor,
    w2: jax.Array | QTensor,
    b13: jax.Array | None,
    b2: jax.Array | None,
    spec: MoESpec,
    *,
    config: GroupedGemmConfig,
    saves: bool = False,
    num_ctas: int | None = None,
    interpret: Any = None,
) -> Any:
    """Compute the experts of a given routing: two launches for the plan, or XLA's, then three.

    Args:
      x: (T, D) bfloat16 | float16.
      routing: ids (T, top_k) int32, outside [0, E) = dropped, and weights (T, top_k) float32.
      w13: (E, 2F, D) or (E, F, D) in x's dtype, or quantised.
      w2: (E, D, F) in x's dtype, or quantised like w13.
      b13: (E, 2F) or (E, F) float, or None.
      b2: (E, D) float, or None.
      spec: The layer.
      config: How it is cut up.
      saves: Whether to keep the products with w13 for a backward pass; not of quantised weights.
      num_ctas: CTAs, at most one for each SM; as many as there are SMs if None.
      interpret: ``plgpu.InterpretGPUParams``, to run on a CPU.

    Returns:
      (T, D) in x's dtype. If it saves, that and (rows of the plan, 2F), gate's columns first, or F.
    """
    rows, num_ctas = _max_rows(x, spec, config), num_ctas or _mgpu.num_sms()
    cut: Any = {"block_m": config.BLOCK_M, "num_rows": rows, "num_ctas": num_ctas}
    plan = _plan.plan_ids(routing, spec, **cut, interpret=interpret)
    launch: Any = {"config": config, "num_ctas": num_ctas, "interpret": interpret}
    y, products = _layer(x, plan, w13, w2, b13, b2, spec, rows, saves=saves, **launch)
    return (y, products) if saves else y


def _max_rows(x: jax.Array, spec: MoESpec, config: GroupedGemmConfig) -> int:
    return config.max_rows(Problem(spec=spec, num_tokens=len(x), dtype=x.dtype.name))


def _layer(
    x: jax.Array,
    plan: BlockPlan,
    w13: jax.Array | QTensor,
    w2: jax.Array | QTensor,
    b13: jax.Array | None,
    b2: jax.Array | None,
    spec: MoESpec,
    rows: int,
    *,
    saves: bool = False,
    interpret: Any = None,
    **launch: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """Run the three launches behind a plan, for y and what it saves; h and the slots have ``rows`` rows."""
    launch["interpret"] = interpret
    down: dict[str, Any] = {"weights": w2}
    scheme = None
    if isinstance(w13, QTensor) and isinstance(w2, QTensor):
        scheme = w13.scheme
        down = {"weights": w2.values, "weight_scale": _scales_of(w2, spec)}
        if scheme.hidden is ActivationScales.STATIC:
            down["row_scale"] = w2.input_scale
    make = Outputs(jax.ShapeDtypeStruct((rows, spec.intermediate_size), down["weights"].dtype))
    if saves:
        make = make._replace(products=jax.ShapeDtypeStruct((rows, w13.shape[1]), x.dtype))
    made = multiply_by_w13(x, plan, w13, b13, spec, make, out_scale=down.get("row_scale"), **launch)
    if made.scale is not None:
        down["row_scale"] = made.scale
    slots = multiply_blocks(
        Operands(rows=made.out, bias=b2, **blocks_of(plan), **down),
        Outputs(jax.ShapeDtypeStruct((rows, x.shape[1]), x.dtype)),
        name="grouped_gemm_down",
        block_n=launch["config"].down_block_n,
        scheme=scheme,
        **launch,
    ).out
    y = combine_slots(slots, plan, spec, len(x), spec.weight_on is WeightOn.OUTPUT, interpret)
    return y, made.products


def blocks_of(plan: BlockPlan) -> dict[str, Any]:
    """Of a plan, what a launch needs whose rows stand in its order."""
    return {name: getattr(plan, name) for name in ("num_blocks", "block_expert", "block_row", "block_size")}


def multiply_by_w13(
    x: jax.Array,
    plan: BlockPlan,
    w13: jax.Array | QTensor,
    b13: jax.Array | None,
    spec: MoESpec,
    make: Outputs,
    *,
    out_scale: jax.Array | None = None,
    **launch: Any,
) -> Outputs:
    """Multiply tokens with w13 of their experts, in the plan's order; ``make`` says what comes of it.

    Of FP8 weights, ``out_scale`` are STATIC scales of h; the scales that h is given are made beside it.
    """
    up: dict[str, Any] = {"rows": x, "weights": w13}
    scheme = None
    if isinstance(w13, QTensor):
        scheme = w13.scheme
        codes, scales = _quantise_x(x, w13, launch["interpret"])
        up = {"rows": codes, "weights": w13.values, "row_scale": scales, "out_scale": out_scale}
        up["weight_scale"] = _scales_of(w13, spec)
        if out_scale is None:
            assert make.out is not None
            num_rows, columns = make.out.shape
            groups = jax.ShapeDtypeStruct((num_rows, columns // QuantScheme.BLOCK), jnp.float32)
            make = make._replace(scale=groups)
    if spec.gated:
        up["weights"] = take_apart(up["weights"], spec)
    return multiply_blocks(
        Operands(
            **up,
            bias=bias_by_branch(b13, spec),
            **blocks_of(plan),
            block_first=plan.block_first,
            token_of=plan.token_of,
            weight_of_row=plan.weight_of_row if spec.weight_on is WeightOn.INPUT else None,
        ),
        make,
        name="grouped_gemm_up",
        block_n=launch["config"].up_block_n,
        gate_up=spec.gate_up if spec.gated else None,
        activate=functools.partial(activate, spec=spec),
        limit=spec.swiglu_limit,
        scheme=scheme,
        **launch,
    )


def bias_by_branch(b13: jax.Array | None, spec: MoESpec) -> jax.Array | None:
    """(E, 2F) → (E, 2, F), gate first; (E, F) of the only branch as it is."""
    return _branches_first(b13, spec) if b13 is not None and spec.gated else b13


def _branches_first(values: jax.Array, spec: MoESpec) -> jax.Array:
    """(E, 2F), in the order of w13's rows → (E, 2, F)."""
    values = take_apart(values, spec)
    return values if spec.gate_up is GateUp.STACKED else values.swapaxes(1, 2)


def _scales_of(weights: QTensor, spec: MoESpec) -> jax.Array:
    """Scales of quantised weights as the kernel takes them."""
    scales = flat_scales(weights)
    if weights.scheme.weights is WeightScales.CHANNEL and weights.gate_up is not None:
        return _branches_first(scales, spec)
    return scales


def _quantise_x(x: jax.Array, w13: QTensor, interpret: Any) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of x, in a launch of its own."""
    if interpret is None:
        return _quantise.quantise(x, w13.input_scale, w13.scheme.activations)
    return quantize_activations(x, w13.scheme.activations, scale_of_x(w13))


def supports(num_rows: int, contracted: int, columns: int, dtype: str) -> str | None:
    """Say why `multiply_groups` can't do this; None if it can."""
    if dtype not in ("bfloat16", "float16"):
        return f"computes in bfloat16 or float16; got {dtype}."
    if contracted % 64 or columns % 64 or not contracted or not columns:
        return f"needs multiples of 64 as sizes of a matrix; got {contracted} contracted, {columns} columns."
    return None if num_rows else "has no rows to compute."


def multiply_groups(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    group_offset: jax.Array | int = 0,
    contract_last: bool = True,
    config: GroupedGemmConfig = _DEFAULT,
    num_ctas: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Multiply each group of rows with its matrix: a few integers by XLA, then one launch.

    Args:
      lhs: (R, K) bfloat16 | float16. Group g has ``group_sizes[g]`` rows, after those of the groups before.
      rhs: (G, N, K) in lhs's dtype; (G, K, N) without ``contract_last``.
      group_sizes: (at least G,) int32, with a sum of at most R.
      group_offset: () int32. The group that rhs[0] belongs to.
      contract_last: Where the axis stands that is summed over.
      config: How it is cut up.
      num_ctas: CTAs, at most one for each SM; as many as there are SMs if None.
      interpret: ``plgpu.InterpretGPUParams``, to run on a CPU.

    Returns:
      (R, N) in lhs's dtype, accumulated in float32. Rows of other groups, or of none, are 0.
    """
    num_rows, num_groups = len(lhs), len(rhs)
    firsts = first_rows(group_sizes, group_offset, num_groups, num_rows)
    blocks = cut_groups(jnp.diff(firsts), firsts, config.BLOCK_M, num_rows)
    return multiply_blocks(
        Operands(
            lhs,
            rhs,
            None,
            num_blocks=blocks.num_blocks,
            block_expert=blocks.group,
            block_row=blocks.first,
            block_size=blocks.size,
            block_first=blocks.first,
            grouped_rows=jnp.stack([firsts[0], firsts[-1]]),
        ),
        Outputs(jax.ShapeDtypeStruct((num_rows, rhs.shape[1 if contract_last else 2]), lhs.dtype)),
        name="grouped_gemm",
        block_n=config.down_block_n,
        contract_last=contract_last,
        config=config,
        num_ctas=num_ctas or _mgpu.num_sms(),
        interpret=interpret,
    ).out


def first_rows(
    group_sizes: jax.Array, group_offset: jax.Array | int, num_groups: int, num_rows: int
) -> jax.Array:
    """(num_groups + 1,): the first row of each group from ``group_offset`` on, and the first after them."""
    # Rows that are not there have no group, whatever the sizes say: the kernels' accesses are not checked.
    ends = jnp.minimum(jnp.cumsum(jnp.maximum(group_sizes, 0), dtype=jnp.int32), num_rows)
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    return lax.dynamic_slice_in_dim(offsets, group_offset, num_groups + 1)
