"""A small language for what each thread does by itself, inside a function of `plgpu.inline_mgpu`.

Pallas speaks of arrays that a warpgroup holds together. Where threads go ways of their own (a warp a token,
lists built by scans and bit masks), these wrappers over MLIR scalars read like ordinary Python:

    lane = thread_index() & 31
    with if_(lane < count):
        table.store(lane, source.load(lane) + 1)

`Int` is an unsigned 32-bit word (so ``id < E`` is false for -1 as well), `Float` a float32, `Bool` a
predicate; Python numbers may stand beside them. A Python loop is unrolled, `for_range` makes a real one.
What is made inside `if_` ends there, except what was stored. Everything that starts with ``warp_`` is called
by all 32 lanes of a warp together.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf

_ALL_LANES = 0xFFFFFFFF


def _word() -> ir.Type:
    return ir.IntegerType.get_signless(32)


class _Scalar:
    """An MLIR value with operators."""

    def __init__(self, value: ir.Value):
        self.value = value

    @classmethod
    def of(cls, value: Self | float) -> Self:
        """Make a constant of a Python number; leave a scalar as it is."""
        if isinstance(value, _Scalar):
            assert isinstance(value, cls), f"{value!r} is no {cls.__name__}"
            return value
        return cls(cls._constant(value))

    @staticmethod
    def _constant(value: Any) -> ir.Value:
        raise NotImplementedError

    def _with(self, op: Callable[..., ir.Value], other: Self | float) -> Self:
        return type(self)(op(self.value, self.of(other).value))


class Bool(_Scalar):
    """A predicate."""

    @staticmethod
    def _constant(value: Any) -> ir.Value:
        return mgpu.utils.c(int(bool(value)), ir.IntegerType.get_signless(1))

    def __and__(self, other: Bool | bool) -> Bool:
        return self._with(arith.andi, other)

    def __or__(self, other: Bool | bool) -> Bool:
        return self._with(arith.ori, other)

    def __invert__(self) -> Bool:
        return self._with(arith.xori, True)


class Int(_Scalar):
    """An unsigned word; arithmetic wraps around."""

    @staticmethod
    def _constant(value: Any) -> ir.Value:
        wrapped = (int(value) + 2**31) % 2**32 - 2**31
        return mgpu.utils.c(wrapped, _word())

    def __add__(self, other: Int | int) -> Int:
        return self._with(arith.addi, other)

    def __sub__(self, other: Int | int) -> Int:
        return self._with(arith.subi, other)

    def __mul__(self, other: Int | int) -> Int:
        return self._with(arith.muli, other)

    def __floordiv__(self, other: Int | int) -> Int:
        return self._with(arith.divui, other)

    def __and__(self, other: Int | int) -> Int:
        return self._with(arith.andi, other)

    def __or__(self, other: Int | int) -> Int:
        return self._with(arith.ori, other)

    def __xor__(self, other: Int | int) -> Int:
        return self._with(arith.xori, other)

    def __lshift__(self, other: Int | int) -> Int:
        return self._with(arith.shli, other)

    def __rshift__(self, other: Int | int) -> Int:
        return self._with(arith.shrui, other)

    def _compare(self, how: arith.CmpIPredicate, other: Int | int) -> Bool:
        return Bool(arith.cmpi(how, self.value, self.of(other).value))

    def __lt__(self, other: Int | int) -> Bool:
        return self._compare(arith.CmpIPredicate.ult, other)

    def __le__(self, other: Int | int) -> Bool:
        return self._compare(arith.CmpIPredicate.ule, other)

    def __gt__(self, other: Int | int) -> Bool:
        return self._compare(arith.CmpIPredicate.ugt, other)

    def __ge__(self, other: Int | int) -> Bool:
        return self._compare(arith.CmpIPredicate.uge, other)

    def equals(self, other: Int | int) -> Bool:
        """Compare; ``==`` is left to Python."""
        return self._compare(arith.CmpIPredicate.eq, other)

    def sign_bits(self) -> Int:
        """Spread the top bit over the word."""
        return self._with(arith.shrsi, 31)

    def as_float(self) -> Float:
        """Take the bits for those of a float."""
        return Float(arith.bitcast(ir.F32Type.get(), self.value))


class Float(_Scalar):
    """A float32."""

    @staticmethod
    def _constant(value: Any) -> ir.Value:
        exact = struct.unpack("f", struct.pack("f", value))[0]
        return mgpu.utils.c(exact, ir.F32Type.get())

    def __add__(self, other: Float | float) -> Float:
        return self._with(arith.addf, other)

    def __sub__(self, other: Float | float) -> Float:
        return self._with(arith.subf, other)

    def __mul__(self, other: Float | float) -> Float:
        return self._with(arith.mulf, other)

    def __truediv__(self, other: Float | float) -> Float:
        """Divide, within 2 ulp."""
        return Float(_pure("div.full.f32 $0, $1, $2;", ir.F32Type.get(), self, Float.of(other)))

    def __gt__(self, other: Float | float) -> Bool:
        return Bool(arith.cmpf(arith.CmpFPredicate.OGT, self.value, self.of(other).value))

    def bits(self) -> Int:
        """Take the bits for those of a word."""
        return Int(arith.bitcast(_word(), self.value))


def _pure(ptx: str, result: ir.Type, *operands: _Scalar) -> ir.Value:
    return mgpu.utils.inline_ptx(ptx, *[x.value for x in operands], result_types=result)


def ptx(code: str, changed: dict[str, Int], **given: Int) -> list[Int]:
    """Run PTX that changes some words and reads others, ``%[name]``; return the changed ones.

    It is for what LLVM would write with more instructions. Registers that it needs beside the operands it
    declares, inside braces.
    """
    # An operand that changes is an output, and once more an input tied to it.
    numbers = {name: i for i, name in enumerate([*changed, *changed, *given])}
    numbers |= {name: i for i, name in enumerate(changed)}
    text = re.sub(r"%\[(\w+)\]", lambda match: f"${numbers[match[1]]}", code)
    ties = [str(i) for i in range(len(changed))]
    constraints = ",".join(["=&r"] * len(changed) + ties + ["r"] * len(given))
    kind = llvm.StructType.get_literal([_word()] * len(changed))
    operands = [x.value for x in (*changed.values(), *given.values())]
    found = llvm.inline_asm(kind, operands, text, constraints, has_side_effects=False)
    return [Int(llvm.extractvalue(_word(), found, [i])) for i in range(len(changed))]


def select[T: (Int, Float)](condition: Bool, yes: T | int | float, no: T | int | float) -> T:
    """Choose ``yes`` where the condition holds; at least one of both is a scalar."""
    kind = type(yes) if isinstance(yes, _Scalar) else type(no)
    assert issubclass(kind, _Scalar)
    return kind(arith.select(condition.value, kind.of(yes).value, kind.of(no).value))


def maximum[T: (Int, Float)](x: T, y: T | int | float) -> T:
    """Return the larger one; of a NaN and a number, the number."""
    return x._with(arith.maxui if isinstance(x, Int) else arith.maxnumf, y)


def minimum[T: (Int, Float)](x: T, y: T | int | float) -> T:
    """Return the smaller one; of a NaN and a number, the number."""
    return x._with(arith.minui if isinstance(x, Int) else arith.minnumf, y)


def exp(x: Float) -> Float:
    """Raise e to x, within about 4 ulp; NaN counts as -inf, and everything past ±200 as ±200."""
    x = minimum(maximum(x, -200.0), 200.0)
    log2_e = 1.4426950408889634
    high = Float.of(log2_e)
    # x · log2(e) = whole + part without rounding away part's low bits; 2^whole and 2^part are near exact.
    whole = Float(_pure("cvt.rni.f32.f32 $0, $1;", ir.F32Type.get(), x * high))
    part = _fma(x, high, Float.of(0.0) - whole)
    part = _fma(x, Float.of(log2_e - struct.unpack("f", struct.pack("f", log2_e))[0]), part)
    return _exp2(part) * _exp2(whole)


def _exp2(x: Float) -> Float:
    return Float(_pure("ex2.approx.f32 $0, $1;", ir.F32Type.get(), x))


def _fma(x: Float, y: Float, z: Float) -> Float:
    return Float(llvm.intr_fma(x.value, y.value, z.value))


def reciprocal(x: Float) -> Float:
    """Return 1 / x, rounded to the nearest; within an ulp from 2^126 on, where that is subnormal.

    What `rcp.rn` does, but for the function that it calls beyond that: registers are spilled around a call.
    """
    near = Float(_pure("rcp.approx.f32 $0, $1;", ir.F32Type.get(), x))
    better = _fma(near, _fma(Float.of(0.0) - x, near, Float.of(1.0)), near)
    return select((x.bits() & 0x7FFFFFFF) < 0x7E800000, better, near)


def to_e4m3(low: Float, high: Float) -> Int:
    """Round two numbers to the nearest e4m3, ±448 at most; return the codes as the lower half of a word."""
    return Int(
        _pure(
            "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, $2, $1; cvt.u32.u16 $0, h; }", _word(), low, high
        )
    )


def count_bits(x: Int) -> Int:
    """Count the bits that are set."""
    return Int(llvm.intr_ctpop(x.value))


def thread_index() -> Int:
    """Return the thread's index in its CTA."""
    return Int(nvvm.read_ptx_sreg_tid_x(results=[_word()]))


