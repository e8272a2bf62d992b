"""Failure cases of the experts (A, D, E, G, H): see failure_cases.py."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from failure_cases import (
    IMPLEMENTATIONS,
    assert_close_by_expert,
    assert_close_by_stripe,
    assert_same_bits,
    experts_of,
    grouped_matmul_for,
    poison_memory,
    run_experts,
    run_layer,
    run_moe,
)
from numpy.typing import ArrayLike, NDArray

from moe_pallas import MoE, MoESpec, Routing, fused_experts, fused_moe, reference
from moe_pallas.interop import convert_gate_up
from moe_pallas.oracle import PORTABLE_BACKENDS
from moe_pallas.plan import make_plan
from moe_pallas.routing import count_experts
from moe_pallas.testing import assert_close, random_logits, random_params, random_tokens

implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
backends = pytest.mark.parametrize("backend", PORTABLE_BACKENDS)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(params=["cpu", "elsewhere"])
def grouped_matmul(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """rows[r] @ weights[group of r].T: (R, K), (G, N, K) and group sizes → (R, N) float32."""
    return grouped_matmul_for(request.param, monkeypatch)


def make_spec(**options: Any) -> MoESpec:
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 16, "intermediate_size": 8}
    return MoESpec(**(sizes | options))


def random_experts(spec: MoESpec, dtype: str = "float32", seed: int = 0) -> dict[str, NDArray]:
    return experts_of(random_params(spec, dtype=dtype, seed=seed))


def expert(params: dict[str, NDArray], index: int, x: ArrayLike, spec: MoESpec) -> NDArray:
    """f_index(x), float64."""
    one = dataclasses.replace(spec, num_experts=1, top_k=1, weight_on="output")
    mine = {name: value[index : index + 1] for name, value in params.items()}
    lead = (*np.shape(x)[:-1], 1)
    return reference.fused_experts(x, np.zeros(lead, int), np.ones(lead), **mine, spec=one)


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> NDArray:
    return np.random.default_rng([seed, len(shape)]).standard_normal(shape).astype(dtype)


def loop(rows: NDArray, weights: NDArray, group_sizes: ArrayLike) -> NDArray:
    """The grouped product in float64, group by group; 0 past the groups."""
    rows, weights = rows.astype(np.float64), weights.astype(np.float64)
    out, start = np.zeros((len(rows), weights.shape[1])), 0
    for matrix, size in zip(weights, np.asarray(group_sizes), strict=True):
        out[start : start + size] = rows[start : start + size] @ matrix.T
        start += size
    return out


# A shapes and tails


@pytest.mark.parametrize(("k", "n"), [(96, 96), (97, 33), (1, 130)])
def test_a1_tails_of_the_contraction_and_the_outputs(grouped_matmul: Any, k: int, n: int) -> None:
    rows, weights = normal(32, k), normal(32, n, k)
    got = grouped_matmul(rows, weights, np.ones(32, np.int32))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, loop(rows, weights, np.ones(32, int)), rtol=0, atol=1e-4)


@implementations
def test_a1_one_token_per_expert(implementation: str) -> None:
    spec = make_spec(num_experts=32, top_k=1, hidden_size=96, intermediate_size=96)
    params, x = random_experts(spec), random_tokens(spec, 32)
    ids = np.random.default_rng(1).permutation(32).astype(np.int32)[:, None]
    y = run_experts(implementation, x, ids, np.ones((32, 1), np.float32), **params, spec=spec)
    expected = np.stack([expert(params, e, row, spec) for e, row in zip(ids[:, 0], x, strict=True)])
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-4)
    assert_close_by_stripe(y, expected, 1e-5)


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_a3_rows_past_the_count_are_zero_and_touch_nobody(grouped_matmul: Any, dtype: Any) -> None:
    counts = np.array([3, 8, 0, 5], np.int32)
    rows, weights = normal(64, 64, dtype=dtype), normal(4, 32, 64, dtype=dtype)
    expected = loop(rows, weights, counts)
    rows[16:] = 1e4
    poison_memory()
    got = np.asarray(grouped_matmul(rows, weights, counts))
    assert_close(got[:16], expected[:16], dtype="float32")
    assert (got[16:] == 0).all()
    rows[16:] = np.nan
    assert_same_bits(grouped_matmul(rows, weights, counts), got)


@backends
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 7, 9, 63, 127, 128, 129])
def test_a4_any_number_of_tokens(backend: str, num_tokens: int) -> None:
    spec = make_spec(num_experts=16, hidden_size=128, intermediate_size=64)
    params = random_experts(spec, "bfloat16")
    x, logits = random_tokens(spec, 256, dtype="bfloat16"), random_logits(256, 16)
    x[num_tokens:], logits[num_tokens:] = 0, 0
    y = run_moe(backend, x[:num_tokens], logits[:num_tokens], params["w13"], params["w2"], spec=spec)
    padded = run_moe(backend, x, logits, params["w13"], params["w2"], spec=spec)
    assert_close(y, padded[:num_tokens])
    truth = reference.fused_moe(x[:num_tokens], logits[:num_tokens], **params, spec=spec)
    assert_close(y, truth)


@backends
@pytest.mark.parametrize("lead", [(0,), (2, 0)])
def test_a5_no_tokens(backend: str, lead: tuple[int, ...]) -> None:
    spec = make_spec(expert_bias=True, router_bias=True, shared_intermediate_size=4)
    params = random_params(spec, dtype="bfloat16")
    x = jnp.zeros((*lead, 16), jnp.bfloat16)
    layer = MoE(spec, backend=backend)

    def total(params: Any, x: jax.Array) -> jax.Array:
        return layer.apply(params, x).astype(jnp.float32).sum()

    for transform in (lambda f: f, jax.jit):
        y, aux = transform(lambda params, x: layer.apply(params, x, return_aux=True))(params, x)
        assert (y.shape, y.dtype) == ((*lead, 16), jnp.bfloat16)
        assert aux.expert_loads.tolist() == [0, 0, 0, 0]
        assert (float(aux.load_balance_loss), float(aux.router_z_loss)) == (0.0, 0.0)
        d_params, dx = transform(jax.grad(total, argnums=(0, 1)))(params, x)
        assert dx.shape == x.shape
        for name, gradient in d_params.items():
            assert gradient.shape == spec.param_shapes[name]
            assert (np.asarray(gradient) == 0).all()
    routing = Routing(jnp.zeros((*lead, 2), jnp.int32), jnp.zeros((*lead, 2)))
    experts = experts_of(params)
    assert fused_experts(x, routing, **experts, spec=spec, backend=backend).shape == (*lead, 16)
    logits = jnp.zeros((*lead, 4))
    assert fused_moe(x, logits, **experts, spec=spec, backend=backend, num_tokens=0).shape == (*lead, 16)
    assert reference.moe(params, np.asarray(x), spec).shape == (*lead, 16)


def test_a5_no_rows(grouped_matmul: Any) -> None:
    rows, weights = normal(0, 6), normal(3, 5, 6)
    out, pull_back = jax.vjp(lambda r, w: grouped_matmul(r, w, np.zeros(3, np.int32)), rows, weights)
    d_rows, d_weights = pull_back(out)
    assert (out.shape, d_rows.shape, d_weights.shape) == ((0, 5), (0, 6), (3, 5, 6))
    assert not np.asarray(d_weights).any()


@pytest.mark.parametrize(
    "counts",
    [
        [128, 130, 65],
        [100, 0, 28, 1],
        [7, 8, 9, 15, 16, 17, 0, 1],
        [0, 0, 0, 5],
    ],
    ids=str,
)
def test_a6_groups_that_end_inside_a_block(grouped_matmul: Any, counts: list[int]) -> None:
    """Weights (e + 1) · identity: each row comes back exactly e + 1 times itself."""
    factor = np.repeat(np.arange(1, len(counts) + 1), counts).astype(np.float32)[:, None]
    weights = np.arange(1, len(counts) + 1)[:, None, None] * np.eye(64, dtype=np.float32)
    weights = weights.astype(np.float32)
    rows = normal(sum(counts), 64)
    poison_memory()
    out, pull_back = jax.vjp(lambda r, w: grouped_matmul(r, w, np.array(counts, np.int32)), rows, weights)
    assert np.array_equal(out, factor * rows)
    d_rows, d_weights = pull_back(jnp.asarray(rows[::-1]))
    assert np.array_equal(d_rows, factor * rows[::-1])
    ends = np.cumsum(counts)
    expected = np.stack(
        [
            rows[::-1][end - count : end].astype(np.float64).T @ rows[end - count : end]
            for end, count in zip(ends, counts, strict=True)
        ]
    )
    assert_close_by_expert(d_weights, expected, 1e-5)


@pytest.mark.parametrize("block", [8, 32, 128])
@pytest.mark.parametrize("extra", [0, 1])
def test_a6_every_block_size(grouped_matmul: Any, block: int, extra: int) -> None:
    """R around the thresholds where the portable backend takes the next block size; all splits in two."""
    num_rows = 2 * block + extra
    rows, weights = normal(num_rows, 12), normal(2, 5, 12)
    d_out = normal(num_rows, 5, seed=1)

    @jax.jit
    def both(sizes: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        out, pull_back = jax.vjp(lambda r, w: grouped_matmul(r, w, sizes), rows, weights)
        return out, pull_back(d_out)

    for first in {0, 1, block - 1, block, block + 1, num_rows - 1, num_rows}:
        out, (d_rows, d_weights) = both(np.array([first, num_rows - first], np.int32))
        assert_close(out, loop(rows, weights, [first, num_rows - first]), dtype="float32")
        transposed = weights.swapaxes(1, 2)
        assert_close(d_rows, loop(d_out, transposed, [first, num_rows - first]), dtype="float32")
        d64, r64 = d_out.astype(np.float64), rows.astype(np.float64)
        expected = np.stack([d64[:first].T @ r64[:first], d64[first:].T @ r64[first:]])
        assert_close_by_expert(d_weights, expected, 1e-5)


@pytest.mark.parametrize("width", [704, 768, 1536])
def test_a7_weight_gradients_of_any_width(grouped_matmul: Any, width: int) -> None:
    sizes = np.array([100, 0, 257, 1, 300, 66, 200, 100], np.int32)
    rows, weights = normal(1024, 64, dtype=BFLOAT16), normal(8, width, 64, dtype=BFLOAT16)
    d_out = normal(1024, width, seed=1, dtype=BFLOAT16)

    @jax.jit
    def gradient(rows: jax.Array, weights: jax.Array) -> jax.Array:
        _, pull_back = jax.vjp(lambda w: grouped_matmul(rows, w, sizes), weights)
        return pull_back(jnp.asarray(d_out, jnp.float32))[0]

    ends = np.cumsum(sizes)
    d64, r64 = d_out.astype(np.float64), rows.astype(np.float64)
    expected = np.stack(
        [d64[end - n : end].T @ r64[end - n : end] for end, n in zip(ends, sizes, strict=True)]
    )
    got = np.asarray(gradient(rows, weights))
    assert got.dtype == BFLOAT16
    assert_close_by_expert(got, expected, 4e-3)  # one rounding to bfloat16


@backends
@pytest.mark.parametrize("num_tokens", [65, 74])
def test_a8_chunks_of_tokens_equal_the_whole(backend: str, num_tokens: int) -> None:
    spec = make_spec(num_experts=8, hidden_size=64, intermediate_size=32)
    params, x, logits = random_experts(spec), random_tokens(spec, num_tokens), random_logits(num_tokens, 8)

    def run(part: slice) -> NDArray:
        return run_moe(backend, x[part], logits[part], params["w13"], params["w2"], spec=spec)

    whole = run(slice(None))
    assert_close(np.concatenate([run(slice(64)), run(slice(64, None))]), whole)
    assert_close(whole, reference.fused_moe(x, logits, params["w13"], params["w2"], spec=spec))


# D loads and ids


@implementations
@pytest.mark.parametrize("ids", [[7], [0], [7, 6], [0, 1]], ids=str)
def test_d1_all_tokens_at_one_expert(implementation: str, ids: list[int]) -> None:
    spec = make_spec(num_experts=8, top_k=len(ids))
    params, x = random_experts(spec), random_tokens(spec, 1024)
    weights = np.tile(np.float32([0.75, 0.5][: len(ids)]), (1024, 1))
    y = run_experts(implementation, x, np.tile(np.int32(ids), (1024, 1)), weights, **params, spec=spec)
    expected = sum(w * expert(params, e, x, spec) for e, w in zip(ids, (0.75, 0.5), strict=False))
    assert_close(y, expected, dtype="float32")
    assert np.asarray(count_experts(jnp.array([ids] * 1024), 8))[ids].tolist() == [1024] * len(ids)


@backends
def test_d2_few_tokens_for_many_experts_after_poisoned_memory(backend: str) -> None:
    spec = make_spec(num_experts=128, hidden_size=64, intermediate_size=32)
    params = random_experts(spec)
    small = random_tokens(spec, 4), random_logits(4, 128)
    truth = reference.fused_moe(*small, params["w13"], params["w2"], spec=spec)
    for repeat in range(10):
        large = random_tokens(spec, 512, seed=repeat), random_logits(512, 128, seed=repeat)
        with np.errstate(over="ignore"):
            large[0][:] = [np.nan, 1e30][repeat % 2]
        run_moe(backend, *large, params["w13"], params["w2"], spec=spec)
        poison_memory()
        assert_close(run_moe(backend, *small, params["w13"], params["w2"], spec=spec), truth)


@implementations
@pytest.mark.parametrize("renormalize", [False, True])
def test_d3_one_expert_per_token_is_weighted_and_scaled(implementation: str, renormalize: bool) -> None:
    spec = make_spec(top_k=1, routed_scaling_factor=1.5, renormalize=renormalize)
    params, x, logits = random_experts(spec), random_tokens(spec, 8), random_logits(8, 4)
    powers = np.exp(logits.astype(np.float64))
    weights = np.ones(8) if renormalize else powers.max(-1) / powers.sum(-1)
    expected = np.stack(
        [
            1.5 * w * expert(params, e, row, spec)
            for w, e, row in zip(weights, logits.argmax(-1), x, strict=True)
        ]
    )
    for _ in range(2):
        y = run_moe(implementation, x, logits, params["w13"], params["w2"], spec=spec)
        assert_close(y, expected, dtype="float32")
        poison_memory()


@implementations
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("biased", [False, True])
def test_d4_the_weight_goes_on_the_input_or_the_output(implementation: str, top_k: int, biased: bool) -> None:
    weights = np.float32([[0.5, 2.0, -1.0][:top_k]])
    ids = np.int32([[2, 0, 3][:top_k]])
    on_output = make_spec(top_k=top_k, expert_bias=biased)
    on_input = dataclasses.replace(on_output, weight_on="input")
    params, x = random_experts(on_output), random_tokens(on_output, 1)
    slots = list(zip(ids[0], weights[0].astype(float), strict=True))
    expected = {
        on_output: sum(w * expert(params, e, x, on_output) for e, w in slots),
        on_input: sum(expert(params, e, w * x, on_output) for e, w in slots),
    }
    twice = sum(w * expert(params, e, w * x, on_output) for e, w in slots)
    for spec, want in expected.items():
        y = run_experts(implementation, x, ids, weights, **params, spec=spec)
        assert_close(y, want, dtype="float32")
        for other in (twice, *(value for key, value in expected.items() if key is not spec)):
            assert np.abs(y - other).max() > 0.1 * np.abs(want).max()


@backends
@pytest.mark.parametrize("num_tokens", [1, 64])
def test_d5_one_expert_is_a_dense_mlp(backend: str, num_tokens: int) -> None:
    spec = make_spec(num_experts=1, top_k=1, hidden_size=128, intermediate_size=128)
    params, x = random_experts(spec), random_tokens(spec, num_tokens)
    logits = random_logits(num_tokens, 1)

    def dense(x: jax.Array, w13: jax.Array, w2: jax.Array) -> jax.Array:
        gate, up = jnp.split(jnp.matmul(x, w13[0].T, precision="highest"), 2, axis=-1)
        return jnp.matmul(jax.nn.silu(gate) * up, w2[0].T, precision="highest")

    def moe(x: jax.Array, w13: jax.Array, w2: jax.Array) -> jax.Array:
        return fused_moe(x, logits, w13, w2, spec=spec, backend=backend)

    @jax.jit
    def both(*args: jax.Array) -> Any:
        out = []
        for function in (moe, dense):
            y, pull_back = jax.vjp(function, *args)
            out.append((y, pull_back(jnp.cos(args[0]))))
        return out

    (y, gradients), (want, expected) = both(x, params["w13"], params["w2"])
    assert_close(y, want)
    for got, gradient in zip(gradients, expected, strict=True):
        assert_close_by_expert(got, gradient, 1e-4)


@implementations
@pytest.mark.parametrize("biased", [False, True])
def test_d6_an_expert_chosen_twice_counts_twice(implementation: str, biased: bool) -> None:
    spec = make_spec(expert_bias=biased)
    params, x = random_experts(spec), random_tokens(spec, 2)
    ids, weights = np.int32([[3, 3], [3, 1]]), np.float32([[0.25, 0.75], [0.5, 0.5]])
    y = run_experts(implementation, x, ids, weights, **params, spec=spec)
    third, first = expert(params, 3, x, spec), expert(params, 1, x, spec)
    assert_close(y, np.stack([third[0], 0.5 * third[1] + 0.5 * first[1]]), dtype="float32")
    assert make_plan(jnp.asarray(ids), 4).group_sizes.tolist() == [0, 1, 0, 3]


@backends
def test_d6_both_weights_of_a_repeated_expert_have_a_gradient(backend: str) -> None:
    spec = make_spec()
    params, x = random_experts(spec), random_tokens(spec, 2)
    ids, g = jnp.array([[3, 3], [3, 1]]), normal(2, 16, seed=6)

    @jax.jit
    @jax.grad
    def gradient(weights: jax.Array) -> jax.Array:
        return (fused_experts(x, Routing(ids, weights), **params, spec=spec, backend=backend) * g).sum()

    got = gradient(jnp.array([[0.25, 0.75], [0.5, 0.5]]))
    third, first = expert(params, 3, x, spec), expert(params, 1, x, spec)
    expected = [[g[0] @ third[0], g[0] @ third[0]], [g[1] @ third[1], g[1] @ first[1]]]
    np.testing.assert_allclose(got, expected, rtol=1e-4)


DROPPED = pytest.mark.parametrize("dropped", [-1, -4, 4, 7, 2**31 - 1, -(2**31)])


@implementations
@DROPPED
def test_d7_ids_out_of_range_add_nothing(implementation: str, dropped: int) -> None:
    spec = make_spec(expert_bias=True)
    params, x = random_experts(spec), random_tokens(spec, 3)
    ids, weights = np.int32([[0, dropped], [dropped, dropped], [2, 3]]), np.full((3, 2), 0.5, np.float32)
    y = run_experts(implementation, x, ids, weights, **params, spec=spec)
    f = [expert(params, e, x, spec) for e in range(4)]
    assert_close(y, np.stack([0.5 * f[0][0], np.zeros(16), 0.5 * f[2][2] + 0.5 * f[3][2]]), dtype="float32")
    assert not y[1].any()
    assert make_plan(jnp.asarray(ids), 4).group_sizes.tolist() == [1, 0, 1, 1]
    assert count_experts(jnp.asarray(ids), 4).tolist() == [1, 0, 1, 1]


@implementations
@pytest.mark.parametrize("weight_on", ["output", "input"])
@pytest.mark.parametrize("bad", [0, 1, 3])
def test_d7_an_expert_that_nobody_visits_may_hold_nan(implementation: str, weight_on: str, bad: int) -> None:
    spec = make_spec(expert_bias=True, weight_on=weight_on)
    params, x = random_experts(spec), random_tokens(spec, 3)
    for value in params.values():
        value[bad] = np.nan
    good = (bad + 1) % 4
    ids = np.int32([[good, -1], [-1, -1], [2, good]])
    weights = np.float32([[0.5, np.nan], [np.nan, 1e30], [0.5, 0.5]])
    y = run_experts(implementation, x, ids, weights, **params, spec=spec)
    assert np.isfinite(y).all()
    assert y[0].any()
    assert not y[1].any()


@backends
@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_d7_an_expert_that_nobody_visits_has_gradient_zero(backend: str, weight_on: str) -> None:
    spec = make_spec(expert_bias=True, weight_on=weight_on)
    x = random_tokens(spec, 3)

    @jax.jit
    def gradients(params: Any, x: jax.Array, ids: jax.Array, weights: jax.Array) -> Any:
        def total(params: Any, x: jax.Array, weights: jax.Array) -> jax.Array:
            y = fused_experts(x, Routing(ids, weights), **params, spec=spec, backend=backend)
            return (y * jnp.sin(jnp.arange(48.0).reshape(3, 16))).sum()

        return jax.grad(total, argnums=(0, 1, 2))(params, x, weights)

    for bad in range(4):
        for value in (np.nan, np.inf, 1e30):
            params, good = random_experts(spec), (bad + 1) % 4
            for array in params.values():
                array[bad] = value
            ids = np.int32([[good, -1], [-1, 9], [good, good]])
            d_params, dx, d_weights = gradients(params, x, ids, np.full((3, 2), 0.5, np.float32))
            for name, gradient in d_params.items():
                assert not np.delete(np.asarray(gradient), good, axis=0).any(), (name, bad, value)
                assert np.isfinite(gradient).all() and np.asarray(gradient)[good].any(), (name, bad, value)
            assert np.isfinite(dx).all()
            assert not np.asarray(dx)[1].any()
            assert np.isfinite(d_weights).all()
            assert (np.asarray(d_weights) != 0).tolist() == [[True, False], [False, False], [True, True]]


@implementations
def test_d10_a_shard_of_the_experts_skips_the_rows_of_the_others(implementation: str) -> None:
    """A shard sees ids less its first expert; the others' ids are out of its range then."""
    spec = make_spec(num_experts=8, top_k=1, expert_bias=True)
    params, x = random_experts(spec), random_tokens(spec, 16)
    ids = np.repeat(np.arange(8), [3, 0, 5, 4, 2, 1, 0, 1]).astype(np.int32)[:, None]
    weights = normal(16, 1, seed=10)
    whole = run_experts(implementation, x, ids, weights, **params, spec=spec)
    total = np.zeros_like(whole)
    for first, last in [(0, 2), (2, 5), (5, 8)]:
        shard = dataclasses.replace(spec, num_experts=last - first)
        local = {name: value[first:last] for name, value in params.items()}
        y = run_experts(implementation, x, ids - first, weights, **local, spec=shard)
        mine = (ids[:, 0] >= first) & (ids[:, 0] < last)
        assert_close(y[mine], whole[mine], dtype="float32")
        assert not y[~mine].any()
        total += y
    assert_close(total, whole, dtype="float32")
    nothing = {name: value[:1] for name, value in params.items()}
    empty = dataclasses.replace(spec, num_experts=1)
    assert not run_experts(implementation, x, ids + 1, weights, **nothing, spec=empty).any()


