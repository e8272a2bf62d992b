"""Plan: from expert ids to the order in which rows are computed. Integers only, static shapes.

A *slot* is one (token, choice) pair, numbered token * top_k + choice. A *row* is a slot's place after
sorting by expert: group e holds rows group_offsets[e] … group_offsets[e + 1] - 1. Dropped slots are sorted
behind the last group.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moe_pallas.routing import count_experts


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
