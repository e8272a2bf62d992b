"""Configurations chosen by a cost model, without measurements of the problem at hand.

The Swap-AB kernel waits for memory. What a configuration changes is how evenly the bytes of the weights
are spread over the CTAs, and how often a CTA begins a step or an item. The model deals out the
items as the kernel does, for as many active experts as a uniform routing hits on average, and takes the CTA
that has the most to do.

A leaf beside `moe_pallas.spec`: no JAX.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator

from moe_pallas.configs.schema import SMEM_BYTES, GroupedGemmConfig, SwapABConfig, can_split
from moe_pallas.spec import ActivationScales, MoESpec, Problem

# BUILD_NOTES "Measured facts": 4.4 TB/s over 132 SMs, and what a step or an item costs besides.
_BYTES_PER_US = 33.3e3
_STEP_US, _ITEM_US, _SPLIT_US = 0.25, 0.5, 2.0
_QUANTISE_US = 0.13  # a step of the second GEMM that quantises 8 rows of h itself
_MAX_STAGES = 6
_MOST_DOWN_STEPS = 16  # longer items of the second GEMM come out too uneven
_ROWS = (64, 56, 48, 40, 32)
_BLOCKS_M = (8, 16, 32, 64)
NARROW = 0.55  # time of a tile of 128 weight rows over that of one of 256 in the grouped GEMM


@functools.lru_cache(maxsize=1024)
def default_swap_ab(problem: Problem, num_sms: int = 132) -> SwapABConfig:
    """Choose how the Swap-AB kernel cuts a problem up.

    Args:
      problem: The call.
      num_sms: SMs of the device.

    Returns:
      The configuration that the model predicts to be fastest; not necessarily a legal one, if none is.
    """
    block_m, spec = _widest_block(problem), problem.spec
    slots = problem.num_tokens * spec.top_k
    blocks = round(max(active_experts(problem.num_tokens, spec), slots / block_m))
    # One token always makes as many blocks; with more, what fits one number best may fit the next worst.
    cases = range(max(1, blocks - 2), blocks + 3) if problem.num_tokens > 1 else (blocks,)
    candidates = _candidates(problem, block_m)
    best = min(candidates, key=lambda config: sum(busiest_us(config, problem, n, num_sms) for n in cases))
    return dataclasses.replace(best, num_stages=_most_stages(best, problem))


@functools.lru_cache(maxsize=1024)
def default_grouped_gemm(problem: Problem, num_sms: int = 132) -> GroupedGemmConfig:
    """Choose how the grouped GEMM cuts a problem up.

    Tiles of 128 weight rows cost more than half of those of 256; they pay where the last of few rounds over
    the SMs would be a small part of one.

    Args:
      problem: The call.
      num_sms: SMs of the device.

    Returns:
      The configuration that the model predicts to be fastest.
    """
    spec, blocks = problem.spec, mean_blocks(problem, GroupedGemmConfig.BLOCK_M)

    def block_n(wide_tiles: int, narrow_tiles: int) -> int:
        wide, narrow = (-(-round(blocks * tiles) // num_sms) for tiles in (wide_tiles, narrow_tiles))
        return 128 if NARROW * narrow < wide else 256

    wide, narrow = GroupedGemmConfig(), GroupedGemmConfig(up_block_n=128, down_block_n=128)
    return GroupedGemmConfig(
        up_block_n=block_n(wide.up_tiles(spec), narrow.up_tiles(spec)) if problem.quant == "none" else 256,
        down_block_n=block_n(wide.down_tiles(spec), narrow.down_tiles(spec)),
    )


def default_config(backend: str, problem: Problem) -> SwapABConfig | GroupedGemmConfig:
    """Choose how the kernel of that name cuts a problem up."""
    return default_swap_ab(problem) if backend == "swap_ab" else default_grouped_gemm(problem)


def search_space(backend: str, problem: Problem) -> Iterator[SwapABConfig | GroupedGemmConfig]:
    """All that a tuner may try of a kernel, but for what `neighbours` adds: legal configurations."""
    configs: Iterable[SwapABConfig | GroupedGemmConfig]
    if backend == "swap_ab":
        configs = (
            dataclasses.replace(config, num_stages=_most_stages(config, problem))
            for block_m in _BLOCKS_M
            if block_m <= _widest_block(problem)
            for config in _candidates(problem, block_m)
        )
    else:
        configs = (
            GroupedGemmConfig(up_block_n=up, down_block_n=down)
            for up, down in itertools.product((256, 128), repeat=2)
        )
    yield from (config for config in configs if config.validate(problem) is None)


def neighbours(
    config: SwapABConfig | GroupedGemmConfig, problem: Problem
) -> Iterator[SwapABConfig | GroupedGemmConfig]:
    """The legal configurations that differ from one in one field, by one step."""
    for name, value in dataclasses.asdict(config).items():
        if name in ("block_m", "band", "up_block_n", "down_block_n"):
            values = value // 2, value * 2
        elif name in ("up_rows", "down_rows"):
            values = value - 8, value + 8
        else:
            values = value - 1, value + 1
        for new in values:
            changed = dataclasses.replace(config, **{name: new})
            if changed.validate(problem) is None:
                yield changed


def mean_blocks(problem: Problem, block_m: int) -> float:
    """Blocks that a uniform routing makes, on average."""
    spec = problem.spec
    share = spec.top_k / spec.num_experts
    mean, deviation = problem.num_tokens * share, math.sqrt(problem.num_tokens * share * (1 - share)) or 1e-9
    # An expert has more than j blocks if it has more than j * block_m tokens.
    more = (
        0.5 * math.erfc((j * block_m + 0.5 - mean) / deviation / math.sqrt(2))
        for j in range(1, problem.num_tokens // block_m + 1)
    )
    return active_experts(problem.num_tokens, spec) + spec.num_experts * sum(more)


def active_experts(num_tokens: int, spec: MoESpec) -> float:
    """Experts that some token visits, on average over uniform routings."""
    return spec.num_experts * (1 - (1 - spec.top_k / spec.num_experts) ** num_tokens)


def _widest_block(problem: Problem) -> int:
    """The narrowest block that takes all tokens, or else the widest that there is."""
    most = 64 if problem.quant == "none" else SwapABConfig.MAX_FP8_BLOCK_M
    return next(block_m for block_m in _BLOCKS_M if block_m >= min(most, problem.num_tokens))


def _candidates(problem: Problem, block_m: int) -> Iterator[SwapABConfig]:
    spec = problem.spec
    slabs = (1,) if problem.quant == "none" else (1, 2)
    rows = (64, 32) if problem.activation_scales is ActivationScales.GROUP else _ROWS
    for cut in itertools.product(slabs, rows, rows, (1, 2, 4), range(1, 17)):
        fields = dict(zip(("slabs", "up_rows", "down_rows", "up_splits", "down_splits"), cut, strict=True))
        config = SwapABConfig(block_m=block_m, num_stages=3, **fields)
        up_steps, down_steps = config.up_steps(spec), config.down_steps(spec)
        if config.down_part(spec) > _MOST_DOWN_STEPS and config.down_splits < 16:
            continue
        if can_split(up_steps, config.up_splits) and can_split(down_steps, config.down_splits):
            yield config


def _most_stages(config: SwapABConfig, problem: Problem) -> int:
    """As many as fit, up to what was seen to help."""
    most = _MAX_STAGES * (1 if problem.quant == "none" or config.slabs == 2 else 2)
    for stages in range(most, 3, -1):
        if dataclasses.replace(config, num_stages=stages).smem_bytes(problem) <= SMEM_BYTES:
            return stages
    return 3


def busiest_us(config: SwapABConfig, problem: Problem, blocks: int, num_sms: int) -> float:
    """Time of the CTA that has the most to do."""
    spec, itemsize = problem.spec, 2 if problem.quant == "none" else 1
    up_part, down_part = config.up_part(spec), config.down_part(spec)
    up_us = _item_us(config.up_weight_rows() * itemsize, up_part)
    down_us = _item_us(config.down_width() * itemsize, down_part)
    if config.reads_floats(problem.activation_scales):
        down_us += down_part * _QUANTISE_US * config.block_m / 8
    ups = blocks * config.up_tiles(spec) * config.up_splits
    downs = blocks * config.down_tiles(spec) * config.down_splits
    rounds, over = divmod(ups, num_sms)
    early = num_sms - over
    finished = rounds * num_sms // (config.up_tiles(spec) * config.up_splits)
    ready = finished * config.down_tiles(spec) * config.down_splits
    ahead = min(up_part // down_part, ready // early) if over else 0
    # The first and the last of those that have an item less of the first GEMM, and of the others.
    most = 0.0
    for place in {0, early - 1, early, num_sms - 1} & set(range(num_sms)):
        my_ups = rounds + (place >= early)
        first = ahead * early + place
        my_downs = (ahead if place < early else 0) + max(0, -(-(downs - first) // num_sms))
        most = max(most, my_ups * up_us + my_downs * down_us)
    return most + _SPLIT_US * (config.up_splits > 1)


def _item_us(column_bytes: int, steps: int) -> float:
    return _ITEM_US + steps * max(_STEP_US, column_bytes * SwapABConfig.BLOCK_K / _BYTES_PER_US)
