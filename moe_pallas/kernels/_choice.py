"""The choice of experts by router logits, one warp a token: the heart of `_routing` and of `_plan`.

A warp holds a token's logits in registers, as words of the same order (`_key`). Lane l has them in stripes:
of the ``32 · width`` neighbouring experts of a stripe the ``width`` from ``width · l`` on, one vector in
global memory, sorted in descending order. Then ``top_k`` rounds of choice follow, in which only the heads of
the stripes take part: the largest key of all lanes wins, of several the lowest expert (with one stripe, that
in the lowest lane). The lane that has it notes the expert and takes it out of its stripe. Weights come last,
a slot a lane, for as many of the warp's tokens at a time as have room.

If there are more tokens than warps, a warp has two in hand: while it waits for one, it does the other. What
counts then is how many instructions go through the integer pipe, which takes two cycles for each: so a step
of the sort is four.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from moe_pallas.configs.lists import is_softmax_of_all, is_softmax_of_chosen, row_words
from moe_pallas.kernels._simt import (
    Bool,
    Float,
    Int,
    Memory,
    exp,
    for_range,
    if_,
    maximum,
    minimum,
    ptx,
    select,
    thread_index,
    warp_ballot,
    warp_barrier,
    warp_float_max,
    warp_float_sum,
    warp_max,
    warp_min,
    warp_take,
)
from moe_pallas.spec import MoESpec, Scoring

NONE = 0xFFFFFFFF  # -1: no expert, no row
_FLOAT_MAX = float(jnp.finfo(jnp.float32).max)
_EPSILON = 1e-20  # as in `moe_pallas.routing`


class Choices(NamedTuple):
    """Choices of one or more tokens, one a lane.

    Attributes:
      token: The lane's token.
      slot: Which of all slots, ``token · top_k + j``.
      in_use: Whether there is such a token and such a slot.
      expert: The expert.
      weight: Its routing weight.
      is_real: Whether it counts: not so for a token that is no real one.
    """

    token: Int
    slot: Int
    in_use: Bool
    expert: Int
    weight: Float
    is_real: Bool


class Router:
    """The choice of experts for the tokens of a launch, in the threads of a CTA.

    Args:
      spec: The layer.
      num_tokens: T.
      num_warps: Warps of the CTA, which share out the tokens.
      logits: (T, E).
      bias: (E,), or None: `MoESpec.correction_bias`.
      real: (1,) number of real tokens, or (T,) flags, or None.
      experts: (S,) shared words, where the chosen experts are noted.
      rows: (row_words · T,) shared words.
      share: First token and number of tokens of the CTA, if it has only some: at least one and at most
        ``num_tokens``, which are then numbered from the first on.
    """

    def __init__(
        self,
        spec: MoESpec,
        num_tokens: int,
        num_warps: int,
        logits: Memory,
        bias: Memory | None,
        real: Memory | None,
        experts: Memory,
        rows: Memory,
        share: tuple[Int, Int] | None = None,
    ):
        self._spec, self._num_tokens, self._num_warps = spec, num_tokens, num_warps
        self._first: Int | int = 0 if share is None else share[0]
        self._count: Int | int = num_tokens if share is None else share[1]
        self._logits, self._bias, self._real = logits, bias, real
        self._experts, self._rows = experts, rows
        self._lane, self._warp = thread_index() & 31, thread_index() >> 5
        self._width = next(w for w in (1, 2, 4) if spec.num_experts <= 32 * w or w == 4)
        self._per_lane = self._width * -(-spec.num_experts // (32 * self._width))
        self._lower_lanes = (Int.of(1) << self._lane) - 1
        # Past 512 experts two tokens don't fit in the registers.
        self._together = 2 if num_tokens > num_warps and spec.num_experts <= 512 else 1
        self._num_groups = -(-num_tokens // self._together)  # group g: tokens g · together …
        self._groups_are_full = share is None and num_tokens % self._together == 0
        self._turns = -(-self._num_groups // num_warps)  # groups of warp w: w, w + num_warps, …

    def first_logits(self) -> list[Float]:
        """Start loading the logits of the warp's first tokens."""
        return self._load(self._warp)

    def choose(self, logits: list[Float]) -> None:
        """Choose the experts of the warp's tokens, given their `first_logits`."""
        if self._turns == 1:
            with if_(self._warp < self._num_groups):
                self._choose_group(self._warp, logits)
        else:

            def turn(group: Int, *logits: Float) -> list[Float]:
                # The next logits are on their way while these are worked on.
                following = self._load(group + self._num_warps)
                self._choose_group(group, list(logits))
                return following

            for_range(self._warp, self._num_groups, self._num_warps, logits, turn)
        warp_barrier()  # a lane reads what others noted

    def weigh(self, note: Callable[[Choices], None]) -> None:
        """Make the weights of what the warp chose, if anything; ``note`` is called with all its lanes."""
        lanes_each = 1 << (self._spec.top_k - 1).bit_length()
        at_once = 32 // lanes_each

        def some(first: Int | int) -> list[Int]:
            index = self._lane // lanes_each + first
            group = index // self._together * self._num_warps + self._warp
            token = group * self._together + (index & (self._together - 1))
            note(self._weighed(token, self._lane & (lanes_each - 1), lanes_each))
            return []

        with if_(self._warp * self._together < self._count):
            if self._turns * self._together <= at_once:
                some(0)
            else:
                for_range(0, self._turns * self._together, at_once, [], some)

    def _load(self, group: Int) -> list[Float]:
        """Load the lane's logits of the group's tokens; past the last token, that one's."""
        found = []
        for i in range(self._together):
            token = minimum(group * self._together + i, self._count - 1) + self._first
            found += self._load_row(self._logits, token * self._spec.num_experts)
        return found

    def _load_row(self, memory: Memory, start: Int | int) -> list[Float]:
        """Load the lane's part of E neighbouring numbers; past the last one, some of them again."""
        num_experts, width = self._spec.num_experts, self._width
        found: list[Float] = []
        for first in range(0, self._per_lane, width):
            place = self._lane * width + 32 * first
            if num_experts % width == 0:
                found += memory.load_vector(minimum(place, num_experts - width) + start, width)
            else:
                found += [memory.load(minimum(place + i, num_experts - 1) + start) for i in range(width)]
        return found

    def _choose_group(self, group: Int, logits: list[Float]) -> None:
        top_k, count = self._spec.top_k, len(logits) // self._together
        rows, exist, starts = [], [], []
        for i in range(self._together):
            token = group * self._together + i
            exist.append(Bool.of(True) if self._groups_are_full else token < self._count)
            starts.append(token * top_k)
            rows.append(self._row(token, exist[i], logits[i * count : (i + 1) * count]))
        size = len(rows[0])

        def play(index: Int, *stripes: Int) -> list[Int]:
            parts = [stripes[i * size : (i + 1) * size] for i in range(self._together)]
            tops = [warp_max(_largest(list(part[:: self._width + 1]))) for part in parts]
            rest: list[Int] = []
            for part, top, start, exists in zip(parts, tops, starts, exist, strict=True):
                has_won, expert, left = self._pop(part, top)
                rest += left
                with if_(has_won & exists):
                    self._experts.store(index + start, expert)
            return rest

        for_range(0, top_k, 1, [word for row in rows for word in row], play)

    def _is_real(self, token: Int) -> Bool:
        if self._real is None:
            return Bool.of(True)
        token = token + self._first
        if self._real.size > 1:
            return self._real.load(token) > 0
        count = self._real.load(0)
        return token < (count & (count.sign_bits() ^ -1))  # below 0: none

    def _row(self, token: Int, exists: Bool, logits: list[Float]) -> list[Int]:
        """Make a token's logits ready: of each stripe the sorted keys, and a word with their places."""
        logits = [_clean(x) for x in logits]
        keys = [self._if_expert(i, _key(x), 0) for i, x in enumerate(logits)]
        if row_words(self._spec):
            best = _logit(warp_max(_largest(keys)))
            total = Float.of(1.0)
            if is_softmax_of_all(self._spec):
                terms = [self._if_expert(i, exp(x - best), 0.0) for i, x in enumerate(logits)]
                total = warp_float_sum(_tree(lambda x, y: x + y, terms))
            with if_(self._lane.equals(0) & exists):
                self._rows.store(token * 2, best.bits())
                self._rows.store(token * 2 + 1, total.bits())
            if self._bias is not None:
                biases = self._load_row(self._bias, 0)
                choices = [self._score(x, best, total) + b for x, b in zip(logits, biases, strict=True)]
                choices = [select(x > -math.inf, y, -math.inf) for x, y in zip(logits, choices, strict=True)]
                keys = [self._if_expert(i, _key(x), 0) for i, x in enumerate(choices)]
        width = self._width
        stripes: list[Int] = []
        for first in range(0, self._per_lane, width):
            stripes += self._sorted(keys[first : first + width], first)
        return stripes

    def _if_expert[T: (Int, Float)](self, index: int, value: T, otherwise: float) -> T:
        """``value`` if the lane's element ``index`` stands for an expert."""
        if 32 * self._per_lane == self._spec.num_experts:
            return value
        first = index % self._width + index // self._width * 32 * self._width
        is_expert = self._lane * self._width < max(0, self._spec.num_experts - first)
        return select(is_expert, value, otherwise)

    def _sorted(self, keys: list[Int], first: int) -> list[Int]:
        """Sort a stripe, descending; only neighbours change places, so that ties stay in order.

        Behind its keys comes a word with a byte for each: its place among the lane's logits.
        """
        count = len(keys)
        order = Int.of(sum((first + i) << 8 * i for i in range(count)))
        for phase in range(count):
            for i in range(phase % 2, count - 1, 2):
                swapped = (0x3201, 0x3120, 0x2310)[i]  # bytes i and i + 1
                keys[i], keys[i + 1], order = ptx(
                    f"""{{ .reg .pred p; .reg .b32 t;
                    setp.lt.u32 p, %[high], %[low]; min.u32 t, %[high], %[low];
                    max.u32 %[high], %[high], %[low]; mov.b32 %[low], t;
                    @p prmt.b32 %[order], %[order], 0, {swapped}; }}""",
                    {"high": keys[i], "low": keys[i + 1], "order": order},
                )
        return [*keys, order]

    def _pop(self, stripes: tuple[Int, ...], top: Int) -> tuple[Bool, Int, list[Int]]:
        """Find the lowest expert with this key, and take it out of its stripe; the lane that has it knows."""
        size = self._width + 1
        parts = [stripes[i : i + size] for i in range(0, len(stripes), size)]
        have = [head.equals(top) for head, *_ in parts]
        # Of the lane's logits, number n in stripe s is that of expert lane · width + 31 · width · s + n.
        starts = [self._lane * self._width + 31 * self._width * s for s in range(len(parts))]
        experts = [(order & 0xFF) + start for (*_, order), start in zip(parts, starts, strict=True)]
        if len(parts) == 1:
            expert = experts[0]
            has_won = have[0] & (warp_ballot(have[0]) & self._lower_lanes).equals(0)
            pops = [has_won]
        else:
            mine = Int.of(NONE)
            for has, expert in reversed(list(zip(have, experts, strict=True))):
                mine = select(has, expert, mine)
            expert = warp_min(mine)
            has_won = mine.equals(expert)
            pops = [e.equals(expert) for e in experts]
        rest: list[Int] = []
        for is_here, (*keys, order) in zip(pops, parts, strict=True):
            rest += [select(is_here, b, a) for a, b in zip(keys, [*keys[1:], Int.of(0)], strict=True)]
            rest.append(select(is_here, order >> 8, order) if self._width > 1 else order)
        return has_won, expert, rest

    def _score(self, logit: Float, best: Float, total: Float) -> Float:
        match self._spec.scoring:
            case Scoring.SIGMOID:
                return Float.of(1.0) / (exp(Float.of(0.0) - logit) + 1.0)
            case Scoring.SOFTMAX:
                return exp(logit - best) / total
        return logit

    def _weighed(self, token: Int, j: Int, lanes_each: int) -> Choices:
        """Make the weights of choices: lane after lane the ``lanes_each`` of a token."""
        spec = self._spec
        in_use = (token < self._count) & (j < spec.top_k)
        # Unused lanes read what their warp noted, if it has noted anything there.
        token, j = select(in_use, token, self._warp * self._together), minimum(j, spec.top_k - 1)
        is_real = self._is_real(token)
        slot = token * spec.top_k + j
        expert = minimum(self._experts.load(slot), spec.num_experts - 1)
        logit = _clean(self._logits.load((token + self._first) * spec.num_experts + expert))
        included = in_use & (logit > -math.inf)
        best, total = warp_take(logit, self._lane & (32 - lanes_each)), Float.of(1.0)
        if row_words(spec):
            best = self._rows.load(token * 2).as_float()
            total = self._rows.load(token * 2 + 1).as_float()
        some = best > -math.inf
        if is_softmax_of_chosen(spec):
            if self._bias is not None:
                included = included & (logit + self._bias.load(expert) > -math.inf)  # what route goes by
                best = warp_float_max(select(included, logit, -math.inf), lanes_each)
            weight = select(included, exp(logit - best), 0.0)
            weight = weight / warp_float_sum(weight, lanes_each)
        else:
            weight = select(included, self._score(logit, best, total), 0.0)
            if spec.renormalize:
                weight = weight / (warp_float_sum(weight, lanes_each) + _EPSILON)
        weight = select(some, weight, math.nan)
        if spec.routed_scaling_factor != 1.0:
            weight = weight * spec.routed_scaling_factor
        return Choices(token, slot, in_use, expert, weight, is_real)


def _clean(logit: Float) -> Float:
    """NaN counts as -inf, +inf as the largest finite number."""
    return minimum(maximum(logit, -math.inf), _FLOAT_MAX)


def _key(value: Float) -> Int:
    """Turn a number that is not NaN to a word of the same order, -0 to that of 0."""
    bits = (value + 0.0).bits()
    return bits ^ (bits.sign_bits() | 0x80000000)


def _logit(key: Int) -> Float:
    """Turn it back."""
    return (key ^ ((key.sign_bits() ^ NONE) | 0x80000000)).as_float()


def _largest(keys: list[Int]) -> Int:
    return _tree(maximum, keys)


def _tree[T](op: Callable[[T, T], T], values: list[T]) -> T:
    """Fold pairwise, so that no result waits for many others."""
    while len(values) > 1:
        pairs = [op(*values[i : i + 2]) for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(values) & ~1 :]
    return values[0]
