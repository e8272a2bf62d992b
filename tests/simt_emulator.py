"""`moe_pallas.kernels._simt` in NumPy: all threads of a CTA in lockstep, a value an array over them.

It runs the same code as a GPU would, with checks that a GPU has not: an index out of bounds, a warp whose
lanes do not all come to a shuffle, are errors. Shared memory begins as garbage.

So is a race of two writes to a word, with no barrier in between of the CTA, or of the warp if both threads
belong to it; two atomics are none, nor are two writes of the same. A read that races with an earlier write
gives garbage, since a lane may read what it has no use for. Of writes that race with an earlier read only
those of its own warp are seen: between them stands a barrier, or any exchange of the lanes. What different
CTAs do is not looked at.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partialmethod
from typing import Any

import numpy as np
import pytest

NUM_THREADS = 384
_cta = 0
_active = [np.ones(NUM_THREADS, bool)]


class _Scalar:
    dtype: Any

    def __init__(self, value: Any):
        array = np.asarray(value, self.dtype)
        self.value = array if array.shape else np.full(NUM_THREADS, array)
        assert self.value.shape == (NUM_THREADS,)

    @classmethod
    def of(cls, value: Any) -> Any:
        if isinstance(value, _Scalar):
            assert isinstance(value, cls)
            return value
        if cls.dtype is np.uint32:
            value %= 2**32
        return cls(value)

    def _with(self, op: Callable[..., Any], other: Any) -> Any:
        with np.errstate(all="ignore"):
            return type(self)(op(self.value, self.of(other).value))

    def _compare(self, op: Callable[..., Any], other: Any) -> Bool:
        return Bool(op(self.value, self.of(other).value))

    __add__ = partialmethod(_with, np.add)
    __sub__ = partialmethod(_with, np.subtract)
    __mul__ = partialmethod(_with, np.multiply)
    __and__ = partialmethod(_with, np.bitwise_and)
    __or__ = partialmethod(_with, np.bitwise_or)
    __xor__ = partialmethod(_with, np.bitwise_xor)
    __lt__ = partialmethod(_compare, np.less)
    __le__ = partialmethod(_compare, np.less_equal)
    __gt__ = partialmethod(_compare, np.greater)
    __ge__ = partialmethod(_compare, np.greater_equal)
    equals = partialmethod(_compare, np.equal)


class Bool(_Scalar):
    dtype = np.bool_

    def __invert__(self) -> Bool:
        return Bool(~self.value)


class Int(_Scalar):
    dtype = np.uint32
    __floordiv__ = partialmethod(_Scalar._with, np.floor_divide)
    __lshift__ = partialmethod(_Scalar._with, np.left_shift)
    __rshift__ = partialmethod(_Scalar._with, np.right_shift)

    def sign_bits(self) -> Int:
        return Int((self.value.view(np.int32) >> 31).view(np.uint32))

    def as_float(self) -> Float:
        return Float(self.value.view(np.float32))


class Float(_Scalar):
    dtype = np.float32
    __truediv__ = partialmethod(_Scalar._with, np.divide)

    def bits(self) -> Int:
        return Int(self.value.view(np.uint32))


def ptx(code: str, changed: dict[str, Int], **given: Int) -> list[Int]:
    values: dict[str, Any] = {f"%[{k}]": v.value for k, v in (changed | given).items()}
    for statement in code.strip("{} \n").split(";"):
        match = re.fullmatch(r"\s*(@(\w+) )?\s*([\w.]+) (.*?)\s*", statement, re.DOTALL)
        if match is None or match[3] == ".reg":
            assert match or not statement.strip()
            continue
        name, *operands = match[4].split(", ")
        a, b, *more = [values[x] if x in values else np.uint32(int(x)) for x in operands] + [None]
        match match[3]:
            case "setp.lt.u32":
                new = a < b
            case "min.u32":
                new = np.minimum(a, b)
            case "max.u32":
                new = np.maximum(a, b)
            case "mov.b32":
                new = a
            case "prmt.b32":
                chosen = [int(more[0]) >> 4 * i & 7 for i in range(4)]
                new = sum(
                    (a >> np.uint32(8 * c) & np.uint32(255)) << np.uint32(8 * i) for i, c in enumerate(chosen)
                )
            case _:
                raise NotImplementedError(statement)
        values[name] = new if match[2] is None else np.where(values[match[2]], new, values[name])
    return [Int(values[f"%[{name}]"]) for name in changed]


def select(condition: Bool, yes: Any, no: Any) -> Any:
    kind = type(yes) if isinstance(yes, _Scalar) else type(no)
    return kind(np.where(condition.value, kind.of(yes).value, kind.of(no).value))


def maximum(x: Any, y: Any) -> Any:
    return x._with(np.maximum if isinstance(x, Int) else np.fmax, y)


def minimum(x: Any, y: Any) -> Any:
    return x._with(np.minimum if isinstance(x, Int) else np.fmin, y)


def exp(x: Float) -> Float:
    with np.errstate(all="ignore"):
        return Float(np.exp(np.fmin(np.fmax(x.value, -200), 200), dtype=np.float32))


def count_bits(x: Int) -> Int:
    return Int(np.bitwise_count(x.value))


def thread_index() -> Int:
    return Int(np.arange(NUM_THREADS))


def cta_index() -> Int:
    return Int.of(_cta)


# So far: barriers of the CTA; of each warp, those included; exchanges in each warp, both included.
_cta_barriers = 0
_warp_barriers = np.zeros(NUM_THREADS // 32, np.int64)
_exchanges = np.zeros(NUM_THREADS // 32, np.int64)


def cta_barrier() -> None:
    global _cta_barriers
    assert _active[-1].all()
    _cta_barriers += 1
    _warp_barriers[:] += 1
    _exchanges[:] += 1


def warp_barrier() -> None:
    _warp_barriers[_by_warp(_active[-1])[:, 0]] += 1


def _by_warp(x: Any) -> np.ndarray:
    together = _active[-1].reshape(-1, 32)
    assert (together == together[:, :1]).all(), "not all lanes come here"
    _exchanges[together[:, 0]] += 1
    return (x.value if isinstance(x, _Scalar) else x).reshape(-1, 32)


def warp_max(x: Int) -> Int:
    return Int(np.repeat(_by_warp(x).max(1), 32))


def warp_min(x: Int) -> Int:
    return Int(np.repeat(_by_warp(x).min(1), 32))


def warp_sum(x: Int) -> Int:
    return Int(np.repeat(_by_warp(x).sum(1, dtype=np.uint32), 32))


def warp_ballot(x: Bool) -> Int:
    bits = _by_warp(x).astype(np.uint32) << np.arange(32, dtype=np.uint32)
    return Int(np.repeat(bits.sum(1, dtype=np.uint32), 32))


def warp_equals(x: Int) -> Int:
    same = _by_warp(x)[:, :, None] == _by_warp(x)[:, None, :]
    bits = same.astype(np.uint32) << np.arange(32, dtype=np.uint32)
    return Int(bits.sum(2, dtype=np.uint32).ravel())


def warp_scan(x: Int, lane: Int) -> Int:
    return Int(_by_warp(x).cumsum(1, dtype=np.uint32).ravel())


def _by_group(x: Float, num_lanes: int, fold: Any) -> Float:
    groups = _by_warp(x).reshape(-1, num_lanes)
    with np.errstate(all="ignore"):
        return Float(np.repeat(fold(groups, axis=1), num_lanes))


def warp_float_sum(x: Float, num_lanes: int = 32) -> Float:
    return _by_group(x, num_lanes, np.sum)


def warp_float_max(x: Float, num_lanes: int = 32) -> Float:
    return _by_group(x, num_lanes, np.max)


def warp_take(x: Float, lane: Int) -> Float:
    return Float(np.take_along_axis(_by_warp(x), _by_warp(lane).astype(np.int64), 1).ravel())


class _Accesses:
    """Who touched which word last: the thread, and how often its CTA and its warp had met by then."""

    NOBODY, SEVERAL = -1, -2

    def __init__(self, size: int):
        # The last write, and the last read of each warp.
        self.writes = np.full((size, 4), self.NOBODY, np.int32)
        self.reads = np.full((size, NUM_THREADS // 32, 4), self.NOBODY, np.int32)

    def read(self, index: np.ndarray, threads: np.ndarray) -> np.ndarray:
        """Note that some threads read a word each; which of them read what others have written just now."""
        writes, warps = self.writes[index], threads // 32
        before, now = self.reads[index, warps], self._now(threads, _exchanges)
        again = (before[:, 1:] == now[:, 1:]).all(1)
        _, where, count = np.unique(index * NUM_THREADS + warps, return_inverse=True, return_counts=True)
        now[(again & (before[:, 0] != threads)) | (count[where] > 1), 0] = self.SEVERAL
        self.reads[index, warps] = now
        return ~self._are_ordered(writes, threads, _warp_barriers)

    def write(self, index: np.ndarray, threads: np.ndarray, unchanged: np.ndarray | None) -> None:
        """Note that some threads write to a word each; which leave it as it is. None: atomically."""
        writes, reads = self.writes[index], self.reads[index, threads // 32]
        harmless = writes[:, 0] == self.SEVERAL if unchanged is None else unchanged
        assert (harmless | self._are_ordered(writes, threads, _warp_barriers)).all(), "two writes race"
        assert self._are_ordered(reads, threads, _exchanges).all(), "a write races with a read"
        now = self._now(threads, _warp_barriers)
        if unchanged is None:
            now[:, :2] = self.SEVERAL
        self.writes[index] = now

    def _now(self, threads: np.ndarray, in_warp: np.ndarray) -> np.ndarray:
        warps = threads // 32
        return np.stack([threads, warps, np.full(threads.size, _cta_barriers), in_warp[warps]], 1)

    def _are_ordered(self, earlier: np.ndarray, threads: np.ndarray, in_warp: np.ndarray) -> np.ndarray:
        """Whether an earlier access is over, for each thread; ``in_warp``: how often each warp met."""
        who, warp, in_cta, before = earlier.T
        by_warp = (warp == threads // 32) & (before < in_warp[threads // 32])
        return (who == self.NOBODY) | (who == threads) | (in_cta < _cta_barriers) | by_warp


class Memory:
    """One row of elements; ``array`` is written in place."""

    def __init__(self, array: np.ndarray):
        self.array, self.size = array.reshape(-1), array.size
        # From the first write on: what is only read has no races.
        self._accesses: list[_Accesses] = []
        self._first, self._all = 0, self.size

    def after(self, count: int) -> Memory:
        rest = copy.copy(self)
        rest.array, rest.size, rest._first = self.array[count:], self.size - count, self._first + count
        return rest

    def _index(self, index: Any) -> np.ndarray:
        """What the active threads mean."""
        found = Int.of(index).value.astype(np.int64)[_active[-1]]
        assert (found < self.size).all(), "out of bounds"
        return found

    def load(self, index: Any) -> Any:
        index, threads = self._index(index), np.flatnonzero(_active[-1])
        values = np.zeros(NUM_THREADS, self.array.dtype)
        values[threads] = self.array[index]
        for accesses in self._accesses:
            racing = threads[accesses.read(index + self._first, threads)]
            values.view(np.uint8).reshape(NUM_THREADS, -1)[racing] = 0xDE
        return (
            Int(values.view(np.uint32)) if self.array.dtype.kind in "iu" else Float(values.astype(np.float32))
        )

    def load_vector(self, index: Int, width: int) -> list[Any]:
        assert (index.value[_active[-1]] % width == 0).all(), "not aligned"
        return [self.load(index + i) for i in range(width)]

    def store(self, index: Any, value: Any) -> None:
        scalar = value if isinstance(value, _Scalar) else Int.of(value)
        words, bits = self.array.view(np.uint32), scalar.value.view(np.uint32)[_active[-1]]
        found = self._index(index)
        self._note(found, words[found] == bits)
        words[found] = bits
        assert (words[found] == bits).all(), "two writes race"

    def set_bits(self, index: Any, bits: Int) -> None:
        self._change(np.bitwise_or, index, bits)

    def add(self, index: Any, value: Any) -> None:
        self._change(np.add, index, Int.of(value))

    def _change(self, how: Any, index: Any, value: Int) -> None:
        found = self._index(index)
        self._note(found, None)
        how.at(self.array.view(np.uint32), found, value.value[_active[-1]])

    def _note(self, index: np.ndarray, unchanged: np.ndarray | None) -> None:
        if not self._accesses:
            self._accesses.append(_Accesses(self._all))
        self._accesses[0].write(index + self._first, np.flatnonzero(_active[-1]), unchanged)


@contextlib.contextmanager
def if_(condition: Bool) -> Iterator[None]:
    _active.append(_active[-1] & condition.value)
    try:
        yield
    finally:
        _active.pop()


def for_range(
    start: Any, stop: Any, step: Any, carried: Sequence[Any], body: Callable[..., Any]
) -> list[Any]:
    index, stop, step, carried = Int.of(start), Int.of(stop), Int.of(step), list(carried)
    while (_active[-1] & (index < stop).value).any():
        running = index < stop
        with if_(running):
            new = body(index, *carried)
        carried = [select(running, b, a) for a, b in zip(carried, new, strict=True)]
        index = index + step
    return carried


def in_every_thread(phase: Callable[[dict[str, Memory]], None], **refs: Any) -> None:
    phase({name: Memory(np.asarray(x)) for name, x in refs.items() if x is not None})


@contextlib.contextmanager
def emulating(*modules: Any) -> Iterator[None]:
    """Let these modules find this one where they import `_simt`."""
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            for name in NAMES:
                if hasattr(module, name):
                    patch.setattr(module, name, globals()[name])
        yield


@contextlib.contextmanager
def as_cta(index: int) -> Iterator[None]:
    """Be this CTA of the grid; 0 otherwise."""
    global _cta
    _cta = index
    try:
        yield
    finally:
        _cta = 0


# All that a module may have imported of _simt.
NAMES = [
    "in_every_thread",
    "cta_index",
    "Bool",
    "Int",
    "Float",
    "Memory",
    "ptx",
    "select",
    "maximum",
    "minimum",
    "exp",
    "count_bits",
    "thread_index",
    "cta_barrier",
    "if_",
    "for_range",
    "warp_barrier",
    "warp_max",
    "warp_min",
    "warp_sum",
    "warp_ballot",
    "warp_equals",
    "warp_scan",
    "warp_float_sum",
    "warp_float_max",
    "warp_take",
]
