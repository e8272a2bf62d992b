"""The plan of many tokens: from router logits, or given expert ids, to blocks of rows, in two launches.

What comes out is what `moe_pallas.plan.make_blocks` makes of what `moe_pallas.routing.route` says: rows in
the order of experts, those of an expert in the order of slots. Every CTA has neighbouring tokens, the same
in both launches, and 12 warps:

    launch     all 12 warps                                                                       then
    count      warp w: logits of some tokens → experts and weights (`_choice`); or thread i,
               with given ids: slots i, i + 384, …; and a count for each expert                   barrier
               thread i: counts i, i + 384, … → global memory
    place      thread i: counts of all CTAs → each expert's slots, and those in the CTAs before
               warp w: a run of the CTA's slots → how many of each expert                         barrier
               thread i: experts i·n … → where the blocks, rows and tokens of each begin: sums
               over the experts below it; its slots before the first of each warp                 barrier
               warp w: the run again, 32 slots at a time, in order → row of a slot, token of a
               row; the first slot of a block describes it

Counts are 16 bits wide, two to a word: (num_ctas, ceil(E / 2)) words. They are added by atomics, which are in
no order, but integers; that is all that one thread does to the words of another.

Shared memory, in words of 4 bytes, n = tokens of a CTA:

    count      ceil(E / 2), and to choose (top_k + `row_words`) · n
    place      (4 + 12) · E + 4 · ceil(E / 2) + 36

Limits: 3 warpgroups; E <= 1536; top_k · n < 65536; to choose, also top_k <= 32 and no expert groups
(`supports_ids`, `supports_logits`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_pallas.configs.lists import MAX_EXPERTS, NUM_WARPS, row_words, supports_choice
from moe_pallas.configs.schema import SMEM_BYTES
from moe_pallas.kernels._choice import NONE, Choices, Router
from moe_pallas.kernels._routing import NUM_THREADS, add_up, log2, sums_below
from moe_pallas.kernels._simt import (
    Int,
    Memory,
    count_bits,
    cta_barrier,
    cta_index,
    for_range,
    if_,
    in_every_thread,
    minimum,
    select,
    thread_index,
    warp_barrier,
    warp_equals,
)
from moe_pallas.plan import BlockPlan, make_blocks
from moe_pallas.routing import Routing
from moe_pallas.spec import MoESpec, WeightOn

_MAX_COUNT = 0xFFFF
_MOST_LOGITS = (1 << 31) - 1  # indices are signed words
_MOST_HELD = 4  # ids that a lane keeps in registers
_MOST_LOADED = 24  # counts that a thread waits for at the same time


class _Split(NamedTuple):
    """Which tokens are whose: CTA c has ``tokens`` of them from ``c · tokens`` on, the last CTA the rest."""

    num_tokens: int
    top_k: int
    num_ctas: int
    tokens: int

    @property
    def slots(self) -> int:
        """Most slots of a CTA."""
        return self.tokens * self.top_k

    def share(self) -> tuple[Int, Int]:
        """First token of the running CTA, and how many it has, at least one."""
        first = cta_index() * self.tokens
        return first, minimum(Int.of(self.num_tokens) - first, self.tokens)


def _split(spec: MoESpec, num_tokens: int, num_ctas: int) -> _Split:
    """Share tokens out evenly, but not so that warps have none while there are CTAs left."""
    tokens = -(-num_tokens // min(num_ctas, -(-num_tokens // NUM_WARPS)))
    return _Split(num_tokens, spec.top_k, -(-num_tokens // tokens), tokens)


def _count_words(spec: MoESpec) -> int:
    return -(-spec.num_experts // 2)


def _choice_words(spec: MoESpec, split: _Split) -> int:
    return _count_words(spec) + split.slots + max(1, row_words(spec) * split.tokens)


def supports_ids(spec: MoESpec, num_tokens: int, num_ctas: int) -> str | None:
    """Say why these launches can't plan given ids; None if they can."""
    if num_tokens < 1:
        return "num_tokens=0: there is nothing to plan"
    if spec.num_experts > MAX_EXPERTS:
        return f"num_experts={spec.num_experts} is more than {MAX_EXPERTS}"
    if (slots := _split(spec, num_tokens, num_ctas).slots) > _MAX_COUNT:
        return f"{slots} slots of a CTA are more than {_MAX_COUNT}"
    return None


