"""Configurations of the kernels: frozen, legal or not by one method, sizes derived.

A leaf beside `moe_pallas.spec`: no JAX.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from moe_pallas.configs.lists import list_bytes, supports_ids
from moe_pallas.spec import Activation, MoESpec, Problem

SMEM_BYTES = 232448  # of one CTA: 228 KiB an SM less 1 KiB reserved, CUDA programming guide


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwapABConfig:
    """How the Swap-AB kernel cuts a problem up. The contraction goes 128 columns at a time.

    Weight rows are multiplied 64 at a time, two such halves to a tile: gate and up, or two runs of rows where
    there is but one branch. A half may hold fewer rows, so that tiles come out even over the SMs: memory is
    what decode waits for, not the rows that are multiplied in vain.

    Args:
      block_m: Tokens of one expert that are multiplied together: 8, 16, 32 or 64. An expert with more has
        its weights read again for the next block.
      num_stages: Tiles of weights and tokens on their way to an SM.
      up_rows: Weight rows in each half of a tile of the first GEMM, a multiple of 8 up to 64.
      down_rows: The same in the second.
      up_splits: Parts that the contraction of the first GEMM (over D) is cut into.
      down_splits: The same for the second (over F).
    """

    block_m: int
    num_stages: int
    up_rows: int = 64
    down_rows: int = 64
    up_splits: int = 1
    down_splits: int = 1

    BLOCK_K: ClassVar[int] = 128
    HALF: ClassVar[int] = 64  # weight rows of one WGMMA

    def validate(self, problem: Problem) -> str | None:
        """Say why the kernel can't run ``problem`` this way; None if it can."""
        spec = problem.spec
        if problem.dtype not in ("bfloat16", "float16"):
            return f"computes in bfloat16 or float16; got {problem.dtype}."
        for name, size in (
            ("hidden_size", spec.hidden_size),
            ("intermediate_size", spec.intermediate_size),
        ):
            if size % 64 or size < 128:
                return f"needs {name} in multiples of 64 from 128 on; got {size}."
        if spec.activation in (Activation.GEGLU, Activation.GELU):
            return f"has no exact (erf) GELU, which activation={spec.activation.value!r} needs."
        if self.block_m not in (8, 16, 32, 64):
            return f"block_m is 8, 16, 32 or 64; got {self.block_m}."
        if not 3 <= self.num_stages <= 32:
            return f"num_stages is 3 ... 32; got {self.num_stages}."
        for name, rows in (("up_rows", self.up_rows), ("down_rows", self.down_rows)):
            if rows % 8 or not 8 <= rows <= self.HALF:
                return f"{name} is a multiple of 8 up to {self.HALF}; got {rows}."
        for name, splits, steps in (
            ("up_splits", self.up_splits, self.up_steps(spec)),
            ("down_splits", self.down_splits, self.down_steps(spec)),
        ):
            # Every split has a step: ceil(steps / splits) steps each must not leave the last one empty.
            if not 1 <= splits <= steps or -(-steps // -(-steps // splits)) != splits:
                return f"{name} cuts {steps} steps of 128 columns into parts, none empty; got {splits}."
        if (need := self.smem_bytes(problem)) > SMEM_BYTES:
            return f"needs {need} bytes of shared memory, of which a CTA has {SMEM_BYTES}: use fewer stages."
        return None

    def up_width(self, spec: MoESpec) -> int:
        """Columns of h that one tile of the first GEMM makes."""
        return self.up_rows * (1 if spec.gated else 2)

    def up_tiles(self, spec: MoESpec) -> int:
        """Tiles of the first GEMM, for each expert."""
        return -(-spec.intermediate_size // self.up_width(spec))

    def up_steps(self, spec: MoESpec) -> int:
        """Steps of 128 columns over D."""
        return -(-spec.hidden_size // self.BLOCK_K)

    def down_width(self) -> int:
        """Columns of y that one tile of the second GEMM makes."""
        return 2 * self.down_rows

    def down_tiles(self, spec: MoESpec) -> int:
        """Tiles of the second GEMM, for each expert."""
        return -(-spec.hidden_size // self.down_width())

    def down_steps(self, spec: MoESpec) -> int:
        """Steps of 128 columns over F."""
        return -(-spec.intermediate_size // self.BLOCK_K)

    def max_blocks(self, problem: Problem) -> int:
        """Most blocks that any routing of the problem's slots makes."""
        slots = problem.num_tokens * problem.spec.top_k
        active = min(problem.spec.num_experts, slots)
        return (slots + (self.block_m - 1) * active) // self.block_m

    def max_rows(self, problem: Problem) -> int:
        """Rows of h and of the slots' buffer: blocks start at multiples of 8."""
        slots = problem.num_tokens * problem.spec.top_k
        return 8 * ((slots + 7 * self.max_blocks(problem)) // 8)

    def max_up_items(self, problem: Problem) -> int:
        """Most items of the first GEMM."""
        return self.max_blocks(problem) * self.up_tiles(problem.spec) * self.up_splits

    def smem_bytes(self, problem: Problem) -> int:
        """Shared memory of a CTA: the ring, the lists of the routing if it makes them, and the barriers."""
        stage = (2 * self.HALF + self.block_m) * self.BLOCK_K * 2
        lists = 0
        if supports_ids(problem.spec, problem.num_tokens) is None:
            lists = list_bytes(problem.num_tokens, problem.spec, self.block_m)
        return self.num_stages * stage + lists + 2048
