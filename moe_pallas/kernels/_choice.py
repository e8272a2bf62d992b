"""The choice of experts by router logits, one warp a token: the heart of `_routing`.

A warp holds a token's logits in registers, as words of the same order (`_key`). Lane l has them in stripes:
of the ``32 · width`` neighbouring experts of a stripe the ``width`` from ``width · l`` on, one vector in
global memory, sorted in descending order. Then ``top_k`` rounds of choice follow, in which only the heads of
the stripes take part: the largest key of all lanes wins, of several the lowest expert; the winner leaves its
stripe. What was chosen stands one choice a lane, where the weights are made of it.

While it waits for one token, a warp goes on with a second one, if there are many: their choices then share
the lanes, half of them each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

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
    select,
    thread_index,
    warp_float_sum,
    warp_group_max,
    warp_max,
    warp_min,
    warp_take,
)
from moe_pallas.spec import MoESpec, Scoring

NONE = 0xFFFFFFFF  # -1: no expert
_EXCLUDED = 0x007FFFFF  # key of -inf
_FLOAT_MAX = float(jnp.finfo(jnp.float32).max)
_EPSILON = 1e-20  # as in `moe_pallas.routing`


class Choices(NamedTuple):
    """Choices of one or two tokens, one a lane.

    Attributes:
      token: The lane's token.
      slot: Which of the token's choices.
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


class _Row(NamedTuple):
    """One token's logits, made ready for the choice.

    Attributes:
      stripes: For each stripe its sorted keys, and a word with a byte for each: the expert's place in it.
      best: Key of the largest logit, where it is needed.
      total: Sum of exp(logit - largest) over all experts, where it is needed.
    """

    stripes: list[Int]
    best: Int | None
    total: Float | None