def test_d10_no_experts_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_experts is an int >= 1; got 0"):
        make_spec(num_experts=0)


# E NaN and padding


@implementations
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("as_count", [False, True], ids=["mask", "num_tokens"])
def test_e1_padding_may_hold_nan(implementation: str, dtype: str, as_count: bool) -> None:
    spec = make_spec(num_experts=8, hidden_size=64, intermediate_size=32, shared_intermediate_size=16)
    params = random_params(spec, dtype=dtype)
    x = random_tokens(spec, 16, dtype=dtype)
    x[8:] = 0
    padding = {"num_tokens": np.int32(8)} if as_count else {"mask": np.arange(16) < 8}
    expected = run_layer(implementation, params, x, spec, **padding)
    for bad in (np.nan, np.inf, -np.inf, 1e30):
        x[8:] = bad
        y = run_layer(implementation, params, x, spec, **padding)
        assert_same_bits(y, expected)
        assert not y[8:].any()
    assert_close(expected[:8], reference.moe(params, x[:8], spec), dtype=dtype)


@implementations
def test_e1_padding_of_logits_may_hold_nan(implementation: str) -> None:
    spec = make_spec(num_experts=8)
    params, x, logits = random_experts(spec), random_tokens(spec, 16), random_logits(16, 8)
    mask = np.arange(16) % 3 > 0
    x[~mask], logits[~mask] = np.nan, np.nan
    y = run_moe(implementation, x, logits, params["w13"], params["w2"], spec=spec, mask=mask)
    expected = run_moe(implementation, x[mask], logits[mask], params["w13"], params["w2"], spec=spec)
    assert_close(y[mask], expected, dtype="float32")
    assert not y[~mask].any()


