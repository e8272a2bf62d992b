"""The order in which rows are computed, against a plain construction of the same."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_pallas import MoESpec, Problem, Routing
from moe_pallas.configs.schema import SwapABConfig
from moe_pallas.plan import BlockPlan, make_blocks, make_plan

_make_blocks = jax.jit(make_blocks, static_argnums=(1, 2))
_make_plan = jax.jit(make_plan, static_argnums=1)


def slots_by_expert(ids: NDArray, num_experts: int) -> list[list[int]]:
    """Each expert's slots, ascending."""
    return [np.flatnonzero(ids.reshape(-1) == expert).tolist() for expert in range(num_experts)]


def check_blocks(ids: NDArray, weights: NDArray, num_experts: int, block_m: int) -> None:
    plan = BlockPlan(*map(np.asarray, _make_blocks(Routing(ids, weights), num_experts, block_m)))
    top_k = ids.shape[1]
    blocks = [
        (expert, slots[i : i + block_m])
        for expert, slots in enumerate(slots_by_expert(ids, num_experts))
        for i in range(0, len(slots), block_m)
    ]
    assert plan.num_blocks.tolist() == [len(blocks)]
    row = first = 0
    row_of_slot = np.full(ids.size, -1)
    weight_of_row = np.zeros(plan.weight_of_row.size, np.float32)
    for i, (expert, slots) in enumerate(blocks):
        assert plan.block_expert[i] == expert
        assert plan.block_size[i] == len(slots)
        assert plan.block_row[i] == row
        assert plan.block_first[i] == first
        assert plan.token_of[first : first + len(slots)].tolist() == [slot // top_k for slot in slots]
        row_of_slot[slots] = row + np.arange(len(slots))
        weight_of_row[row : row + len(slots)] = weights.reshape(-1)[slots]
        row += -(-len(slots) // 8) * 8
        first += len(slots)
    np.testing.assert_array_equal(plan.row_of_slot, row_of_slot)
    np.testing.assert_array_equal(plan.weight_of_slot, weights.reshape(-1))
    np.testing.assert_array_equal(plan.weight_of_row, weight_of_row)
    assert {leaf.dtype.name for leaf in plan[:-2]} == {"int32"}

    # What the kernel sets aside for any routing is enough for this one.
    spec = MoESpec(num_experts=num_experts, top_k=top_k, hidden_size=128, intermediate_size=128)
    problem = Problem(spec=spec, num_tokens=len(ids), dtype="bfloat16")
    config = SwapABConfig(block_m=block_m, num_stages=4)
    assert len(blocks) <= min(config.max_blocks(problem), plan.block_expert.size)
    assert row <= config.max_rows(problem)
    # Whoever reads a block's weights reads block_m of them.
    assert all(plan.block_row[i] + block_m <= plan.weight_of_row.size for i in range(len(blocks)))


@st.composite
def routings(draw: st.DrawFn) -> tuple[NDArray, NDArray, int]:
    num_experts, top_k = draw(st.sampled_from([(1, 1), (5, 3), (16, 4)]))
    num_tokens = draw(st.sampled_from([1, 9, 70]))  # few shapes: each one is compiled
    low, high = draw(st.sampled_from([(-1, num_experts), (0, num_experts), (-3, num_experts + 3), (0, 1)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    ids = rng.integers(low, high, (num_tokens, top_k)).astype(np.int32)
    return ids, rng.random(ids.shape, np.float32), num_experts


@given(routings(), st.sampled_from([8, 16, 64]))
def test_blocks_are_the_plain_construction(routing: tuple[NDArray, NDArray, int], block_m: int) -> None:
    ids, weights, num_experts = routing
    check_blocks(ids, weights, num_experts, block_m)


CASES: dict[str, tuple[Any, int]] = {
    "all dropped": ([[-1, -1], [4, -7]], 4),
    "an expert twice": ([[2, 2], [2, 0], [0, 0]], 4),
    "an expert with more slots than there are tokens": ([[0, 0]] + [[0, 1]] * 7, 2),
    "one token": ([[3, 0]], 4),
    "the last expert alone": ([[3, -1]] * 9, 4),
    "just full": ([[0]] * 8 + [[1]] * 8, 2),
    "one over": ([[0]] * 9 + [[1]] * 17, 2),
    "largest ids": ([[2**31 - 1, -(2**31)], [1, 1]], 2),
}


@pytest.mark.parametrize("block_m", [8, 64])
@pytest.mark.parametrize(("ids", "num_experts"), CASES.values(), ids=CASES)
def test_blocks_at_the_edges(ids: Any, num_experts: int, block_m: int) -> None:
    ids = np.array(ids, np.int32)
    check_blocks(ids, np.linspace(1, 2, ids.size, dtype=np.float32).reshape(ids.shape), num_experts, block_m)


@given(routings())
def test_plan_is_the_plain_construction(routing: tuple[NDArray, NDArray, int]) -> None:
    ids, _, num_experts = routing
    plan = _make_plan(jnp.asarray(ids), num_experts)
    groups = slots_by_expert(ids, num_experts)
    sizes = [len(group) for group in groups]
    assert plan.group_sizes.tolist() == sizes
    assert plan.group_offsets.tolist() == [0, *np.cumsum(sizes).tolist()]
    live = [slot for group in groups for slot in group]
    assert plan.slot_of_row[: len(live)].tolist() == live
    assert sorted(plan.slot_of_row.tolist()) == list(range(ids.size))
    np.testing.assert_array_equal(plan.row_of_slot[plan.slot_of_row], np.arange(ids.size))


def test_blocks_are_made_of_any_float_weights() -> None:
    ids = np.array([[0, 1], [1, 0]], np.int32)
    for dtype in (jnp.bfloat16, jnp.float16):
        weights = jnp.asarray([[0.5, 0.25], [1.0, 2.0]], dtype)
        plan = functools.partial(make_blocks, num_experts=2, block_m=8)(Routing(ids, weights))
        assert plan.weight_of_slot.dtype == plan.weight_of_row.dtype == jnp.float32
        assert plan.weight_of_slot.tolist() == [0.5, 0.25, 1.0, 2.0]