def cta_index() -> Int:
    """Return the CTA's index in the grid."""
    return Int(nvvm.read_ptx_sreg_ctaid_x(results=[_word()]))


def cta_barrier() -> None:
    """Let every thread of the CTA come here, and see what the others wrote."""
    nvvm.barrier()


def warp_barrier() -> None:
    """Let every lane of the warp come here, and see what the others wrote."""
    mgpu.utils.warp_barrier()


def warp_max(x: Int) -> Int:
    """Return the largest of the lanes' values."""
    return _reduce(x, mgpu.utils.ReductionKind.UMAX)


def warp_min(x: Int) -> Int:
    """Return the smallest of the lanes' values."""
    return _reduce(x, mgpu.utils.ReductionKind.UMIN)


def warp_sum(x: Int) -> Int:
    """Return the sum of the lanes' values."""
    return _reduce(x, mgpu.utils.ReductionKind.ADD)


def _reduce(x: Int, kind: Any) -> Int:
    return Int(mgpu.utils.redux(x.value, Int.of(_ALL_LANES).value, kind))


def warp_ballot(x: Bool) -> Int:
    """Return a bit for each lane, set where its predicate holds."""
    return Int(nvvm.vote_sync(Int.of(_ALL_LANES).value, x.value, nvvm.VoteSyncKind.ballot))