@backends
def test_e1_padding_is_in_no_gradient(backend: str) -> None:
    spec = make_spec(num_experts=8, expert_bias=True, shared_intermediate_size=8, shared_expert_gate=True)
    params, x = random_params(spec), random_tokens(spec, 16)
    layer = MoE(spec, backend=backend)

    @jax.jit
    def gradients(params: Any, x: jax.Array, mask: jax.Array | None) -> Any:
        def total(params: Any, x: jax.Array) -> jax.Array:
            y = layer.apply(params, x, mask=mask)
            return (y * jnp.sin(jnp.arange(float(y.size)).reshape(y.shape))).sum()

        return jax.grad(total, argnums=(0, 1))(params, x)

    d_expected, dx_expected = gradients(params, x[:8], None)
    for bad in (np.nan, np.inf, 1e30):
        x[8:] = bad
        d_params, dx = gradients(params, x, np.arange(16) < 8)
        assert not np.asarray(dx[8:]).any()
        assert_close_by_expert(dx[:8], dx_expected, 1e-5, "x")
        for name, gradient in d_params.items():
            assert_close_by_expert(gradient, d_expected[name], 1e-5, name)


@implementations
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("bad_id", [12345, 2**31 - 1])
def test_e3_garbage_past_the_valid_rows(implementation: str, counted: bool, bad_id: int) -> None:
    """A receive buffer: 9 of 32 rows are valid. Ids out of range are enough; a count works as well."""
    spec = make_spec(num_experts=8, expert_bias=True)
    params, x = random_experts(spec), random_tokens(spec, 32)
    ids = np.random.default_rng(3).integers(0, 8, (32, 2)).astype(np.int32)
    weights = normal(32, 2, seed=3)
    expected = run_experts(implementation, x[:9], ids[:9], weights[:9], **params, spec=spec)
    x[9:], ids[9:], weights[9:] = np.nan, bad_id, np.nan
    padding = {"num_tokens": np.int32(9)} if counted else {}
    if counted:
        ids[20:] = 3  # a legal id past the count is garbage just the same
    y = run_experts(implementation, x, ids, weights, **params, spec=spec, **padding)
    assert_close(y[:9], expected, dtype="float32")
    assert not y[9:].any()


