"""How long a layer takes, on paper: from router logits to y, by one of the kernels in one configuration.

    swap_ab       launch + half what the busiest CTA reads, half what all read evenly + slots + logits
    grouped_gemm  launches + logits + of each GEMM √(memory² + products²) + combine

Neither knows of the L2 cache or of clocks. The constants were fitted to measurements (`benchmarks.fit`), so
that one means no more than its name. BUILD_NOTES "Predicted times" says how far off they are.

A leaf beside `moe_pallas.spec`: no JAX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moe_pallas.configs.heuristics import NARROW, active_experts, busiest_us, mean_blocks
from moe_pallas.configs.schema import MOST_LOGITS, GroupedGemmConfig, SwapABConfig
from moe_pallas.spec import ActivationScales, Problem

_NUM_SMS = 132  # of the device that the constants are for
_HALF = 64  # rows that a consumer of the grouped GEMM multiplies: a block of so few takes half the time


class SwapABConstants(NamedTuple):
    """In us; what they multiply in brackets."""

    launch: float
    quantise: float  # [1 if FP8]
    busiest: float  # [us of the busiest CTA]
    read: float  # [MB of the experts hit]
    reread: float  # [MB of their further blocks]
    slots: float  # [MB of slots written and read]
    logits: float  # [thousands of logits that a CTA looks at]


class GroupedGemmConstants(NamedTuple):
    """In us, MB / us or TFLOP / s."""

    launch: float
    logits: float  # us for a million
    read: float  # MB / us of weights
    combine: float  # MB / us of slots and y
    tail: float  # items for which SMs run dry at the end
    rate: float  # TFLOP / s of bf16
    fp8_rate: float  # the same of FP8
    fp8_added_rate: float  # of FP8 where sums of two steps are scaled and added up


class Constants(NamedTuple):
    """Of both kernels, for one device."""

    swap_ab: SwapABConstants
    grouped_gemm: GroupedGemmConstants


# By `benchmarks.fit`, from benchmarks/results.
CONSTANTS: Mapping[str, Constants] = {
    "NVIDIA H200": Constants(
        SwapABConstants(
            launch=8.03, quantise=3.99, busiest=0.485, read=0.114, reread=0.1, slots=0.646, logits=0.363
        ),
        GroupedGemmConstants(
            launch=28.8,
            logits=19.3,
            read=4.55,
            combine=3.95,
            tail=0.293,
            rate=739,
            fp8_rate=1200,
            fp8_added_rate=1030,
        ),
    )
}


def predicted_us(
    problem: Problem,
    config: SwapABConfig | GroupedGemmConfig,
    constants: Constants = CONSTANTS["NVIDIA H200"],
    group_sizes: Sequence[int] | None = None,
) -> float:
    """Predict the time of a layer.

    Args:
      problem: The call.
      config: How its kernel cuts it up.
      constants: Of the device.
      group_sizes: (E,) tokens of each expert; None: the average over uniform routings.

    Returns:
      us.
    """
    if not problem.num_tokens:
        return 0.0
    if isinstance(config, SwapABConfig):
        return _swap_ab_us(problem, config, constants.swap_ab, group_sizes)
    return _grouped_gemm_us(problem, config, constants.grouped_gemm, group_sizes)


def _swap_ab_us(
    problem: Problem, config: SwapABConfig, constants: SwapABConstants, group_sizes: Sequence[int] | None
) -> float:
    spec, is_fp8 = problem.spec, problem.quant != "none"
    hit, blocks = _hit(problem, group_sizes), _blocks(problem, config.block_m, group_sizes)
    low = math.floor(blocks)
    busiest = [busiest_us(config, problem, count, _NUM_SMS) for count in (low, low + 1)]
    expert_mb = spec.hidden_size * (spec.w13_rows + spec.intermediate_size) * (1 if is_fp8 else 2) / 1e6
    slots_mb = 2 * 4 * config.down_splits * problem.num_tokens * spec.top_k * spec.hidden_size / 1e6
    terms = SwapABConstants(
        launch=1,
        quantise=is_fp8,
        busiest=busiest[0] + (blocks - low) * (busiest[1] - busiest[0]),
        read=hit * expert_mb,
        reread=(blocks - hit) * expert_mb,
        slots=slots_mb,
        logits=min(problem.num_tokens * spec.num_experts, MOST_LOGITS) / 1e3,
    )
    return math.sumprod(constants, terms)


def _grouped_gemm_us(
    problem: Problem,
    config: GroupedGemmConfig,
    constants: GroupedGemmConstants,
    group_sizes: Sequence[int] | None,
) -> float:
    spec, is_fp8 = problem.spec, problem.quant != "none"
    hit, halves = _hit(problem, group_sizes), _blocks(problem, _HALF, group_sizes)
    rate = constants.rate
    if is_fp8:
        is_static = problem.activation_scales is ActivationScales.STATIC
        rate = constants.fp8_rate if is_static else constants.fp8_added_rate
    total = constants.launch + constants.logits * problem.num_tokens * spec.num_experts / 1e6
    for tiles, block_n, outputs, contraction in (
        (config.up_tiles(spec), config.up_block_n, spec.w13_rows, spec.hidden_size),
        (config.down_tiles(spec), config.down_block_n, spec.hidden_size, spec.intermediate_size),
    ):
        memory = hit * outputs * contraction * (1 if is_fp8 else 2) / 1e6 / constants.read
        item = 2 * _HALF * block_n * contraction / (rate * 1e6 / _NUM_SMS)
        item *= 2 * NARROW if block_n == 128 else 1
        total += math.hypot(memory, (halves * tiles / _NUM_SMS + constants.tail) * item)
    slots = problem.num_tokens * spec.top_k * spec.hidden_size
    return total + (4 * slots + 2 * problem.num_tokens * spec.hidden_size) / 1e6 / constants.combine


def _hit(problem: Problem, group_sizes: Sequence[int] | None) -> float:
    if group_sizes is None:
        return active_experts(problem.num_tokens, problem.spec)
    return sum(size > 0 for size in group_sizes)


def _blocks(problem: Problem, block_m: int, group_sizes: Sequence[int] | None) -> float:
    if group_sizes is None:
        return mean_blocks(problem, block_m)
    return sum(-(-int(size) // block_m) for size in group_sizes)
