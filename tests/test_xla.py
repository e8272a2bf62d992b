"""The portable backend's grouped products: both walks over tiles, the same on any device."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_pallas import MoE, MoESpec, fused_moe, reference, xla
from moe_pallas.testing import assert_close, random_logits, random_params, random_tokens

# Empty groups first, last and in a row; one row; primes; groups that straddle every block size; one hot.
GROUP_SIZES = [
    [0, 0, 3, 1, 0, 4, 0],
    [7, 41, 64, 100, 1, 0, 43],
    [128, 130, 65],
    [100, 0, 28, 1],
    [0, 0, 0, 300],
    [300, 0, 0, 0],
    [1],
    [0, 0],
    [5, 1031, 3],
]


@pytest.fixture(params=["one_by_one", "many_at_once"])
def walk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with the CPU's walk over tiles and with the one that all other platforms take."""

    def platform_dependent(*operands: jax.Array, cpu: Callable, default: Callable) -> jax.Array:
        return (cpu if request.param == "one_by_one" else default)(*operands)

    monkeypatch.setattr(xla.lax, "platform_dependent", platform_dependent)
    return request.param


def grouped_case(sizes: list[int], past: int = 5, n: int = 24, k: int = 40) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(len(sizes))
    rows = rng.standard_normal((sum(sizes) + past, k)).astype(np.float32)
    weights = rng.standard_normal((len(sizes), n, k)).astype(np.float32)
    return rows, weights, np.array(sizes, np.int32), np.repeat(np.arange(len(sizes)), sizes)


@pytest.mark.parametrize("sizes", GROUP_SIZES, ids=str)
def test_each_row_meets_its_own_matrix(walk: str, sizes: list[int]) -> None:
    rows, weights, group_sizes, group_of_row = grouped_case(sizes)
    out = jax.jit(xla.grouped_matmul)(rows, weights, group_sizes)
    expected = np.zeros(out.shape)
    for r, group in enumerate(group_of_row):
        expected[r] = weights[group].astype(np.float64) @ rows[r]
    assert_close(out, expected, context=f"{walk} {sizes}")


@pytest.mark.parametrize("sizes", GROUP_SIZES, ids=str)
def test_gradients_are_those_of_a_loop_over_groups(walk: str, sizes: list[int]) -> None:
    rows, weights, group_sizes, group_of_row = grouped_case(sizes)
    d_out = np.random.default_rng(9).standard_normal((len(rows), weights.shape[1])).astype(np.float32)

    @jax.jit
    def gradients(rows: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.vjp(lambda r, w: xla.grouped_matmul(r, w, jnp.asarray(group_sizes)), rows, weights)[1](
            jnp.asarray(d_out)
        )

    d_rows, d_weights = gradients(rows, weights)
    expected_rows, expected_weights = np.zeros(rows.shape), np.zeros(weights.shape)
    for r, group in enumerate(group_of_row):
        expected_rows[r] = d_out[r].astype(np.float64) @ weights[group]
        expected_weights[group] += np.outer(d_out[r].astype(np.float64), rows[r])
    assert_close(d_rows, expected_rows, context=f"{walk} {sizes}")
    assert_close(d_weights, expected_weights, context=f"{walk} {sizes}")  # empty groups: exactly 0


def test_nan_in_a_group_stays_in_its_rows(walk: str) -> None:
    rows, weights, group_sizes, group_of_row = grouped_case([3, 9, 0, 20], past=4)
    clean = np.asarray(jax.jit(xla.grouped_matmul)(rows, weights, group_sizes))
    weights[2] = np.nan  # nobody's
    weights[1] = np.nan
    rows[-4:] = np.nan  # past the groups
    out = np.asarray(jax.jit(xla.grouped_matmul)(rows, weights, group_sizes))
    is_theirs = np.append(group_of_row == 1, [False] * 4)
    assert np.isnan(out[is_theirs]).all()
    np.testing.assert_array_equal(out[~is_theirs], clean[~is_theirs])


@pytest.mark.parametrize("num_tokens", [1, 3, 64, 700])
def test_the_layer_is_right_with_either_walk(walk: str, num_tokens: int) -> None:
    spec = MoESpec(num_experts=6, top_k=2, hidden_size=36, intermediate_size=20, expert_bias=True)
    params, x = random_params(spec), random_tokens(spec, num_tokens)
    assert_close(jax.jit(MoE(spec).apply)(params, x), reference.moe(params, x, spec), context=walk)


@pytest.mark.parametrize("copy_bytes", [1, 2000, 2**28])
def test_copies_are_bounded_and_change_nothing(
    walk: str, copy_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, weights, group_sizes, _ = grouped_case([7, 41, 64, 100, 1, 0, 43])
    expected = jax.jit(xla.grouped_matmul)(rows, weights, group_sizes)
    monkeypatch.setattr(xla, "_COPY_BYTES", copy_bytes)
    got = jax.jit(lambda *operands: xla.grouped_matmul(*operands))(rows, weights, group_sizes)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("load", ["uniform", "zipf", "one_hot"])
def test_on_the_device_a_layer_matches_the_reference(dtype: str, load: str) -> None:
    spec = MoESpec(num_experts=60, top_k=6, hidden_size=96, intermediate_size=80)
    params, x = random_params(spec, dtype=dtype), random_tokens(spec, 133, dtype=dtype)
    logits = random_logits(133, 60, load=load)
    layer = jax.jit(functools.partial(fused_moe, spec=spec, backend="xla"))
    y = layer(x, logits, params["w13"], params["w2"])
    assert_close(y, reference.fused_moe(x, logits, params["w13"], params["w2"], spec=spec))
