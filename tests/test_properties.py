"""Random specs, routings, masks and group sizes against the reference, and every option with every other."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from failure_cases import (
    assert_same_bits,
    experts_of,
    jitted_route,
    poison_memory,
    run_experts,
    run_moe,
)
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_pallas import MoE, MoESpec, Routing, fused_experts, fused_moe, reference, route, xla
from moe_pallas.oracle import PORTABLE_BACKENDS
from moe_pallas.plan import make_plan
from moe_pallas.testing import assert_close, random_logits, random_params, random_tokens

backends = pytest.mark.parametrize("backend", PORTABLE_BACKENDS)

# The same examples in every run. Where one example is one compilation there are fewer of them.
compiled_once = hypothesis.settings(max_examples=100, deadline=None, derandomize=True, database=None)
compiled_each = hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)

RTOL = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}


def assert_near(actual: Any, expected: NDArray, dtype: str, context: str = "") -> None:
    """Against the largest entry: with hidden sizes of 1 a row's own RMS may be next to 0 by cancelling."""
    got = np.asarray(actual).astype(np.float64)
    assert got.shape == expected.shape
    assert np.array_equal(np.isnan(got), np.isnan(expected)), context
    scale = np.nanmax(np.abs(expected), initial=0.0)
    worst = np.nanmax(np.abs(got - expected), initial=0.0)
    assert worst <= RTOL[dtype] * scale, f"off by {worst:.3g} of {scale:.3g}. {context}"


# Every option with every other

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "expert": [
        {"activation": activation, "gate_up": order}
        for activation, order in itertools.product(
            ["swiglu", "geglu", "geglu_tanh"], ["stacked", "interleaved"]
        )
    ]
    + [{"activation": activation} for activation in ("relu2", "silu", "gelu", "gelu_tanh")]
    + [
        {"swiglu_alpha": 1.702, "swiglu_limit": 0.5, "swiglu_up_offset": 1.0, "gate_up": order}
        for order in ("stacked", "interleaved")
    ],
    "weight": [{"weight_on": "output"}, {"weight_on": "input"}],
    "scoring": [{"scoring": name} for name in ("softmax", "softmax_after_topk", "sigmoid")],
    "renormalize": [{"renormalize": True}, {"renormalize": False}],
    "expert_bias": [{}, {"expert_bias": True}],
    "router_bias": [{}, {"router_bias": True}],
    "correction": [{}, {"correction_bias": True}],
    "groups": [
        {},
        {"num_expert_groups": 3, "top_k_groups": 2},
        {"num_expert_groups": 2, "top_k_groups": 1, "group_score": "max"},
    ],
    "shared": [
        {},
        {"shared_intermediate_size": 5},
        {"shared_intermediate_size": 3, "shared_expert_gate": True},
    ],
    "factor": [{}, {"routed_scaling_factor": 2.5}],
    "top_k": [{"top_k": 2}, {"top_k": 1}, {"top_k": 3}],
    "padding": ["none", "mask", "num_tokens"],  # type: ignore[list-item]
    "dtype": ["float32", "bfloat16", "float16"],  # type: ignore[list-item]
}


