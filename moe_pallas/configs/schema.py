"""Configurations of the kernels: frozen, legal or not by one method, sizes derived.

A leaf beside `moe_pallas.spec`: no JAX.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from moe_pallas.configs.lists import list_bytes, supports_ids
from moe_pallas.spec import ActivationScales, MoESpec, Problem, QuantScheme, WeightOn

_LEAST_STAGES = 3  # the consumer frees a stage one step late
_BARRIER_BYTES = 2048  # barriers and the launch's number, alignment included
# Past these, two launches plan faster than each CTA for itself: BUILD_NOTES "Measured facts".
MOST_LOGITS, _MOST_TOKENS = 1 << 15, 128
SMEM_BYTES = 232448  # of one CTA: 228 KiB an SM less 1 KiB reserved, CUDA programming guide


def _objection_to_quant(problem: Problem) -> str | None:
    """Say why no kernel can do this problem in FP8; None if one can, or if it is not in FP8."""
    if problem.activation_scales is ActivationScales.TENSOR:
        return (
            "has no scales of activations that a call shares: each token would wait for all others. "
            "Scales of tokens are as good, with the same weights: activations='token'."
        )
    if problem.activation_scales is not None and problem.spec.weight_on is WeightOn.INPUT:
        return "quantises x before it is routed, which weight_on='input' does not allow."
    return None


def can_split(steps: int, splits: int) -> bool:
    """Whether ``splits`` parts of ceil(steps / splits) steps each leave none of them empty."""
    return 1 <= splits <= steps and -(-steps // -(-steps // splits)) == splits


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwapABConfig:
    """How the Swap-AB kernel cuts a problem up. The contraction goes 128 columns at a time.

    A tile has two halves, gate and up, or two runs of rows where there is but one branch. Weight rows are
    multiplied 64 at a time: a half is one such slab, in FP8 one or two. A slab may hold fewer rows, so that
    tiles come out even over the SMs: memory is what decode waits for, not the rows that are multiplied in
    vain.

    Args:
      block_m: Tokens of one expert that are multiplied together: 8, 16, 32 or 64. An expert with more has
        its weights read again for the next block.
      num_stages: Tiles of weights and tokens on their way to an SM.
      up_rows: Weight rows in each slab of a tile of the first GEMM, a multiple of 8 up to 64.
      down_rows: The same in the second.
      up_splits: Parts that the contraction of the first GEMM (over D) is cut into.
      down_splits: The same for the second (over F).
      slabs: Slabs of 64 weight rows in each half of a tile: 1, or in FP8 2.

    Example:
      >>> from moe_pallas import MoESpec, Problem, SwapABConfig
      >>> spec = MoESpec(num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768)
      >>> problem = Problem(spec=spec, num_tokens=8, dtype="bfloat16")
      >>> SwapABConfig(block_m=8, num_stages=6).validate(problem)
      >>> SwapABConfig(block_m=24, num_stages=6).validate(problem)
      'block_m is 8, 16, 32 or 64; got 24.'
    """

    block_m: int
    num_stages: int
    up_rows: int = 64
    down_rows: int = 64
    up_splits: int = 1
    down_splits: int = 1
    slabs: int = 1

    BLOCK_K: ClassVar[int] = 128
    SLAB: ClassVar[int] = 64  # weight rows of one WGMMA
    MAX_FP8_BLOCK_M: ClassVar[int] = 32  # sums and products of a step are held apart: registers

    def validate(self, problem: Problem) -> str | None:
        """Say why the kernel can't run ``problem`` this way; None if it can."""
        spec = problem.spec
        if problem.dtype not in ("bfloat16", "float16"):
            return f"computes in bfloat16 or float16; got {problem.dtype}."
        if objection := self._objection_to_quant(problem):
            return objection
        for name, size in (
            ("hidden_size", spec.hidden_size),
            ("intermediate_size", spec.intermediate_size),
        ):
            if size % 64 or size < 128:
                return f"needs {name} in multiples of 64 from 128 on; got {size}."
        if self.block_m not in (8, 16, 32, 64):
            return f"block_m is 8, 16, 32 or 64; got {self.block_m}."
        if not _LEAST_STAGES <= self.num_stages <= 32:
            return f"num_stages is {_LEAST_STAGES} ... 32; got {self.num_stages}."
        for name, rows in (("up_rows", self.up_rows), ("down_rows", self.down_rows)):
            if rows % 8 or not 8 <= rows <= self.SLAB:
                return f"{name} is a multiple of 8 up to {self.SLAB}; got {rows}."
        for name, splits, steps in (
            ("up_splits", self.up_splits, self.up_steps(spec)),
            ("down_splits", self.down_splits, self.down_steps(spec)),
        ):
            if not can_split(steps, splits):
                return f"{name} cuts {steps} steps of 128 columns into parts, none empty; got {splits}."
        if (need := self.smem_bytes(problem)) > SMEM_BYTES:
            return f"needs {need} bytes of shared memory, of which a CTA has {SMEM_BYTES}: use fewer stages."
        return None

    def _objection_to_quant(self, problem: Problem) -> str | None:
        spec, activations = problem.spec, problem.activation_scales
        if activations is None:
            return None if self.slabs == 1 else f"slabs is 1 unless weights are quantised; got {self.slabs}."
        if self.slabs not in (1, 2):
            return f"slabs is 1 or 2 of quantised weights; got {self.slabs}."
        if self.block_m > self.MAX_FP8_BLOCK_M:
            return f"block_m is at most {self.MAX_FP8_BLOCK_M} in FP8; got {self.block_m}."
        if objection := _objection_to_quant(problem):
            return objection
        if activations is ActivationScales.GROUP:
            for name, rows in (("up_rows", self.up_rows), ("down_rows", self.down_rows)):
                if rows not in (32, self.SLAB):
                    return f"{name} is 32 or {self.SLAB} with weights in blocks; got {rows}."
        half = self.slabs * self.SLAB
        for name, size, least in (
            ("hidden_size", spec.hidden_size, 2 * half),
            ("intermediate_size", spec.intermediate_size, half if spec.gated else 2 * half),
        ):
            if size % 128 or size < least:
                return f"needs {name} in multiples of 128 from {least} on in FP8; got {size}."
        return None

    def reads_floats(self, activations: ActivationScales | None) -> bool:
        """Whether h is float32, quantised by who reads it, with these scales (None: not in FP8).

        Else scales are stored, or those of groups of 128 columns, which a tile of the first GEMM makes whole.
        """
        makes_groups = self.slabs == 2 and self.up_rows == self.SLAB
        return not makes_groups and activations not in (None, ActivationScales.STATIC)

    def up_weight_rows(self) -> int:
        """Weight rows of a tile of the first GEMM."""
        return 2 * self.slabs * self.up_rows

    def up_width(self, spec: MoESpec) -> int:
        """Columns of h that one tile of the first GEMM makes."""
        return self.up_weight_rows() // (2 if spec.gated else 1)

    def up_tiles(self, spec: MoESpec) -> int:
        """Tiles of the first GEMM, for each expert."""
        return -(-spec.intermediate_size // self.up_width(spec))

    def up_steps(self, spec: MoESpec) -> int:
        """Steps of 128 columns over D."""
        return -(-spec.hidden_size // self.BLOCK_K)

    def up_part(self, spec: MoESpec) -> int:
        """Most steps of an item of the first GEMM."""
        return -(-self.up_steps(spec) // self.up_splits)

    def down_part(self, spec: MoESpec) -> int:
        """Most steps of an item of the second."""
        return -(-self.down_steps(spec) // self.down_splits)

    def down_width(self) -> int:
        """Columns of y that one tile of the second GEMM makes, weight rows of one likewise."""
        return 2 * self.slabs * self.down_rows

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

    def plan_rows(self, problem: Problem) -> int:
        """Entries of a plan by rows: those of the last block are read to its full width."""
        return self.max_rows(problem) + self.block_m

    def max_up_items(self, problem: Problem) -> int:
        """Most items of the first GEMM."""
        return self.max_blocks(problem) * self.up_tiles(problem.spec) * self.up_splits

    def smem_bytes(self, problem: Problem) -> int:
        """Shared memory of a CTA: the ring, the lists of the routing if it makes them, and the barriers."""
        lists = self._list_bytes(problem) if self.makes_lists(problem) else 0
        return (
            self.num_stages * self._stage_bytes(problem) + lists + self._scale_bytes(problem) + _BARRIER_BYTES
        )

    def workspace_bytes(self, problem: Problem) -> int:
        """Count the global memory of what the phases leave to each other.

        That is h, the slots, parts of a split; in FP8 also x, and the scales of both.
        """
        spec, rows = problem.spec, self.max_rows(problem)
        split = 2 * self.slabs * self.SLAB * self.block_m * self.max_up_items(problem)
        floats = self.down_splits * rows * spec.hidden_size + (split if self.up_splits > 1 else 0)
        if problem.activation_scales is None:
            return 2 * rows * spec.intermediate_size + 4 * floats
        codes = rows * spec.intermediate_size + problem.num_tokens * spec.hidden_size
        if self.reads_floats(problem.activation_scales):
            codes += 3 * rows * spec.intermediate_size
        elif problem.activation_scales is not ActivationScales.STATIC:
            floats += rows * self.down_steps(spec)
        is_group = problem.activation_scales is ActivationScales.GROUP
        floats += problem.num_tokens * (self.up_steps(spec) if is_group else 1)
        return codes + 4 * floats

    def makes_lists(self, problem: Problem) -> bool:
        """Whether the kernel finds out by itself where tokens go, and has no plan made for it before."""
        if supports_ids(problem.spec, problem.num_tokens) is not None:
            return False
        if problem.num_tokens * problem.spec.num_experts > MOST_LOGITS or problem.num_tokens > _MOST_TOKENS:
            return False
        least = dataclasses.replace(self, num_stages=_LEAST_STAGES)
        ring = least.num_stages * least._stage_bytes(problem) + least._scale_bytes(problem)
        return ring + self._list_bytes(problem) + _BARRIER_BYTES <= SMEM_BYTES

    def _list_bytes(self, problem: Problem) -> int:
        return list_bytes(problem.num_tokens, problem.spec, self.block_m)

    def _stage_bytes(self, problem: Problem) -> int:
        itemsize = 2 if problem.quant == "none" else 1
        return (2 * self.slabs * self.SLAB + self.block_m) * self.BLOCK_K * itemsize

    def _scale_bytes(self, problem: Problem) -> int:
        """Scales in shared memory: of the ring, and of what a warp finds for a block's tokens."""
        if problem.activation_scales is None:
            return 0
        words = self.num_stages * self.scales_of_stage(), 4 * self.block_m
        return sum(-(-4 * count // 1024) * 1024 for count in words)

    def scales_of_stage(self) -> int:
        """Scales that come with a stage of the ring: of its tokens, then of its slabs."""
        return self.block_m + 2 * self.slabs


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedGemmConfig:
    """How the grouped GEMM cuts a problem up: tiles of 128 rows of one expert by 256 weight rows, or 128.

    Args:
      up_block_n: Weight rows of a tile of the first GEMM, gate and up together: 128 or 256. 256 is the faster
        for each row, 128 comes out more even over the SMs where there are few tiles.
      down_block_n: The same for the second.
      num_stages: Tiles of rows and weights on their way to an SM, 128 bytes of the contraction each.
      band: Blocks of rows that are multiplied with the same weights one after the other, so that both stay
        in the L2 cache.

    Example:
      >>> from moe_pallas import GroupedGemmConfig, MoESpec, Problem
      >>> spec = MoESpec(num_experts=8, top_k=2, hidden_size=4096, intermediate_size=14336)
      >>> problem = Problem(spec=spec, num_tokens=512, dtype="bfloat16")
      >>> GroupedGemmConfig(down_block_n=128).validate(problem)
      >>> GroupedGemmConfig(num_stages=5).validate(problem)
      'needs 281600 bytes of shared memory, of which a CTA has 232448: use fewer stages.'
    """

    up_block_n: int = 256
    down_block_n: int = 256
    num_stages: int = 4
    band: int = 8

    BLOCK_M: ClassVar[int] = 128

    def validate(self, problem: Problem) -> str | None:
        """Say why the kernel can't run ``problem`` this way; None if it can."""
        spec = problem.spec
        if problem.dtype not in ("bfloat16", "float16"):
            return f"computes in bfloat16 or float16; got {problem.dtype}."
        if problem.quant == "none" and problem.weight_dtype != problem.dtype:
            return f"needs weights in {problem.dtype}, like the tokens; got {problem.weight_dtype}."
        if problem.quant != "none" and self.up_block_n != 256:
            return f"up_block_n is 256 in FP8; got {self.up_block_n}."
        if objection := _objection_to_quant(problem):
            return objection
        multiple = 64 if problem.quant == "none" else 128
        for name, size in (
            ("hidden_size", spec.hidden_size),
            ("intermediate_size", spec.intermediate_size),
        ):
            if size % multiple or size < 128:
                return f"needs {name} in multiples of {multiple} from 128 on; got {size}."
        for name, rows in (("up_block_n", self.up_block_n), ("down_block_n", self.down_block_n)):
            if rows not in (128, 256):
                return f"{name} is 128 or 256; got {rows}."
        if self.num_stages < 3:
            return f"num_stages is 3 or more; got {self.num_stages}."
        if self.band < 1:
            return f"band is 1 or more; got {self.band}."
        if (need := self.smem_bytes(problem)) > SMEM_BYTES:
            return f"needs {need} bytes of shared memory, of which a CTA has {SMEM_BYTES}: use fewer stages."
        return None

    def up_tiles(self, spec: MoESpec) -> int:
        """Tiles of weight rows of the first GEMM, for each expert."""
        return -(-spec.intermediate_size * (2 if spec.gated else 1) // self.up_block_n)

    def down_tiles(self, spec: MoESpec) -> int:
        """Tiles of weight rows of the second GEMM, for each expert."""
        return -(-spec.hidden_size // self.down_block_n)

    def max_rows(self, problem: Problem) -> int:
        """Rows of h and of the slots' buffer: experts start at multiples of 8, a tile ends within."""
        slots = problem.num_tokens * problem.spec.top_k
        active = min(problem.spec.num_experts, slots)
        return 8 * ((slots + 7 * active) // 8) + self.BLOCK_M

    def workspace_bytes(self, problem: Problem) -> int:
        """Count the global memory of what one launch leaves to the next: h and the slots.

        In FP8 also x, and the scales of both.
        """
        spec, rows = problem.spec, self.max_rows(problem)
        if problem.activation_scales is None:
            return 2 * rows * (spec.intermediate_size + spec.hidden_size)
        codes = rows * spec.intermediate_size + problem.num_tokens * spec.hidden_size
        is_group = problem.activation_scales is ActivationScales.GROUP
        scales = problem.num_tokens * (spec.hidden_size // QuantScheme.BLOCK if is_group else 1)
        if problem.activation_scales is not ActivationScales.STATIC:
            scales += rows * spec.intermediate_size // QuantScheme.BLOCK
        return 2 * rows * spec.hidden_size + codes + 4 * scales

    def smem_bytes(self, problem: Problem) -> int:
        """Shared memory of a CTA: the ring, four tiles of results, words and barriers."""
        rows = self.BLOCK_M + max(self.up_block_n, self.down_block_n)
        results, scales = 4 * 64 * 64 * 2, 0
        if problem.quant != "none":
            results, scales = results // 2, -(-self.num_stages * 4 * (self.BLOCK_M + 2) // 1024) * 1024
        return self.num_stages * rows * 128 + results + scales + 3 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientConfig:
    """What computes gradients behind the kernels, what it finds, and what it gives.

    Args:
      kernels: Whether the backward pass is one of Hopper kernels, for weights that are not quantised; else it
        is the portable backend's. They are not yet proved for every option on a GPU.
      save: ``"inputs"``: a forward pass that is differentiated keeps its inputs, and the products of x and
        w13 are computed once more in the backward pass, a sixth of all products of a step.
        ``"products"``: it keeps those too, T * top_k * 2F numbers of x's dtype, under the name
        ``"moe_products"``, which policies of ``jax.checkpoint`` can go by; with ``kernels`` alone. The
        portable backend keeps what JAX's differentiation keeps.
      float32_weights: w13 and w2 are float32 while x is bfloat16 or float16. Each call casts them to x's
        dtype, for its products; their gradients are the float32 sums over tokens, not rounded between
        (by the portable backend: rounded to x's dtype).

    Example:
      >>> from moe_pallas import GradientConfig
      >>> GradientConfig(kernels=True, save="products")
      GradientConfig(kernels=True, save='products', float32_weights=False)
    """

    kernels: bool = False
    save: str = "inputs"
    float32_weights: bool = False

    SAVED: ClassVar[tuple[str, ...]] = ("inputs", "products")
    PRODUCTS: ClassVar[str] = "moe_products"

    def __post_init__(self) -> None:
        if self.save not in self.SAVED:
            raise ValueError(f"save is 'inputs' or 'products'; got {self.save!r}.")
        for name in ("kernels", "float32_weights"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is a bool; got {getattr(self, name)!r}.")
        if self.save == "products" and not self.kernels:
            raise ValueError("save='products' is what the kernels can do; need kernels=True with it.")
