"""Which items of the Swap-AB kernel a CTA works on, and in what order.

An item is a tile of weight rows times a block of tokens, over the contraction or a fixed part of it. Items of
each GEMM are numbered: blocks, their tiles, their splits. CTA c takes items c, c + num_ctas, ... of the first
GEMM. In its last, partial round some CTAs go without: these begin the second GEMM, with as many items each as
fit into the time of one of the first and belong to blocks that the full rounds have finished. The rest of the
second GEMM goes round all CTAs again, those first that began first.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moe_pallas.configs.schema import SwapABConfig
from moe_pallas.spec import MoESpec


class Item(NamedTuple):
    """A piece of one GEMM. Steps are 128 columns of the contraction."""

    number: jax.Array
    block: jax.Array
    tile: jax.Array
    split: jax.Array
    first_step: jax.Array
    num_steps: jax.Array


class Schedule:
    """The items of one CTA.

    Args:
      config: How the problem is cut up.
      spec: The layer.
      num_ctas: CTAs of the launch.
      cta: () int32. This one.
      num_blocks: () int32. Blocks that the routing made.
      phases: ``"up"``, ``"down"`` or both: the GEMMs that the launch has.

    Attributes:
      num_ups: () int32. Items of the first GEMM that are this CTA's.
      num_downs: () int32. Of the second.
    """

    def __init__(
        self,
        config: SwapABConfig,
        spec: MoESpec,
        num_ctas: int,
        cta: jax.Array,
        num_blocks: jax.Array,
        phases: frozenset[str],
    ):
        self._cta, self._num_ctas = cta, num_ctas
        up_steps, down_steps = config.up_steps(spec), config.down_steps(spec)
        self._up = _Cut(config.up_tiles(spec), config.up_splits, up_steps, config.up_part(spec))
        self._down = _Cut(config.down_tiles(spec), config.down_splits, down_steps, config.down_part(spec))
        none = jnp.int32(0)
        ups = num_blocks * self._up.per_block if "up" in phases else none
        downs = num_blocks * self._down.per_block if "down" in phases else none
        rounds, over = divmod_static(ups, num_ctas)
        self.num_ups = rounds + jnp.where(cta < over, 1, 0)
        # CTAs from `over` on have an item less, and come first in the second GEMM.
        self._early = num_ctas - over
        place = cta - over
        self._place = jnp.where(place < 0, place + num_ctas, place)
        ready = lax.div(rounds * num_ctas, jnp.int32(self._up.per_block)) * self._down.per_block
        ahead = jnp.minimum(self._up.part // self._down.part, lax.div(ready, self._early))
        ahead = jnp.where(over > 0, ahead, 0)
        self._ahead = jnp.where(self._place < self._early, ahead, 0)
        self._first_down = ahead * self._early + self._place
        rest = jnp.maximum(downs - self._first_down + num_ctas - 1, 0)
        self.num_downs = self._ahead + lax.div(rest, jnp.int32(num_ctas))

    def up(self, i: jax.Array) -> Item:
        """This CTA's i-th item of the first GEMM."""
        return self._up.item(self._cta + i * self._num_ctas)

    def down(self, i: jax.Array) -> Item:
        """This CTA's i-th item of the second GEMM."""
        ahead = self._place + i * self._early
        later = self._first_down + (i - self._ahead) * self._num_ctas
        return self._down.item(jnp.where(i < self._ahead, ahead, later))


class _Cut:
    """How a block's part of one GEMM is cut into items."""

    def __init__(self, tiles: int, splits: int, steps: int, part: int):
        self.tiles, self.splits, self.steps, self.part = tiles, splits, steps, part
        self.per_block = tiles * splits

    def item(self, number: jax.Array) -> Item:
        rest, split = divmod_static(number, self.splits)
        block, tile = divmod_static(rest, self.tiles)
        first = split * self.part
        return Item(number, block, tile, split, first, jnp.minimum(self.part, self.steps - first))


def divmod_static(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    """``divmod`` of a number >= 0, with a divisor that the compiler knows."""
    quotient = lax.div(a, jnp.int32(b))
    return quotient, a - quotient * b