def all_pairs(sizes: list[int]) -> list[tuple[int, ...]]:
    """Few rows of choices in which each pair of two options' values stands in some row."""
    rng = np.random.default_rng(0)
    columns = range(len(sizes))
    missing = {
        (i, a, j, b)
        for i, j in itertools.combinations(columns, 2)
        for a in range(sizes[i])
        for b in range(sizes[j])
    }

    def pairs(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(i, row[i], j, row[j]) for i, j in itertools.combinations(columns, 2)}

    rows = []
    while missing:
        i, a, j, b = min(missing)
        candidates = []
        for _ in range(60):
            row = [int(rng.integers(size)) for size in sizes]
            row[i], row[j] = a, b
            candidates.append(tuple(row))
        best = max(candidates, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        rows.append(best)
    return rows


ROWS = all_pairs([len(values) for values in OPTIONS.values()])


def spec_of_row(row: tuple[int, ...]) -> tuple[MoESpec, str, str]:
    chosen = [values[i] for values, i in zip(OPTIONS.values(), row, strict=True)]
    *options, padding, dtype = chosen
    sizes: dict[str, Any] = {"num_experts": 6, "hidden_size": 20, "intermediate_size": 7}
    return MoESpec(**functools.reduce(lambda a, b: a | b, options, sizes)), str(padding), str(dtype)


def test_rows_hold_every_pair_of_options() -> None:
    for (i, a), (j, b) in itertools.combinations(enumerate(OPTIONS.values()), 2):
        pairs = {(row[i], row[j]) for row in ROWS}
        assert pairs == set(itertools.product(range(len(a)), range(len(b))))
    assert len(ROWS) < 60


@backends
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "".join(map(str, row)))
def test_every_option_with_every_other(backend: str, row: tuple[int, ...]) -> None:
    spec, padding, dtype = spec_of_row(row)
    params, x = random_params(spec, dtype=dtype), random_tokens(spec, 12, dtype=dtype)
    mask = np.arange(12) < 7 if padding == "num_tokens" else np.arange(12) % 4 != 1
    rest: dict[str, Any] = {"none": {}, "mask": {"mask": mask}, "num_tokens": {"num_tokens": np.int32(7)}}[
        padding
    ]
    real = np.ones(12, bool) if padding == "none" else mask
    x[~real] = np.nan
    layer = MoE(spec, backend=backend)
    apply = jax.jit(functools.partial(layer.apply, return_aux=True))
    y, aux = apply(params, x, **rest)
    assert y.dtype == x.dtype
    truth = reference.moe(params, x, spec, mask=real)
    if dtype == "float32":
        assert_close(y, truth, context=str(spec))
    else:
        # Sums of so few terms, and a token rounded again when it is weighted: twice what assert_close allows.
        unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
        row_rms = np.sqrt(np.mean(truth[real] ** 2, axis=-1, keepdims=True))
        error = (np.asarray(y).astype(np.float64)[real] - truth[real]) / row_rms
        assert np.abs(error).max() <= 10 * unit, spec
        assert np.sqrt(np.mean(error**2)) <= 2 * unit, spec
    assert not np.asarray(y)[~real].any()

    wide = {name: value.astype(np.float64) for name, value in params.items()}
    logits = np.zeros((12, 6))
    logits[real] = x[real].astype(np.float64) @ wide["router"].T + wide.get("router_bias", 0.0)
    ids, weights = reference.route(logits, spec, correction_bias=params.get("correction_bias"))
    ids[~real], weights[~real] = -1, 0.0
    assert np.array_equal(aux.routing.topk_ids, ids)
    np.testing.assert_allclose(aux.routing.topk_weights, weights, rtol=1e-4)
    assert np.array_equal(aux.expert_loads, np.bincount(ids[real].reshape(-1), minlength=6))
    loss = reference.load_balance_loss(logits, ids, spec, mask=real)
    np.testing.assert_allclose(aux.load_balance_loss, loss, rtol=1e-4)
    np.testing.assert_allclose(aux.router_z_loss, reference.router_z_loss(logits, mask=real), rtol=1e-4)


# Random specs

# No two of them, nor their sigmoids, add up to the same as two others: ties are exact or there is none.
LEVELS = [-1.7, -0.9, -0.3, 0.0, 0.4, 1.1, 2.3]


@st.composite
def specs(draw: st.DrawFn) -> MoESpec:
    groups, group_size = draw(
        st.sampled_from([(1, 1), (1, 2), (1, 3), (1, 5), (1, 8), (2, 2), (3, 2), (4, 1), (2, 5)])
    )
    kept = draw(st.integers(1, groups))
    activation = draw(
        st.sampled_from(["swiglu", "swiglu", "geglu", "geglu_tanh", "relu2", "silu", "gelu", "gelu_tanh"])
    )
    shape = {}
    if activation == "swiglu" and draw(st.booleans()):
        shape = {
            "swiglu_alpha": draw(st.sampled_from([1.0, 1.702])),
            "swiglu_limit": draw(st.sampled_from([None, 0.5, 7.0])),
            "swiglu_up_offset": draw(st.sampled_from([0.0, 1.0])),
        }
    return MoESpec(
        num_experts=groups * group_size,
        top_k=draw(st.integers(1, min(4, kept * group_size))),
        hidden_size=draw(st.integers(1, 9)),
        intermediate_size=draw(st.integers(1, 7)),
        activation=activation,
        **shape,
        gate_up=draw(st.sampled_from(["stacked", "interleaved"])),
        expert_bias=draw(st.booleans()),
        scoring=draw(st.sampled_from(["softmax", "softmax_after_topk", "sigmoid"])),
        renormalize=draw(st.booleans()),
        correction_bias=draw(st.booleans()),
        num_expert_groups=groups,
        top_k_groups=kept,
        group_score=draw(st.sampled_from(["max", "top2_sum"])),
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        weight_on=draw(st.sampled_from(["output", "input"])),
    )


