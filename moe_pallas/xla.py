"""The portable backend: grouped matrix products in plain XLA, for CPU, TPU and any GPU.

    rows    = x[token of row]                     (R, D)   gathered, sorted by expert
    a       = rows @ w13[e].T (+ b13[e])          (R, 2F)  float32
    h       = activation(a)                       (R, F)   in x's dtype; quantised weights: float32
    y_row   = h @ w2[e].T (+ b2[e])               (R, D)   float32
    y       = Σ_k weight_k · y_row[row of (t, k)] (T, D)   float32, in slot order

What it costs: the grouped products walk over tiles, blocks of one expert's rows. On a CPU each tile's
product reads the weights where they are: work and memory are those of the routed rows, temporary memory
O(R · (D + 2F)), nothing of size R × E. Elsewhere (NVIDIA GPUs, TPUs) tiles are multiplied many at a time,
each with a copy of its expert's weights: about three times the weights' traffic, and at most `_COPY_BYTES`
of copies at once. That is a fallback, not a fast path.

`jax.lax.ragged_dot` is not used: on CPUs and NVIDIA GPUs XLA computes it densely, every row times every
expert's weights, masked: E times the work, buffers of E × R × max(D, 2F), and a NaN in an expert that no
token visits reaches every row (BUILD_NOTES "Measured facts").

Quantised weights are multiplied by rows that are rounded to FP8 too; both products are those of what the
codes stand for, in float32 (the rules: `moe_pallas.quant`). A tile dequantises its own expert's matrix: on a
CPU there is one at a time, elsewhere `_COPY_BYTES` of them.

Sums over experts run in a fixed order without scatter-adds, in the backward pass too, so results are
bitwise repeatable.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moe_pallas.activations import activate
from moe_pallas.plan import Plan, make_plan
from moe_pallas.quant import QTensor, dequantize, round_activations, scale_of_x
from moe_pallas.routing import Routing
from moe_pallas.spec import MoESpec, WeightOn

# Rows of a tile (BUILD_NOTES "Measured facts"). Where a tile costs a copy of its weights, few large ones win.
_MIN_BLOCK, _MAX_BLOCK, _MAX_BLOCK_COPIED = 8, 128, 1024
_COPY_BYTES = 2**28  # of copied weights at once


def fused_experts(
    x: jax.Array,
    routing: Routing,
    w13: jax.Array | QTensor,
    w2: jax.Array | QTensor,
    b13: jax.Array | None,
    b2: jax.Array | None,
    spec: MoESpec,
) -> jax.Array:
    """Compute the routed experts of checked inputs.

    Args:
      x: (T, D). Rows that are routed nowhere are never read into a result.
      routing: ids (T, top_k) and weights (T, top_k).
      w13: (E, 2F, D) in x's dtype, or quantised.
      w2: (E, D, F) in x's dtype, or quantised by the same scheme.
      b13: (E, 2F) or None.
      b2: (E, D) or None.
      spec: The layer.

    Returns:
      (T, D) float32.
    """
    plan = make_plan(routing.topk_ids, spec.num_experts)
    is_live = _arange(plan.slot_of_row.size) < plan.group_offsets[-1]
    is_valid = (routing.topk_ids >= 0) & (routing.topk_ids < spec.num_experts)
    weights = jnp.where(is_valid, routing.topk_weights, 0.0)  # (T, top_k)

    with jax.named_scope("dispatch"):
        rows = jnp.where(is_live[:, None], _dispatch(x, plan, spec.top_k), 0)
        if spec.weight_on is WeightOn.INPUT:
            row_weights = weights.reshape(-1)[plan.slot_of_row]
            rows = rows.astype(jnp.float32) * row_weights[:, None]
        if isinstance(w13, QTensor):
            rows = round_activations(rows, w13.scheme.activations, scale_of_x(w13))
        else:
            rows = rows.astype(x.dtype)
    with jax.named_scope("w13"):
        a = grouped_matmul(rows, w13, plan.group_sizes)
        if b13 is not None:
            a = a + _bias_of_rows(b13, plan.group_sizes, a.shape[0])
        h = activate(a, spec)
        if isinstance(w2, QTensor):
            h = jnp.where(is_live[:, None], h, 0.0)
            h = round_activations(h, w2.scheme.hidden, _scale_of_h(w2, routing, plan))
        else:
            h = h.astype(x.dtype)
    with jax.named_scope("w2"):
        y = grouped_matmul(h, w2, plan.group_sizes)
        if b2 is not None:
            y = y + _bias_of_rows(b2, plan.group_sizes, y.shape[0])
    with jax.named_scope("combine"):
        slots = _collect(jnp.where(is_live[:, None], y, 0.0), plan).reshape(*weights.shape, -1)
        # Multiply and add instead of a dot: XLA may run a float32 dot in TF32 on a GPU.
        scale = weights if spec.weight_on is WeightOn.OUTPUT else is_valid.astype(jnp.float32)
        return jnp.where(is_valid[..., None], slots * scale[..., None], 0.0).sum(1)


def _scale_of_h(w2: QTensor, routing: Routing, plan: Plan) -> jax.Array | None:
    """(R, 1): each row's expert's input_scale; None if scales are dynamic."""
    if w2.input_scale is None:
        return None
    expert_of_row = routing.topk_ids.reshape(-1)[plan.slot_of_row]
    return w2.input_scale[jnp.clip(expert_of_row, 0, w2.shape[0] - 1)]


@jax.custom_vjp
def grouped_matmul(rows: jax.Array, weights: jax.Array | QTensor, group_sizes: jax.Array) -> jax.Array:
    """Multiply each group of rows by its own matrix: ``out[r] = rows[r] @ weights[group of r].T``.

    Args:
      rows: (R, K). Sorted by group; rows past the groups must not matter to anybody.
      weights: (G, N, K) in rows' dtype; or quantised, with rows in float32.
      group_sizes: (G,) int32, with a sum of at most R.

    Returns:
      (R, N) float32, accumulated in float32; 0 in rows past the groups.

    Notes:
      Reverse-mode gradients only. Cotangents come in the operands' dtype; the incoming one is rounded to
      it before the two backward products. Weights of empty groups get exactly 0; quantised weights are
      frozen, their gradient is 0.
    """
    return _rows_by_group(rows, weights, group_sizes, contract=2)


def _grouped_matmul_fwd(
    rows: jax.Array, weights: jax.Array | QTensor, group_sizes: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array | QTensor, jax.Array]]:
    return grouped_matmul(rows, weights, group_sizes), (rows, weights, group_sizes)


def _grouped_matmul_bwd(
    residuals: tuple[jax.Array, jax.Array | QTensor, jax.Array], d_out: jax.Array
) -> tuple[jax.Array, jax.Array | None, None]:
    rows, weights, group_sizes = residuals
    d_out = d_out.astype(rows.dtype)
    d_rows = _rows_by_group(d_out, weights, group_sizes, contract=1)
    if isinstance(weights, QTensor):
        return like_primal(d_rows.astype(rows.dtype), rows), None, None
    d_weights = _weights_by_group(d_out, rows, group_sizes)
    return (
        like_primal(d_rows.astype(rows.dtype), rows),
        like_primal(d_weights.astype(weights.dtype), weights),
        None,
    )


grouped_matmul.defvjp(_grouped_matmul_fwd, _grouped_matmul_bwd)


def _take(array: jax.Array, index: jax.Array) -> jax.Array:
    """``array[index]``; of FP8 as bytes, because XLA for CPUs widens all of an FP8 array to index it."""
    if array.dtype != jnp.float8_e4m3fn:
        return lax.dynamic_index_in_dim(array, index, keepdims=False)
    # The barrier keeps these bytes, a copy of all, from being made ahead of the loop.
    array, index = lax.optimization_barrier((array, index))
    codes = lax.bitcast_convert_type(array, jnp.uint8)
    codes = lax.dynamic_index_in_dim(codes, index, keepdims=False)
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)


def _arange(size: int) -> jax.Array:
    return jnp.arange(size, dtype=jnp.int32)


def _varying_axes(array: jax.Array) -> frozenset[str]:
    """Name the mesh axes that an array varies over inside ``shard_map``; none outside."""
    return jax.typeof(array).manual_axis_type.varying


def _zeros(shape: tuple[int, ...], *operands: jax.Array) -> jax.Array:
    """Float32 zeros that, inside ``shard_map``, vary over the mesh axes that any operand varies over."""
    return vary_like(jnp.zeros(shape, jnp.float32), *operands)


def vary_like(array: jax.Array, *operands: jax.Array) -> jax.Array:
    """Make an array vary over all mesh axes that any operand varies over."""
    axes = frozenset[str]().union(*map(_varying_axes, operands)) - _varying_axes(array)
    return lax.pcast(array, tuple(axes), to="varying") if axes else array


def like_primal(cotangent: jax.Array, primal: jax.Array) -> jax.Array:
    """Inside ``shard_map``: sum a cotangent over the mesh axes that its primal is replicated over."""
    axes = _varying_axes(cotangent) - _varying_axes(primal)
    return lax.psum(cotangent, tuple(axes)) if axes else cotangent


def _precision(dtype: jnp.dtype) -> lax.Precision:
    # A GPU's default for float32 is TF32, which keeps 10 bits.
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def _rows_by_group(
    rows: jax.Array, weights: jax.Array | QTensor, group_sizes: jax.Array, *, contract: int
) -> jax.Array:
    """(R, K), (G, N, K) or (G, K, N) with K on axis ``contract`` → (R, N) float32."""
    num_rows, num_outputs = rows.shape[0], weights.shape[3 - contract]
    if num_rows == 0:
        return jnp.zeros((0, num_outputs), jnp.float32)

    def product(padded: jax.Array, weights: Any, group: jax.Array, start: jax.Array, block: int) -> jax.Array:
        matrix = jax.tree.map(functools.partial(_take, index=group), weights)
        return lax.dot_general(
            lax.dynamic_slice_in_dim(padded, start, block),
            dequantize(matrix) if isinstance(matrix, QTensor) else matrix,
            (((1,), (contract - 1,)), ((), ())),
            precision=_precision(rows.dtype),
            preferred_element_type=jnp.float32,
        )

    def one_by_one(rows: jax.Array, weights: Any, group_sizes: jax.Array) -> jax.Array:
        padded, tiles, block = _tile(rows, group_sizes, _MAX_BLOCK)

        def step(tile: jax.Array, out: jax.Array) -> jax.Array:
            start = tiles.start[tile]
            value = product(padded, weights, tiles.group[tile], start, block)
            # A tile may reach into the next group's rows; that group's own tiles come later and overwrite.
            return lax.dynamic_update_slice_in_dim(out, value, start, 0)

        out = _zeros((padded.shape[0], num_outputs), rows, *jax.tree.leaves(weights), group_sizes)
        return lax.fori_loop(0, tiles.num_tiles, step, out)[:num_rows]

    def many_at_once(rows: jax.Array, weights: Any, group_sizes: jax.Array) -> jax.Array:
        padded, tiles, block = _tile(rows, group_sizes, _MAX_BLOCK_COPIED)
        copy_bytes = math.prod(weights.shape[1:]) * rows.dtype.itemsize
        products = lax.map(
            lambda tile: product(padded, weights, tile[0], tile[1], block),
            (tiles.group, tiles.start),
            batch_size=max(1, min(_COPY_BYTES // copy_bytes, tiles.group.size)),
        )
        row = _arange(num_rows)
        tile = jnp.searchsorted(tiles.start, row, side="right", method="sort").astype(jnp.int32)
        tile = jnp.maximum(tile - 1, 0)
        return products.reshape(-1, num_outputs)[tile * block + (row - tiles.start[tile])]

    @jax.custom_batching.sequential_vmap
    def multiply(rows: jax.Array, weights: Any, group_sizes: jax.Array) -> jax.Array:
        out = lax.platform_dependent(rows, weights, group_sizes, cpu=one_by_one, default=many_at_once)
        return jnp.where((_arange(num_rows) < group_sizes.sum(dtype=jnp.int32))[:, None], out, 0.0)

    return multiply(rows, weights, group_sizes)


def _weights_by_group(d_out: jax.Array, rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """(R, N), (R, K) → (G, N, K) float32: ``Σ_r d_out[r]ᵀ rows[r]`` over each group's rows."""
    num_rows, num_groups = rows.shape[0], group_sizes.shape[0]
    shape = (num_groups, d_out.shape[1], rows.shape[1])
    if num_rows == 0:
        return jnp.zeros(shape, jnp.float32)

    @jax.custom_batching.sequential_vmap
    def multiply(d_out: jax.Array, rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
        rows, tiles, block = _tile(rows, group_sizes, _MAX_BLOCK)
        d_out = jnp.pad(d_out, ((0, block), (0, 0)))

        def step(tile: jax.Array, out: jax.Array) -> jax.Array:
            group, start = tiles.group[tile], tiles.start[tile]
            is_mine = (start + _arange(block) < tiles.end[tile])[:, None]
            left, right = (
                jnp.where(is_mine, lax.dynamic_slice_in_dim(v, start, block), 0) for v in (d_out, rows)
            )
            product = lax.dot_general(
                left,
                right,
                (((0,), (0,)), ((), ())),
                precision=_precision(rows.dtype),
                preferred_element_type=jnp.float32,
            )
            total = lax.dynamic_index_in_dim(out, group, keepdims=False) + product
            return lax.dynamic_update_index_in_dim(out, total, group, 0)

        return lax.fori_loop(0, tiles.num_tiles, step, _zeros(shape, d_out, rows, group_sizes))

    return multiply(d_out, rows, group_sizes)


class _Tiles(NamedTuple):
    """Blocks of rows, each beginning inside one group, in the order of their rows.

    ``group`` (its matrix), ``start`` (its first row) and ``end`` (of its group's rows), each (tiles,) int32;
    the first ``num_tiles`` tiles are real, the others begin behind the last row.
    """

    group: jax.Array
    start: jax.Array
    end: jax.Array
    num_tiles: jax.Array


def _tile(rows: jax.Array, group_sizes: jax.Array, max_block: int) -> tuple[jax.Array, _Tiles, int]:
    """Cut (R, K) rows into tiles of about one group's share of rows, a power of two.

    Returns:
      The rows with one more block of zeros at their end, the tiles, and the rows of a tile.
    """
    num_rows, num_groups = rows.shape[0], group_sizes.shape[0]
    share = -(-num_rows // num_groups)
    block = min(max(1 << (share - 1).bit_length(), _MIN_BLOCK), max_block)
    tile = _arange(num_rows // block + min(num_groups, num_rows))  # never more
    tiles_of_group = -(-group_sizes // block)
    tile_ends = jnp.cumsum(tiles_of_group, dtype=jnp.int32)
    row_ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    group = jnp.searchsorted(tile_ends, tile, side="right", method="sort").astype(jnp.int32)
    group = jnp.minimum(group, num_groups - 1)
    nth = tile - (tile_ends - tiles_of_group)[group]
    start = (row_ends - group_sizes)[group] + nth * block
    start = jnp.where(tile < tile_ends[-1], start, num_rows).astype(jnp.int32)
    return jnp.pad(rows, ((0, block), (0, 0))), _Tiles(group, start, row_ends[group], tile_ends[-1]), block


def _bias_of_rows(bias: jax.Array, group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """(G, N) → (R, N): the bias of each row's group.

    As a grouped product with ones: its gradient is a sum over each group's rows without a scatter-add.
    """
    ones = jnp.ones((num_rows, 1), jnp.float32)
    return grouped_matmul(ones, bias.astype(jnp.float32)[..., None], group_sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _dispatch(x: jax.Array, plan: Plan, top_k: int) -> jax.Array:
    """(T, D) → (R, D): the token of each row."""
    return x[plan.slot_of_row // top_k]


def _dispatch_fwd(x: jax.Array, plan: Plan, top_k: int) -> tuple[jax.Array, tuple[jax.Array, Plan]]:
    return _dispatch(x, plan, top_k), (x, plan)


def _dispatch_bwd(top_k: int, residuals: tuple[jax.Array, Plan], d_rows: jax.Array) -> tuple[jax.Array, None]:
    x, plan = residuals  # of x only its type is used
    # A token's rows are fetched and summed in slot order: no scatter-add.
    d_slots = d_rows[plan.row_of_slot].reshape(-1, top_k, d_rows.shape[-1])
    return like_primal(d_slots.astype(jnp.float32).sum(1).astype(d_rows.dtype), x), None


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@jax.custom_vjp
def _collect(y: jax.Array, plan: Plan) -> jax.Array:
    """(R, D) rows → (R, D) slots: undo the sort."""
    return y[plan.row_of_slot]


def _collect_fwd(y: jax.Array, plan: Plan) -> tuple[jax.Array, Plan]:
    return _collect(y, plan), plan


def _collect_bwd(plan: Plan, d_slots: jax.Array) -> tuple[jax.Array, None]:
    return d_slots[plan.slot_of_row], None


_collect.defvjp(_collect_fwd, _collect_bwd)
