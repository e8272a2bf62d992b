"""The ring of stages in shared memory through which a CTA's warpgroups hand over what they work on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Ring:
    """Steps go round the stages; ``empty`` has a barrier for each, of the consumers.

    Args:
      empty: Barriers, (num_stages,).
      num_stages: Of the ring.
    """

    def __init__(self, empty: Any, num_stages: int):
        self._empty, self.num_stages = empty, num_stages

    def stage(self, step: jax.Array) -> jax.Array:
        """Place in the ring."""
        return lax.rem(step, jnp.int32(self.num_stages))

    def await_empty(self, step: jax.Array) -> jax.Array:
        """Who loads: wait until the stage of a step is free; return the stage."""
        stage = self.stage(step)

        @pl.when(step >= self.num_stages)
        def _() -> None:
            plgpu.barrier_wait(self._empty.at[stage])  # what it held is multiplied

        return stage

    def free_before(self, step: jax.Array) -> None:
        """Consumer: free the stage of the step before this one."""
        plgpu.barrier_arrive(self._empty.at[self.stage(step + self.num_stages - 1)])

    def drain(self, total: jax.Array) -> None:
        """Who loads: wait for what `await_empty` did not, after so many steps.

        A barrier may go when all its completions were seen.
        """
        last = jnp.minimum(total, self.num_stages)

        @pl.loop(0, last)
        def _(i: jax.Array) -> None:
            plgpu.barrier_wait(self._empty.at[self.stage(total - last + i)])