def draw_logits(draw: st.DrawFn, num_tokens: int, spec: MoESpec) -> NDArray:
    """With ties, NaN and -inf."""
    values = st.sampled_from([*LEVELS, *LEVELS, np.nan, -np.inf])
    flat = draw(
        st.lists(values, min_size=num_tokens * spec.num_experts, max_size=num_tokens * spec.num_experts)
    )
    return np.array(flat, np.float32).reshape(num_tokens, spec.num_experts)


def draw_bias(draw: st.DrawFn, spec: MoESpec) -> NDArray:
    values = st.sampled_from([-1.03, -0.17, 0.0, 0.59, 1.31])
    return np.array(draw(st.lists(values, min_size=spec.num_experts, max_size=spec.num_experts)), np.float32)


@backends
@compiled_each
@hypothesis.given(data=st.data())
def test_any_spec(backend: str, data: st.DataObject) -> None:
    spec, dtype = (
        data.draw(specs()),
        data.draw(st.sampled_from(["float32", "float32", "bfloat16", "float16"])),
    )
    num_tokens, seed = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 9))
    logits = draw_logits(data.draw, num_tokens, spec)
    params, x = (
        random_params(spec, dtype=dtype, seed=seed),
        random_tokens(spec, num_tokens, dtype=dtype, seed=seed),
    )
    bias = draw_bias(data.draw, spec) if spec.correction_bias else None
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens)), bool)
    x[~mask] = np.nan
    experts = experts_of(params)

    @jax.jit
    def compute(x: jax.Array, logits: jax.Array, mask: jax.Array) -> tuple[jax.Array, Routing]:
        y = fused_moe(x, logits, **experts, spec=spec, correction_bias=bias, mask=mask, backend=backend)
        return y, route(logits, spec, correction_bias=None if bias is None else jnp.asarray(bias))

    y, routing = compute(x, logits, mask)
    ids, weights = reference.route(logits, spec, correction_bias=bias)
    assert np.array_equal(routing.topk_ids, ids)
    np.testing.assert_allclose(routing.topk_weights, weights, rtol=1e-5)
    truth = reference.fused_moe(x, logits, **experts, spec=spec, correction_bias=bias, mask=mask)
    assert_near(y, truth, dtype, str(spec))
    assert not np.asarray(y)[~mask].any()


# Random routers, one program each

ROUTERS = {
    "softmax": {},
    "plain": {"renormalize": False},
    "gpt_oss": {"scoring": "softmax_after_topk"},
    "gpt_oss_biased": {
        "scoring": "softmax_after_topk",
        "correction_bias": True,
        "num_expert_groups": 4,
        "top_k_groups": 2,
    },
    "deepseek": {"scoring": "sigmoid", "correction_bias": True, "num_expert_groups": 4, "top_k_groups": 2},
    "deepseek_v2": {"num_expert_groups": 2, "group_score": "max", "renormalize": False},
    "biased": {"correction_bias": True, "routed_scaling_factor": 2.5},
    "sigmoid": {"scoring": "sigmoid", "renormalize": False, "num_expert_groups": 8, "top_k_groups": 5},
}


@pytest.mark.parametrize("options", ROUTERS.values(), ids=ROUTERS)
@compiled_once
@hypothesis.given(data=st.data())
def test_any_logits(options: dict[str, Any], data: st.DataObject) -> None:
    spec = MoESpec(num_experts=8, top_k=3, hidden_size=4, intermediate_size=4, **options)
    logits = draw_logits(data.draw, 4, spec)
    bias = draw_bias(data.draw, spec) if spec.correction_bias else None
    ids, weights = reference.route(logits, spec, correction_bias=bias)
    got = jitted_route(jnp.asarray(logits), spec, correction_bias=bias)
    assert np.array_equal(got.topk_ids, ids)
    np.testing.assert_allclose(got.topk_weights, weights, rtol=1e-5)
    for row in ids:
        assert len(set(row.tolist())) == 3