def supports_logits(spec: MoESpec, num_tokens: int, num_ctas: int) -> str | None:
    """Say why these launches can't choose experts by logits; None if they can."""
    if reason := supports_choice(spec) or supports_ids(spec, num_tokens, num_ctas):
        return reason
    if num_tokens * spec.num_experts > _MOST_LOGITS:
        return f"{num_tokens * spec.num_experts} logits are more than {_MOST_LOGITS}"
    if (need := 4 * _choice_words(spec, _split(spec, num_tokens, num_ctas))) > SMEM_BYTES:
        return f"the choices of a CTA need {need} bytes of shared memory, of which it has {SMEM_BYTES}"
    return None


def _each(first: Int, stop: Int | int, do: Callable[[Int], None]) -> None:
    """Do something for each index in a range, a thread an index."""

    def one(index: Int) -> list[Int]:
        do(index)
        return []

    for_range(first + thread_index(), stop, NUM_THREADS, [], one)


def _count(given: dict[str, Memory], *, spec: MoESpec, split: _Split) -> None:
    """Choose the experts of the CTA's tokens, or take those given, and count the slots of each expert."""
    counts, words, top_k = given["scratch"], _count_words(spec), spec.top_k
    first, count = split.share()
    zero, start = Int.of(0), first * top_k

    def note(expert: Int) -> None:
        is_upper = expert >= words
        counts.add(select(is_upper, expert - words, expert), select(is_upper, Int.of(1 << 16), 1))

    def note_choices(choices: Choices) -> None:
        slot, is_real = choices.slot + start, choices.is_real
        with if_(choices.in_use):
            given["ids"].store(slot, select(is_real, choices.expert, NONE))
            given["weights"].store(slot, select(is_real, choices.weight, 0.0))
        with if_(choices.in_use & is_real):
            note(choices.expert)

    def note_given(slot: Int) -> None:
        expert = given["ids"].load(slot)
        with if_(expert < spec.num_experts):
            note(expert)

    if "logits" in given:
        bias, real = given.get("bias"), given.get("real")
        experts, rows = counts.after(words), counts.after(words + split.slots)
        share = first, count
        router = Router(spec, split.tokens, NUM_WARPS, given["logits"], bias, real, experts, rows, share)
        logits = router.first_logits()
    _each(zero, words, lambda i: counts.store(i, 0))
    cta_barrier()
    if "logits" in given:
        router.choose(logits)
        router.weigh(note_choices)
    else:
        _each(start, start + count * top_k, note_given)
    cta_barrier()
    _each(zero, words, lambda i: given["counts"].store(cta_index() * words + i, counts.load(i)))


