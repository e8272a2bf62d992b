"""Gradients of the experts: a layer's backward pass as grouped GEMMs over the rows of its plan.

With r the weight of a row, p its products with w13, e its expert and t its token, weights on the output:

    g[r]     = dy[t] @ w2[e]                      the data gradient of the second product
    dp[r]    = (d act / dp)ᵀ (r g)                in the epilogue of that launch, which reads p again
    dx[t]    = sum over the token's rows of dp[r] @ w13[e]
    dr       = g[r] · act(p) + dy[t] · b2[e]      the router's gradient
    dw13[e]  = sum over its rows of dp[r].T @ x[t]
    dw2[e]   = sum over its rows of dy[t].T @ (r act(p))
    db13[e], db2[e] = sums over its rows of dp[r], of r dy[t]

Weights on the input: p is multiplied by r before the activation, g is not; see `_block_results`.

Launches, without biases:

    plan_count, plan_place    the plan again, unless it was saved
    grouped_gemm_up           p again, unless it was saved                       (rows, 2F)
    grouped_gemm_back         g, and from it dp, r act(p) and parts of dr        (rows, 2F), (rows, F)
    grouped_gemm_back_x       dp @ w13, row by row                               (rows, D)
    combine_slots             dx
    weight_gradient_13, weight_gradient_2

w2 and w13 are read as they are: the axis that is contracted here is not their last, which 16-bit WGMMA takes
as well. Numbers between launches have the operands' dtype, sums are in float32. Results are bitwise
repeatable. Rows of no slot are never read into a result, so that they may hold anything.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moe_pallas.configs.schema import GroupedGemmConfig
from moe_pallas.kernels import _mgpu, _plan
from moe_pallas.kernels._activation import activate_with_slopes
from moe_pallas.kernels._block_gemm import multiply_blocks
from moe_pallas.kernels._block_launch import Operands, Outputs, num_tiles
from moe_pallas.kernels._combine_slots import combine_slots
from moe_pallas.kernels._group_sums import RowGroups, sum_groups
from moe_pallas.kernels._weights import take_apart
from moe_pallas.kernels.grouped_gemm import bias_by_branch, blocks_of, multiply_by_w13
from moe_pallas.kernels.weight_gradient import Groups, Rows, weight_gradient
from moe_pallas.plan import BlockPlan
from moe_pallas.routing import Routing
from moe_pallas.spec import GateUp, MoESpec, Problem, WeightOn


class Gradients(NamedTuple):
    """What `gradients` returns.

    Attributes:
      x: (T, D) in x's dtype.
      topk_weights: (T, top_k) float32; exactly 0 for dropped slots.
      w13, w2: In the weights' dtype, or float32; exactly 0 for experts without tokens.
      b13, b2: float32, or None.
    """

    x: jax.Array
    topk_weights: jax.Array
    w13: jax.Array
    w2: jax.Array
    b13: jax.Array | None
    b2: jax.Array | None


def gradients(
    d_y: jax.Array,
    x: jax.Array,
    routing: Routing,
    w13: jax.Array,
    w2: jax.Array,
    b13: jax.Array | None,
    b2: jax.Array | None,
    spec: MoESpec,
    *,
    products: jax.Array | None = None,
    weight_dtype: Any = None,
    config: GroupedGemmConfig,
    num_ctas: int | None = None,
    interpret: Any = None,
) -> Gradients:
    """Pull a cotangent of the experts' output back to all that they were given.

    Args:
      d_y: (T, D) in x's dtype. Rows of tokens that are routed nowhere are not read.
      x: As in `grouped_gemm.fused_experts`, as are the following.
      routing: Likewise.
      w13: (E, 2F, D) or (E, F, D) in x's dtype.
      w2: (E, D, F) in x's dtype.
      b13: Likewise.
      b2: Likewise.
      spec: The layer.
      products: What `grouped_gemm.fused_experts` saved, of any configuration; computed again if None.
      weight_dtype: Of the weights' gradients, float32 or x's; x's if None.
      config: How products are cut up.
      num_ctas: CTAs, at most one for each SM; as many as there are SMs if None.
      interpret: ``plgpu.InterpretGPUParams``, to run on a CPU.

    Returns:
      `Gradients`.
    """
    launch: Any = _launch(config, num_ctas, interpret)
    num_rows = _num_rows(x, spec, config)
    plan = _make_plan(routing, spec, num_rows, launch)
    if products is None:
        products = _products(x, plan, w13, b13, spec, num_rows, launch)
    on_input = spec.weight_on is WeightOn.INPUT
    columns = spec.intermediate_size
    wide = jax.ShapeDtypeStruct(products.shape, x.dtype)
    # Gradients take the place of what they are made from. The interpreter has no word for that.
    in_place = interpret is None
    given: Any = jax.new_ref(products) if in_place else products
    tiles = num_tiles(columns, config.down_block_n)
    back = multiply_blocks(
        Operands(
            rows=d_y,
            weights=w2,
            bias=bias_by_branch(b13, spec),
            **blocks_of(plan),
            block_first=plan.block_first,
            token_of=plan.token_of,
            weight_of_row=plan.weight_of_row if on_input else None,
            weight_of_result=None if on_input else plan.weight_of_row,
            products=given,
        ),
        Outputs(
            d_products=None if in_place else wide,
            hidden=jax.ShapeDtypeStruct((num_rows, columns), x.dtype),
            d_bias=wide if on_input and b13 is not None else None,
            dots=jax.ShapeDtypeStruct((tiles, num_rows), jnp.float32),
        ),
        name="grouped_gemm_back",
        block_n=config.down_block_n,
        activate=functools.partial(activate_with_slopes, spec=spec),
        contract_last=False,
        **launch,
    )
    d_products = jax.freeze(given) if in_place else back.d_products
    is_interleaved = spec.gated and spec.gate_up is GateUp.INTERLEAVED
    d_slots = multiply_blocks(
        Operands(
            rows=d_products,
            weights=take_apart(w13, spec) if is_interleaved else w13,
            bias=None,
            **blocks_of(plan),
        ),
        Outputs(jax.ShapeDtypeStruct((num_rows, x.shape[1]), x.dtype)),
        name="grouped_gemm_back_x",
        block_n=config.down_block_n,
        contract_last=False,
        **launch,
    ).out
    groups = _groups(plan, spec)
    of_weights: Any = {"out_dtype": weight_dtype, **launch}
    d_w13 = weight_gradient(
        d_products,
        x,
        groups,
        (Rows.PLANNED, Rows.TOKENS),
        name="weight_gradient_13",
        is_interleaved=is_interleaved,
        **of_weights,
    )
    d_w2 = weight_gradient(
        d_y, back.hidden, groups, (Rows.TOKENS, Rows.PLANNED), name="weight_gradient_2", **of_weights
    )
    d_b13 = d_b2 = None
    if b13 is not None and b2 is not None:
        d_pre = d_products if back.d_bias is None else back.d_bias
        d_b13 = _in_order(_sum_rows(d_pre, plan, groups, interpret), spec)
        tokens = {"first": plan.block_first, "token_of": plan.token_of}
        weights = None if on_input else plan.weight_of_row
        d_b2 = _sum_rows(d_y, plan, groups, interpret, **tokens, weight_of_row=weights)
    return Gradients(
        x=combine_slots(d_slots, plan, spec, len(x), False, interpret),
        topk_weights=_weight_gradients(back.dots, plan, routing, d_y, None if on_input else b2),
        w13=d_w13,
        w2=d_w2,
        b13=d_b13,
        b2=d_b2,
    )


def _launch(config: GroupedGemmConfig, num_ctas: int | None, interpret: Any) -> dict[str, Any]:
    return {"config": config, "num_ctas": num_ctas or _mgpu.num_sms(), "interpret": interpret}


def _num_rows(x: jax.Array, spec: MoESpec, config: GroupedGemmConfig) -> int:
    return config.max_rows(Problem(spec=spec, num_tokens=len(x), dtype=x.dtype.name))


def _make_plan(routing: Routing, spec: MoESpec, num_rows: int, launch: dict[str, Any]) -> BlockPlan:
    return _plan.plan_ids(
        routing,
        spec,
        block_m=GroupedGemmConfig.BLOCK_M,
        num_rows=num_rows,
        num_ctas=launch["num_ctas"],
        by_row=True,
        interpret=launch["interpret"],
    )


def _products(
    x: jax.Array,
    plan: BlockPlan,
    w13: jax.Array,
    b13: jax.Array | None,
    spec: MoESpec,
    num_rows: int,
    launch: dict[str, Any],
) -> jax.Array:
    struct = jax.ShapeDtypeStruct((num_rows, w13.shape[1]), x.dtype)
    products = multiply_by_w13(x, plan, w13, b13, spec, Outputs(products=struct), **launch).products
    assert products is not None
    return products


def _groups(plan: BlockPlan, spec: MoESpec) -> Groups:
    """The rows of each expert, from those of its blocks."""
    experts = jnp.arange(spec.num_experts, dtype=jnp.int32)
    exists = jnp.arange(len(plan.block_size), dtype=jnp.int32) < plan.num_blocks
    is_mine = (plan.block_expert == experts[:, None]) & exists
    size = jnp.sum(jnp.where(is_mine, plan.block_size, 0), axis=1, dtype=jnp.int32)
    return Groups(_sums_before(-(-size // 8) * 8), _sums_before(size), size, plan.token_of)


def _sums_before(values: jax.Array) -> jax.Array:
    return jnp.cumsum(values, dtype=jnp.int32) - values


def _sum_rows(values: jax.Array, plan: BlockPlan, groups: Groups, interpret: Any, **rows: Any) -> jax.Array:
    """Sum rows over each expert: first over each block, so that experts with many rows take no longer."""
    exists = jnp.arange(len(plan.block_size), dtype=jnp.int32) < plan.num_blocks
    blocks = RowGroups(plan.block_row, jnp.where(exists, plan.block_size, 0), **rows)
    parts = sum_groups(values, blocks, interpret)
    count = -(-groups.size // GroupedGemmConfig.BLOCK_M)
    return sum_groups(parts, RowGroups(_sums_before(count), count), interpret)


def _in_order(d_b13: jax.Array, spec: MoESpec) -> jax.Array:
    """Gate's columns and then up's → the order of w13's rows."""
    if spec.gated and spec.gate_up is GateUp.INTERLEAVED:
        return d_b13.reshape(len(d_b13), 2, -1).swapaxes(1, 2).reshape(d_b13.shape)
    return d_b13


def _weight_gradients(
    dots: jax.Array, plan: BlockPlan, routing: Routing, d_y: jax.Array, b2: jax.Array | None
) -> jax.Array:
    """Add up the parts that tiles have made, and that of the bias."""
    ids = routing.topk_ids
    row = plan.row_of_slot.reshape(ids.shape)
    total = jnp.sum(dots[:, jnp.maximum(row, 0)], axis=0)
    if b2 is not None:
        of_experts = lax.dot_general(
            d_y.astype(jnp.float32),
            b2.astype(jnp.float32),
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST,  # a GPU's default is TF32
        )
        total += jnp.take_along_axis(of_experts, jnp.clip(ids, 0, len(b2) - 1), axis=1)
    return jnp.where(row >= 0, total, 0.0)