# Random routings and masks, one program

FIXED = MoESpec(num_experts=5, top_k=3, hidden_size=24, intermediate_size=10, expert_bias=True)
PARAMS = experts_of(random_params(FIXED))


@st.composite
def routings(draw: st.DrawFn, num_tokens: int = 13) -> tuple[NDArray, NDArray]:
    """Ids with repeats and with some out of range; sometimes only few experts have any."""
    used = draw(st.lists(st.integers(-2, 6), min_size=1, max_size=5))
    slots = num_tokens * FIXED.top_k
    ids = draw(st.lists(st.sampled_from(used), min_size=slots, max_size=slots))
    weights = np.random.default_rng(draw(st.integers(0, 99))).standard_normal((num_tokens, FIXED.top_k))
    return np.array(ids, np.int32).reshape(num_tokens, FIXED.top_k), weights.astype(np.float32)


masks = st.lists(st.booleans(), min_size=13, max_size=13).map(lambda values: np.array(values, bool))


@backends
@compiled_once
@hypothesis.given(routing=routings(), mask=masks, bad=st.sampled_from([np.nan, np.inf, 1e30]))
def test_any_routing_and_mask(
    backend: str, routing: tuple[NDArray, NDArray], mask: NDArray, bad: float
) -> None:
    (ids, weights), x = routing, random_tokens(FIXED, 13)
    x[~mask], weights[~mask] = bad, bad
    y = run_experts(backend, x, ids, weights, **PARAMS, spec=FIXED, mask=mask)
    truth = reference.fused_experts(x, ids, weights, **PARAMS, spec=FIXED, mask=mask)
    assert_near(y, truth, "float32")
    live = mask & ((ids >= 0) & (ids < 5)).any(-1)
    assert not y[~live].any()


@functools.partial(jax.jit, static_argnames="backend")
def _gradients(params: Any, x: Any, ids: Any, weights: Any, mask: Any, *, backend: str) -> Any:
    def loss(params: Any, x: jax.Array, weights: jax.Array) -> jax.Array:
        y = fused_experts(x, Routing(ids, weights), **params, spec=FIXED, mask=mask, backend=backend)
        return (y * jnp.cos(jnp.arange(float(y.size))).reshape(y.shape)).sum()

    return jax.grad(loss, argnums=(0, 1, 2))(params, x, weights)


@backends
@compiled_once
@hypothesis.given(routing=routings(), mask=masks, bad=st.sampled_from([np.nan, np.inf]))
def test_gradients_of_any_routing_and_mask(
    backend: str, routing: tuple[NDArray, NDArray], mask: NDArray, bad: float
) -> None:
    """What is not used has gradient 0; the loss is linear in (w2, b2), so Σ w · dw gives it back."""
    (ids, weights), x = routing, random_tokens(FIXED, 13)
    x[~mask], weights[~mask] = bad, bad
    d_params, dx, d_weights = jax.tree.map(
        np.asarray, _gradients(PARAMS, x, ids, weights, mask, backend=backend)
    )
    live = (ids >= 0) & (ids < 5) & mask[:, None]
    assert not d_weights[~live].any()
    assert not dx[~live.any(-1)].any()
    unused = np.setdiff1d(np.arange(5), ids[live])
    for gradient in d_params.values():
        assert np.isfinite(gradient).all()
        assert not gradient[unused].any()
    truth = reference.fused_experts(x, ids, weights, **PARAMS, spec=FIXED, mask=mask)
    loss = (truth * np.cos(np.arange(truth.size)).reshape(truth.shape)).sum()
    recovered = sum(np.vdot(PARAMS[name].astype(float), d_params[name]) for name in ("w2", "b2"))
    by_weights = np.vdot(np.where(live, weights, 0.0), d_weights)
    scale = np.abs(truth).sum() + 1e-9
    assert abs(recovered - loss) <= 1e-5 * scale
    assert abs(by_weights - loss) <= 1e-5 * scale