class Router:
    """The choice of experts for the tokens of a launch, in the threads of a CTA.

    Args:
      spec: The layer.
      num_tokens: T.
      num_warps: Warps of the CTA; warp w takes tokens w, w + num_warps, …
      logits: (T, E).
      bias: (E,), or None: `MoESpec.correction_bias`.
      real: (1,) number of real tokens, or (T,) flags, or None.
    """

    def __init__(
        self,
        spec: MoESpec,
        num_tokens: int,
        num_warps: int,
        logits: Memory,
        bias: Memory | None,
        real: Memory | None,
    ):
        self._spec, self._num_tokens, self._num_warps = spec, num_tokens, num_warps
        self._logits, self._bias, self._real = logits, bias, real
        self._lane, self._warp = thread_index() & 31, thread_index() >> 5
        self._width = next(w for w in (1, 2, 4) if spec.num_experts <= 32 * w or w == 4)
        self._num_stripes = -(-spec.num_experts // (32 * self._width))
        # Past 512 experts two tokens don't fit in the registers.
        two = num_tokens > num_warps and spec.num_experts <= 512 and spec.top_k <= 16
        self._together = 2 if two else 1
        self._lanes_each = 32 // self._together

    def first_logits(self) -> list[Float]:
        """Start loading the logits of the warp's first tokens."""
        return self._load(self._warp)

    def choose_all(self, logits: list[Float], note: Callable[[Choices], None]) -> None:
        """Choose for all tokens, given their `first_logits`; ``note`` is called with all lanes."""
        step = self._num_warps * self._together

        def some(token: Int, *logits: Float) -> list[Float]:
            # The next logits are on their way while these are worked on.
            following = self._load(token + step) if self._num_tokens > step else list(logits)
            note(self.choose(token, list(logits)))
            return following

        if self._num_tokens > step:
            for_range(self._warp, self._num_tokens, step, logits, some)
        else:
            with if_(self._warp < self._num_tokens):
                some(self._warp, *logits)

    def choose(self, first: Int, logits: list[Float]) -> Choices:
        """Choose for the tokens ``first`` and, if two are together, ``first + num_warps``."""
        slot = self._lane & (self._lanes_each - 1)
        half = self._lane // self._lanes_each
        token = first + half * self._num_warps
        is_real = self._is_real(token)
        count = len(logits) // self._together
        rows = [self._row(logits[i * count : (i + 1) * count]) for i in range(self._together)]

        def play(index: Int, expert: Int, key: Int, *stripes: Int) -> list[Int]:
            size = len(stripes) // len(rows)
            state: list[Int] = []
            # All first halves before all second ones: nothing waits for what the other row could fill.
            tops = [warp_max(self._head(stripes[i * size : (i + 1) * size])) for i in range(len(rows))]
            for i, top in enumerate(tops):
                winner, rest = self._pop(stripes[i * size : (i + 1) * size], top)
                is_mine = self._lane.equals(index + i * self._lanes_each)
                expert, key = select(is_mine, winner, expert), select(is_mine, top, key)
                state += rest
            return [expert, key, *state]

        stripes = [word for row in rows for word in row.stripes]
        expert, key, *_ = for_range(0, self._spec.top_k, 1, [Int.of(0), Int.of(0), *stripes], play)
        weight = self._weight(token, slot, expert, key, rows)
        in_use = (token < self._num_tokens) & (slot < self._spec.top_k)
        return Choices(token, slot, in_use, expert, weight, is_real)

    def _load(self, first: Int) -> list[Float]:
        """Load the lane's logits of the tokens of one `choose`; past the last token, that one's."""
        found = []
        for i in range(self._together):
            token = minimum(first + i * self._num_warps, self._num_tokens - 1)
            found += self._load_row(self._logits, token * self._spec.num_experts)
        return found

    def _load_row(self, memory: Memory, start: Int | int) -> list[Float]:
        """Load the lane's part of E neighbouring numbers; past the last one, some of them again."""
        num_experts, width = self._spec.num_experts, self._width
        found: list[Float] = []
        for s in range(self._num_stripes):
            place = self._lane * width + s * 32 * width
            if num_experts % width == 0:
                found += memory.load_vector(minimum(place, num_experts - width) + start, width)
            else:
                found += [memory.load(minimum(place + i, num_experts - 1) + start) for i in range(width)]
        return found

    def _is_real(self, token: Int) -> Bool:
        if self._real is None:
            return token < self._num_tokens
        if self._real.size == 1:
            return token < minimum(self._real.load(0), self._num_tokens)
        return self._real.load(minimum(token, self._num_tokens - 1)) > 0

    def _row(self, logits: list[Float]) -> _Row:
        logits = [_clean(x) for x in logits]
        keys = [self._if_expert(i, _key(x), 0) for i, x in enumerate(logits)]
        best, total = None, None
        whole_softmax = self._spec.scoring is Scoring.SOFTMAX and not self._is_softmax_of_chosen()
        if whole_softmax or self._bias is not None:
            best = warp_max(_largest(keys))
        if whole_softmax and best is not None:
            terms = [self._if_expert(i, exp(x - _logit(best)), 0.0) for i, x in enumerate(logits)]
            total = warp_float_sum(_tree(lambda x, y: x + y, terms))
        if self._bias is not None:
            biases = self._load_row(self._bias, 0)
            scores = [self._score(x, best, total) + b for x, b in zip(logits, biases, strict=True)]
            scores = [select(x > -math.inf, y, -math.inf) for x, y in zip(logits, scores, strict=True)]
            keys = [self._if_expert(i, _key(x), 0) for i, x in enumerate(scores)]
        width, stripes = self._width, []
        for s in range(self._num_stripes):
            stripes += self._sorted(keys[s * width : (s + 1) * width])
        return _Row(stripes, best, total)

    def _if_expert[T: (Int, Float)](self, index: int, value: T, otherwise: float) -> T:
        """``value`` if the lane's element ``index`` stands for an expert."""
        stripe, i = divmod(index, self._width)
        size = 32 * self._width
        if (stripe + 1) * size <= self._spec.num_experts:
            return value
        is_expert = self._lane * self._width < max(0, self._spec.num_experts - stripe * size - i)
        return select(is_expert, value, otherwise)

    def _sorted(self, keys: list[Int]) -> list[Int]:
        """Sort a stripe, descending; only neighbours change places, so that ties stay in order."""
        count = len(keys)
        places = [self._lane * count + i for i in range(count)]
        for phase in range(count):
            for i in range(phase % 2, count - 1, 2):
                swap = keys[i] < keys[i + 1]
                keys[i : i + 2] = [maximum(keys[i], keys[i + 1]), minimum(keys[i], keys[i + 1])]
                first, second = places[i : i + 2]
                places[i : i + 2] = [select(swap, second, first), select(swap, first, second)]
        return [*keys, _tree(lambda x, y: x | y, [place << 8 * i for i, place in enumerate(places)])]

    def _head(self, stripes: tuple[Int, ...]) -> Int:
        return _largest(list(stripes[:: self._width + 1]))

    def _pop(self, stripes: tuple[Int, ...], top: Int) -> tuple[Int, list[Int]]:
        """Find the lowest expert with this key, and take it out of its stripe."""
        size = self._width + 1
        parts = [stripes[i : i + size] for i in range(0, len(stripes), size)]
        experts = [(order & 0xFF) + s * 32 * self._width for s, (*_, order) in enumerate(parts)]
        mine = Int.of(NONE)
        for expert, (head, *_) in reversed(list(zip(experts, parts, strict=True))):
            mine = select(head.equals(top), expert, mine)
        winner = warp_min(mine)
        rest: list[Int] = []
        for expert, (*keys, order) in zip(experts, parts, strict=True):
            won = expert.equals(winner)
            rest += [select(won, b, a) for a, b in zip(keys, [*keys[1:], Int.of(0)], strict=True)]
            rest.append(select(won, order >> 8, order) if self._width > 1 else order)
        return winner, rest

    def _is_softmax_of_chosen(self) -> bool:
        """Are the weights a softmax over the chosen logits?"""
        if self._spec.scoring is Scoring.SOFTMAX:
            # Renormalised, the sum over all experts cancels, and 1e-20 of it is nothing beside the largest
            # term, 1, which is among the chosen if the choice is by logits.
            return self._spec.renormalize and self._bias is None
        return self._spec.scoring is Scoring.SOFTMAX_AFTER_TOPK

    def _score(self, logit: Float, best: Int | None, total: Float | None) -> Float:
        if self._spec.scoring is Scoring.SIGMOID:
            return Float.of(1.0) / (exp(Float.of(0.0) - logit) + 1.0)
        if best is None or total is None:
            return logit
        return exp(logit - _logit(best)) / total

    def _weight(self, token: Int, slot: Int, expert: Int, key: Int, rows: list[_Row]) -> Float:
        """Make the lane's routing weight of its choice and those of its neighbours."""
        spec = self._spec
        included = (key > _EXCLUDED) & (slot < spec.top_k)
        lanes = 1 << (spec.top_k - 1).bit_length()
        if self._bias is None:
            logit = _logit(key)
            best = warp_take(key, self._lane - slot)
        else:
            place = minimum(token, self._num_tokens - 1) * spec.num_experts + expert
            logit = _clean(self._logits.load(place))
            best = self._of_lane([row.best for row in rows if row.best is not None])
        if self._is_softmax_of_chosen():
            top = best
            if self._bias is not None:
                top = warp_group_max(select(included, _key(logit), _EXCLUDED), lanes)
            weight = select(included, exp(logit - _logit(top)), 0.0)
            weight = weight / warp_float_sum(weight, lanes)
        else:
            totals = [row.total for row in rows if row.total is not None]
            weight = self._score(logit, best, self._of_lane(totals) if totals else None)
            weight = select(included, weight, 0.0)
            if spec.renormalize:
                weight = weight / (warp_float_sum(weight, lanes) + _EPSILON)
        weight = select(best > _EXCLUDED, weight, math.nan)
        return weight if spec.routed_scaling_factor == 1.0 else weight * spec.routed_scaling_factor

    def _of_lane[T: (Int, Float)](self, values: list[T]) -> T:
        """Return what belongs to the lane's token."""
        return values[0] if len(values) == 1 else select(self._lane < self._lanes_each, *values)


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