@implementations
@pytest.mark.parametrize("name", ["w13", "w2", "b13", "b2"])
@pytest.mark.parametrize("bad", [0, 2])
def test_e4_nan_in_one_expert_stays_with_its_tokens(implementation: str, name: str, bad: int) -> None:
    spec = make_spec(top_k=1, expert_bias=True)
    params, x = random_experts(spec), random_tokens(spec, 16)
    ids, weights = (np.arange(16, dtype=np.int32) % 4)[:, None], np.ones((16, 1), np.float32)
    clean = run_experts(implementation, x, ids, weights, **params, spec=spec)
    params[name][bad] = np.nan
    y = run_experts(implementation, x, ids, weights, **params, spec=spec)
    theirs = ids[:, 0] == bad
    assert_same_bits(y[~theirs], clean[~theirs])
    assert np.isnan(y[theirs]).all()


@implementations
@pytest.mark.parametrize("axes", [(0, 2, 1), (1, 0, 2), (1, 2, 0)], ids=str)
@pytest.mark.parametrize("name", ["w13", "w2"])
def test_e4_wrongly_laid_out_weights_are_refused(
    implementation: str, name: str, axes: tuple[int, ...]
) -> None:
    spec = make_spec(num_experts=5, intermediate_size=6)
    params, x = random_experts(spec), random_tokens(spec, 2)
    params[name] = params[name].transpose(axes)
    ids, weights = np.zeros((2, 2), np.int32), np.ones((2, 2), np.float32)
    with pytest.raises(ValueError, match=name):
        run_experts(implementation, x, ids, weights, **params, spec=spec)


