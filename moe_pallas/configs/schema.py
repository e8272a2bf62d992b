"""Configurations of the kernels: frozen, legal or not by one method, sizes derived.

A leaf beside `moe_pallas.spec`: no JAX.
"""

from __future__ import annotations

import dataclasses
import math

from moe_pallas.spec import Activation, MoESpec, Problem

SMEM_BYTES = 232448  # of one CTA: 228 KiB an SM less 1 KiB reserved, CUDA programming guide


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwapABConfig:
    """How the Swap-AB kernel cuts a problem up. Rows of weights go 128 at a time, K 128 columns at a time.

    Args:
      block_m: Tokens of one expert that are multiplied together: 8, 16, 32 or 64. An expert with more has
        its weights read again for the next block.
      num_stages: Tiles of weights and tokens on their way to an SM.
      up_splits: Parts that the contraction of the first GEMM (over D) is cut into.
      down_splits: The same for the second (over F).
    """

    block_m: int
    num_stages: int
    up_splits: int = 1
    down_splits: int = 1

    BLOCK_N = 128
    BLOCK_K = 128

    def validate(self, problem: Problem) -> str | None:
        """Say why the kernel can't run ``problem`` this way; None if it can."""
        spec = problem.spec
        if problem.dtype not in ("bfloat16", "float16"):
            return f"computes in bfloat16 or float16; got {problem.dtype}"
        if spec.hidden_size % 64 or spec.hidden_size < 128:
            return f"needs hidden_size in multiples of 64 from 128 on; got {spec.hidden_size}"
        if spec.intermediate_size % 64 or spec.intermediate_size < 128:
            return f"needs intermediate_size in multiples of 64 from 128 on; got {spec.intermediate_size}"
        if spec.activation in (Activation.GEGLU, Activation.GELU):
            return f"has no exact (erf) GELU, which {spec.activation.value!r} needs"
        if self.block_m not in (8, 16, 32, 64):
            return f"block_m is 8, 16, 32 or 64; got {self.block_m}"
        if not 3 <= self.num_stages <= 32:
            return f"num_stages is 3 … 32; got {self.num_stages}"
        for name, splits, steps in (
            ("up_splits", self.up_splits, self.up_steps(spec)),
            ("down_splits", self.down_splits, self.down_steps(spec)),
        ):
            # Every split has a step: ceil(steps / splits) steps each must not leave the last one empty.
            if not 1 <= splits <= steps or -(-steps // -(-steps // splits)) != splits:
                return f"{name} cuts {steps} steps of 128 into parts, none empty; got {splits}"
        if (need := self.smem_bytes(problem)) > SMEM_BYTES:
            return f"needs {need} bytes of shared memory, a CTA has {SMEM_BYTES}; use fewer stages"
        return None

    def up_tiles(self, spec: MoESpec) -> int:
        """Tiles along F in the first GEMM: 64 gate and 64 up rows each, or 128 rows if not gated."""
        return -(-spec.intermediate_size // self.up_width(spec))

    def up_width(self, spec: MoESpec) -> int:
        """Columns of h that one tile of the first GEMM makes."""
        return self.BLOCK_N // 2 if spec.gated else self.BLOCK_N

    def up_steps(self, spec: MoESpec) -> int:
        return -(-spec.hidden_size // self.BLOCK_K)

    def down_tiles(self, spec: MoESpec) -> int:
        return -(-spec.hidden_size // self.BLOCK_N)

    def down_steps(self, spec: MoESpec) -> int:
        return -(-spec.intermediate_size // self.BLOCK_K)

    def max_blocks(self, problem: Problem) -> int:
        """Most blocks that any routing of the problem's slots makes."""
        slots = problem.num_tokens * problem.spec.top_k
        return min(problem.spec.num_experts, slots) + slots // self.block_m

    def max_rows(self, problem: Problem) -> int:
        """Rows of h and of the slots' buffer: blocks start at multiples of 8."""
        slots = problem.num_tokens * problem.spec.top_k
        return min(8 * slots, -(-(slots + 7 * self.max_blocks(problem)) // 8) * 8)

    def max_up_items(self, problem: Problem) -> int:
        """Most items of the first GEMM."""
        return self.max_blocks(problem) * self.up_tiles(problem.spec) * self.up_splits

    def smem_bytes(self, problem: Problem) -> int:
        """Shared memory of a CTA: the ring, barriers; lists of the routing not counted."""
        stage = (self.BLOCK_N + self.block_m) * self.BLOCK_K * 2
        return self.num_stages * stage + 1024


def default_swap_ab(problem: Problem) -> SwapABConfig:
    """Choose a configuration by the token count and the shape, without measurements."""
    spec = problem.spec
    block_m = min(64, max(8, 1 << math.ceil(math.log2(max(1, problem.num_tokens)))))
    stages = {8: 6, 16: 5, 32: 5, 64: 4}[block_m]
    config = SwapABConfig(block_m=block_m, num_stages=stages)
    return dataclasses.replace(config, down_splits=_even_splits(config.down_steps(spec), 14))


def _even_splits(steps: int, most: int) -> int:
    """Fewest parts of at most ``most`` steps each."""
    per_part = -(-steps // -(-steps // most))
    return -(-steps // per_part)
