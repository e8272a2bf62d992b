"""Failure cases of the router and of the routing's metadata (C, A9): see failure_cases.py."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from failure_cases import (
    IMPLEMENTATIONS,
    assert_same_bits,
    jitted_route,
    poison_memory,
    run_layer,
    run_moe,
)
from numpy.typing import ArrayLike, NDArray

from moe_pallas import MoE, MoESpec, load_balance_loss, reference, route, router_z_loss
from moe_pallas.oracle import PORTABLE_BACKENDS
from moe_pallas.plan import make_plan
from moe_pallas.routing import count_experts
from moe_pallas.testing import assert_close, random_logits, random_params, random_tokens

# route() itself, the reference, and what each backend's fused_moe makes of the logits.
ROUTERS = ("route", "reference", *PORTABLE_BACKENDS)
WITH_IDS = ("route", "reference")
ALL_SCORINGS = ("softmax", "softmax_after_topk", "sigmoid")


def make_spec(**options: Any) -> MoESpec:
    return MoESpec(**({"hidden_size": 4, "intermediate_size": 4} | options))


def ids_and_weights(
    router: str, logits: ArrayLike, spec: MoESpec, bias: ArrayLike | None = None
) -> tuple[NDArray, NDArray]:
    if router == "reference":
        return reference.route(logits, spec, correction_bias=bias)
    bias = None if bias is None else jnp.asarray(bias)
    routing = jitted_route(jnp.asarray(logits), spec, correction_bias=bias)
    return np.asarray(routing.topk_ids), np.asarray(routing.topk_weights)


def weight_of_expert(router: str, logits: ArrayLike, spec: MoESpec, bias: ArrayLike | None = None) -> NDArray:
    """(T, E) logits → (T, E): the weight that each expert got, 0 where it was not chosen.

    A backend shows it through experts whose outputs are unit vectors, made by b2 alone.
    """
    e = spec.num_experts
    if router in WITH_IDS:
        ids, weights = ids_and_weights(router, logits, spec, bias)
        out = np.zeros(np.shape(logits), np.float64)
        np.put_along_axis(out, ids, weights, axis=-1)
        return out
    spec = dataclasses.replace(spec, hidden_size=e, intermediate_size=1, expert_bias=True)
    rest: dict[str, Any] = {"b13": np.zeros((e, 2), np.float32), "b2": np.eye(e, dtype=np.float32)}
    if bias is not None:
        rest["correction_bias"] = bias
    x = np.ones((len(np.asarray(logits)), e), np.float32)
    w13, w2 = np.zeros((e, 2, e), np.float32), np.zeros((e, e, 1), np.float32)
    return run_moe(router, x, logits, w13, w2, spec=spec, **rest)


def expand(ids: list[int], weights: list[float], num_experts: int) -> NDArray:
    out = np.zeros(num_experts)
    out[ids] = weights
    return out


def logit(score: ArrayLike) -> NDArray:
    score = np.asarray(score, np.float64)
    return np.log(score / (1 - score)).astype(np.float32)


# C1 ties


TIES = [
    ([0.0] * 16, 4, [0, 1, 2, 3]),
    ([1.0, 3.0, 3.0, 3.0, 0.0], 2, [1, 2]),
    ([0.0] * 384, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("logits", "top_k", "ids"), TIES, ids=["E16", "E5", "E384"])
def test_c1_ties_go_to_the_lowest_id(
    router: str, dtype: str, logits: list[float], top_k: int, ids: list[int]
) -> None:
    spec = make_spec(num_experts=len(logits), top_k=top_k)
    rows = np.asarray(jnp.asarray([logits] * 3, dtype))
    expected = expand(ids, [1 / top_k] * top_k, len(logits))
    first = weight_of_expert(router, rows, spec)
    np.testing.assert_allclose(first, np.tile(expected, (3, 1)), rtol=1e-6)
    for _ in range(20):
        assert_same_bits(weight_of_expert(router, rows, spec), first)
    if router in WITH_IDS:
        assert ids_and_weights(router, rows, spec)[0].tolist() == [ids] * 3


@pytest.mark.parametrize("router", WITH_IDS)
@pytest.mark.parametrize("scoring", ALL_SCORINGS)
@pytest.mark.parametrize("biased", [False, True])
def test_c1_ties_under_every_scoring(router: str, scoring: str, biased: bool) -> None:
    spec = make_spec(num_experts=6, top_k=3, scoring=scoring, correction_bias=biased)
    logits = np.array([[1.0, 2.0, 2.0, 1.0, 2.0, 2.0], [0.5, 0.5, -1.0, 0.5, 0.5, 0.5]], np.float32)
    bias = np.full(6, -3.0, np.float32) if biased else None
    assert ids_and_weights(router, logits, spec, bias)[0].tolist() == [[1, 2, 4], [0, 1, 3]]


@pytest.mark.parametrize("router", WITH_IDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_c1_zeros_tie_whatever_their_sign(router: str, dtype: str) -> None:
    """-0.0 == 0.0: the lower id wins, though a sort by bits puts -0.0 behind 0.0."""
    spec = make_spec(num_experts=4, top_k=2)
    logits = np.asarray(jnp.asarray([[-0.0, 0.0, -1.0, 0.0], [0.0, -0.0, -1.0, 0.0]], dtype))
    assert ids_and_weights(router, logits, spec)[0].tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize("router", WITH_IDS)
def test_c1_tied_groups_go_to_the_lowest(router: str) -> None:
    spec = make_spec(num_experts=6, top_k=2, num_expert_groups=3, top_k_groups=2, scoring="sigmoid")
    logits = np.array([[-1.0, -1.0, 1.0, 0.0, 0.0, 1.0], [2.0, 0.0, 0.0, 2.0, 2.0, 0.0]], np.float32)
    assert ids_and_weights(router, logits, spec)[0].tolist() == [[2, 5], [0, 3]]


@pytest.mark.parametrize("router", WITH_IDS)
def test_c1_saturated_scores_are_no_ties(router: str) -> None:
    """Sigmoids of 30, 40 and 50 are all 1 in float32; without correction bias the logits decide."""
    spec = make_spec(num_experts=4, top_k=2, scoring="sigmoid")
    assert ids_and_weights(router, np.array([[30.0, 50.0, 40.0, 0.0]], np.float32), spec)[0].tolist() == [
        [1, 2]
    ]
    spec = make_spec(num_experts=4, top_k=2)
    logits = np.array([[200.0, -20.0, -10.0, -30.0]], np.float32)
    assert ids_and_weights(router, logits, spec)[0].tolist() == [[0, 2]]


# C3, C4, C5: NaN, -inf, underflow


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_c3_a_row_of_nan_logits_spoils_only_itself(implementation: str, bad: float) -> None:
    spec = make_spec(num_experts=16, top_k=4, hidden_size=16, intermediate_size=8)
    params, x = random_params(spec), random_tokens(spec, 8)
    logits = random_logits(8, 16)
    zeroed, logits = logits.copy(), logits.copy()
    logits[5], zeroed[5] = bad, 0.0
    y = run_moe(implementation, x, logits, params["w13"], params["w2"], spec=spec)
    expected = run_moe(implementation, x, zeroed, params["w13"], params["w2"], spec=spec)
    others = np.arange(8) != 5
    assert_same_bits(y[others], expected[others])
    assert np.isfinite(expected).all()
    assert np.isnan(y[5]).all()


@pytest.mark.parametrize("router", WITH_IDS)
@pytest.mark.parametrize("scoring", ALL_SCORINGS)
def test_c3_ids_of_a_row_without_experts_are_unique(router: str, scoring: str) -> None:
    spec = make_spec(num_experts=16, top_k=4, scoring=scoring)
    logits = random_logits(8, 16)
    logits[5] = np.nan
    ids, weights = ids_and_weights(router, logits, spec)
    assert ids[5].tolist() == [0, 1, 2, 3]
    assert np.isnan(weights[5]).all()
    assert np.isfinite(np.delete(weights, 5, axis=0)).all()


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("scoring", ALL_SCORINGS)
def test_c4_a_nan_logit_excludes_its_expert_only(router: str, scoring: str) -> None:
    """Whether the other logits are above 0 or below."""
    spec = make_spec(num_experts=4, top_k=2, scoring=scoring)
    logits = np.array([[np.nan, 1.0, 2.0, 0.0], [0.0, np.nan, 1.0, 2.0], [np.nan, -1, -2, -3]], np.float32)
    ids = [[2, 1], [3, 2], [1, 2]]
    weights = [[0.7310586, 0.2689414]] * 3
    if scoring == "sigmoid":  # 0.8807971 and 0.7310586, 0.2689414 and 0.1192029, over their sums
        weights = [[0.5464491, 0.4535509]] * 2 + [[0.6928902, 0.3071098]]
    expected = np.stack([expand(i, w, 4) for i, w in zip(ids, weights, strict=True)])
    np.testing.assert_allclose(weight_of_expert(router, logits, spec), expected, rtol=1e-6)
    if router in WITH_IDS:
        assert ids_and_weights(router, logits, spec)[0].tolist() == ids


@pytest.mark.parametrize("router", ROUTERS)
def test_c4_weights_of_experts_that_only_the_bias_chose(router: str) -> None:
    """The written rule, s / (sum + 1e-20), keeps them finite where their softmax scores underflow."""
    spec = make_spec(num_experts=4, top_k=2, correction_bias=True)
    bias = np.array([0.0, 5.0, 5.0, 0.0], np.float32)
    for gap, rest in [(30.0, 1.0), (100.0, 0.0)]:
        got = weight_of_expert(router, np.array([[gap, 0.0, 0.5, 0.0]], np.float32), spec, bias)
        expected = rest * expand([1, 2], [0.3775407, 0.6224593], 4)[None]  # softmax of 0 and 0.5
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("router", WITH_IDS)
@pytest.mark.parametrize("scoring", ALL_SCORINGS)
def test_c4_an_infinite_logit_wins_and_stays_finite(router: str, scoring: str) -> None:
    spec = make_spec(num_experts=4, top_k=2, scoring=scoring)
    ids, weights = ids_and_weights(router, np.array([[0.0, np.inf, 1.0, -np.inf]], np.float32), spec)
    assert ids.tolist() == [[1, 2]]
    expected = [0.57768, 0.42232] if scoring == "sigmoid" else [1.0, 0.0]
    np.testing.assert_allclose(weights, [expected], rtol=1e-5)


UNDERFLOW = pytest.mark.parametrize(
    ("level", "dtype"), [(-50.0, "float32"), (-120.0, "float32"), (-1e4, "float32"), (-120.0, "bfloat16")]
)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@UNDERFLOW
def test_c5_underflowed_sigmoids_give_finite_weights(implementation: str, level: float, dtype: str) -> None:
    spec = make_spec(num_experts=8, top_k=2, scoring="sigmoid", correction_bias=True)
    params, x = random_params(spec), random_tokens(spec, 3)
    logits = np.asarray(jnp.full((3, 8), level, dtype))
    y = run_moe(
        implementation,
        x,
        logits,
        params["w13"],
        params["w2"],
        spec=spec,
        correction_bias=params["correction_bias"],
    )
    assert np.isfinite(y).all()
    bias = params["correction_bias"]
    ids, weights = reference.route(logits, spec, correction_bias=bias)
    truth = reference.fused_experts(x, ids, weights, params["w13"], params["w2"], spec=spec)
    np.testing.assert_allclose(y, truth, rtol=1e-4, atol=1e-6)


@UNDERFLOW
def test_c5_underflowed_sigmoids_give_finite_gradients(level: float, dtype: str) -> None:
    spec = make_spec(num_experts=8, top_k=2, scoring="sigmoid", correction_bias=True)
    bias = jnp.asarray(random_params(spec)["correction_bias"])
    logits = jnp.full((3, 8), level, dtype)

    @jax.jit
    def gradients(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        def chosen(logits: jax.Array) -> jax.Array:
            return (route(logits, spec, correction_bias=bias).topk_weights * jnp.array([1.0, 2.0])).sum()

        def balance(logits: jax.Array) -> jax.Array:
            return load_balance_loss(logits, route(logits, spec, correction_bias=bias), spec)

        return jax.grad(chosen)(logits), jax.grad(balance)(logits)

    for gradient in gradients(logits):
        assert np.isfinite(np.asarray(gradient, np.float32)).all()


# C7, C8, C9: groups and biases


@pytest.mark.parametrize("router", ROUTERS)
def test_c7_masked_groups_lose_against_negative_choices(router: str) -> None:
    spec = make_spec(
        num_experts=8,
        top_k=2,
        num_expert_groups=2,
        top_k_groups=1,
        scoring="sigmoid",
        correction_bias=True,
    )
    logits = np.array([[0.0, 0.1, 0.2, 0.3, -1.0, -1.0, -1.0, -1.0]], np.float32)
    bias = np.full(8, -2.0, np.float32)
    expected = expand([3, 2], [0.51094, 0.48906], 8)[None]
    np.testing.assert_allclose(weight_of_expert(router, logits, spec, bias), expected, rtol=2e-5)
    if router in WITH_IDS:
        assert ids_and_weights(router, logits, spec, bias)[0].tolist() == [[3, 2]]


@pytest.mark.parametrize("router", ROUTERS)
def test_c8_a_common_bias_changes_nothing(router: str) -> None:
    logits = np.random.default_rng(8).permutation(np.linspace(-3.0, 3.0, 160)).astype(np.float32)[None]
    spec = make_spec(num_experts=160, top_k=6, scoring="sigmoid", correction_bias=True)
    plain = dataclasses.replace(spec, correction_bias=False)
    expected = weight_of_expert(router, logits, plain)
    for bias in (0.0, -5.0, -5e3):
        got = weight_of_expert(router, logits, spec, np.full(160, bias, np.float32))
        if bias == -5e3:  # sums are multiples of 2**-11 here: other ids may tie
            assert np.count_nonzero(got) == 6
        else:
            np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert np.flatnonzero(expected).tolist() == sorted(np.argsort(-logits[0])[:6].tolist())


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(("group_score", "ids"), [("top2_sum", [4, 5]), ("max", [0, 1])])
def test_c9_group_score_is_an_explicit_choice(router: str, group_score: str, ids: list[int]) -> None:
    spec = make_spec(
        num_experts=8,
        top_k=2,
        num_expert_groups=2,
        top_k_groups=1,
        group_score=group_score,
        scoring="sigmoid",
    )
    scores = np.array([0.9, 0.1, 0.1, 0.1, 0.6, 0.6, 0.5, 0.5])
    expected = expand(ids, scores[ids] / scores[ids].sum(), 8)[None]
    np.testing.assert_allclose(weight_of_expert(router, logit(scores)[None], spec), expected, rtol=1e-5)


@pytest.mark.parametrize("router", WITH_IDS)
@pytest.mark.parametrize("group_score", ["top2_sum", "max"])
def test_c9_groups_of_one_expert(router: str, group_score: str) -> None:
    spec = make_spec(num_experts=4, top_k=2, num_expert_groups=4, top_k_groups=3, group_score=group_score)
    logits = np.array([[0.0, 3.0, 1.0, 2.0]], np.float32)
    assert ids_and_weights(router, logits, spec)[0].tolist() == [[1, 3]]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_c10_router_logits_are_float32(implementation: str) -> None:
    spec = make_spec(num_experts=2, top_k=1, hidden_size=64, intermediate_size=1, expert_bias=True)
    params = {name: np.zeros(shape, np.float32) for name, shape in spec.param_shapes.items()}
    params["router"][0, 0] = params["router"][1, 0] = 10.0
    params["router"][1, 1] = 0.02
    params["b2"][1] = 1.0  # expert 1 answers 1, expert 0 answers 0
    half = {name: np.asarray(jnp.asarray(value, jnp.bfloat16)) for name, value in params.items()}
    x = np.zeros((1, 64), np.float32)
    x[0, :2] = 1.0
    y = run_layer(implementation, half, np.asarray(jnp.asarray(x, jnp.bfloat16)), spec)
    assert (y.astype(np.float32) == 1.0).all()


# C11, C12, C13: weights


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(
    ("renormalize", "weights"), [(False, [0.64391, 0.23688]), (True, [0.73106, 0.26894])]
)
def test_c11_weights_are_probabilities(router: str, renormalize: bool, weights: list[float]) -> None:
    spec = make_spec(num_experts=4, top_k=2, renormalize=renormalize)
    got = weight_of_expert(router, np.array([[2.0, 1.0, 0.0, -1.0]], np.float32), spec)
    np.testing.assert_allclose(got, expand([0, 1], weights, 4)[None], rtol=2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_c12_router_bias_and_softmax_over_the_chosen(implementation: str) -> None:
    spec = make_spec(
        num_experts=4,
        top_k=2,
        intermediate_size=1,
        scoring="softmax_after_topk",
        router_bias=True,
        expert_bias=True,
    )
    params = {name: np.zeros(shape, np.float32) for name, shape in spec.param_shapes.items()}
    params["router"][0, 0] = 1.0
    params["router_bias"][2] = 5.0
    params["b2"] = np.eye(4, dtype=np.float32)  # the output shows the weights
    y = run_layer(implementation, params, np.array([[1.0, 0.0, 0.0, 0.0]], np.float32), spec)
    np.testing.assert_allclose(y, [[0.0179862, 0.0, 0.9820138, 0.0]], rtol=1e-5)


def test_c12_the_layer_tells_its_routing() -> None:
    spec = make_spec(num_experts=4, top_k=2, scoring="softmax_after_topk", router_bias=True)
    params = {name: jnp.zeros(shape) for name, shape in spec.param_shapes.items()}
    params["router"] = params["router"].at[0, 0].set(1.0)
    params["router_bias"] = jnp.array([0.0, 0.0, 5.0, 0.0])
    apply = jax.jit(lambda params, x: MoE(spec).apply(params, x, return_aux=True)[1])
    aux = apply(params, jnp.array([[1.0, 0.0, 0.0, 0.0]]))
    assert aux.routing.topk_ids.tolist() == [[2, 0]]
    np.testing.assert_allclose(aux.routing.topk_weights, [[0.9820138, 0.0179862]], rtol=1e-5)
    assert aux.expert_loads.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_c13_scaling_factor_is_applied_once_and_not_to_the_shared_expert(
    implementation: str, renormalize: bool, biased: bool
) -> None:
    spec = make_spec(
        num_experts=8,
        top_k=2,
        hidden_size=8,
        scoring="sigmoid" if biased else "softmax",
        renormalize=renormalize,
        correction_bias=biased,
        shared_intermediate_size=4,
    )
    scaled = dataclasses.replace(spec, routed_scaling_factor=2.5)
    params, x = random_params(spec), random_tokens(spec, 5)
    gate, up = np.split(x.astype(np.float64) @ params["shared_w13"].T, 2, axis=-1)
    shared = (gate / (1 + np.exp(-gate)) * up) @ params["shared_w2"].T
    once = run_layer(implementation, params, x, spec) - shared
    assert_close(
        run_layer(implementation, params, x, scaled), 2.5 * once + shared, dtype="float32", context=str(spec)
    )
    assert np.abs(once).max() > 0.1


# C14, C15: numbers of experts


@functools.cache
def _logits_and_ids(num_experts: int) -> tuple[NDArray, NDArray]:
    logits = random_logits(64, num_experts, seed=num_experts)
    k = min(8, num_experts)
    return logits, np.argsort(-logits, axis=-1, kind="stable")[:, :k]


@pytest.mark.parametrize("num_experts", [1, 3, 6, 60, 96, 160, 384])
@pytest.mark.parametrize("num_tokens", [1, 64, 60000])
def test_c14_any_number_of_experts_at_any_number_of_tokens(num_experts: int, num_tokens: int) -> None:
    spec = make_spec(num_experts=num_experts, top_k=min(8, num_experts))
    logits, ids = _logits_and_ids(num_experts)
    row = np.arange(num_tokens) % 64
    got, weights = ids_and_weights("route", logits[row], spec)
    assert np.array_equal(got, ids[row])
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-5)
    assert ids_and_weights("reference", logits[:1], spec)[0].tolist() == ids[:1].tolist()


@pytest.mark.parametrize("router", WITH_IDS)
@pytest.mark.parametrize("scoring", ALL_SCORINGS)
def test_c15_all_experts_are_chosen_once(router: str, scoring: str) -> None:
    spec = make_spec(num_experts=6, top_k=6, scoring=scoring)
    ids, weights = ids_and_weights(router, random_logits(9, 6), spec)
    assert np.sort(ids, axis=-1).tolist() == [list(range(6))] * 9
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-6)


def test_c15_more_than_all_experts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"top_k=7 .* num_experts=6"):
        make_spec(num_experts=6, top_k=7)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("scoring", ALL_SCORINGS)
@pytest.mark.parametrize("renormalize", [False, True])
def test_c15_excluded_experts_come_last_with_weight_zero(
    router: str, scoring: str, renormalize: bool
) -> None:
    """With one expert left of four, top_k = 3 has to take two excluded ones."""
    spec = make_spec(num_experts=4, top_k=3, scoring=scoring, renormalize=renormalize)
    logits = np.array([[-np.inf, -np.inf, 0.5, -np.inf]], np.float32)
    own = 0.6224593 if scoring == "sigmoid" and not renormalize else 1.0
    np.testing.assert_allclose(weight_of_expert(router, logits, spec), expand([2], [own], 4)[None], rtol=1e-6)
    if router in WITH_IDS:
        ids, weights = ids_and_weights(router, logits, spec)
        assert ids.tolist() == [[2, 0, 1]]
        assert weights[0, 1:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("router", WITH_IDS)
@pytest.mark.parametrize("scoring", ALL_SCORINGS)
def test_c15_experts_outside_of_the_kept_groups_have_weight_zero(router: str, scoring: str) -> None:
    """The kept group has one expert left; the second place goes to an expert that may not be used."""
    spec = make_spec(
        num_experts=6, top_k=2, num_expert_groups=3, top_k_groups=1, group_score="max", scoring=scoring
    )
    logits = np.array([[0.5, 0.0, 2.0, -np.inf, 1.0, 1.0]], np.float32)
    ids, weights = ids_and_weights(router, logits, spec)
    assert ids[0, 0] == 2
    assert ids[0, 1] != 2
    np.testing.assert_allclose(weights, [[1.0, 0.0]], rtol=1e-6)


@pytest.mark.parametrize("router", WITH_IDS)
@pytest.mark.parametrize("group_score", ["top2_sum", "max"])
@pytest.mark.parametrize("biased", [False, True])
def test_c15_a_group_with_an_expert_left_beats_a_group_without(
    router: str, group_score: str, biased: bool
) -> None:
    spec = make_spec(
        num_experts=4,
        top_k=1,
        num_expert_groups=2,
        top_k_groups=1,
        group_score=group_score,
        scoring="sigmoid",
        correction_bias=biased,
    )
    bias = np.full(4, -2.0, np.float32) if biased else None
    ids, weights = ids_and_weights(
        router, np.array([[-np.inf, -np.inf, -np.inf, 0.5]], np.float32), spec, bias
    )
    assert ids.tolist() == [[3]]
    np.testing.assert_allclose(weights, [[1.0]])


# C16, C17: the balance loss


def balance_loss(router: str, logits: NDArray, spec: MoESpec, mask: NDArray | None = None) -> float:
    if router == "reference":
        ids, _ = reference.route(logits, spec)
        return reference.load_balance_loss(logits, ids, spec, mask=mask)
    loss = jax.jit(lambda logits: load_balance_loss(logits, route(logits, spec), spec, mask=mask))
    return float(loss(jnp.asarray(logits)))


@pytest.mark.parametrize("router", WITH_IDS)
def test_c16_balance_loss_takes_logits(router: str) -> None:
    spec = make_spec(num_experts=4, top_k=1)
    logits = np.tile(np.array([10.0, 0.0, 0.0, 0.0], np.float32), (6, 1))
    assert balance_loss(router, logits, spec) == pytest.approx(3.99946, rel=1e-5)


@pytest.mark.parametrize("router", WITH_IDS)
@pytest.mark.parametrize("scoring", ALL_SCORINGS)
@pytest.mark.parametrize("top_k", [1, 2])
def test_c16_uniform_routing_gives_one_for_any_top_k(router: str, scoring: str, top_k: int) -> None:
    spec = make_spec(num_experts=4, top_k=top_k, scoring=scoring)
    logits = (10.0 * np.eye(4, dtype=np.float32)) + (9.0 * np.roll(np.eye(4, dtype=np.float32), 1, axis=1))
    assert balance_loss(router, logits, spec) == pytest.approx(1.0, rel=1e-5)


def _losses(logits: jax.Array, spec: MoESpec, mask: jax.Array | None) -> jax.Array:
    return load_balance_loss(logits, route(logits, spec), spec, mask=mask) + router_z_loss(logits, mask=mask)


@pytest.mark.parametrize("scoring", ALL_SCORINGS)
def test_c17_padding_is_in_no_loss(scoring: str) -> None:
    spec = make_spec(num_experts=4, top_k=2, scoring=scoring)
    real = random_logits(8, 4)
    ids, _ = reference.route(real, spec)
    truth = reference.load_balance_loss(real, ids, spec) + reference.router_z_loss(real)
    grad = jax.jit(jax.value_and_grad(_losses), static_argnums=1)
    want, expected = grad(jnp.asarray(real), spec, None)
    np.testing.assert_allclose(want, truth, rtol=1e-5)
    padded = np.concatenate([real, np.zeros_like(real)])
    for padding in (50.0, np.nan, np.inf):
        padded[8:, 0] = padding
        loss, gradient = grad(jnp.asarray(padded), spec, jnp.arange(16) < 8)
        np.testing.assert_allclose(loss, want, rtol=1e-6)
        np.testing.assert_allclose(gradient[:8], expected, rtol=1e-4, atol=1e-7)
        assert (np.asarray(gradient[8:]) == 0).all()


def test_c17_padding_is_in_no_loss_of_the_layer() -> None:
    spec = make_spec(num_experts=4, top_k=2)
    params, x = random_params(spec), random_tokens(spec, 16)
    x[8:] = np.nan

    def losses(params: Any, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        aux = MoE(spec).apply(params, x, mask=mask, return_aux=True)[1]
        return aux.load_balance_loss + aux.router_z_loss

    grad = jax.jit(jax.value_and_grad(losses, argnums=(0, 1)))
    loss, (d_params, dx) = grad(params, jnp.asarray(x), jnp.arange(16) < 8)
    want, (d_expected, dx_expected) = grad(params, jnp.asarray(x[:8]), None)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    np.testing.assert_allclose(d_params["router"], d_expected["router"], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(dx[:8], dx_expected, rtol=1e-4, atol=1e-7)
    assert (np.asarray(dx[8:]) == 0).all()


def test_c17_no_real_token_gives_no_loss() -> None:
    spec = make_spec(num_experts=4, top_k=2)
    logits = jnp.full((3, 4), jnp.nan)
    loss, gradient = jax.jit(jax.value_and_grad(lambda v: _losses(v, spec, jnp.zeros(3, bool))))(logits)
    assert loss == 0.0
    assert (np.asarray(gradient) == 0).all()


# A9, C18: the sort by expert


def check_plan(plan: Any, ids: NDArray, num_experts: int) -> None:
    """A bijection of slots and rows, sorted stably by expert, with the right counts and offsets."""
    slot_of_row, row_of_slot = np.asarray(plan.slot_of_row), np.asarray(plan.row_of_slot)
    flat = ids.reshape(-1)
    keys = np.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    sizes = np.bincount(keys, minlength=num_experts + 1)[:num_experts]
    assert np.array_equal(slot_of_row[row_of_slot], np.arange(flat.size))
    assert np.array_equal(np.asarray(plan.group_sizes), sizes)
    assert np.array_equal(np.asarray(plan.group_offsets), np.concatenate([[0], np.cumsum(sizes)]))
    assert np.array_equal(slot_of_row, np.argsort(keys, kind="stable"))


jitted_plan = jax.jit(make_plan, static_argnums=1)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300])
def test_a9_sort_by_expert_is_a_bijection(num_tokens: int) -> None:
    ids = np.random.default_rng(num_tokens).integers(0, 8, (num_tokens, 2), np.int32)
    poison_memory()
    check_plan(jitted_plan(ids, 8), ids, 8)


def test_a9_every_count_of_live_tokens() -> None:
    """1 … 300 tokens, anywhere among dropped ones: one program, 300 routings."""
    rng = np.random.default_rng(9)
    ids = rng.integers(0, 8, (300, 300, 2), np.int32)
    ids[np.arange(300)[None, :] > np.arange(300)[:, None]] = -1
    ids = rng.permuted(ids, axis=1)
    plans = jax.jit(jax.vmap(lambda ids: make_plan(ids, 8)))(ids)
    for n in range(300):
        assert np.count_nonzero(ids[n] >= 0) == 2 * (n + 1)
        check_plan(jax.tree.map(lambda leaf, n=n: leaf[n], plans), ids[n], 8)


@pytest.mark.parametrize("kind", ["round_robin", "last"])
def test_c18_more_experts_than_threads_in_a_block(kind: str) -> None:
    ids = np.arange(4096, dtype=np.int32)[:, None] % 1536
    if kind == "last":
        ids = np.full_like(ids, 1535)
    check_plan(jitted_plan(ids, 1536), ids, 1536)
    counts = np.asarray(count_experts(jnp.asarray(ids), 1536))
    assert counts[1535] == (4096 if kind == "last" else 2)