# G gate, up, clamps, biases


def preactivation_experts(
    gate: ArrayLike, up: ArrayLike, order: str, *, by_bias: bool = False
) -> tuple[dict[str, NDArray], NDArray]:
    """One expert whose gate and up are given (F,) for the token returned; w2 is the identity (D = F)."""
    gate, up = np.float32(gate), np.float32(up)
    rows = np.concatenate([gate, up]) if order == "stacked" else np.stack([gate, up], 1).reshape(-1)
    d = len(gate)
    w13, x = np.zeros((1, 2 * d, d), np.float32), np.zeros((1, d), np.float32)
    x[0, -1] = 0.5
    params = {"w13": w13, "w2": np.eye(d, dtype=np.float32)[None]}
    if by_bias:
        return params | {"b13": rows[None], "b2": np.zeros((1, d), np.float32)}, x
    w13[0, :, -1] = 2 * rows
    return params, x


def one_expert(width: int, **options: Any) -> MoESpec:
    return make_spec(num_experts=1, top_k=1, hidden_size=width, intermediate_size=width, **options)


def run_one(implementation: str, params: dict[str, NDArray], x: NDArray, spec: MoESpec) -> NDArray:
    lead = (*x.shape[:-1], 1)
    return run_experts(
        implementation, x, np.zeros(lead, np.int32), np.ones(lead, np.float32), **params, spec=spec
    )


