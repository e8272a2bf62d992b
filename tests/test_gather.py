"""Where `cp.async` gathers put the bytes of rows and scales: their PTX, run in Python for every thread."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from moe_pallas.kernels import _gather

NUM_THREADS = 128
# Addresses of what the code is given; memory is bytes by address.
ROWS, TOKENS, OPERAND, LANDED, SCALES, WEIGHTS = (1 << 40, 2 << 40, 1 << 20, 1 << 22, 3 << 40, 4 << 40)
BINARY: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "and": operator.and_,
    "xor": operator.xor,
    "shr": operator.rshift,
    "div": operator.floordiv,
}
COMPARE = {"lt": operator.lt, "ge": operator.ge, "eq": operator.eq}


class Machine:
    """Runs straight PTX of integers for one thread after the other; notes what cp.async copies."""

    def __init__(self, words: dict[int, int]):
        self.words = words  # by address
        self.copies: dict[int, tuple[int, int]] = {}  # address in shared memory → source, bytes that are read

    def run(self, code: str, given: dict[str, int]) -> None:
        for thread in range(NUM_THREADS):
            values = {f"%[{name}]": value for name, value in given.items()} | {"%tid.x": thread + 256}
            for statement in code.strip().strip("{}").split(";"):
                self._step(statement.strip(), values)

    def _step(self, statement: str, values: dict[str, int]) -> None:
        match = re.fullmatch(r"(?:@(!?)(\w+) )?([\w.:]+)(?: (.*))?", statement, re.DOTALL)
        if not statement or (match and match[3] == ".reg"):
            return
        assert match, statement
        negated, guard, op, operands = match.groups()
        if guard and values[guard] == (negated == "!"):
            return
        name, *rest = (part.strip() for part in (operands or "").split(","))

        def value(text: str) -> int:
            return values[text] if text in values else int(text)

        kind = op.split(".")[0]
        if op.startswith(("cp.async.ca", "cp.async.cg")):
            source, size, *read = [value(text.strip("[]").split("+")[0]) for text in rest]
            target = sum(value(part) for part in name.strip("[]").split("+"))
            assert target not in self.copies, "two threads copy to one place"
            self.copies[target] = source, (read or [size])[0]
        elif kind == "ld":
            values[name] = self.words[value(rest[0].strip("[]"))]
        elif kind == "setp":
            values[name] = int(COMPARE[op.split(".")[1]](value(rest[0]), value(rest[1])))
        elif kind == "selp":
            values[name] = value(rest[0] if value(rest[2]) else rest[1])
        elif kind == "mad":
            values[name] = value(rest[0]) * value(rest[1]) + value(rest[2])
        elif kind == "mov":
            values[name] = value(rest[0])
        elif kind in BINARY:
            values[name] = BINARY[kind](value(rest[0]), value(rest[1]))
        else:
            assert op.startswith("cp.async."), statement  # commits and arrivals


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """What the gathers emit is run at once; refs stand for themselves by their address."""
    tokens = {TOKENS + 4 * i: 3 * i + 1 for i in range(400)}
    machine = Machine(tokens)

    def inline_mgpu(arg_types: Any = (), return_type: Any = None) -> Any:
        return lambda function: lambda *args: function(None, *args)

    fakes = {
        "address": lambda ref: ref.address,
        "shared_address": lambda ref: ref.address,
        "scalar": int,
        "ptx": lambda code, **given: machine.run(code, given),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(_gather, name, fake)
    monkeypatch.setattr(_gather.plgpu, "inline_mgpu", inline_mgpu)
    return machine


def ref(address: int, *shape: int, dtype: Any = jnp.int32) -> Any:
    return SimpleNamespace(address=address, shape=shape, dtype=jnp.dtype(dtype))


def place(row: int, byte: int, bytes_of_row: int) -> int:
    """Where a WGMMA operand has a byte: tiles of 8 rows of 128 bytes, 16-byte chunks swizzled by the row."""
    tile = row // 8 * (bytes_of_row // 128) + byte // 128
    chunk, rest = divmod(byte % 128, 16)
    return 1024 * tile + 128 * (row % 8) + 16 * (chunk ^ row % 8) + rest


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("block_m", [8, 16, 32, 64])
@pytest.mark.parametrize("is_mapped", [True, False])
def test_rows(machine: Machine, dtype: str, block_m: int, is_mapped: bool) -> None:
    """Each of the block's rows once, the contraction's tail as zeros, other rows not at all."""
    itemsize, first, stage = jnp.dtype(dtype).itemsize, 5, 2
    columns = 320 if itemsize == 2 else 384
    x, operand = ref(ROWS, 1000, columns, dtype=dtype), ref(OPERAND, 4, block_m, 128, dtype=dtype)
    token_of = ref(TOKENS, 400) if is_mapped else None
    for size, step in ((block_m, 0), (block_m - 3, columns // 128), (1, 1)):
        machine.copies.clear()
        _gather.gather_rows(x, token_of, operand, first, size, step, stage, interpret=False)
        expected = {}
        for j in range(size):
            row = 3 * (first + j) + 1 if is_mapped else first + j
            for chunk in range(8 * itemsize):
                target = OPERAND + stage * block_m * 128 * itemsize + place(j, 16 * chunk, 128 * itemsize)
                byte = 128 * itemsize * step + 16 * chunk
                is_there = byte < columns * itemsize
                expected[target] = (ROWS + row * columns * itemsize + byte, 16) if is_there else (0, 0)
        assert {at: read if read[1] else (0, 0) for at, read in machine.copies.items()} == expected


@pytest.mark.parametrize("is_mapped", [True, False])
def test_scales(machine: Machine, is_mapped: bool) -> None:
    """A float of each row, and those of the weights behind all rows there may be."""
    scales, weights = ref(SCALES, 100, 7), ref(WEIGHTS, 50, 7)
    token_of = ref(TOKENS, 400) if is_mapped else None
    target = ref(OPERAND, 4, 36)
    for by_step in (True, False):
        machine.copies.clear()
        source = _gather.Scales(scales, 7 if by_step else 1, by_step=by_step)
        blocks = (weights, [21, 70, 7, 140])
        _gather.gather_scales(source, token_of, target, 9, 30, 3, 1, blocks, interpret=False)
        expected = {}
        for j in range(30):
            row = 3 * (9 + j) + 1 if is_mapped else 9 + j
            at = row * 7 + 3 if by_step else row
            expected[OPERAND + 4 * (36 + j)] = (SCALES + 4 * at, 4)
        for i, start in enumerate(blocks[1]):
            expected[OPERAND + 4 * (36 + 32 + i)] = (WEIGHTS + 4 * (start + 3), 4)
        assert machine.copies == expected


def test_a_wrong_swizzle_is_seen(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    run = machine.run
    monkeypatch.setattr(machine, "run", lambda code, given: run(code.replace("xor.b32", "add.s32"), given))
    with pytest.raises(AssertionError):
        test_rows(machine, "bfloat16", 16, True)


def test_scales_of_an_expert(machine: Machine) -> None:
    """One for all rows."""
    source = _gather.Scales(ref(SCALES, 100, 1), 0, 17)
    _gather.gather_scales(source, None, ref(OPERAND, 4, 36), 9, 30, 3, 1, None, interpret=False)
    assert machine.copies == {OPERAND + 4 * (36 + j): (SCALES + 4 * 17, 4) for j in range(30)}


def test_nothing_for_a_block_of_none(machine: Machine) -> None:
    x, operand = ref(ROWS, 10, 128, dtype="bfloat16"), ref(OPERAND, 4, 8, 128, dtype="bfloat16")
    _gather.gather_rows(x, None, operand, 0, 0, 0, 0, interpret=False)
    assert machine.copies == {}
