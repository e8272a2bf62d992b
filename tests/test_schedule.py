"""The order of the Swap-AB kernel's work: every item once, and none before what it waits for."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_pallas import MoESpec
from moe_pallas.configs.schema import SwapABConfig
from moe_pallas.kernels._schedule import Item, Schedule


@functools.partial(jax.jit, static_argnames=("config", "spec", "num_ctas", "most", "phases"))
def deal(
    num_blocks: Any, *, config: SwapABConfig, spec: MoESpec, num_ctas: int, most: int, phases: Any
) -> Any:
    """For each CTA: its numbers of items, and ``most`` items of each GEMM, of which so many count."""

    def of_one(cta: jax.Array) -> Any:
        schedule = Schedule(config, spec, num_ctas, cta, num_blocks, phases)
        i = jnp.arange(most, dtype=jnp.int32)
        return schedule.num_ups, schedule.num_downs, jax.vmap(schedule.up)(i), jax.vmap(schedule.down)(i)

    return jax.vmap(of_one)(jnp.arange(num_ctas, dtype=jnp.int32))


def taken(count: Any, items: Item, cta: int) -> Item:
    """The items of a CTA that count."""
    return Item(*(np.asarray(field)[cta, : count[cta]] for field in items))


QWEN = MoESpec(num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768)
WIDE = MoESpec(num_experts=4, top_k=2, hidden_size=320, intermediate_size=704, activation="relu2")


@pytest.mark.parametrize("num_ctas", [1, 3, 132])
@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (QWEN, {}),
        (QWEN, {"up_rows": 48, "down_splits": 3}),
        (QWEN, {"up_splits": 4, "down_rows": 40}),
        (WIDE, {"up_rows": 24, "up_splits": 3, "down_splits": 2}),
    ],
)
@pytest.mark.parametrize("num_blocks", [0, 1, 7, 8, 53])
def test_every_item_is_dealt_once(
    num_blocks: int, spec: MoESpec, options: dict[str, int], num_ctas: int
) -> None:
    config = SwapABConfig(block_m=8, num_stages=4, **options)
    ups = num_blocks * config.up_tiles(spec) * config.up_splits
    downs = num_blocks * config.down_tiles(spec) * config.down_splits
    most = max(ups, downs) // num_ctas + 64 if num_ctas > 1 else max(ups, downs, 1)
    num_ups, num_downs, up_items, down_items = jax.tree.map(
        np.asarray,
        deal(
            jnp.int32(num_blocks),
            config=config,
            spec=spec,
            num_ctas=num_ctas,
            most=most,
            phases=frozenset({"up", "down"}),
        ),
    )
    assert max(num_ups.max(), num_downs.max()) <= most
    first_ups = [taken(num_ups, up_items, cta) for cta in range(num_ctas)]
    then_downs = [taken(num_downs, down_items, cta) for cta in range(num_ctas)]
    assert sorted(n for items in first_ups for n in items.number) == list(range(ups))
    assert sorted(n for items in then_downs for n in items.number) == list(range(downs))
    for items, tiles, splits, steps in (
        (first_ups, config.up_tiles(spec), config.up_splits, config.up_steps(spec)),
        (then_downs, config.down_tiles(spec), config.down_splits, config.down_steps(spec)),
    ):
        pieces: dict[tuple[int, int], list[range]] = {}
        for cta in items:
            assert (np.diff(cta.number) > 0).all()  # a CTA waits for lower numbers only
            for _, block, tile, _, first, count in zip(*cta, strict=True):
                assert count > 0
                pieces.setdefault((int(block), int(tile)), []).append(range(first, first + count))
        assert pieces.keys() == {(b, t) for b in range(num_blocks) for t in range(tiles)}
        for parts in pieces.values():
            assert len(parts) == splits
            assert sorted(step for part in parts for step in part) == list(range(steps))


def test_who_has_less_of_the_first_gemm_begins_the_second_with_finished_blocks() -> None:
    # 8 blocks of 24 tiles on 132 CTAs: 60 have two items, the others one and then four of the second GEMM.
    spec = MoESpec(num_experts=128, top_k=8, hidden_size=4096, intermediate_size=1536)
    config = SwapABConfig(block_m=8, num_stages=6, down_splits=2)
    num_ups, num_downs, _, down_items = jax.tree.map(
        np.asarray,
        deal(
            jnp.int32(8),
            config=config,
            spec=spec,
            num_ctas=132,
            most=8,
            phases=frozenset({"up", "down"}),
        ),
    )
    assert num_ups.tolist() == [2] * 60 + [1] * 72
    finished = 132 // 24
    ahead = [taken(num_downs, down_items, cta).block[:4] for cta in range(60, 132)]
    assert all((blocks < finished).all() for blocks in ahead)
    steps = num_ups * 32 + num_downs * 6
    assert steps.max() - steps.min() <= 16


def test_a_launch_of_one_phase_has_its_items_only() -> None:
    config = SwapABConfig(block_m=8, num_stages=4)
    for phase in ("up", "down"):
        num_ups, num_downs, *_ = deal(
            jnp.int32(5), config=config, spec=QWEN, num_ctas=4, most=1, phases=frozenset({phase})
        )
        assert (int(num_ups.sum()) > 0, int(num_downs.sum()) > 0) == (phase == "up", phase == "down")