def silu(z: ArrayLike) -> NDArray:
    z = np.asarray(z, np.float64)
    return z / (1 + np.exp(-z))


@implementations
@pytest.mark.parametrize("order", ["stacked", "interleaved"])
@pytest.mark.parametrize("by_bias", [False, True])
def test_g1_silu_is_of_the_gate(implementation: str, order: str, by_bias: bool) -> None:
    gate, up = np.array([2.0, 1.0, -1.0, 0.5, 3.0]), np.array([3.0, -2.0, 4.0, 1.5, 2.0])
    params, x = preactivation_experts(gate, up, order, by_bias=by_bias)
    y = run_one(implementation, params, x, one_expert(5, gate_up=order, expert_bias=by_bias))
    np.testing.assert_allclose(y, [silu(gate) * up], rtol=1e-6)
    assert y[0, 0] == pytest.approx(5.28478, rel=1e-5)
    assert np.abs(silu(gate) * up - silu(up) * gate).min() > 0.1  # a swap would be seen in every column


@implementations
@pytest.mark.parametrize("order", ["stacked", "interleaved"])
def test_g1_silu_is_of_the_gate_in_the_shared_expert(implementation: str, order: str) -> None:
    params, x = preactivation_experts([2.0, 1.0], [3.0, -2.0], order)
    spec = one_expert(2, gate_up=order, shared_intermediate_size=2)
    zeros = {name: np.zeros(shape, np.float32) for name, shape in spec.param_shapes.items()}
    layer = zeros | {"shared_w13": params["w13"][0], "shared_w2": params["w2"][0]}
    np.testing.assert_allclose(
        run_layer(implementation, layer, x, spec), [silu([2.0, 1.0]) * [3.0, -2.0]], rtol=1e-6
    )


