"""The gradient of expert weights: interpreted on a CPU with a race detector, run on a Hopper GPU.

What `test_grouped_gemm` says of the interpreter is true here as well; `test_aot` compiles the kernel.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from failure_cases import assert_close_by_expert, assert_same_bits
from interpreted import interpreted, without_races
from numpy.typing import NDArray

from moe_pallas.configs.schema import GroupedGemmConfig
from moe_pallas.kernels import _mgpu
from moe_pallas.kernels.weight_gradient import Groups, Rows, weight_gradient

PLANNED, TOKENS, SORTED = Rows.PLANNED, Rows.TOKENS, Rows.SORTED


class Inputs(NamedTuple):
    left: NDArray
    right: NDArray
    groups: Groups
    want: NDArray  # (E, M, N) float64


def make_inputs(
    sizes: tuple[int, ...], m: int, n: int, rows: tuple[Rows, Rows], dtype: Any = jnp.bfloat16, seed: int = 0
) -> Inputs:
    """Random operands; NaN stands in all rows that belong to no group."""
    rng = np.random.default_rng([seed, *sizes])
    size = np.array(sizes, np.int32)
    total = int(size.sum())
    padded = -(-size // 8) * 8
    first, row = (np.asarray(np.cumsum(x) - x, np.int32) for x in (size, padded))
    token_of = rng.integers(0, total + 5, max(total, 1)).astype(np.int32)
    operands, parts = [], []
    for kind, columns in zip(rows, (m, n), strict=True):
        places = {
            PLANNED: [np.arange(r, r + s) for r, s in zip(row, size, strict=True)],
            TOKENS: [token_of[f : f + s] for f, s in zip(first, size, strict=True)],
            SORTED: [np.arange(f, f + s) for f, s in zip(first, size, strict=True)],
        }[kind]
        count = {PLANNED: int(padded.sum()) + 128, TOKENS: total + 5, SORTED: total + 3}[kind]
        values = rng.standard_normal((count, columns)).astype(jnp.dtype(dtype))
        values[np.setdiff1d(np.arange(count), np.concatenate(places))] = np.nan
        operands.append(values)
        parts.append([values[place].astype(np.float64) for place in places])
    want = np.stack([left.T @ right for left, right in zip(*parts, strict=True)])
    return Inputs(*operands, Groups(row, first, size, token_of), want)


def check(got: Any, inputs: Inputs, rtol: float) -> None:
    got = np.asarray(got)
    assert_close_by_expert(got, inputs.want, rtol)
    assert not got[inputs.groups.size == 0].astype(np.float32).any()


# Each: group sizes, M, N, where rows stand, the result's dtype, CTAs.
CASES: dict[str, tuple[tuple[int, ...], int, int, tuple[Rows, Rows], str, int]] = {
    "tokens on the right, the last tile moved back": (
        (3, 70, 0, 9), 192, 128, (PLANNED, TOKENS), "bfloat16", 2,
    ),
    "tokens on the left, float32, a stage by TMA after zeros": (
        (64, 0, 65, 130), 128, 320, (TOKENS, PLANNED), "float32", 2,
    ),
    "sorted": ((5, 0, 66), 128, 128, (SORTED, SORTED), "bfloat16", 3),
    "many empty groups": ((0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0), 128, 128, (PLANNED, PLANNED), "bfloat16", 1),
    "no rows at all": ((0, 0), 128, 128, (TOKENS, PLANNED), "bfloat16", 2),
    "float16": ((7, 1), 128, 128, (PLANNED, TOKENS), "float16", 2),
}  # fmt: skip
RTOL = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 1e-6}


@pytest.mark.parametrize("name", CASES)
def test_interpreted(name: str) -> None:
    sizes, m, n, rows, out_dtype, num_ctas = CASES[name]
    dtype = jnp.float16 if out_dtype == "float16" else jnp.bfloat16
    inputs = make_inputs(sizes, m, n, rows, dtype)
    options: Any = {"rows": rows, "out_dtype": out_dtype, "num_ctas": num_ctas}
    program = interpreted(weight_gradient, name="weight_gradient", config=GroupedGemmConfig(), **options)
    got = without_races(program, *inputs[:3])
    assert got.dtype == out_dtype
    check(got, inputs, RTOL[out_dtype])


def test_interleaved_interpreted() -> None:
    """Left's columns are those of gate, then up; the result's rows take turns."""
    inputs = make_inputs((5, 3), 384, 128, (PLANNED, TOKENS))
    options: Any = {"rows": (PLANNED, TOKENS), "is_interleaved": True, "num_ctas": 2}
    program = interpreted(weight_gradient, name="weight_gradient", config=GroupedGemmConfig(), **options)
    got = without_races(program, *inputs[:3])
    want = inputs.want.reshape(2, 2, 192, 128).swapaxes(1, 2).reshape(2, 384, 128)
    check(got, inputs._replace(want=want), RTOL["bfloat16"])


# On a GPU


CONFIG = GroupedGemmConfig()


@functools.cache
def program(rows: tuple[Rows, Rows], out_dtype: str, config: GroupedGemmConfig = CONFIG) -> Any:
    return jax.jit(
        lambda left, right, groups: weight_gradient(
            left,
            right,
            groups,
            rows,
            name="weight_gradient",
            out_dtype=out_dtype,
            config=config,
            num_ctas=_mgpu.num_sms(),
        )
    )


SIZES = [
    (300, 77, 0, 129),
    (0, 0, 0),
    (1, 0, 63, 64, 65, 127, 128, 129),
    (7, 41, 64, 100, 1, 0, 43),
    (4001, 0, 1, 3),
    (0,) * 60 + (13,) + (0,) * 400,
]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [(PLANNED, TOKENS), (TOKENS, PLANNED), (SORTED, SORTED), (PLANNED, PLANNED)])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("m", "n"), [(128, 128), (192, 704), (1536, 2048)])
def test_sizes(rows: tuple[Rows, Rows], out_dtype: str, m: int, n: int) -> None:
    for sizes in SIZES[: 3 if m > 1000 else None]:
        inputs = make_inputs(sizes, m, n, rows)
        # A GPU adds a group's rows in float32, in another order than the truth.
        check(program(rows, out_dtype)(*inputs[:3]), inputs, max(RTOL[out_dtype], 1e-5))


@pytest.mark.gpu
@pytest.mark.parametrize("num_stages", [3, 4])
@pytest.mark.parametrize("band", [1, 8])
def test_configurations(num_stages: int, band: int) -> None:
    inputs = make_inputs((300, 77, 0, 129), 704, 1024, (PLANNED, TOKENS), jnp.float16)
    run = program((PLANNED, TOKENS), "float16", GroupedGemmConfig(num_stages=num_stages, band=band))
    check(run(*inputs[:3]), inputs, RTOL["float16"])


@pytest.mark.gpu
def test_fifty_calls_repeat_bitwise() -> None:
    inputs = [
        make_inputs(sizes, 1024, 768, (PLANNED, TOKENS), seed=seed)
        for seed, sizes in enumerate(((300, 0, 700, 129), (1000, 1, 0, 65), (64, 64, 64, 937)))
    ]
    run = program((PLANNED, TOKENS), "bfloat16")
    outputs = [[run(*x[:3]) for x in inputs] for _ in range(50)]
    for again in outputs:
        for got, first, one in zip(again, outputs[0], inputs, strict=True):
            assert_same_bits(got, first)
            if again is outputs[0]:
                check(got, one, RTOL["bfloat16"])
