"""Routing as the first phase of a kernel: router logits, or given expert ids, to lists in shared memory.

Every CTA does it for itself, so that no launch and no wait for others comes before the experts' work: the
lists are the same in all of them. An expert's tokens fill blocks of up to ``block_m``; each block begins at
a row that is a multiple of 8. The rules are those of `moe_pallas.routing.route`.

    phase    all 12 warps                                                                              then
    choose   warp w: logits of tokens w, w + 12, … → experts and weights (`_choice`), and for each     barrier
             expert a bit for each of its tokens
    count    thread i: experts i·n … → how many tokens, blocks and rows; sums over the warp's          barrier
    place    the same: where the blocks, rows and tokens of each expert begin                          barrier
    list     thread i: slots i, i + 384, … → row (tokens of the expert below this one), block; the     barrier
             first token of a block describes it

One token needs none of this: warp 0 chooses, and writes one block a choice.

Lists (`Lists` says what they hold; B blocks, S = T · top_k slots, `list_sizes`), 4 bytes a word:

    num_blocks                                              4 words
    block_expert, block_row, block_first, block_size        B each
    token_of, row_of_slot, block_of_slot, weight_of_slot    S each
    scratch                                                 E · (ceil(T / 32) + 2) + 24 (one token: none),
                                                            and `row_words` · T

each rounded up to 1024 bytes (`moe_pallas.configs.lists.list_bytes`).

Limits: 3 warpgroups; T <= 256, E <= 1536, top_k <= 32, no expert groups, weights on the output
(`moe_pallas.configs.lists`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_pallas.configs.lists import NUM_WARPS, list_sizes, scratch_words, supports_ids, supports_logits
from moe_pallas.kernels._choice import NONE, Choices, Router
from moe_pallas.kernels._simt import (
    Bool,
    Float,
    Int,
    Memory,
    count_bits,
    cta_barrier,
    for_range,
    if_,
    in_every_thread,
    minimum,
    select,
    thread_index,
    warp_ballot,
    warp_equals,
    warp_scan,
    warp_sum,
)
from moe_pallas.spec import MoESpec

NUM_THREADS = 32 * NUM_WARPS


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
    )
    return lists, plgpu.SMEM((scratch_words(num_tokens, spec),), jnp.int32)


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
      correction_bias_ref: (E,) float in global memory, exactly when ``spec.correction_bias``.
      real_ref: int32 in global memory: (1,), the number of real tokens, which come first, or (T,), not 0 for
        a real token; all are real if None. The others are routed nowhere, whatever their logits hold.
      lists: As `list_scratch` describes them.
      scratch: Likewise.
      spec: The layer.
      num_tokens: T.
      block_m: Most tokens of a block: 8, 16, 32 or 64.
    """
    assert supports_logits(spec, num_tokens) is None, supports_logits(spec, num_tokens)
    assert (correction_bias_ref is not None) == spec.correction_bias

    def phase(given: dict[str, Memory]) -> None:
        work = _Work(given, spec, num_tokens, block_m)
        router = Router(
            spec,
            num_tokens,
            NUM_WARPS,
            given["logits"],
            given.get("bias"),
            given.get("real"),
            work.experts,
            work.rows,
        )
        if num_tokens == 1:
            with if_(work.warp.equals(0)):
                router.choose(router.first_logits())
                router.weigh(work.list_only_choices)
            cta_barrier()
        else:
            logits = router.first_logits()
            work.clear_masks()
            cta_barrier()
            router.choose(logits)
            router.weigh(work.note_choices)
            cta_barrier()
            work.list_tokens()

    inputs = {"logits": logits_ref, "bias": correction_bias_ref, "real": real_ref}
    in_every_thread(phase, **inputs, **lists._asdict(), scratch=scratch)


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
    assert supports_ids(spec, num_tokens) is None, supports_ids(spec, num_tokens)

    def phase(given: dict[str, Memory]) -> None:
        work = _Work(given, spec, num_tokens, block_m)
        ids, weights = given["ids"], given["weights"]
        if num_tokens == 1:
            with if_(work.warp.equals(0)):
                slot = minimum(work.lane, spec.top_k - 1)
                expert, weight = ids.load(slot), weights.load(slot)
                work.list_one_token(expert, weight, expert < spec.num_experts, distinct=False)
            cta_barrier()
        else:
            work.clear_masks()
            cta_barrier()
            work.note_given(ids, weights)
            cta_barrier()
            work.list_tokens()

    in_every_thread(phase, ids=ids_ref, weights=weights_ref, **lists._asdict(), scratch=scratch)