@implementations
def test_g2_interleaved_columns_alternate(implementation: str) -> None:
    gate, up = np.arange(1.0, 5.0), 10 * np.arange(1.0, 5.0)
    params, x = preactivation_experts(gate, up, "interleaved")
    assert (0.5 * params["w13"][0, :, -1]).tolist() == [1, 10, 2, 20, 3, 30, 4, 40]
    y = run_one(implementation, params, x, one_expert(4, gate_up="interleaved"))
    np.testing.assert_allclose(y, [silu(gate) * up], rtol=1e-6)


@implementations
@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_g2_both_orders_are_the_same_layer(implementation: str, activation: str) -> None:
    """With weights, biases and per-column scales converted together, results agree to the last bit."""
    stacked = make_spec(expert_bias=True, activation=activation)
    other = dataclasses.replace(stacked, gate_up="interleaved")
    params, x, logits = random_experts(stacked), random_tokens(stacked, 6), random_logits(6, 4)
    scale = np.exp2(np.arange(16.0)).astype(np.float32)
    moved = {name: convert_gate_up(params[name], "stacked", "interleaved", axis=1) for name in ("w13", "b13")}
    moved_scale = convert_gate_up(scale, "stacked", "interleaved", axis=0)
    assert_same_bits(
        moved["w13"] * moved_scale[:, None],
        convert_gate_up(params["w13"] * scale[:, None], "stacked", "interleaved", axis=1),
    )
    for name, value in moved.items():
        assert_same_bits(convert_gate_up(value, "interleaved", "stacked", axis=1), params[name])
    y = run_moe(implementation, x, logits, **params, spec=stacked)
    assert_same_bits(run_moe(implementation, x, logits, **(params | moved), spec=other), y)


@implementations
@pytest.mark.parametrize("num_tokens", [1, 64])
def test_g4_the_limit_is_kept_everywhere(implementation: str, num_tokens: int) -> None:
    spec = make_spec(hidden_size=32, intermediate_size=32, swiglu_limit=7.0, shared_intermediate_size=32)
    params, x = random_params(spec), random_tokens(spec, num_tokens)
    x *= np.float32(7.0)  # N(0, 49): a third of the pre-activations exceed 7 in magnitude
    truth = reference.moe(params, x, spec)
    assert_close(run_layer(implementation, params, x, spec), truth, dtype="float32")
    unlimited = reference.moe(params, x, dataclasses.replace(spec, swiglu_limit=None))
    assert np.sqrt(np.mean((truth - unlimited) ** 2)) > 0.3 * np.sqrt(np.mean(truth**2))
    for part in ("w2", "shared_w2"):  # each of the two kinds of expert by itself
        alone = params | {part: np.zeros_like(params[part])}
        truth = reference.moe(alone, x, spec)
        assert_close(run_layer(implementation, alone, x, spec), truth, dtype="float32")
        unlimited = reference.moe(alone, x, dataclasses.replace(spec, swiglu_limit=None))
        assert np.sqrt(np.mean((truth - unlimited) ** 2)) > 0.3 * np.sqrt(np.mean(truth**2))


@implementations
def test_g5_the_clamp_comes_before_the_activation(implementation: str) -> None:
    gate, up = [8.0, 8.0, -9.0, 1.0, 1.0], [1.0, 9.0, 1.0, -8.0, 8.0]
    params, x = preactivation_experts(gate, up, "stacked")
    y = run_one(implementation, params, x, one_expert(5, swiglu_limit=7.0))
    expected = [silu(7.0), silu(7.0) * 7, silu(-9.0), -7 * silu(1.0), 7 * silu(1.0)]
    np.testing.assert_allclose(y, [expected], rtol=1e-5)
    assert y[0, 0] == pytest.approx(6.99362, rel=1e-6)


@implementations
def test_g5_gpt_oss_adds_one_to_up_behind_the_clamp(implementation: str) -> None:
    params, x = preactivation_experts([8.0, 1.0, 2.0], [9.0, -8.0, 0.5], "interleaved")
    spec = one_expert(3, gate_up="interleaved", swiglu_alpha=1.702, swiglu_limit=7.0, swiglu_up_offset=1.0)
    gate, up = np.array([7.0, 1.0, 2.0]), np.array([7.0, -7.0, 0.5])
    expected = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    np.testing.assert_allclose(run_one(implementation, params, x, spec), [expected], rtol=1e-5)


@implementations
@pytest.mark.parametrize(("weights", "expected"), [([0.25] * 4, 2.5), ([0.1, 0.2, 0.2, 0.1], 1.5)])
def test_g6_the_second_bias_is_weighted(implementation: str, weights: list[float], expected: float) -> None:
    spec = make_spec(top_k=4, expert_bias=True)
    params, x = random_experts(spec), random_tokens(spec, 3)
    params["w2"][:] = 0
    params["b2"][:] = np.arange(1, 5)[:, None]
    y = run_experts(
        implementation,
        x,
        np.tile(np.int32([0, 1, 2, 3]), (3, 1)),
        np.float32([weights] * 3),
        **params,
        spec=spec,
    )
    np.testing.assert_allclose(y, np.full((3, 16), expected), rtol=1e-6)


