"""Plan: from expert ids to the order in which rows are computed. Integers only, static shapes.

A *slot* is one (token, choice) pair, numbered token * top_k + choice. A *row* is a slot's place after
sorting by expert: group e holds rows group_offsets[e] … group_offsets[e + 1] - 1. Dropped slots are sorted
behind the last group.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moe_pallas.routing import Routing, count_experts


class Plan(NamedTuple):
    """Rows sorted by expert, R = T * top_k of them.

    Attributes:
      group_sizes: (E,) int32. Rows of each expert.
      group_offsets: (E + 1,) int32. First row of each expert; the last entry is the number of live rows.
      slot_of_row: (R,) int32. Which slot stands in a row.
      row_of_slot: (R,) int32. Its inverse.
    """

    group_sizes: jax.Array
    group_offsets: jax.Array
    slot_of_row: jax.Array
    row_of_slot: jax.Array


def make_plan(topk_ids: jax.Array, num_experts: int) -> Plan:
    """Sort slots by expert, stably (rows of one expert keep the order of their tokens).

    Args:
      topk_ids: (T, top_k) int32. Ids outside [0, E) are dropped: they are in no group.
      num_experts: E.

    Returns:
      `Plan`.

    Example:
      >>> import jax.numpy as jnp
      >>> from moe_pallas.plan import make_plan
      >>> make_plan(jnp.array([[2, 0], [-1, 2]]), 3).group_sizes.tolist()
      [1, 0, 2]
    """
    ids = topk_ids.reshape(-1)
    keys = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    slot_of_row = jnp.argsort(keys, stable=True).astype(jnp.int32)
    rows = jnp.arange(ids.size, dtype=jnp.int32)
    row_of_slot = jnp.zeros_like(rows).at[slot_of_row].set(rows, unique_indices=True)
    group_sizes = count_experts(ids, num_experts)
    group_offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(group_sizes, dtype=jnp.int32)])
    return Plan(group_sizes, group_offsets, slot_of_row, row_of_slot)


class Blocks(NamedTuple):
    """Groups of rows cut into blocks of up to ``block_m`` rows of one group each. Arrays are int32.

    Attributes:
      num_blocks: (1,). Blocks that exist; the size of the others is 0.
      first_block: (G,). First block of each group.
      group, first, size: (B,). A block's group, its first row, and how many it has.
    """

    num_blocks: jax.Array
    first_block: jax.Array
    group: jax.Array
    first: jax.Array
    size: jax.Array


def cut_groups(group_sizes: jax.Array, group_offsets: jax.Array, block_m: int, num_rows: int) -> Blocks:
    """Cut groups, of which the g-th has ``group_sizes[g]`` rows from ``group_offsets[g]`` on, into blocks.

    ``num_rows`` bounds the sum of the sizes.
    """
    num_groups = group_sizes.size
    per_group = -(-group_sizes // block_m)
    ends = jnp.cumsum(per_group, dtype=jnp.int32)
    blocks = jnp.arange(min(num_groups, num_rows) + num_rows // block_m, dtype=jnp.int32)
    # Every end compared with every block: one launch, where a binary search is a loop of them.
    group = jnp.searchsorted(ends, blocks, side="right", method="compare_all")
    group = jnp.minimum(group, num_groups - 1).astype(jnp.int32)
    skipped = (blocks - (ends - per_group)[group]) * block_m  # the group's rows in earlier blocks
    size = jnp.where(blocks < ends[-1], jnp.clip(group_sizes[group] - skipped, 0, block_m), 0)
    return Blocks(ends[-1:], ends - per_group, group, group_offsets[group] + skipped, size)


class BlockPlan(NamedTuple):
    """Rows cut into blocks of one expert each, as the kernels walk over them; S = T * top_k slots.

    A block is up to ``block_m`` rows of one expert. Rows are numbered anew, so that each block starts at a
    multiple of 8; the rows between blocks stand for nothing. Arrays are int32 unless said otherwise.

    Attributes:
      num_blocks: (1,). Blocks that exist; entries of the others mean nothing.
      block_expert, block_row, block_first, block_size: (B,). A block's expert, its first row, where its
        tokens start in ``token_of``, and how many they are.
      token_of: (S,). Tokens, block by block, without gaps.
      row_of_slot: (S,). Where a slot's result stands; -1: the slot is dropped.
      weight_of_slot: (S,) float32. Routing weights.
      weight_of_row: (8 * S + block_m,) float32. The same where the rows are. What `kernels._plan` makes is
        shorter, and None where weights are not on the input.
    """

    num_blocks: jax.Array
    block_expert: jax.Array
    block_row: jax.Array
    block_first: jax.Array
    block_size: jax.Array
    token_of: jax.Array
    row_of_slot: jax.Array
    weight_of_slot: jax.Array
    weight_of_row: jax.Array | None


def make_blocks(routing: Routing, num_experts: int, block_m: int) -> BlockPlan:
    """Cut the slots of a routing (T, top_k) into blocks; an id that a token has twice gets two rows."""
    num_tokens, top_k = routing.topk_ids.shape
    num_slots = num_tokens * top_k
    plan = make_plan(routing.topk_ids, num_experts)
    cut = cut_groups(plan.group_sizes, plan.group_offsets, block_m, num_slots)
    first_block, expert, first, size = cut.first_block, cut.group, cut.first, cut.size
    padded = -(-size // 8) * 8
    row = jnp.cumsum(padded, dtype=jnp.int32) - padded
    ids = routing.topk_ids.reshape(-1)
    dropped = (ids < 0) | (ids >= num_experts)
    expert_of_slot = jnp.where(dropped, 0, ids)
    place = plan.row_of_slot - plan.group_offsets[expert_of_slot]
    block_of_slot = first_block[expert_of_slot] + place // block_m
    block_of_slot = jnp.where(dropped, 0, block_of_slot)
    weights = routing.topk_weights.reshape(-1).astype(jnp.float32)
    row_of_slot = jnp.where(dropped, -1, row[block_of_slot] + place % block_m)
    rows = jnp.where(dropped, 8 * num_slots + block_m, row_of_slot)
    return BlockPlan(
        num_blocks=cut.num_blocks,
        block_expert=expert,
        block_row=row,
        block_first=first,
        block_size=size,
        token_of=plan.slot_of_row // top_k,
        row_of_slot=row_of_slot,
        weight_of_slot=weights,
        weight_of_row=jnp.zeros(8 * num_slots + block_m, jnp.float32).at[rows].set(weights, mode="drop"),
    )
