"""Sizes and limits of the lists that a kernel makes of a routing in shared memory (`kernels._routing`).

A leaf beside `moe_pallas.spec`: no JAX.
"""

from __future__ import annotations

from typing import NamedTuple

from moe_pallas.spec import MoESpec, Scoring, WeightOn

NUM_WARPS = 12  # of the CTA, all of which take part
MAX_EXPERTS = 1536
_MAX_TOKENS, _MAX_TOP_K = 256, 32
_ALIGNMENT = 1024  # bytes, of every Pallas allocation in shared memory


class ListSizes(NamedTuple):
    """Upper bounds for any routing of so many tokens.

    Attributes:
      max_blocks: Blocks.
      max_rows: Rows, with each block rounded up to a multiple of 8.
      max_slots: Slots, S = T · top_k.
    """

    max_blocks: int
    max_rows: int
    max_slots: int


def list_sizes(num_tokens: int, spec: MoESpec, block_m: int) -> ListSizes:
    """Bound the lists: at most min(E, S) experts have tokens, none more than T, all together at most S."""
    slots = num_tokens * spec.top_k
    active = min(spec.num_experts, slots)

    def pieces(size: int) -> int:
        return min(active * -(-num_tokens // size), (slots + (size - 1) * active) // size)

    return ListSizes(max_blocks=pieces(block_m), max_rows=8 * pieces(8), max_slots=slots)


def scratch_words(num_tokens: int, spec: MoESpec) -> int:
    """A bit for each expert and token, two words for each expert and each warp, and what the router keeps."""
    kept = row_words(spec) * num_tokens
    if num_tokens == 1:
        return max(1, kept)
    return (-(-num_tokens // 32) + 2) * spec.num_experts + 2 * NUM_WARPS + kept


def row_words(spec: MoESpec) -> int:
    """Count the words that the router keeps of each token: of its logits, the largest and the sum of exp."""
    return 2 if spec.correction_bias or is_softmax_of_all(spec) else 0


def is_softmax_of_chosen(spec: MoESpec) -> bool:
    """Are the weights a softmax over the chosen logits?"""
    if spec.scoring is Scoring.SOFTMAX:
        # Renormalised, the sum over all experts cancels, and 1e-20 of it is nothing beside the largest term,
        # 1, which is among the chosen if the choice is by logits.
        return spec.renormalize and not spec.correction_bias
    return spec.scoring is Scoring.SOFTMAX_AFTER_TOPK


def is_softmax_of_all(spec: MoESpec) -> bool:
    """Whether weights need the sum over all experts."""
    return spec.scoring is Scoring.SOFTMAX and not is_softmax_of_chosen(spec)


def list_bytes(num_tokens: int, spec: MoESpec, block_m: int) -> int:
    """Count the shared memory of the lists and of the scratch to make them, alignment included."""
    blocks, _, slots = list_sizes(num_tokens, spec, block_m)
    words = [4, *[blocks] * 4, *[slots] * 4, scratch_words(num_tokens, spec)]
    return sum(-(-4 * n // _ALIGNMENT) * _ALIGNMENT for n in words)


def supports_logits(spec: MoESpec, num_tokens: int) -> str | None:
    """Say why a kernel can't route these tokens by their logits; None if it can."""
    return supports_choice(spec) or supports_ids(spec, num_tokens)


def supports_choice(spec: MoESpec) -> str | None:
    """Say why a warp can't choose a token's experts by their logits; None if it can."""
    if spec.num_expert_groups > 1:
        return f"num_expert_groups={spec.num_expert_groups}: experts are chosen without groups only"
    return _too_many(num_experts=(spec.num_experts, MAX_EXPERTS), top_k=(spec.top_k, _MAX_TOP_K))


def supports_ids(spec: MoESpec, num_tokens: int) -> str | None:
    """Say why a kernel can't make lists of given ids; None if it can."""
    if spec.weight_on is WeightOn.INPUT:
        return "weight_on='input': ids may name an expert twice, with two weights, and its row has one"
    if num_tokens < 1:
        return "num_tokens=0: there is nothing to route"
    return _too_many(
        num_experts=(spec.num_experts, MAX_EXPERTS),
        top_k=(spec.top_k, _MAX_TOP_K),
        num_tokens=(num_tokens, _MAX_TOKENS),
    )


def _too_many(**limits: tuple[int, int]) -> str | None:
    """Name the first value that is more than it may be."""
    wrong = (f"{name}={value} is more than {most}" for name, (value, most) in limits.items() if value > most)
    return next(wrong, None)