def warp_equals(x: Int) -> Int:
    """Return a bit for each lane, set where its value is the caller's."""
    return Int(_convergent("match.any.sync.b32 $0, $1, 0xffffffff;", x))


def _convergent(ptx: str, *operands: _Scalar) -> ir.Value:
    return mgpu.utils.inline_ptx(
        ptx, *[x.value for x in operands], result_types=_word(), has_side_effects=True, convergent=True
    )


def warp_scan(x: Int, lane: Int) -> Int:
    """Return the sum of the values of this lane and of those below it."""
    for distance in (1, 2, 4, 8, 16):
        other = _shuffle(x.value, distance, nvvm.ShflKind.up, clamp=0)
        x = x + select(lane >= distance, Int(other), 0)
    return x


def warp_float_sum(x: Float, num_lanes: int = 32) -> Float:
    """Sum over groups of as many neighbouring lanes, a power of two; every lane of a group has the sum."""
    distance = num_lanes // 2
    while distance:
        x = x + Float(_shuffle(x.value, distance, nvvm.ShflKind.bfly, clamp=31))
        distance //= 2
    return x


def warp_float_max(x: Float, num_lanes: int = 32, apart: int = 1) -> Float:
    """Return the largest value of each group of as many neighbouring lanes, or of every so many of these.

    ``num_lanes`` and ``apart`` are powers of two: lane l sees lanes l, l + apart, ... of its group.
    """
    distance = num_lanes // 2
    while distance >= apart:
        x = maximum(x, Float(_shuffle(x.value, distance, nvvm.ShflKind.bfly, clamp=31)))
        distance //= 2
    return x


def warp_take(x: Float, lane: Int) -> Float:
    """Return the value that another lane has."""
    mask, clamp = Int.of(_ALL_LANES).value, Int.of(31).value
    return Float(nvvm.shfl_sync(mask, x.value, lane.value, clamp, nvvm.ShflKind.idx))


def _shuffle(value: ir.Value, by: int, kind: Any, clamp: int) -> ir.Value:
    return nvvm.shfl_sync(Int.of(_ALL_LANES).value, value, Int.of(by).value, Int.of(clamp).value, kind)