@compiled_once
@hypothesis.given(ids=st.lists(st.integers(-3, 9), min_size=20, max_size=20))
def test_any_plan(ids: list[int]) -> None:
    plan = jitted_plan(np.array(ids, np.int32).reshape(10, 2), 7)
    keys = np.where((np.array(ids) >= 0) & (np.array(ids) < 7), ids, 7)
    assert np.array_equal(plan.slot_of_row, np.argsort(keys, kind="stable"))
    assert np.array_equal(np.asarray(plan.slot_of_row)[np.asarray(plan.row_of_slot)], np.arange(20))
    assert np.array_equal(plan.group_sizes, np.bincount(keys, minlength=8)[:7])
    assert np.array_equal(plan.group_offsets, [0, *np.cumsum(plan.group_sizes)])


jitted_plan = jax.jit(make_plan, static_argnums=1)
jitted_grouped_matmul = jax.jit(xla.grouped_matmul)


@compiled_once
@hypothesis.given(cuts=st.lists(st.integers(0, 150), min_size=6, max_size=6), past=st.integers(0, 150))
def test_any_group_sizes(cuts: list[int], past: int) -> None:
    """Six groups in 150 rows; blocks hold 32."""
    ends = np.minimum(np.sort(cuts), 150 - past)
    sizes = np.diff(ends, prepend=0).astype(np.int32)
    rng = np.random.default_rng(0)
    rows, weights = rng.standard_normal((150, 9), np.float32), rng.standard_normal((6, 5, 9), np.float32)
    rows[ends[-1] :] = np.nan
    expected = np.zeros((150, 5))
    for matrix, end, size in zip(weights, ends, sizes, strict=True):
        expected[end - size : end] = rows[end - size : end].astype(float) @ matrix.T
    got = np.asarray(jitted_grouped_matmul(rows, weights, sizes))
    assert_near(got, expected, "float32")
    assert not got[ends[-1] :].any()


# Shapes, dtypes, repeats


@backends
@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 1, 3)], ids=str)
def test_any_leading_axes(backend: str, lead: tuple[int, ...]) -> None:
    spec = dataclasses.replace(FIXED, shared_intermediate_size=4)
    params, count = random_params(spec), int(np.prod(lead))
    x = random_tokens(spec, count).reshape(*lead, 24)
    layer = MoE(spec, backend=backend)
    y, aux = jax.jit(functools.partial(layer.apply, return_aux=True))(params, x)
    assert_close(y, reference.moe(params, x, spec))
    assert aux.routing.topk_ids.shape == (*lead, 3)
    assert_close(y.reshape(-1, 24), reference.moe(params, x.reshape(-1, 24), spec))


@backends
@pytest.mark.parametrize("load", ["uniform", "zipf", "one_hot"])
def test_every_load_at_larger_sizes(backend: str, load: str) -> None:
    spec = MoESpec(num_experts=24, top_k=4, hidden_size=64, intermediate_size=48)
    params, x = random_params(spec), random_tokens(spec, 211)
    for seed in range(3):
        logits = random_logits(211, 24, load=load, seed=seed)
        y = run_moe(backend, x, logits, params["w13"], params["w2"], spec=spec)
        assert_close(y, reference.fused_moe(x, logits, params["w13"], params["w2"], spec=spec))


@backends
def test_calls_from_many_to_few_live_tokens(backend: str) -> None:
    """One program, replayed with fewer and fewer live rows between poisoned memory: nothing is left over."""
    spec = MoESpec(num_experts=8, top_k=2, hidden_size=32, intermediate_size=16)
    params, x = random_params(spec), random_tokens(spec, 64)
    logits = random_logits(64, 8)
    args = (params["w13"], params["w2"])
    first = {}
    for count in (64, 40, 9, 1, 0, 64, 1, 40):
        y = run_moe(backend, x, logits, *args, spec=spec, num_tokens=np.int32(count))
        assert_close(y, reference.fused_moe(x, logits, *args, spec=spec, mask=np.arange(64) < count))
        assert_same_bits(y, first.setdefault(count, y))
        poison_memory()


@backends
def test_inputs_are_not_changed(backend: str) -> None:
    spec = dataclasses.replace(FIXED, shared_intermediate_size=4)
    params, x = random_params(spec), random_tokens(spec, 9)
    before = {name: value.copy() for name, value in (params | {"x": x}).items()}
    placed, placed_x = jax.tree.map(jnp.asarray, (params, x))
    apply = jax.jit(MoE(spec, backend=backend).apply)
    first = apply(placed, placed_x)
    assert_same_bits(apply(placed, placed_x), first)
    for name, value in (placed | {"x": placed_x}).items():
        assert_same_bits(value, before[name])