class _Work:
    """The lists, written by all threads of the CTA."""

    def __init__(self, given: dict[str, Memory], spec: MoESpec, num_tokens: int, block_m: int):
        self.lists = Lists(*(given.get(name) for name in Lists._fields))
        self.spec, self.num_tokens, self.block_m = spec, num_tokens, block_m
        self.slots = num_tokens * spec.top_k
        self.thread = thread_index()
        self.lane, self.warp = self.thread & 31, self.thread >> 5
        # Until the blocks are known, a slot's expert stands in the place of its block.
        self.experts = self.lists.block_of_slot
        # An expert's tokens; where its blocks and rows, and its tokens, begin; sums of warps.
        self.scratch = given["scratch"]
        self.mask_words = -(-num_tokens // 32)
        self.starts = self.mask_words * spec.num_experts
        self.firsts = self.starts + spec.num_experts
        self.sums = self.firsts + spec.num_experts
        self.rows = self.scratch.after(0 if num_tokens == 1 else self.sums + 2 * NUM_WARPS)

    def clear_masks(self) -> None:
        """Forget all tokens."""
        for_range(self.thread, self.starts, NUM_THREADS, [], self._clear)

    def _clear(self, index: Int) -> list[Int]:
        self.scratch.store(index, 0)
        return []

    def note_choices(self, choices: Choices) -> None:
        """Note the choices that were made of logits, one a lane."""
        with if_(choices.in_use):
            self._note(choices.slot, choices.token, choices.expert, choices.weight, choices.is_real)

    def note_given(self, ids: Memory, weights: Memory) -> None:
        """Note the choices that were made elsewhere."""

        def note(slot: Int) -> list[Int]:
            expert = ids.load(slot)
            token = slot // self.spec.top_k
            self._note(slot, token, expert, weights.load(slot), expert < self.spec.num_experts)
            return []

        for_range(self.thread, self.slots, NUM_THREADS, [], note)

    def _note(self, slot: Int, token: Int, expert: Int, weight: Float, valid: Bool) -> None:
        self.experts.store(slot, select(valid, expert, NONE))
        self.lists.weight_of_slot.store(slot, select(valid, weight, 0.0))
        with if_(valid):
            word = (token >> 5) * self.spec.num_experts + expert
            self.scratch.set_bits(word, Int.of(1) << (token & 31))

    def list_only_choices(self, choices: Choices) -> None:
        """Write the lists of the only token, of choices that were made of its logits."""
        self.list_one_token(choices.expert, choices.weight, choices.is_real, distinct=True)

    def list_one_token(self, expert: Int, weight: Float, valid: Bool, distinct: bool) -> None:
        """Write the lists of the only token, whose choices stand one a lane: a block each, in their order."""
        lists, lane = self.lists, self.lane
        valid = valid & (lane < self.spec.top_k)
        # The first of several that name the same expert has its block.
        same = Int.of(1) << lane if distinct else warp_equals(select(valid, expert, NONE))
        below_first = (same & (Int.of(0) - same)) - 1
        leads = valid & below_first.equals((Int.of(1) << lane) - 1)
        leaders = warp_ballot(leads)
        block = count_bits(leaders & below_first)
        with if_(lane < self.spec.top_k):
            lists.row_of_slot.store(lane, select(valid, block * 8, NONE))
            lists.block_of_slot.store(lane, block)
            lists.weight_of_slot.store(lane, select(valid, weight, 0.0))
        with if_(leads):
            self._list_block(block, expert, block * 8, block, Int.of(1))
            lists.token_of.store(block, 0)
        with if_(lane.equals(0)):
            lists.num_blocks.store(0, count_bits(leaders))

    def _list_block(self, block: Int, expert: Int, row: Int, first: Int, size: Int) -> None:
        lists = self.lists
        lists.block_expert.store(block, expert)
        lists.block_row.store(block, row)
        lists.block_first.store(block, first)
        lists.block_size.store(block, size)

    def list_tokens(self) -> None:
        """Write the lists from what was noted."""
        self._place_experts()
        cta_barrier()
        for_range(self.thread, self.slots, NUM_THREADS, [], self._place_slot)
        cta_barrier()

    def _place_experts(self) -> None:
        """Find where each expert's blocks, rows and tokens begin: sums over the experts below it."""
        num_experts, scratch = self.spec.num_experts, self.scratch
        each = -(-num_experts // NUM_THREADS)
        counts, places = [], []
        for i in range(each):
            expert = self.thread * each + i
            readable = minimum(expert, num_experts - 1)
            words = [scratch.load(readable + w * num_experts) for w in range(self.mask_words)]
            count = select(expert < num_experts, add_up(count_bits(word) for word in words), 0)
            blocks = (count + (self.block_m - 1)) >> log2(self.block_m)
            counts.append(count)
            places.append(blocks | ((count + 7) >> 3 << 16))
        place, first = sums_below([add_up(places), add_up(counts)], scratch.after(self.sums))
        for i in range(each):
            expert = self.thread * each + i
            with if_(expert < num_experts):
                scratch.store(expert + self.starts, place)
                scratch.store(expert + self.firsts, first)
            place, first = place + places[i], first + counts[i]
        with if_(self.thread.equals(NUM_THREADS - 1)):
            self.lists.num_blocks.store(0, place & 0xFFFF)

    def _place_slot(self, slot: Int) -> list[Int]:
        """Give a slot its row; the first token of a block describes the block."""
        lists, scratch, num_experts = self.lists, self.scratch, self.spec.num_experts
        expert = self.experts.load(slot)
        with if_(expert >= num_experts):
            lists.row_of_slot.store(slot, NONE)
        with if_(expert < num_experts):
            token = slot // self.spec.top_k
            below, count = Int.of(0), Int.of(0)
            for w in range(self.mask_words):
                word = scratch.load(expert + w * num_experts)
                lower = (Int.of(1) << (token & 31)) - 1
                if self.mask_words > 1:
                    lower = select((token >> 5).equals(w), lower, select((token >> 5) > w, NONE, Int.of(0)))
                below, count = below + count_bits(word & lower), count + count_bits(word)
            place, first = scratch.load(expert + self.starts), scratch.load(expert + self.firsts) + below
            block = (place & 0xFFFF) + (below >> log2(self.block_m))
            row = (place >> 16 << 3) + below
            lists.row_of_slot.store(slot, row)
            lists.block_of_slot.store(slot, block)
            lists.token_of.store(first, token)
            with if_((below & (self.block_m - 1)).equals(0)):
                self._list_block(block, expert, row, first, minimum(count - below, self.block_m))
        return []


def sums_below(values: list[Int], sums: Memory) -> list[Int]:
    """Sum each value over the threads below; called by all, with ``NUM_WARPS`` words of scratch a value."""
    lane, warp = thread_index() & 31, thread_index() >> 5
    upto = [warp_scan(x, lane) for x in values]
    with if_(lane.equals(31)):
        for i, x in enumerate(upto):
            sums.store(warp + i * NUM_WARPS, x)
    cta_barrier()
    found = []
    for i, (x, own) in enumerate(zip(upto, values, strict=True)):
        of_warp = sums.load(minimum(lane, NUM_WARPS - 1) + i * NUM_WARPS)
        found.append(warp_sum(select(lane < warp, of_warp, 0)) + x - own)
    return found


def add_up(values: Iterable[Int]) -> Int:
    """Add at least one value."""
    return functools.reduce(lambda x, y: x + y, values)


def log2(power: int) -> int:
    """Return n of 2^n."""
    assert power & (power - 1) == 0
    return power.bit_length() - 1