def in_every_thread(phase: Callable[[dict[str, Memory]], None], **refs: Any) -> None:
    """Run ``phase`` in every thread of a kernel; it is given each ref that is not None, by its name."""
    refs = {name: ref for name, ref in refs.items() if ref is not None}

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
    def run(ctx: Any, *values: Any) -> None:
        phase({name: Memory(value) for name, value in zip(refs, values, strict=True)})

    run(*refs.values())


class Memory:
    """A contiguous ref in global or shared memory, as one row of elements.

    Words are read as `Int`, floats of any width as `Float`.
    """

    def __init__(self, ref: Any):
        self.size = math.prod(ir.MemRefType(ref.type).shape)
        self._element = ir.MemRefType(ref.type).element_type
        if mgpu.utils.bitwidth(self._element) == 8:  # LLVM has no FP8
            self._element = ir.IntegerType.get_signless(8)
        self._pointer = mgpu.utils.memref_ptr(ref)

    def after(self, count: int) -> Memory:
        """Leave out the first elements."""
        rest = copy.copy(self)
        rest._pointer, rest.size = self._at(count), self.size - count
        return rest

    def row(self, index: Int, length: int) -> Memory:
        """Begin with the row of that number, of as many elements each: any offset, 64 bits."""
        wide = ir.IntegerType.get_signless(64)
        offset = arith.muli(arith.extui(wide, index.value), mgpu.utils.c(length, wide))
        rest = copy.copy(self)
        rest._pointer = mgpu.utils.getelementptr(self._pointer, [offset], self._element)
        return rest

    def _at(self, index: Int | int) -> ir.Value:
        return mgpu.utils.getelementptr(self._pointer, [Int.of(index).value], self._element)

    def load(self, index: Int | int) -> Any:
        """Read one element."""
        return self.load_vector(index, 1)[0]

    def load_vector(self, index: Int | int, width: int) -> list[Any]:
        """Read ``width`` elements at once; ``index`` is a multiple of it."""
        if width == 1:
            return [self._read(llvm.load(self._element, self._at(index)))]
        kind = ir.VectorType.get((width,), self._element)
        size = width * mgpu.utils.bytewidth(self._element)
        vector = llvm.load(kind, self._at(index), alignment=size)
        return [self._read(llvm.extractelement(vector, Int.of(i).value)) for i in range(width)]

    def _read(self, value: ir.Value) -> Int | Float:
        if isinstance(self._element, ir.IntegerType):
            return Int(value)
        if isinstance(self._element, ir.F32Type):
            return Float(value)
        return Float(arith.extf(ir.F32Type.get(), value))

    def store(self, index: Int | int, value: Int | Float | int) -> None:
        """Write 32 bits: one element, or what else has room there."""
        scalar = value if isinstance(value, _Scalar) else Int.of(value)
        llvm.store(scalar.value, self._at(index))

    def set_bits(self, index: Int | int, bits: Int) -> None:
        """Or bits into a word, whatever other threads of the CTA do to it."""
        self._change(llvm.AtomicBinOp._or, index, bits)

    def add(self, index: Int | int, value: Int | int) -> None:
        """Add to a word, whatever other threads of the CTA do to it."""
        self._change(llvm.AtomicBinOp.add, index, Int.of(value))

    def _change(self, how: Any, index: Int | int, value: Int) -> None:
        order = llvm.AtomicOrdering.monotonic
        llvm.atomicrmw(how, self._at(index), value.value, order, syncscope="block")


@contextlib.contextmanager
def if_(condition: Bool) -> Iterator[None]:
    """Run what stands inside where the condition holds."""
    with mgpu.utils.when(condition.value):
        yield


def for_range[T: (Int, Float)](
    start: Int | int,
    stop: Int | int,
    step: Int | int,
    carried: Sequence[T],
    body: Callable[..., Sequence[T]],
) -> list[T]:
    """Loop while ``start + i · step < stop``: ``carried = body(index, *carried)``; return the last ones."""
    bounds = [Int.of(bound).value for bound in (start, stop, step)]
    op = scf.ForOp(*bounds, [x.value for x in carried])  # type: ignore[call-arg, arg-type]
    kinds = [type(x) for x in carried]
    with ir.InsertionPoint(op.body):
        inner = [kind(value) for kind, value in zip(kinds, op.inner_iter_args, strict=True)]
        outcome = body(Int(op.induction_variable), *inner)
        scf.yield_([x.value for x in outcome])
    return [kind(value) for kind, value in zip(kinds, op.results, strict=True)]
