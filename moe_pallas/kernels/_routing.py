"""Routing as the first phase of a kernel: router logits, or given expert ids, to lists in shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_pallas.spec import MoESpec, WeightOn

NUM_THREADS = 384  # of the CTA, all of which take part
_NUM_WARPS = NUM_THREADS // 32
_MAX_TOKENS, _MAX_EXPERTS, _MAX_TOP_K = 256, 1536, 32
_ALIGNMENT = 1024  # bytes, of every Pallas allocation in shared memory


class Lists(NamedTuple):
    """What the phase leaves behind: references to shared memory, 1-D, int32 unless said otherwise.

    B = most blocks, S = T · top_k slots; slot t · top_k + j is the j-th choice of token t.

    Attributes:
      num_blocks: (4,). Word 0 is the number of blocks; the others are not used.
      block_expert: (B,). Expert of a block; experts ascend (with T = 1 they come in order of choice).
      block_row: (B,). First row of a block, a multiple of 8.
      block_first: (B,). Where the tokens of a block begin in ``token_of``.
      block_size: (B,). Tokens of a block, 1 … block_m.
      token_of: (S,). Tokens of the blocks, one block after another, ascending inside an expert.
      row_of_slot: (S,). Row of a slot, -1 if it is dropped.
      block_of_slot: (S,). Block of a slot; anything if it is dropped.
      weight_of_slot: (S,) float32. Routing weight, 0 if the slot is dropped.
      weight_of: (S,) float32. Routing weights in the order of ``token_of``; None unless they go on the INPUT.
    """

    num_blocks: Any
    block_expert: Any
    block_row: Any
    block_first: Any
    block_size: Any
    token_of: Any
    row_of_slot: Any
    block_of_slot: Any
    weight_of_slot: Any
    weight_of: Any | None


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


def list_scratch(num_tokens: int, spec: MoESpec, block_m: int) -> tuple[Lists, Any]:
    """Describe the shared memory that the phase needs, for ``scratch_types``.

    Returns:
      The lists, and the phase's own scratch: nothing reads that after the phase, so that it may lie over
      anything that is written later (by the copy engine: after a proxy fence).
    """
    blocks, _, slots = list_sizes(num_tokens, spec, block_m)
    by_block, by_slot = plgpu.SMEM((blocks,), jnp.int32), plgpu.SMEM((slots,), jnp.int32)
    weights = plgpu.SMEM((slots,), jnp.float32)
    lists = Lists(
        num_blocks=plgpu.SMEM((4,), jnp.int32),
        block_expert=by_block,
        block_row=by_block,
        block_first=by_block,
        block_size=by_block,
        token_of=by_slot,
        row_of_slot=by_slot,
        block_of_slot=by_slot,
        weight_of_slot=weights,
        weight_of=weights if spec.weight_on is WeightOn.INPUT else None,
    )
    return lists, plgpu.SMEM((_scratch_words(num_tokens, spec),), jnp.int32)


def smem_bytes(num_tokens: int, spec: MoESpec, block_m: int) -> int:
    """Count the shared memory that `list_scratch` asks for, alignment included."""
    blocks, _, slots = list_sizes(num_tokens, spec, block_m)
    by_slot = 5 if spec.weight_on is WeightOn.INPUT else 4
    words = [4, *[blocks] * 4, *[slots] * by_slot, _scratch_words(num_tokens, spec)]
    return sum(-(-4 * n // _ALIGNMENT) * _ALIGNMENT for n in words)


def _scratch_words(num_tokens: int, spec: MoESpec) -> int:
    """A bit for each expert and token, two words for each expert, and two for each warp."""
    if num_tokens == 1:
        return 1
    return (-(-num_tokens // 32) + 2) * spec.num_experts + 2 * _NUM_WARPS


def supports(spec: MoESpec, num_tokens: int) -> str | None:
    """Say why the phase can't route these tokens by their logits; None if it can."""
    if spec.num_expert_groups > 1:
        return f"num_expert_groups={spec.num_expert_groups}: experts are chosen without groups only"
    return supports_ids(spec, num_tokens)


def supports_ids(spec: MoESpec, num_tokens: int) -> str | None:
    """Say why the phase can't make lists of given ids; None if it can."""
    for name, value, most in (
        ("num_experts", spec.num_experts, _MAX_EXPERTS),
        ("top_k", spec.top_k, _MAX_TOP_K),
        ("num_tokens", num_tokens, _MAX_TOKENS),
    ):
        if value > most:
            return f"{name}={value} is more than {most}"
    if num_tokens < 1:
        return "num_tokens=0: there is nothing to route"
    return None


def route_logits(
    logits_ref: Any,
    correction_bias_ref: Any | None,
    real_ref: Any | None,
    lists: Lists,
    scratch: Any,
    *,
    spec: MoESpec,
    num_tokens: int,
    block_m: int,
) -> None:
    """Route by router logits and write the lists; called by all threads, which see them afterwards.

    Args:
      logits_ref: (T, E) float32 | bfloat16 | float16, in global memory.
      correction_bias_ref: (E,) float32 in global memory, exactly when ``spec.correction_bias``.
      real_ref: int32 in global memory: (1,), the number of real tokens, which come first, or (T,), not 0 for
        a real token; all are real if None. The others are routed nowhere, whatever their logits hold.
      lists: As `list_scratch` describes them.
      scratch: Likewise.
      spec: The layer.
      num_tokens: T.
      block_m: Most tokens of a block: 8, 16, 32 or 64.
    """
    raise NotImplementedError


def route_ids(
    ids_ref: Any,
    weights_ref: Any,
    lists: Lists,
    scratch: Any,
    *,
    spec: MoESpec,
    num_tokens: int,
    block_m: int,
) -> None:
    """Write the lists of a given routing; called by all threads, which see them afterwards.

    Args:
      ids_ref: (T, top_k) int32 in global memory. Outside [0, E) = dropped. An expert that a token names
        twice has it once, in a row that both slots share.
      weights_ref: (T, top_k) float32 in global memory.
      lists: As for `route_logits`.
      scratch: Likewise.
      spec: Likewise.
      num_tokens: Likewise.
      block_m: Likewise.
    """
    raise NotImplementedError
