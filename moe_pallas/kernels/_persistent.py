"""What kernels of drawn items share: a CTA for each SM, a producer and two consumers, a ring of stages.

A CTA begins with the item of its own number and then draws the next that no other has. The producer draws,
and tells the consumers by a ring of numbers in shared memory, which has room for more items than the producer
can be ahead. The barriers of both rings: `moe_pallas.kernels._block_gemm`.
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

from moe_pallas.kernels import _gather, _mgpu
from moe_pallas.kernels._ring import Ring

NUMBERS = 8  # items whose numbers are kept; the producer is up to num_stages items ahead, if they are short

PRODUCER = 2  # warpgroup; 0 and 1 are the consumers
# Registers of a thread: 3 warpgroups share 504 for 3 threads, 168 each before they are dealt out.
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 216, 72


class Persistent(Ring):
    """A CTA of such a kernel.

    Args:
      flags: Of which only the counters are used; None if interpreted.
      scratch: With ``words`` (`NUMBERS` + 2), ``landed``, ``empty`` and ``drawn``.
      num_stages: Of the ring.
      items: () int32. How many there are, for all CTAs.
      num_ctas: CTAs.
      interpret: Whether Pallas' interpreter runs this.
    """

    def __init__(
        self, flags: Any, scratch: Any, *, num_stages: int, items: Any, num_ctas: int, interpret: bool
    ):
        super().__init__(scratch.empty, num_stages)
        self.flags, self.scratch, self.items = flags, scratch, items
        self.num_ctas, self.interpret = num_ctas, interpret
        self.numbers, self.epoch = (scratch.words.at[pl.ds(*at)] for at in ((0, NUMBERS), (NUMBERS, 2)))
        self.cta = lax.axis_index("cta")

    def run(self, produce: Callable[[], jax.Array], consume: Callable[[jax.Array], None]) -> None:
        """Give the warpgroups their roles; ``produce`` returns the number of its steps."""
        if self.scratch.landed is not None:
            _gather.init_landed(self.scratch.landed)
        warpgroup = lax.axis_index("wg")

        @pl.when(warpgroup == PRODUCER)
        def _() -> None:
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            steps = produce()
            if not self.interpret:
                # With no step there was no barrier to wait for the launch's number.
                pl.when(steps > 0)(functools.partial(_mgpu.check_alone, self.epoch))
                _mgpu.leave(self.flags, self.num_ctas)

        @pl.when(warpgroup < PRODUCER)
        def _() -> None:
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            if not self.interpret:

                @pl.when(warpgroup == 0)
                def _() -> None:
                    _mgpu.draw_ticket(self.flags, self.epoch, self.num_ctas)

            consume(warpgroup)

    def draw(self, slot: jax.Array) -> jax.Array:
        """Producer: draw the next item's number, and tell it."""
        _mgpu.draw_item(self.flags, self.numbers, slot, self.num_ctas, self.items, interpret=self.interpret)
        plgpu.barrier_arrive(self.scratch.drawn.at[slot])
        return self.numbers[slot]

    def drawn(self, slot: jax.Array) -> jax.Array:
        """Consumer: the next item's number."""
        plgpu.barrier_wait(self.scratch.drawn.at[slot])
        return self.numbers[slot]


def ring_scratch(num_stages: int, lands: bool) -> dict[str, Any]:
    """Describe what `Persistent` needs of the scratch; ``lands``: whether something comes by cp.async."""
    assert num_stages < NUMBERS, num_stages
    return {
        "words": plgpu.SMEM((NUMBERS + 2,), jnp.int32),
        "landed": plgpu.SMEM((num_stages, 2), jnp.int32) if lands else None,
        "empty": plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
        "drawn": plgpu.Barrier(num_arrivals=1, num_barriers=NUMBERS),
    }


def run_roles(
    body: Callable[..., None],
    operands: Any,
    make: Any,
    scratch: Any,
    *,
    num_ctas: int,
    name: str,
    interpret: Any,
) -> Any:
    """Run ``body(operands, outputs, scratch)`` in three warpgroups of each CTA, with references for arrays.

    Args:
      body: A CTA's work.
      operands: A tree of arrays.
      make: A tree of `jax.ShapeDtypeStruct`.
      scratch: A tree of what is to be in shared memory.
      num_ctas: CTAs.
      name: Of the launch.
      interpret: ``plgpu.InterpretGPUParams``, or None.

    Returns:
      What ``make`` describes.
    """
    flat, trees = zip(*map(jax.tree.flatten, (operands, make, scratch)), strict=True)
    leaves, structs, held = flat
    ends = len(leaves), len(leaves) + len(structs)

    def run(*refs: Any) -> None:
        parts = refs[: ends[0]], refs[ends[0] : ends[1]], refs[ends[1] :]
        body(*map(jax.tree.unflatten, trees, parts))

    made = plgpu.kernel(
        run,
        out_type=structs,
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="wg",
        scratch_types=held,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        kernel_name=name,
        interpret=interpret,
    )(*leaves)
    return jax.tree.unflatten(trees[1], made)
