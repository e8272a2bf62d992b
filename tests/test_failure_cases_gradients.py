"""Failure cases of gradients (K): see failure_cases.py.

The truth is JAX's own differentiation, in float64, of a dense layer written here: every expert for every
slot, then a sum. The reference gives finite differences besides.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from failure_cases import (
    assert_close_by_expert,
    assert_same_bits,
    experts_of,
    grouped_matmul_for,
    poison_memory,
)
from numpy.typing import NDArray

from moe_pallas import (
    Activation,
    GateUp,
    MoE,
    MoESpec,
    Routing,
    fused_experts,
    fused_moe,
    reference,
)
from moe_pallas.oracle import PORTABLE_BACKENDS
from moe_pallas.spec import WeightOn
from moe_pallas.testing import random_logits, random_params, random_tokens

backends = pytest.mark.parametrize("backend", PORTABLE_BACKENDS)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
Arrays = dict[str, Any]


def make_spec(**options: Any) -> MoESpec:
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 12, "intermediate_size": 6}
    return MoESpec(**(sizes | options))


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> NDArray:
    return np.random.default_rng([seed, 7]).standard_normal(shape).astype(dtype)


def dense_activation(a: jax.Array, spec: MoESpec) -> jax.Array:
    if not spec.gated:
        return {
            Activation.RELU2: lambda z: jnp.where(z > 0, z * z, 0),
            Activation.SILU: lambda z: z / (1 + jnp.exp(-z)),
            Activation.GELU: lambda z: z * jax.scipy.stats.norm.cdf(z),
            Activation.GELU_TANH: lambda z: (
                0.5 * z * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
            ),
        }[spec.activation](a)
    f = a.shape[-1] // 2
    both = a.reshape(*a.shape[:-1], *((2, f) if spec.gate_up is GateUp.STACKED else (f, 2)))
    gate, up = jnp.moveaxis(both, -2 if spec.gate_up is GateUp.STACKED else -1, 0)
    if spec.activation is Activation.GEGLU:
        return gate * jax.scipy.stats.norm.cdf(gate) * up
    if spec.activation is Activation.GEGLU_TANH:
        return dense_activation(gate, dataclasses.replace(spec, activation="gelu_tanh")) * up
    if (limit := spec.swiglu_limit) is not None:
        gate = jnp.where(gate > limit, limit, gate)
        up = jnp.where(up > limit, limit, jnp.where(up < -limit, -limit, up))
    return gate / (1 + jnp.exp(-spec.swiglu_alpha * gate)) * (up + spec.swiglu_up_offset)


def dense_experts(
    params: Arrays, x: jax.Array, weights: jax.Array, ids: jax.Array, spec: MoESpec
) -> jax.Array:
    chosen = (ids[..., None] == jnp.arange(spec.num_experts, dtype=jnp.int32)).astype(x.dtype)  # (T, k, E)
    inputs = jnp.broadcast_to(x[:, None], (*ids.shape, x.shape[-1]))
    if spec.weight_on is WeightOn.INPUT:
        inputs, weights = inputs * weights[..., None], jnp.ones_like(weights)
    a = jnp.einsum("tkd,end->tken", inputs, params["w13"])
    if spec.expert_bias:
        a = a + params["b13"]
    y = jnp.einsum("tkef,edf->tked", dense_activation(a, spec), params["w2"])
    if spec.expert_bias:
        y = y + params["b2"]
    return jnp.einsum("tke,tk,tked->td", chosen.astype(x.dtype), weights, y)


def expected_gradients(
    params: Arrays, x: NDArray, weights: NDArray, ids: NDArray, d_y: NDArray, spec: MoESpec
) -> tuple[Arrays, NDArray, NDArray]:
    with jax.enable_x64(True):
        args = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), (params, x, weights))
        return jax.tree.map(np.asarray, _pull_dense(args, ids, jnp.asarray(d_y, jnp.float64), spec))


@functools.partial(jax.jit, static_argnames="spec")
def _pull_dense(args: Any, ids: Any, d_y: jax.Array, spec: MoESpec) -> Any:
    return jax.vjp(lambda *args: dense_experts(*args, ids, spec), *args)[1](d_y)


@functools.partial(jax.jit, static_argnames=("spec", "backend"))
def _gradients(
    params: Arrays, x: Any, weights: Any, ids: Any, d_y: Any, num_tokens: Any, *, spec: MoESpec, backend: str
) -> Any:
    def apply(params: Arrays, x: jax.Array, weights: jax.Array) -> jax.Array:
        routing = Routing(ids, weights)
        return fused_experts(x, routing, **params, spec=spec, num_tokens=num_tokens, backend=backend)

    y, pull_back = jax.vjp(apply, params, x, weights)
    return y, pull_back(d_y)


def gradients(
    backend: str,
    params: Arrays,
    x: NDArray,
    weights: NDArray,
    ids: NDArray,
    d_y: NDArray,
    spec: MoESpec,
    num_tokens: int | None = None,
) -> tuple[NDArray, tuple[Arrays, NDArray, NDArray]]:
    """The output, and the gradients of params, x and weights."""
    count = None if num_tokens is None else np.int32(num_tokens)
    return jax.tree.map(
        np.asarray, _gradients(params, x, weights, ids, d_y, count, spec=spec, backend=backend)
    )


def check_gradients(
    backend: str, params: Arrays, x: NDArray, weights: NDArray, ids: NDArray, spec: MoESpec, rtol: float
) -> tuple[Arrays, NDArray, NDArray]:
    """Compare every gradient with the truth: each expert and each token by itself."""
    d_y = normal(*x.shape, seed=5, dtype=x.dtype)
    _, got = gradients(backend, params, x, weights, ids, d_y, spec)
    d_params, dx, d_weights = expected_gradients(params, x, weights, ids, d_y, spec)
    for name, want in d_params.items():
        assert got[0][name].dtype == params[name].dtype
        assert_close_by_expert(got[0][name], want, rtol, name)
    assert_close_by_expert(got[1], dx, rtol, "x")
    # One number per slot, a sum that may cancel: measured against the largest.
    assert_close_by_expert(got[2][None], d_weights[None], rtol, "weights")
    return got


def routed(counts: list[int], seed: int = 0) -> NDArray:
    """(T, 1) ids with these counts, shuffled."""
    ids = np.repeat(np.arange(len(counts)), counts)
    return np.random.default_rng(seed).permutation(ids).astype(np.int32)[:, None]


PATTERNS = [
    [8, 0, 8, 0],
    [0, 8, 8, 0],
    [8, 8, 0, 0],
    [0, 0, 0, 16],
    [16, 0, 0, 0],
    [0, 16, 0, 0],
    [5, 0, 0, 11],
]


@pytest.fixture(params=["cpu", "elsewhere"])
def grouped_matmul(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """xla.grouped_matmul as it runs on a CPU and as it runs on other devices."""
    return grouped_matmul_for(request.param, monkeypatch)


def test_k1_empty_groups_have_gradient_zero(grouped_matmul: Any) -> None:
    rows, weights = normal(16, 64, dtype=BFLOAT16), normal(4, 32, 64, seed=1, dtype=BFLOAT16)
    d_out = normal(16, 32, seed=2).astype(BFLOAT16)

    @jax.jit
    def gradient(sizes: jax.Array) -> jax.Array:
        _, pull_back = jax.vjp(lambda w: grouped_matmul(rows, w, sizes), weights)
        return pull_back(jnp.asarray(d_out, jnp.float32))[0]

    for counts in PATTERNS:
        poison_memory()
        got, ends = gradient(np.array(counts, np.int32)), np.cumsum(counts)
        d64, r64 = d_out.astype(np.float64), rows.astype(np.float64)
        expected = np.stack([d64[e - n : e].T @ r64[e - n : e] for e, n in zip(ends, counts, strict=True)])
        assert not np.asarray(got)[np.array(counts) == 0].astype(np.float32).any()
        assert_close_by_expert(got, expected, 4e-3)


@backends
def test_k1_experts_without_tokens_have_gradient_zero(backend: str) -> None:
    """Of 18 experts only the first six have tokens; then every pattern of empty ones among four."""
    spec = make_spec(num_experts=18, top_k=1, hidden_size=64, intermediate_size=43, expert_bias=True)
    params, x = experts_of(random_params(spec)), random_tokens(spec, 32)
    ids = routed([4, 9, 1, 7, 5, 6])
    d_params, _, _ = check_gradients(backend, params, x, normal(32, 1, seed=3), ids, spec, 1e-5)
    for name in params:
        assert not d_params[name][6:].any()
    spec = make_spec(top_k=1, expert_bias=True)
    params, x = experts_of(random_params(spec)), random_tokens(spec, 16)
    for counts in PATTERNS:
        poison_memory()
        got = check_gradients(backend, params, x, normal(16, 1, seed=3), routed(counts), spec, 1e-5)
        for name in params:
            assert not got[0][name][np.array(counts) == 0].any()


@backends
@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_k3_groups_may_start_anywhere(backend: str, dtype: str, rtol: float) -> None:
    spec = make_spec(num_experts=7, top_k=1, hidden_size=128, intermediate_size=64, expert_bias=True)
    params, x = experts_of(random_params(spec, dtype=dtype)), random_tokens(spec, 256, dtype=dtype)
    check_gradients(
        backend, params, x, np.ones((256, 1), np.float32), routed([7, 41, 64, 100, 1, 0, 43]), spec, rtol
    )


@pytest.mark.parametrize("num_groups", [1, 4])
def test_k4_rows_past_the_groups_have_gradient_zero(grouped_matmul: Any, num_groups: int) -> None:
    rows, weights = normal(48, 16), normal(num_groups, 8, 16, seed=1)
    sizes = np.array([32] if num_groups == 1 else [9, 0, 20, 3], np.int32)
    rows[32:] = np.nan

    @jax.jit
    def both(rows: jax.Array, weights: jax.Array) -> Any:
        def total(rows: jax.Array, weights: jax.Array) -> jax.Array:
            out = grouped_matmul(rows, weights, sizes)
            return (out * jnp.cos(jnp.arange(48.0 * 8).reshape(48, 8))).sum()

        return jax.value_and_grad(total, argnums=(0, 1))(rows, weights)

    first = both(rows, weights)
    poison_memory()
    for got, again in zip(jax.tree.leaves(first), jax.tree.leaves(both(rows, weights)), strict=True):
        assert_same_bits(got, again)
        assert np.isfinite(got).all()
    d_rows = np.asarray(first[1][0])
    assert not d_rows[32:].any()
    assert d_rows[:32].any(-1).all()


@backends
@pytest.mark.parametrize("num_experts", [1, 4])
def test_k4_unused_rows_of_a_buffer_have_gradient_zero(backend: str, num_experts: int) -> None:
    """24 tokens of two slots, 16 of them real; the rest holds NaN, in the cotangent too."""
    spec = make_spec(num_experts=num_experts, top_k=min(2, num_experts), expert_bias=True)
    params, x = experts_of(random_params(spec)), random_tokens(spec, 24)
    ids = np.random.default_rng(4).integers(0, num_experts, (24, spec.top_k), np.int32)
    weights, d_y = normal(24, spec.top_k, seed=4), normal(24, 12, seed=5)
    expected = expected_gradients(params, x[:16], weights[:16], ids[:16], d_y[:16], spec)
    for bad in (np.nan, np.inf, 1e30):
        x[16:], weights[16:], d_y[16:] = bad, bad, bad
        y, got = gradients(backend, params, x, weights, ids, d_y, spec, num_tokens=16)
        assert not y[16:].any()
        assert np.isfinite(y).all()
        for name, want in expected[0].items():
            assert_close_by_expert(got[0][name], want, 1e-5, name)
        assert_close_by_expert(got[1][:16], expected[1], 1e-5, "x")
        assert_close_by_expert(got[2][None, :16], expected[2][None], 1e-5, "weights")
        for gradient in got[1:]:
            assert not gradient[16:].any()
        poison_memory()


@backends
@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_k5_dropped_slots_give_the_router_no_gradient(backend: str, weight_on: str) -> None:
    spec = make_spec(weight_on=weight_on, expert_bias=True)
    params, x = experts_of(random_params(spec)), random_tokens(spec, 2)
    for dropped in (-1, 4, 2**31 - 1):
        for weight in (0.3, 0.0):
            ids, weights = np.int32([[0, dropped], [1, 2]]), np.float32([[0.7, weight], [0.6, 0.4]])
            _, _, got = check_gradients(backend, params, x, weights, ids, spec, 1e-5)
            assert got[0, 1] == 0.0
            assert (got != 0).tolist() == [[True, False], [True, True]]


@backends
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_after_topk"])
def test_k5_padding_gives_the_logits_no_gradient(backend: str, scoring: str) -> None:
    spec = make_spec(scoring=scoring)
    params, x, logits = experts_of(random_params(spec)), random_tokens(spec, 6), random_logits(6, 4)
    mask = np.array([True, False, True, True, False, True])

    @jax.jit
    @jax.grad
    def gradient(logits: jax.Array, x: jax.Array) -> jax.Array:
        y = fused_moe(x, logits, **params, spec=spec, mask=mask, backend=backend)
        return (y * jnp.cos(jnp.arange(72.0).reshape(6, 12))).sum()

    for bad in (np.nan, np.inf, -np.inf):
        x[~mask], logits[~mask] = bad, bad
        got = np.asarray(gradient(logits, x))
        assert not got[~mask].any()
        assert np.isfinite(got).all()
        assert got[mask].any(-1).all()


@backends
@pytest.mark.parametrize("order", ["stacked", "interleaved"])
@pytest.mark.parametrize(("alpha", "offset"), [(1.0, 0.0), (1.702, 1.0)])
def test_k6_the_clamp_stops_gradients_where_it_acts(
    backend: str, order: str, alpha: float, offset: float
) -> None:
    """All pairs of gate and up, one a column; b13 is the pre-activation (w13 = 0, w2 = identity)."""
    gate, up = (v.reshape(-1) for v in np.meshgrid([-9.0, -3.0, 3.0, 8.0], [-8.0, 0.0, 2.0, 8.0]))
    f = gate.size
    spec = make_spec(
        num_experts=1,
        top_k=1,
        hidden_size=f,
        intermediate_size=f,
        expert_bias=True,
        gate_up=order,
        swiglu_limit=7.0,
        swiglu_alpha=alpha,
        swiglu_up_offset=offset,
    )
    axis = 0 if order == "stacked" else 1
    b13 = np.stack([gate, up], axis).reshape(1, 2 * f).astype(np.float32)
    params = {
        "w13": np.zeros((1, 2 * f, f), np.float32),
        "w2": np.eye(f, dtype=np.float32)[None],
        "b13": b13,
        "b2": np.zeros((1, f), np.float32),
    }
    ids, one = np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
    _, (d_params, _, _) = gradients(
        backend, params, np.ones((1, f), np.float32), one, ids, np.ones((1, f), np.float32), spec
    )
    d_gate, d_up = np.moveaxis(d_params["b13"].reshape((2, f) if axis == 0 else (f, 2)), axis, 0)
    clamped_gate, clamped_up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    sigmoid = 1 / (1 + np.exp(-alpha * clamped_gate))
    slope = sigmoid * (1 + alpha * clamped_gate * (1 - sigmoid))
    np.testing.assert_allclose(
        d_gate, np.where(gate > 7, 0, slope * (clamped_up + offset)), rtol=1e-4, atol=1e-9
    )
    np.testing.assert_allclose(
        d_up, np.where(np.abs(up) > 7, 0, clamped_gate * sigmoid), rtol=1e-4, atol=1e-9
    )
    assert not d_gate[gate == 8].any()
    assert d_gate[(gate == -9) & (up != -offset)].all()  # no lower clamp
    assert not d_up[np.abs(up) == 8].any()


@backends
@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_k7_the_gradient_of_a_token_has_a_gate_term_and_an_up_term(
    backend: str, dtype: str, rtol: float
) -> None:
    """With one branch frozen at its value, by a bias instead of weights, one term is left."""
    spec = make_spec(num_experts=1, top_k=1, hidden_size=32, intermediate_size=16, expert_bias=True)
    whole, x = experts_of(random_params(spec, dtype=dtype)), random_tokens(spec, 1, dtype=dtype)
    whole["b13"] = np.zeros((1, 32), np.float32)
    whole["b2"] = np.zeros((1, 32), np.float32)
    a = whole["w13"].astype(np.float64) @ x[0].astype(np.float64)  # (1, 2F), gate and then up
    up_only, gate_only = ({name: value.copy() for name, value in whole.items()} for _ in range(2))
    up_only["w13"][:, :16], up_only["b13"][:, :16] = 0, a[:, :16]
    gate_only["w13"][:, 16:], gate_only["b13"][:, 16:] = 0, a[:, 16:]
    ids, one = np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
    terms = []
    for params in (gate_only, up_only, whole):
        _, dx, _ = check_gradients(backend, params, x, one, ids, spec, rtol)
        terms.append(dx.astype(np.float64))
    gate_term, up_term, both = terms
    assert_close_by_expert(both, gate_term + up_term, rtol)
    assert np.abs(gate_term).max() > 0.1 and np.abs(up_term).max() > 0.1


@backends
def test_k8_weight_gradients_carry_the_routing_weight(backend: str) -> None:
    spec = make_spec(num_experts=2, expert_bias=True)
    params, x = experts_of(random_params(spec)), random_tokens(spec, 1)
    for value in params.values():
        value[1] = value[0]
    ids, weights = np.int32([[0, 1]]), np.float32([[0.9, 0.1]])
    d_params, _, _ = check_gradients(backend, params, x, weights, ids, spec, 1e-5)
    for gradient in d_params.values():
        np.testing.assert_allclose(gradient[0], 9 * gradient[1], rtol=1e-4, atol=1e-6)
        assert np.abs(gradient[1]).max() > 1e-3


# All options, through the whole layer, against finite differences of the reference.

LAYERS = {
    "plain": {},
    "qwen": {
        "router_bias": True,
        "shared_intermediate_size": 5,
        "shared_expert_gate": True,
        "renormalize": False,
    },
    "gpt_oss": {
        "gate_up": "interleaved",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 1.0,
        "swiglu_up_offset": 1.0,
        "scoring": "softmax_after_topk",
        "router_bias": True,
        "expert_bias": True,
    },
    "deepseek": {
        "num_experts": 8,
        "scoring": "sigmoid",
        "correction_bias": True,
        "num_expert_groups": 4,
        "top_k_groups": 2,
        "routed_scaling_factor": 2.5,
        "shared_intermediate_size": 4,
    },
    "softmax_with_correction": {"correction_bias": True, "expert_bias": True, "activation": "silu"},
    "llama4": {
        "top_k": 1,
        "scoring": "sigmoid",
        "renormalize": False,
        "weight_on": "input",
        "expert_bias": True,
    },
    "relu2": {"activation": "relu2", "weight_on": "input", "top_k": 3},
    "geglu": {"activation": "geglu", "shared_intermediate_size": 3, "routed_scaling_factor": 0.5},
    "geglu_tanh": {"activation": "geglu_tanh", "gate_up": "interleaved", "weight_on": "input"},
    "gelu": {"activation": "gelu", "scoring": "softmax_after_topk", "correction_bias": True},
    "gelu_tanh": {"activation": "gelu_tanh", "expert_bias": True, "scoring": "sigmoid"},
}


@backends
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_gradients_are_finite_differences_of_the_reference(backend: str, options: dict[str, Any]) -> None:
    spec = make_spec(**({"num_experts": 5} | options))
    params, x = random_params(spec), random_tokens(spec, 7)
    params["router"] *= np.float32(3)
    d_y = normal(*x.shape, seed=5)
    mask = np.arange(7) != 4
    layer = MoE(spec, backend=backend)

    @jax.jit
    @functools.partial(jax.grad, argnums=0)
    def gradient(inputs: Arrays) -> jax.Array:
        params = {name: value for name, value in inputs.items() if name != "x"}
        return (layer.apply(params, inputs["x"], mask=mask) * d_y).sum()

    inputs = params | {"x": x}
    got = gradient(inputs)
    double = {name: value.astype(np.float64) for name, value in inputs.items()}

    def loss(moved: Arrays) -> float:
        params = {name: value for name, value in moved.items() if name != "x"}
        return float((reference.moe(params, moved["x"], spec, mask=mask) * d_y).sum())

    rng = np.random.default_rng(11)
    for name, value in double.items():
        mine = np.asarray(got[name], np.float64)
        assert np.isfinite(mine).all()
        for _ in range(3):
            direction = rng.standard_normal(value.shape)
            up, down = ({**double, name: value + step * direction} for step in (1e-6, -1e-6))
            expected = (loss(up) - loss(down)) / 2e-6
            bound = 1e-4 * np.linalg.norm(mine) * np.linalg.norm(direction) + 1e-6
            assert abs(np.vdot(mine, direction) - expected) <= bound, name
        if name == "correction_bias":
            assert not mine.any()
        else:
            assert np.linalg.norm(mine) > 1e-2, name