@implementations
@pytest.mark.parametrize(
    ("num_tokens", "dtype", "weight_on"),
    [(1, "float32", "output"), (40, "bfloat16", "input")],
)
def test_g7_biases_reach_the_output_on_every_path(
    implementation: str, num_tokens: int, dtype: str, weight_on: str
) -> None:
    spec = make_spec(expert_bias=True, weight_on=weight_on, renormalize=False)
    params, x = random_params(spec, dtype=dtype), np.zeros((num_tokens, 16), np.float32)
    x = x.astype(params["w13"].dtype)
    params["router"][:] = 0
    logits = np.zeros((num_tokens, 4), np.float32)
    experts = experts_of(params)
    b13, b2 = params["b13"].astype(np.float64), params["b2"].astype(np.float64)
    h = silu(b13[:, :8]) * b13[:, 8:]
    f = np.einsum("edf,ef->ed", params["w2"].astype(np.float64), h) + b2
    expected = np.tile((f[0] + f[1]) * (0.25 if weight_on == "output" else 1.0), (num_tokens, 1))
    ids, weights = np.tile(np.int32([0, 1]), (num_tokens, 1)), np.full((num_tokens, 2), 0.25, np.float32)
    results = [
        run_experts(implementation, x, ids, weights, **experts, spec=spec),
        run_moe(implementation, x, logits, **experts, spec=spec),
        run_layer(implementation, params, x, spec),
    ]
    for y in results:
        assert_close(y, expected, dtype=dtype)
        assert_same_bits(y, results[0])


# H the sum over a token's experts


@backends
@pytest.mark.parametrize("by_bias", [False, True])
def test_h1_the_sum_over_experts_is_rounded_once(backend: str, by_bias: bool) -> None:
    """256 + 7 · 1 = 263 is 264 in bfloat16; a running bfloat16 sum stays at 256."""
    spec = make_spec(num_experts=8, top_k=8, intermediate_size=1, activation="relu2", expert_bias=by_bias)
    params = {name: np.zeros(spec.param_shapes[name], BFLOAT16) for name in experts_of(random_params(spec))}
    params["w13"][:, 0, 0] = 1.0
    params["b2" if by_bias else "w2"][0] = 256.0
    params["b2" if by_bias else "w2"][1:] = 1.0
    x = np.zeros((8, 16), BFLOAT16)
    x[:, 0] = 1.0
    ids = np.stack([np.roll(np.arange(8), shift) for shift in range(8)]).astype(np.int32)
    y = run_experts(backend, x, ids, np.ones((8, 8), np.float32), **params, spec=spec)
    assert (y.astype(np.float32) == 264.0).all()


def outputs_and_gradients(backend: str, top_k: int, dtype: str) -> str:
    """A digest of 20 equal runs."""
    spec = make_spec(num_experts=8, top_k=top_k, hidden_size=192, intermediate_size=96, expert_bias=True)
    params, x = random_params(spec, dtype=dtype), random_tokens(spec, 64, dtype=dtype)
    layer = MoE(spec, backend=backend)

    @jax.jit
    def both(params: Any, x: jax.Array) -> Any:
        y, pull_back = jax.vjp(layer.apply, params, x)
        return y, pull_back(jnp.cos(x))

    digests = set()
    for _ in range(20):
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(both(params, x)):
            digest.update(np.asarray(leaf).tobytes())
        digests.add(digest.hexdigest())
    assert len(digests) == 1
    return digests.pop()


@backends
@pytest.mark.parametrize(("top_k", "dtype"), [(1, "float32"), (8, "bfloat16")])
def test_h3_twenty_runs_agree_bitwise(backend: str, top_k: int, dtype: str) -> None:
    outputs_and_gradients(backend, top_k, dtype)


OTHER_PROCESS = """
import sys
sys.path.insert(0, {tests!r})
import conftest, test_failure_cases_experts as cases
print(cases.outputs_and_gradients({backend!r}, 2, "bfloat16"))
"""


@backends
def test_h3_two_processes_agree_bitwise(backend: str) -> None:
    script = OTHER_PROCESS.format(tests=str(Path(__file__).parent), backend=backend)
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert other.stdout.split() == [outputs_and_gradients(backend, 2, "bfloat16")]


def test_h3_no_gradient_is_summed_over_experts_by_scatter() -> None:
    """A scatter-add of floats with repeated indices is atomics on a GPU: no fixed order."""
    spec = make_spec(num_experts=5, expert_bias=True, weight_on="input")
    params, x = random_experts(spec), random_tokens(spec, 7)
    ids, weights = jnp.zeros((7, 2), jnp.int32), jnp.ones((7, 2))

    def total(params: Any, x: jax.Array, weights: jax.Array) -> jax.Array:
        return fused_experts(x, Routing(ids, weights), **params, spec=spec, backend="xla").sum()

    jaxpr = jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2)))(params, x, weights)
    scattered = [
        tuple(eqn.outvars[0].aval.shape)
        for eqn in equations(jaxpr.jaxpr)
        if eqn.primitive.name == "scatter-add" and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
    ]
    # Only the gradient of the slots' weights (R,) may: each is fetched once.
    assert set(scattered) <= {(14,)}


def equations(jaxpr: Any) -> list[Any]:
    """All equations of a jaxpr and of those inside it."""
    found = []
    for eqn in jaxpr.eqns:
        found.append(eqn)
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                found += equations(getattr(value, "jaxpr", value))
    return found