class _Placing:
    """What the threads of a CTA share that place its slots."""

    def __init__(self, given: dict[str, Memory], spec: MoESpec, split: _Split, block_m: int):
        self.given, self.spec, self.split, self.block_m = given, spec, split, block_m
        self.thread, self.cta = thread_index(), cta_index()
        self.lane, self.warp = self.thread & 31, self.thread >> 5
        self.words = _count_words(spec)
        # Four words for each expert: where its blocks, rows and tokens begin, and its slots.
        self.starts = given["scratch"]
        # Of each expert, the slots that a warp has, then those before the warp's next one.
        self.ranks = self.starts.after(4 * spec.num_experts)
        # Of each expert, the slots in all CTAs, and those in the CTAs before this one.
        self.totals = self.ranks.after(NUM_WARPS * spec.num_experts)
        self.befores = self.totals.after(2 * self.words)
        self.sums = self.befores.after(2 * self.words)
        # The warp's run of slots.
        first, count = split.share()
        self.run = 32 * -(-split.slots // NUM_THREADS)
        self.stop = (first + count) * spec.top_k
        self.first = first * spec.top_k + self.warp * self.run + self.lane
        few = self.run <= 32 * _MOST_HELD
        self.held = [self._expert(self.first + i) for i in range(0, self.run, 32)] if few else []

    @staticmethod
    def scratch_words(spec: MoESpec) -> int:
        return (4 + NUM_WARPS) * spec.num_experts + 4 * _count_words(spec) + 3 * NUM_WARPS

    def _expert(self, slot: Int) -> Int:
        """Read an expert; there is none past the end, or outside [0, E)."""
        expert = self.given["ids"].load(minimum(slot, self.stop - 1))
        return select((slot < self.stop) & (expert < self.spec.num_experts), expert, NONE)

    def _each_step(self, do: Callable[[Int, Int], None]) -> None:
        """Do something for each slot of the run and its expert, with all lanes, in order."""
        for i, expert in enumerate(self.held):
            do(self.first + 32 * i, expert)

        def step(i: Int) -> list[Int]:
            do(self.first + i, self._expert(self.first + i))
            return []

        if not self.held:
            for_range(0, self.run, 32, [], step)

    def clear(self) -> None:
        _each(Int.of(0), NUM_WARPS * self.spec.num_experts + 4 * self.words, lambda i: self.ranks.store(i, 0))

    def sum_counts(self) -> None:
        """Add up the counts of all CTAs, and of those before this one."""
        width = min(self.words, NUM_THREADS)
        lines, num_ctas = NUM_THREADS // width, self.split.num_ctas
        line = self.thread // width
        # So many are loaded at once, and added two in a word, in which they have room.
        at_once = min(_MOST_LOADED, -(-num_ctas // lines), _MAX_COUNT // self.split.slots)

        def sum_word(word: Int) -> list[Int]:
            def sum_some(first: Int, *sums: Int) -> list[Int]:
                ctas = [first + i * lines for i in range(at_once)]
                starts = [minimum(cta, num_ctas - 1) * self.words for cta in ctas]
                found = [self.given["counts"].load(start + word) for start in starts]
                parts = [
                    add_up(select(c < end, x, 0) for c, x in zip(ctas, found, strict=True))
                    for end in (num_ctas, self.cta)
                ]
                halves = [half for part in parts for half in (part & 0xFFFF, part >> 16)]
                return [x + half for x, half in zip(sums, halves, strict=True)]

            sums = for_range(line, num_ctas, at_once * lines, [Int.of(0)] * 4, sum_some)
            # `totals`, then `befores`.
            for i, x in enumerate(sums):
                self.totals.add(word + i * self.words, x)
            return []

        with if_(line < lines):
            for_range(self.thread - line * width, self.words, width, [], sum_word)

    def count_run(self) -> None:
        """Count the slots of each expert in the warp's run."""

        def note(slot: Int, expert: Int) -> None:
            with if_(expert < self.spec.num_experts):
                self.ranks.add(self.warp * self.spec.num_experts + expert, 1)

        self._each_step(note)

    def place_experts(self) -> None:
        """Find where each expert's blocks, rows and tokens begin, and the first slot of each warp."""
        num_experts, block_m = self.spec.num_experts, self.block_m
        each = -(-num_experts // NUM_THREADS)
        experts = [self.thread * each + i for i in range(each)]
        counts = [
            select(expert < num_experts, self.totals.load(minimum(expert, num_experts - 1)), 0)
            for expert in experts
        ]
        blocks = [(count + (block_m - 1)) >> log2(block_m) for count in counts]
        rows = [(count + 7) & ~7 for count in counts]
        block, row, first = sums_below([add_up(x) for x in (blocks, rows, counts)], self.sums)
        for i, expert in enumerate(experts):
            with if_(expert < num_experts):
                for j, x in enumerate((block, row, first, counts[i])):
                    self.starts.store(expert * 4 + j, x)
                rank = self.befores.load(expert)
                places = [expert + warp * num_experts for warp in range(NUM_WARPS)]
                for place, own in [(place, self.ranks.load(place)) for place in places]:
                    self.ranks.store(place, rank)
                    rank = rank + own
            block, row, first = block + blocks[i], row + rows[i], first + counts[i]
        with if_(self.thread.equals(NUM_THREADS - 1) & self.cta.equals(0)):
            self.given["num_blocks"].store(0, block)

    def place_slots(self) -> None:
        """Give each slot of the warp's run its row; the first slot of a block describes it."""
        self._each_step(self._place)

    def _place(self, slot: Int, expert: Int) -> None:
        given, num_experts, block_m = self.given, self.spec.num_experts, self.block_m
        exists, known = expert < num_experts, minimum(expert, num_experts - 1)
        same = warp_equals(expert)
        below = count_bits(same & ((Int.of(1) << self.lane) - 1))
        place = self.warp * num_experts + known
        rank = self.ranks.load(place)
        warp_barrier()  # all lanes have read what one of them changes
        with if_(exists & below.equals(0)):
            self.ranks.store(place, rank + count_bits(same))
        warp_barrier()  # the next step reads it
        rank = rank + below
        block, row, first, count = self.starts.load_vector(known * 4, 4)
        row, first = row + rank, first + rank
        with if_(slot < self.stop):
            given["row_of_slot"].store(slot, select(exists, row, NONE))
        with if_(exists):
            given["token_of"].store(first, slot // self.spec.top_k)
            if "weight_of_row" in given:
                given["weight_of_row"].store(row, given["weights"].load(slot))
        with if_(exists & (rank & (block_m - 1)).equals(0)):
            block = block + (rank >> log2(block_m))
            given["block_expert"].store(block, expert)
            given["block_row"].store(block, row)
            given["block_first"].store(block, first)
            given["block_size"].store(block, minimum(count - rank, block_m))


def _place(given: dict[str, Memory], *, spec: MoESpec, split: _Split, block_m: int) -> None:
    placing = _Placing(given, spec, split, block_m)
    placing.clear()
    cta_barrier()
    placing.sum_counts()
    placing.count_run()
    cta_barrier()
    placing.place_experts()
    cta_barrier()
    placing.place_slots()


def _launch(
    phase: Callable[[dict[str, Memory]], None],
    name: str,
    num_ctas: int,
    scratch_words: int,
    outputs: dict[str, Any],
    inputs: dict[str, Any],
) -> dict[str, Any]:
    """Run ``phase`` in every thread of every CTA, with inputs, outputs and ``scratch`` by their names."""
    inputs = {key: x for key, x in inputs.items() if x is not None}
    names = (*inputs, *outputs, "scratch")

    def body(*refs: Any) -> None:
        in_every_thread(phase, **dict(zip(names, refs, strict=True)))

    made = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=NUM_WARPS // 4,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((scratch_words,), jnp.int32)],
        kernel_name=name,
    )(*inputs.values())
    return dict(zip(outputs, made, strict=True))


def plan_logits(
    logits: jax.Array,
    correction_bias: jax.Array | None,
    real: jax.Array | None,
    spec: MoESpec,
    *,
    block_m: int,
    num_rows: int,
    num_ctas: int,
) -> BlockPlan:
    """Route tokens by their logits and plan their rows.

    Args:
      logits: (T, E) float32 | bfloat16 | float16.
      correction_bias: (E,) float, exactly when ``spec.correction_bias``.
      real: int32, (1,): the number of real tokens, which come first, or (T,): not 0 for a real token. The
        others are routed nowhere. None: all are real.
      spec: The layer.
      block_m: Most rows of a block, a power of two from 8 on.
      num_rows: Entries of ``weight_of_row``.
      num_ctas: CTAs, as many as there are SMs.

    Returns:
      `BlockPlan`, with ``weight_of_row`` only if weights are on the input. What stands for no block, token or
      row holds anything.
    """
    num_tokens = len(logits)
    assert (reason := supports_logits(spec, num_tokens, num_ctas)) is None, reason
    split = _split(spec, num_tokens, num_ctas)
    slots = (num_tokens, spec.top_k)
    made = _launch(
        functools.partial(_count, spec=spec, split=split),
        "plan_count",
        split.num_ctas,
        _choice_words(spec, split),
        {
            "ids": jax.ShapeDtypeStruct(slots, jnp.int32),
            "weights": jax.ShapeDtypeStruct(slots, jnp.float32),
            "counts": _counts(spec, split),
        },
        {"logits": logits, "bias": correction_bias, "real": real},
    )
    return _plan(made["ids"], made["weights"], made["counts"], spec, split, block_m, num_rows)


def plan_ids(
    routing: Routing,
    spec: MoESpec,
    *,
    block_m: int,
    num_rows: int,
    num_ctas: int,
    by_row: bool = False,
    interpret: Any = None,
) -> BlockPlan:
    """Plan the rows of a given routing, as `plan_logits` does; by XLA if need be, or if interpreted.

    Args:
      routing: ids (T, top_k) int32 and weights (T, top_k) float32.
      spec: As in `plan_logits`, as are all others.
      block_m: Likewise.
      num_rows: Likewise.
      num_ctas: Likewise.
      by_row: Whether there is a ``weight_of_row`` in any case.
      interpret: None, or what says that kernels are interpreted on a CPU.

    Returns:
      As `plan_logits`.
    """
    ids, weights = routing
    if interpret is not None or supports_ids(spec, len(ids), num_ctas) is not None:
        return make_blocks(routing, spec.num_experts, block_m)
    split = _split(spec, len(ids), num_ctas)
    made = _launch(
        functools.partial(_count, spec=spec, split=split),
        "plan_count",
        split.num_ctas,
        _count_words(spec),
        {"counts": _counts(spec, split)},
        {"ids": ids},
    )
    return _plan(ids, weights, made["counts"], spec, split, block_m, num_rows, by_row)


def _counts(spec: MoESpec, split: _Split) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((split.num_ctas, _count_words(spec)), jnp.int32)


def _plan(
    ids: jax.Array,
    weights: jax.Array,
    counts: jax.Array,
    spec: MoESpec,
    split: _Split,
    block_m: int,
    num_rows: int,
    by_row: bool = False,
) -> BlockPlan:
    by_row = by_row or spec.weight_on is WeightOn.INPUT
    slots = split.num_tokens * spec.top_k
    by_block = jax.ShapeDtypeStruct((min(spec.num_experts, slots) + slots // block_m,), jnp.int32)
    by_slot = jax.ShapeDtypeStruct((slots,), jnp.int32)
    outputs = {
        "num_blocks": jax.ShapeDtypeStruct((1,), jnp.int32),
        "block_expert": by_block,
        "block_row": by_block,
        "block_first": by_block,
        "block_size": by_block,
        "token_of": by_slot,
        "row_of_slot": by_slot,
    }
    if by_row:
        outputs["weight_of_row"] = jax.ShapeDtypeStruct((num_rows,), jnp.float32)
    made = _launch(
        functools.partial(_place, spec=spec, split=split, block_m=block_m),
        "plan_place",
        split.num_ctas,
        _Placing.scratch_words(spec),
        outputs,
        {"ids": ids, "counts": counts, "weights": weights if by_row else None},
    )
    return BlockPlan(**({"weight_of_row": None} | made), weight_of_slot=weights.reshape(-1))
