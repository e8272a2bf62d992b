"""The reference against numbers worked out by hand, and against the golden checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray
from safetensors.numpy import load_file

from moe_pallas import reference
from moe_pallas.spec import GateUp, GroupScore, MoESpec, Scoring

GOLDENS = Path(__file__).parent / "data" / "goldens"

LN2, LN3 = math.log(2.0), math.log(3.0)

# silu(z) = z / (1 + exp(-z))
SILU_1 = 0.7310586  # 1 / 1.3678794
SILU_2 = 1.7615942  # 2 / 1.1353353
SILU_3 = 2.8577224  # 3 / 1.0497871
SILU_4 = 3.9280552  # 4 / 1.0183156


def make_spec(**options: Any) -> MoESpec:
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 1, "intermediate_size": 1}
    return MoESpec(**(sizes | options))


def assert_near(actual: ArrayLike, expected: ArrayLike, rtol: float = 1e-6) -> None:
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=rtol, atol=0)


def route_row(logits: ArrayLike, bias: ArrayLike | None = None, **options: Any) -> tuple[list[int], NDArray]:
    """Ids and weights of one token."""
    spec = make_spec(num_experts=len(np.asarray(logits)), correction_bias=bias is not None, **options)
    ids, weights = reference.route(logits, spec, correction_bias=bias)
    assert ids.dtype == np.int32
    assert weights.dtype == np.float64
    return ids.tolist(), weights


def activate(*branches: float, **options: Any) -> NDArray:
    """What the activation makes of one token's w13 rows: x = 1 picks them, w2 = identity returns them."""
    gated = options.get("activation", "swiglu") in ("swiglu", "geglu", "geglu_tanh")
    width = len(branches) // (2 if gated else 1)
    spec = make_spec(num_experts=1, top_k=1, hidden_size=width, intermediate_size=width, **options)
    x = np.eye(1, width)
    w13 = np.zeros((1, len(branches), width))
    w13[0, :, 0] = branches
    return reference.fused_experts(x, [[0]], [[1.0]], w13, np.eye(width)[np.newaxis], spec=spec)[0]


def random_problem(
    seed: int, leading: tuple[int, ...], **options: Any
) -> tuple[MoESpec, dict[str, NDArray], NDArray]:
    """A layer with every array that its spec has, and tokens for it."""
    sizes = {"num_experts": 6, "top_k": 2, "hidden_size": 7, "intermediate_size": 5}
    spec = MoESpec(**(sizes | options))
    rng = np.random.default_rng(seed)
    params = {name: rng.normal(size=shape) for name, shape in spec.param_shapes.items()}
    return spec, params, rng.normal(size=(*leading, spec.hidden_size))


# Experts whose output tells which of them were used: f_e(x) = 10 ** e for every x, from b2 alone.
def marked_experts(spec: MoESpec) -> dict[str, Any]:
    experts = {name: np.zeros(spec.param_shapes[name]) for name in ("w13", "w2", "b13", "b2")}
    experts["b2"][:] = 10.0 ** np.arange(spec.num_experts)[:, np.newaxis]
    return experts


class TestActivations:
    def test_g1_swiglu_multiplies_silu_of_gate_by_up(self) -> None:
        # silu(2) * 3; with gate and up swapped it would be silu(3) * 2 = 5.7154448.
        assert_near(activate(2.0, 3.0), [5.2847825])

    def test_g5_clamp_comes_before_the_activation(self) -> None:
        # gate min(8, 7): silu(7) * 1 = 7 / (1 + exp(-7)) = 7 / 1.00091188. Clamping last would give 7.
        assert_near(activate(8.0, 1.0, swiglu_limit=7.0), [6.9936226])

    def test_g5_up_is_clamped_on_both_sides(self) -> None:
        # silu(1) * 7 and silu(1) * -7
        assert_near(activate(1.0, 1.0, 8.0, -9.0, swiglu_limit=7.0), [7 * SILU_1, -7 * SILU_1])

    def test_g5_gate_has_no_lower_clamp(self) -> None:
        # -9 * sigmoid(-9) * 1 = -9 * 1.2339458e-4; a clamp to -7 would give -6.3773e-3.
        assert_near(activate(-9.0, 1.0, swiglu_limit=7.0), [-1.1105512e-3])

    def test_without_limit_nothing_is_clamped(self) -> None:
        # 8 / (1 + exp(-8)) * 9 = 7.9973172 * 9
        assert_near(activate(8.0, 9.0), [71.975855])

    def test_gpt_oss_alpha_and_up_offset(self) -> None:
        # g = 1, u = 0.5: sigmoid(1.702) * (0.5 + 1); exp(-1.702) = 0.18231852, 1.5 / 1.18231852.
        # g = 1, u = -8: u is clamped to -7 before 1 is added: -6 / 1.18231852.
        options: dict[str, Any] = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "swiglu_up_offset": 1.0}
        assert_near(activate(1.0, 1.0, 0.5, -8.0, **options), [1.2686937, -5.0747747])

    # GELU(z) = z * Phi(z): Phi(1) = 0.84134475, Phi(-1) = 0.15865525, Phi(2) = 0.97724987.
    # tanh form, (1 + tanh t) / 2 for Phi, t = 0.79788456 * (z + 0.044715 z^3). z = 1: t = 0.83356195,
    # 0.84119199; z = -1: one minus that; z = 2: t = 0.79788456 * 2.35772 = 1.88118842, 0.97729885.
    @pytest.mark.parametrize(
        ("activation", "branches", "expected"),
        [
            ("geglu", (1.0, -1.0, 3.0, 2.0), [0.84134475 * 3, -0.15865525 * 2]),
            ("geglu_tanh", (1.0, -1.0, 3.0, 2.0), [0.84119199 * 3, -0.15880801 * 2]),
            ("relu2", (-2.0, 3.0, 0.5), [0.0, 9.0, 0.25]),
            ("silu", (2.0, -1.0), [SILU_2, SILU_1 - 1.0]),
            ("gelu", (1.0, -1.0, 2.0), [0.84134475, -0.15865525, 1.95449974]),
            ("gelu_tanh", (1.0, -1.0, 2.0), [0.84119199, -0.15880801, 1.95459770]),
        ],
    )
    def test_activation(self, activation: str, branches: tuple[float, ...], expected: list[float]) -> None:
        assert_near(activate(*branches, activation=activation), expected)

    def test_gelu_keeps_its_digits_in_the_tail(self) -> None:
        # -10 * Phi(-10) with Phi(-10) = 7.619853024e-24, where 1 + erf is 0 in float64.
        assert_near(activate(-10.0, activation="gelu"), [-7.619853024e-23], rtol=1e-9)

    @pytest.mark.parametrize(
        "activation", ["swiglu", "geglu", "geglu_tanh", "relu2", "silu", "gelu", "gelu_tanh"]
    )
    def test_large_values_warn_nowhere(self, activation: str) -> None:
        branches = [1e4, -1e4, 1e120, -1e120, 2.0, -2.0]
        assert np.isfinite(activate(*branches, activation=activation)).all()

    def test_g2_both_gate_up_orders(self) -> None:
        # gates 1 2 3 4, ups 10 20 30 40
        expected = [10 * SILU_1, 20 * SILU_2, 30 * SILU_3, 40 * SILU_4]
        stacked = (1.0, 2.0, 3.0, 4.0, 10.0, 20.0, 30.0, 40.0)
        interleaved = (1.0, 10.0, 2.0, 20.0, 3.0, 30.0, 4.0, 40.0)
        assert_near(activate(*stacked, gate_up="stacked"), expected)
        assert_near(activate(*interleaved, gate_up="interleaved"), expected)

    @pytest.mark.parametrize(
        ("gate_up", "b13"), [("stacked", [1.0, 2.0, 10.0, 20.0]), ("interleaved", [1.0, 10.0, 2.0, 20.0])]
    )
    def test_g2_bias_has_the_order_of_the_rows(self, gate_up: str, b13: list[float]) -> None:
        spec = make_spec(
            num_experts=1, top_k=1, hidden_size=2, intermediate_size=2, gate_up=gate_up, expert_bias=True
        )
        w13, w2 = np.zeros((1, 4, 2)), np.eye(2)[np.newaxis]
        y = reference.fused_experts(
            [[5.0, 5.0]], [[0]], [[1.0]], w13, w2, spec=spec, b13=[b13], b2=np.zeros((1, 2))
        )
        assert_near(y, [[10 * SILU_1, 20 * SILU_2]])


class TestScoringAndWeights:
    def test_c11_softmax_with_and_without_renormalising(self) -> None:
        # exp(2, 1, 0, -1) sums to 11.4752; 7.3890561 / 11.4752, 2.7182818 / 11.4752; e / (1 + e).
        ids, weights = route_row([2.0, 1.0, 0.0, -1.0], renormalize=False)
        assert ids == [0, 1]
        assert_near(weights, [0.64391426, 0.23688282])
        ids, weights = route_row([2.0, 1.0, 0.0, -1.0], renormalize=True)
        assert ids == [0, 1]
        assert_near(weights, [0.73105858, 0.26894142])

    def test_c11_sigmoid_with_and_without_renormalising(self) -> None:
        # sigmoid(ln 3) = 3/4, sigmoid(0) = 1/2; together 5/4.
        ids, weights = route_row([0.0, LN3, -5.0], scoring="sigmoid", renormalize=False)
        assert ids == [1, 0]
        assert_near(weights, [0.75, 0.5])
        assert_near(route_row([0.0, LN3, -5.0], scoring="sigmoid")[1], [0.6, 0.4])

    @pytest.mark.parametrize("renormalize", [True, False])
    def test_c11_softmax_after_topk_always_sums_to_one(self, renormalize: bool) -> None:
        # softmax(ln 3, 0) = 3/4, 1/4, whatever the other logits are.
        ids, weights = route_row(
            [-0.5, 0.0, LN3, -0.1], scoring="softmax_after_topk", renormalize=renormalize
        )
        assert ids == [2, 1]
        assert_near(weights, [0.75, 0.25])

    def test_c12_gpt_oss_router_bias_and_softmax_over_the_chosen(self) -> None:
        # logits 1 0 0 0 plus bias 0 0 5 0: ids 2, 0; softmax(5, 1) = 0.98201379, 0.01798621.
        # Marked experts: 100 * 0.98201379 + 1 * 0.01798621.
        spec = make_spec(scoring="softmax_after_topk", router_bias=True, expert_bias=True)
        router: dict[str, Any] = {"router": [[1.0], [0.0], [0.0], [0.0]], "router_bias": [0.0, 0.0, 5.0, 0.0]}
        y = reference.moe(marked_experts(spec) | router, [[1.0]], spec)
        assert_near(y, [[98.219365]])
        ids, weights = route_row([1.0, 0.0, 5.0, 0.0], scoring="softmax_after_topk")
        assert ids == [2, 0]
        assert_near(weights, [0.98201379, 0.01798621])

    @pytest.mark.parametrize(
        ("scoring", "logits", "bias", "expected_ids", "raw", "renormalized"),
        [
            # scores 0.5, 0.75, 0.2; choice 0.5, 0.75, 1.2; 0.2 / 0.95, 0.75 / 0.95
            (
                "sigmoid",
                [0.0, LN3, -2 * LN2],
                [0.0, 0.0, 1.0],
                [2, 1],
                [0.2, 0.75],
                [0.21052632, 0.78947368],
            ),
            # scores 1/8, 2/8, 5/8; choice 0.825, 0.25, 0.625; 1/6, 5/6
            (
                "softmax",
                [0.0, LN2, math.log(5.0)],
                [0.7, 0.0, 0.0],
                [0, 2],
                [0.125, 0.625],
                [1 / 6, 5 / 6],
            ),
            # choice 0, 1.0986, 4; softmax(-1, ln 3): 0.36787944 / 3.36787944
            (
                "softmax_after_topk",
                [0.0, LN3, -1.0],
                [0.0, 0.0, 5.0],
                [2, 1],
                [0.10923178, 0.89076822],
                [0.10923178, 0.89076822],
            ),
        ],
    )
    def test_correction_bias_moves_the_choice_and_not_the_weights(
        self,
        scoring: str,
        logits: list[float],
        bias: list[float],
        expected_ids: list[int],
        raw: list[float],
        renormalized: list[float],
    ) -> None:
        for renormalize, expected in ((False, raw), (True, renormalized)):
            ids, weights = route_row(logits, bias, scoring=scoring, renormalize=renormalize)
            assert ids == expected_ids
            assert_near(weights, expected)

    @pytest.mark.parametrize("bias", [None, [0.5, 0.0, -0.5, 1.0, 0.0, 0.0, 0.3, -1.0]])
    @pytest.mark.parametrize("renormalize", [True, False])
    @pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_after_topk"])
    def test_c13_scaling_factor_multiplies_the_weights_once(
        self, scoring: str, renormalize: bool, bias: list[float] | None
    ) -> None:
        logits = [0.3, -1.0, 2.0, 0.7, 0.1, -0.2, 1.1, 0.0]
        options: dict[str, Any] = {"scoring": scoring, "renormalize": renormalize}
        ids, weights = route_row(logits, bias, **options)
        scaled_ids, scaled = route_row(logits, bias, routed_scaling_factor=2.5, **options)
        assert scaled_ids == ids
        assert_near(scaled, 2.5 * weights, rtol=1e-14)

    def test_c13_scaling_factor_leaves_the_shared_expert_alone(self) -> None:
        spec, params, x = random_problem(0, (5,), shared_intermediate_size=3)
        scaled_spec, _, _ = random_problem(0, (5,), shared_intermediate_size=3, routed_scaling_factor=2.5)
        routed = reference.moe(params | {"shared_w2": np.zeros((7, 3))}, x, spec)
        shared = reference.moe(params | {"w2": np.zeros((6, 7, 5))}, x, spec)
        assert_near(reference.moe(params, x, scaled_spec), 2.5 * routed + shared, rtol=1e-12)

    def test_the_choice_is_made_on_logits_and_not_on_rounded_scores(self) -> None:
        # exp(-1000) and exp(-999) are both 0, sigmoid(50) and sigmoid(60) both 1 in float64.
        assert route_row([0.0, -1000.0, -999.0])[0] == [0, 2]
        assert route_row([50.0, 60.0, 0.0], scoring="sigmoid")[0] == [1, 0]

    def test_c10_logits_are_not_rounded_to_the_dtype_of_x(self) -> None:
        # 10 + 0.02 rounds to 10 in bfloat16, a tie that expert 0 would win.
        spec = make_spec(num_experts=2, top_k=1, hidden_size=2, expert_bias=True)
        router = np.array([[10.0, 0.0], [10.0, 0.02]], ml_dtypes.bfloat16)
        params = marked_experts(spec) | {"router": router}
        y = reference.moe(params, np.ones((1, 2), ml_dtypes.bfloat16), spec)
        assert y.tolist() == [[10.0, 10.0]]


class TestTies:
    @pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
    @pytest.mark.parametrize(
        ("logits", "top_k", "expected"),
        [
            ([0.0] * 16, 4, [0, 1, 2, 3]),
            ([1.0, 3.0, 3.0, 3.0, 0.0], 2, [1, 2]),
            ([0.0] * 384, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        ],
    )
    @pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_after_topk"])
    def test_c1_lowest_id_wins(
        self, scoring: str, logits: list[float], top_k: int, expected: list[int], dtype: Any
    ) -> None:
        ids, weights = route_row(np.array(logits, dtype), top_k=top_k, scoring=scoring)
        assert ids == expected
        assert_near(weights, np.full(top_k, 1 / top_k), rtol=1e-14)

    def test_c1_lowest_group_wins(self) -> None:
        options: dict[str, Any] = {
            "top_k": 2,
            "num_expert_groups": 3,
            "top_k_groups": 1,
            "scoring": "sigmoid",
        }
        assert route_row([0.0, 0.0, 1.0, 1.0, 1.0, 1.0], **options)[0] == [2, 3]

    def test_c15_top_k_equal_to_num_experts_gives_a_permutation(self) -> None:
        # exp(ln n) / 21
        ids, weights = route_row([math.log(n) for n in (3, 1, 4, 2, 6, 5)], top_k=6)
        assert ids == [4, 5, 2, 0, 3, 1]
        assert_near(weights, np.array([6, 5, 4, 3, 2, 1]) / 21)

    def test_c15_top_k_above_num_experts_is_refused(self) -> None:
        with pytest.raises(ValueError, match="top_k=7 is more than num_experts=6"):
            make_spec(num_experts=6, top_k=7)


class TestNotFiniteLogits:
    @pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_after_topk"])
    def test_c3_row_of_nan_gets_first_ids_and_nan_weights_alone(self, scoring: str) -> None:
        spec = make_spec(num_experts=16, top_k=4, scoring=scoring)
        logits = np.random.default_rng(3).normal(size=(8, 16))
        logits[5] = 0.0
        clean_ids, clean_weights = reference.route(logits, spec)
        logits[5] = np.nan
        ids, weights = reference.route(logits, spec)
        assert ids[5].tolist() == [0, 1, 2, 3]
        assert np.isnan(weights[5]).all()
        others = np.arange(8) != 5
        assert (ids[others] == clean_ids[others]).all()
        assert (weights[others] == clean_weights[others]).all()

    @pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_after_topk"])
    def test_c3_row_of_minus_inf_gets_nan_weights_even_when_a_bias_ranks_it(self, scoring: str) -> None:
        ids, weights = route_row([-np.inf, np.nan, -np.inf], [0.0, 1.0, 2.0], scoring=scoring)
        assert ids == [0, 1]
        assert np.isnan(weights).all()

    def test_c3_nan_row_of_logits_makes_its_own_output_row_nan(self) -> None:
        spec = make_spec()
        w13, w2 = np.ones((4, 2, 1)), np.ones((4, 1, 1))
        logits = [[0.0, 1.0, 2.0, 3.0], [np.nan] * 4]
        y = reference.fused_moe(np.ones((2, 1)), logits, w13, w2, spec=spec)
        assert_near(y[0], [SILU_1])  # all experts alike, weights sum to 1
        assert np.isnan(y[1]).all()

    def test_c4_nan_logit_counts_as_minus_inf(self) -> None:
        # softmax(2, 1) = e / (1 + e)
        ids, weights = route_row([np.nan, 1.0, 2.0, 0.0])
        assert ids == [2, 1]
        assert_near(weights, [0.73105858, 0.26894142])

    @pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_after_topk"])
    @pytest.mark.parametrize("bias", [None, [100.0, 0.0, 50.0, 0.0]])
    def test_c4_excluded_experts_come_last_and_weigh_nothing(
        self, scoring: str, bias: list[float] | None
    ) -> None:
        ids, weights = route_row([-np.inf, 1.0, np.nan, 1.0], bias, top_k=4, scoring=scoring)
        assert ids == [1, 3, 0, 2]
        assert_near(weights[:2], [0.5, 0.5])
        assert weights[2:].tolist() == [0.0, 0.0]

    @pytest.mark.parametrize("scoring", ["softmax", "softmax_after_topk", "sigmoid"])
    def test_c4_plus_inf_is_the_largest_finite_float32(self, scoring: str) -> None:
        largest = float(np.finfo(np.float32).max)
        ids, weights = route_row([0.0, np.inf, 5.0, largest], scoring=scoring)
        assert ids == [1, 3]
        assert_near(weights, [0.5, 0.5])

    def test_c5_sigmoid_underflow_keeps_weights_finite(self) -> None:
        # sigmoid(-120) = exp(-120) = 7.6676481e-53, over 2 * that + 1e-20; sigmoid(-1e4) = 0.
        bias = [0.1, 0.9, -0.3, 0.2, 0.8, 0.0, -0.1, 0.5]
        ids, weights = route_row([-120.0] * 8, bias, scoring="sigmoid")
        assert ids == [1, 4]
        assert_near(weights, [7.6676481e-33, 7.6676481e-33])
        for dtype in (np.float32, ml_dtypes.bfloat16):
            ids, weights = route_row(np.full(8, -1e4, dtype), bias, scoring="sigmoid")
            assert ids == [1, 4]
            assert weights.tolist() == [0.0, 0.0]


class TestGroups:
    def test_c7_experts_outside_of_the_kept_groups_lose_to_negative_values(self) -> None:
        # choice of group 0: 0.5 - 2 … 0.57444 - 2, all negative. sigmoid(0.3) = 0.57444252,
        # sigmoid(0.2) = 0.54983400, together 1.12427652.
        ids, weights = route_row(
            [0.0, 0.1, 0.2, 0.3, -1.0, -1.0, -1.0, -1.0],
            [-2.0] * 8,
            scoring="sigmoid",
            num_expert_groups=2,
            top_k_groups=1,
        )
        assert ids == [3, 2]
        assert_near(weights, [0.51094415, 0.48905585])

    def test_c8_a_bias_of_minus_five_for_all_changes_nothing(self) -> None:
        logits = np.random.default_rng(8).normal(size=160)
        ids, weights = route_row(logits, np.full(160, -5.0), top_k=6, scoring="sigmoid")
        expected_ids, expected_weights = route_row(logits, np.zeros(160), top_k=6, scoring="sigmoid")
        assert ids == expected_ids == np.argsort(-logits)[:6].tolist()
        assert (weights == expected_weights).all()

    @pytest.mark.parametrize(
        ("group_score", "expected_ids", "expected_weights"),
        [
            ("top2_sum", [4, 5], [0.5, 0.5]),  # 0.9 + 0.1 < 0.6 + 0.6
            ("max", [0, 1], [0.9, 0.1]),  # 0.9 > 0.6; 0.9 and 0.1 sum to 1
        ],
    )
    def test_c9_group_score(
        self, group_score: str, expected_ids: list[int], expected_weights: list[float]
    ) -> None:
        scores = np.array([0.9, 0.1, 0.1, 0.1, 0.6, 0.6, 0.5, 0.5])
        ids, weights = route_row(
            np.log(scores / (1 - scores)),
            scoring="sigmoid",
            num_expert_groups=2,
            top_k_groups=1,
            group_score=group_score,
        )
        assert ids == expected_ids
        assert_near(weights, expected_weights)

    @pytest.mark.parametrize("group_score", ["top2_sum", "max"])
    def test_c9_groups_of_one(self, group_score: str) -> None:
        options: dict[str, Any] = {"num_expert_groups": 4, "top_k_groups": 2, "group_score": group_score}
        assert route_row([0.0, 3.0, 1.0, 2.0], **options)[0] == [1, 3]

    def test_group_score_includes_the_correction_bias(self) -> None:
        # Without the bias group 0 wins (0.75 + 0.75), with it group 1 (0.5 + 0.5 + 0.6).
        options: dict[str, Any] = {"scoring": "sigmoid", "num_expert_groups": 2, "top_k_groups": 1}
        assert route_row([LN3, LN3, 0.0, 0.0], **options)[0] == [0, 1]
        assert route_row([LN3, LN3, 0.0, 0.0], [0.0, 0.0, 0.0, 0.6], **options)[0] == [3, 2]

    def test_softmax_after_topk_ranks_groups_by_logits(self) -> None:
        # Logits: 5 - 9 < 1 + 1. By softmax group 0 would win.
        options: dict[str, Any] = {"scoring": "softmax_after_topk", "num_expert_groups": 2, "top_k_groups": 1}
        ids, weights = route_row([5.0, -9.0, 1.0, 1.0], **options)
        assert ids == [2, 3]
        assert_near(weights, [0.5, 0.5])

    def test_softmax_scores_of_other_groups_still_count_in_the_denominator(self) -> None:
        # exp: 4, 4, 3, 1 of 12. Group 0 kept; 4/12 each without renormalising.
        logits = [math.log(4.0), math.log(4.0), LN3, 0.0]
        ids, weights = route_row(logits, num_expert_groups=2, top_k_groups=1, renormalize=False)
        assert ids == [0, 1]
        assert_near(weights, [1 / 3, 1 / 3])

    def test_excluded_experts_do_not_carry_their_group(self) -> None:
        # Group 0 would have won by expert 0; with it excluded, group 1 does.
        options: dict[str, Any] = {"num_expert_groups": 2, "top_k_groups": 1, "group_score": "max"}
        assert route_row([9.0, 0.0, 1.0, 1.0], **options)[0] == [0, 1]
        assert route_row([np.nan, 0.0, 1.0, 1.0], **options)[0] == [2, 3]
        # Nor by a bias: of sigmoids group 0 has 1/2 without expert 0, group 1 has 3/4.
        bias = [2.0, 0.0, 0.0, 0.0]
        assert route_row([0.0, 0.0, LN3, 0.0], bias, scoring="sigmoid", **options)[0] == [0, 1]
        assert route_row([np.nan, 0.0, LN3, 0.0], bias, scoring="sigmoid", **options)[0] == [2, 3]


class TestExperts:
    def test_gate_up_down_and_bias_by_hand(self) -> None:
        # x = (1, 2). gate = 1*1 + 2*1 - 1 = 2, up = 1*3 + 2*0 + 0 = 3: h = silu(2) * 3 = 5.2847825.
        # y = (2 h + 1, -h): (11.569565, -5.2847825), each times the weight 0.5.
        spec = make_spec(num_experts=1, top_k=1, hidden_size=2, expert_bias=True)
        y = reference.fused_experts(
            [[1.0, 2.0]],
            [[0]],
            [[0.5]],
            [[[1.0, 1.0], [3.0, 0.0]]],
            [[[2.0], [-1.0]]],
            spec=spec,
            b13=[[-1.0, 0.0]],
            b2=[[1.0, 0.0]],
        )
        assert_near(y, [[5.7847825, -2.6423912]])
        assert y.dtype == np.float64

    @pytest.mark.parametrize(
        ("weights", "expected"),
        [([0.25, 0.25, 0.25, 0.25], 2.5), ([0.1, 0.2, 0.1, 0.2], 0.1 + 0.4 + 0.3 + 0.8)],
    )
    def test_g6_down_bias_is_weighted(self, weights: list[float], expected: float) -> None:
        # W_down = 0 and b2[e] = e + 1: the sum of w_e * (e + 1).
        spec = make_spec(top_k=4, expert_bias=True)
        y = reference.fused_experts(
            [[3.0]],
            [[0, 1, 2, 3]],
            [weights],
            np.ones((4, 2, 1)),
            np.zeros((4, 1, 1)),
            spec=spec,
            b13=np.ones((4, 2)),
            b2=[[1.0], [2.0], [3.0], [4.0]],
        )
        assert_near(y, [[expected]])

    def test_g7_biases_alone(self) -> None:
        # x = 0. Expert 0: 2 * silu(2) * 3 + 0.5 = 11.069565. Expert 1: -silu(1) * 10 + 1 = -6.310586.
        # 0.25 * 11.069565 - 0.75 * 6.310586
        spec = make_spec(num_experts=2, expert_bias=True)
        y = reference.fused_experts(
            [[0.0]],
            [[0, 1]],
            [[0.25, 0.75]],
            np.ones((2, 2, 1)),
            [[[2.0]], [[-1.0]]],
            spec=spec,
            b13=[[2.0, 3.0], [1.0, 10.0]],
            b2=[[0.5], [1.0]],
        )
        assert_near(y, [[-1.9655483]])

    def test_d4_weight_on_output_or_on_input(self) -> None:
        # f(x) = silu(2 x), x = 1, weight 0.5: 0.5 * silu(2) = 0.8807971 on the output, silu(1) on the input.
        def run(weight_on: str) -> NDArray:
            spec = make_spec(top_k=1, activation="silu", weight_on=weight_on)
            w13, w2 = np.full((4, 1, 1), 2.0), np.ones((4, 1, 1))
            return reference.fused_experts([[1.0]], [[2]], [[0.5]], w13, w2, spec=spec)

        assert_near(run("output"), [[0.8807971]])
        assert_near(run("input"), [[SILU_1]])

    def test_d4_weight_on_input_with_two_experts_and_biases(self) -> None:
        # f_e(w x) + b: silu(1) + 1 and 10 * silu(3) + 1; the bias takes no weight.
        spec = make_spec(num_experts=2, activation="silu", weight_on="input", expert_bias=True)
        y = reference.fused_experts(
            [[1.0]],
            [[1, 0]],
            [[0.75, 0.25]],
            np.full((2, 1, 1), 4.0),
            [[[1.0]], [[10.0]]],
            spec=spec,
            b13=np.zeros((2, 1)),
            b2=np.ones((2, 1)),
        )
        assert_near(y, [[SILU_1 + 1 + 10 * SILU_3 + 1]])

    def test_d6_duplicate_ids_add_up(self) -> None:
        # Marked experts: 1000 * (0.25 + 0.75); 0.5 * 1000 + 0.5 * 10.
        spec = make_spec(expert_bias=True)
        ids, weights = [[3, 3], [3, 1]], [[0.25, 0.75], [0.5, 0.5]]
        y = reference.fused_experts(np.ones((2, 1)), ids, weights, spec=spec, **marked_experts(spec))
        assert_near(y, [[1000.0], [505.0]])

    def test_d7_minus_one_is_dropped_and_not_the_last_expert(self) -> None:
        spec = make_spec(expert_bias=True)
        experts = marked_experts(spec)
        experts["w2"][3] = np.nan
        ids, weights = [[0, -1], [-1, -1]], [[0.5, 0.5], [0.5, np.nan]]
        y = reference.fused_experts(np.ones((2, 1)), ids, weights, spec=spec, **experts)
        assert y.tolist() == [[0.5], [0.0]]

    @pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
    @pytest.mark.parametrize("garbage", [4, 12345, 2**31 - 1])
    def test_e3_ids_out_of_range_are_dropped(self, garbage: int, dtype: Any) -> None:
        # Row 1 has no valid slot, so its NaN is never read.
        spec = make_spec(expert_bias=True)
        ids = np.array([[1, garbage], [garbage, garbage]], dtype)
        y = reference.fused_experts(
            [[1.0], [np.nan]], ids, np.full((2, 2), 0.5), spec=spec, **marked_experts(spec)
        )
        assert y.tolist() == [[5.0], [0.0]]

    def test_d1_all_tokens_to_the_last_expert(self) -> None:
        spec, params, x = random_problem(1, (40,), top_k=1)
        ids, weights = np.full((40, 1), 5), np.ones((40, 1))
        y = reference.fused_experts(x, ids, weights, params["w13"], params["w2"], spec=spec)
        gate, up = np.split(x @ params["w13"][5].T, 2, axis=1)
        assert_near(y, (gate / (1 + np.exp(-gate)) * up) @ params["w2"][5].T, rtol=1e-10)

    def test_d3_top_1_keeps_weight_and_factor(self) -> None:
        # softmax(ln 3, 0, 0, 0) = 3/6; 1.5 * 0.5 * 10 ** 0, or 1.5 * 1 renormalised.
        for renormalize, expected in ((False, 0.75), (True, 1.5)):
            spec = make_spec(top_k=1, expert_bias=True, routed_scaling_factor=1.5, renormalize=renormalize)
            y = reference.fused_moe([[1.0]], [[LN3, 0.0, 0.0, 0.0]], spec=spec, **marked_experts(spec))
            assert_near(y, [[expected]])

    def test_h1_sum_over_slots_is_not_rounded(self) -> None:
        # 256 + 7 * 1; a bfloat16 sum would stay at 256.
        spec = make_spec(num_experts=8, top_k=8, expert_bias=True)
        experts = {name: a.astype(ml_dtypes.bfloat16) for name, a in marked_experts(spec).items()}
        experts["b2"] = np.array([[256.0]] + [[1.0]] * 7, ml_dtypes.bfloat16)
        x, weights = np.ones((1, 1), ml_dtypes.bfloat16), np.ones((1, 8), ml_dtypes.bfloat16)
        y = reference.fused_experts(x, [list(range(8))], weights, spec=spec, **experts)
        assert y.tolist() == [[263.0]]

    @pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
    def test_every_float_dtype_is_converted_before_the_first_operation(self, dtype: Any) -> None:
        spec, params, x = random_problem(
            2, (9,), expert_bias=True, router_bias=True, shared_intermediate_size=3, shared_expert_gate=True
        )
        narrow = {name: array.astype(dtype) for name, array in params.items()}
        wide = {name: array.astype(np.float64) for name, array in narrow.items()}
        expected = reference.moe(wide, x.astype(dtype).astype(np.float64), spec)
        assert (reference.moe(narrow, x.astype(dtype), spec) == expected).all()


class TestMaskedAndSpoiltTokens:
    OPTIONS: Mapping[str, Any] = {
        "num_experts": 8,
        "expert_bias": True,
        "router_bias": True,
        "shared_intermediate_size": 3,
        "shared_expert_gate": True,
    }

    @pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_after_topk"])
    def test_e1_masked_rows_are_never_read_and_exactly_zero(self, scoring: str) -> None:
        spec, params, x = random_problem(4, (16,), scoring=scoring, **self.OPTIONS)
        mask = np.arange(16) < 8
        x[8:] = 0.0
        clean = reference.moe(params, x, spec, mask=mask)
        x[8:12], x[12:] = np.nan, np.inf
        y = reference.moe(params, x, spec, mask=mask)
        assert (y[8:] == 0).all()
        assert (y[:8] == clean[:8]).all()
        assert (y[:8] == reference.moe(params, x[:8], spec)).all()

    def test_e1_mask_between_rows_and_over_leading_axes(self) -> None:
        spec, params, x = random_problem(5, (2, 3), **self.OPTIONS)
        mask = np.array([[True, False, True], [False, True, False]])
        expected = np.where(mask[..., np.newaxis], reference.moe(params, x, spec), 0.0)
        x[~mask] = np.nan
        assert_near(reference.moe(params, x, spec, mask=mask), expected, rtol=1e-12)

    def test_e1_mask_of_given_routing_and_logits(self) -> None:
        spec = make_spec(expert_bias=True)
        mask, x = [True, False], [[1.0], [np.nan]]
        ids, weights = [[2, 0], [2, 0]], [[0.5, 0.5], [np.nan, 0.5]]
        experts = marked_experts(spec)
        y = reference.fused_experts(x, ids, weights, spec=spec, mask=mask, **experts)
        assert y.tolist() == [[50.5], [0.0]]
        logits = [[0.0, -9.0, 0.0, -9.0], [np.nan] * 4]
        y = reference.fused_moe(x, logits, spec=spec, mask=mask, **experts)
        assert y.tolist() == [[50.5], [0.0]]

    def test_nan_token_spoils_its_own_row_only(self) -> None:
        spec, params, x = random_problem(6, (12,), **self.OPTIONS)
        expected = reference.moe(params, x, spec)
        x[5, 3] = np.nan
        y = reference.moe(params, x, spec)
        others = np.arange(12) != 5
        assert np.isnan(y[5]).all()
        assert_near(y[others], expected[others], rtol=1e-12)

    def test_infinite_token_warns_nowhere_and_spoils_its_own_row_only(self) -> None:
        spec, params, x = random_problem(7, (12,), **self.OPTIONS)
        expected = reference.moe(params, x, spec)
        x[5, 3] = np.inf
        others = np.arange(12) != 5
        assert_near(reference.moe(params, x, spec)[others], expected[others], rtol=1e-12)


class TestSharedExpert:
    # Routed experts are 0. Shared: gate = 2 x, up = 3 x at x = 1, w2 = 1: silu(2) * 3 = 5.2847825.
    @pytest.mark.parametrize(
        ("gate_up", "gate", "expected"),
        [
            ("stacked", None, 2 * 5.2847825),
            ("interleaved", None, 2 * 5.2847825),
            ("stacked", [LN3], 0.75 * 2 * 5.2847825),  # sigmoid(ln 3) = 3/4
        ],
    )
    def test_shared_expert(self, gate_up: str, gate: list[float] | None, expected: float) -> None:
        spec = make_spec(
            gate_up=gate_up,
            shared_intermediate_size=2,
            shared_expert_gate=gate is not None,
            routed_scaling_factor=7.0,
        )
        params: dict[str, Any] = {
            "router": np.zeros((4, 1)),
            "w13": np.ones((4, 2, 1)),
            "w2": np.zeros((4, 1, 1)),
            # Two columns of 2 x and 3 x: gate, gate, up, up or gate, up, gate, up.
            "shared_w13": [[2.0], [2.0], [3.0], [3.0]]
            if gate_up == "stacked"
            else [[2.0], [3.0], [2.0], [3.0]],
            "shared_w2": [[1.0, 1.0]],
        }
        if gate is not None:
            params["shared_gate"] = gate
        assert_near(reference.moe(params, [[1.0]], spec), [[expected]])

    def test_shared_expert_has_the_activation_of_the_routed_ones(self) -> None:
        # relu2, not gated: (2 * 3)^2 * 0.5 = 18 at x = 3, and 0 at x = -3. Routed: 1 * (1 * x)^2 = 9, 0.
        spec = make_spec(num_experts=1, top_k=1, activation="relu2", shared_intermediate_size=1)
        params: dict[str, ArrayLike] = {
            "router": [[0.0]],
            "w13": [[[1.0]]],
            "w2": [[[1.0]]],
            "shared_w13": [[2.0]],
            "shared_w2": [[0.5]],
        }
        assert_near(reference.moe(params, [[3.0], [-3.0]], spec), [[27.0], [0.0]])

    def test_i5_inputs_are_left_as_they_were(self) -> None:
        spec, params, x = random_problem(8, (4,), shared_intermediate_size=3, shared_expert_gate=True)
        before = {name: array.copy() for name, array in params.items()} | {"x": x.copy()}
        first, second = reference.moe(params, x, spec), reference.moe(params, x, spec)
        assert (first == second).all()
        assert all((array == before[name]).all() for name, array in (params | {"x": x}).items())


class TestShapes:
    def test_leading_axes_are_tokens(self) -> None:
        spec, params, x = random_problem(9, (2, 3), shared_intermediate_size=3)
        flat = reference.moe(params, x.reshape(6, 7), spec)
        assert (reference.moe(params, x, spec) == flat.reshape(2, 3, 7)).all()
        assert_near(reference.moe(params, x[0, 0], spec), flat[0], rtol=1e-12)
        logits = x @ params["router"].T
        ids, weights = reference.route(logits, spec)
        flat_ids, flat_weights = reference.route(logits.reshape(6, 6), spec)
        assert (ids == flat_ids.reshape(2, 3, 2)).all()
        assert (weights == flat_weights.reshape(2, 3, 2)).all()
        y = reference.fused_experts(x, ids, weights, params["w13"], params["w2"], spec=spec)
        assert y.shape == (2, 3, 7)

    @pytest.mark.parametrize("leading", [(0,), (2, 0), (0, 3)])
    def test_a5_no_tokens(self, leading: tuple[int, ...]) -> None:
        spec, params, x = random_problem(10, leading, shared_intermediate_size=3, shared_expert_gate=True)
        y = reference.moe(params, x, spec, mask=np.zeros(leading, bool))
        assert y.shape == (*leading, 7)
        ids, weights = reference.route(np.zeros((*leading, 6)), spec)
        assert ids.shape == weights.shape == (*leading, 2)
        assert reference.load_balance_loss(np.zeros((*leading, 6)), ids, spec) == 0.0
        assert reference.router_z_loss(np.zeros((*leading, 6))) == 0.0

    @pytest.mark.parametrize(
        ("name", "wrong", "message"),
        [
            ("x", np.zeros((5, 8)), r"x has shape \(5, 8\); need \(..., 7\)"),
            ("x", np.float64(1.0), r"x has shape \(\); need \(..., 7\)"),
            ("topk_ids", np.zeros((5, 3), int), r"topk_ids has shape \(5, 3\); need \(5, 2\)"),
            ("topk_ids", np.zeros((4, 2), int), r"topk_ids has shape \(4, 2\); need \(5, 2\)"),
            ("topk_weights", np.zeros((5,)), r"topk_weights has shape \(5,\); need \(5, 2\)"),
            ("w13", np.zeros((6, 7, 10)), r"w13 has shape \(6, 7, 10\); need \(6, 10, 7\)"),
            ("w2", np.zeros((6, 5, 7)), r"w2 has shape \(6, 5, 7\); need \(6, 7, 5\)"),
            ("b13", np.zeros((6, 5)), r"b13 has shape \(6, 5\); need \(6, 10\)"),
            ("b13", None, r"b13 is None; the spec needs it with shape \(6, 10\)"),
            ("b2", np.zeros((6,)), r"b2 has shape \(6,\); need \(6, 7\)"),
            ("b2", None, r"b2 is None; the spec needs it with shape \(6, 7\)"),
            ("mask", np.ones((5, 1), bool), r"mask has shape \(5, 1\); need \(5,\)"),
            ("spec", MoESpec(num_experts=6, top_k=2, hidden_size=7, intermediate_size=5), "b13 is given"),
        ],
    )
    def test_shapes_that_disagree_are_refused(self, name: str, wrong: Any, message: str) -> None:
        spec, params, x = random_problem(11, (5,), expert_bias=True)
        arguments: dict[str, Any] = {key: params[key] for key in ("w13", "w2", "b13", "b2")}
        arguments |= {
            "x": x,
            "spec": spec,
            "topk_ids": np.zeros((5, 2), int),
            "topk_weights": np.ones((5, 2)),
            "mask": np.ones(5, bool),
        }
        assert reference.fused_experts(**arguments).shape == (5, 7)
        with pytest.raises(ValueError, match=message):
            reference.fused_experts(**(arguments | {name: wrong}))

    def test_logits_and_correction_bias_that_disagree_are_refused(self) -> None:
        spec, biased = make_spec(), make_spec(correction_bias=True)
        with pytest.raises(ValueError, match=r"logits has shape \(2, 3\); need \(..., 4\)"):
            reference.route(np.zeros((2, 3)), spec)
        with pytest.raises(ValueError, match=r"correction_bias has shape \(1, 4\); need \(4,\)"):
            reference.route(np.zeros((2, 4)), biased, correction_bias=np.zeros((1, 4)))
        with pytest.raises(ValueError, match="correction_bias is None"):
            reference.route(np.zeros((2, 4)), biased)
        with pytest.raises(ValueError, match="correction_bias is given"):
            reference.route(np.zeros((2, 4)), spec, correction_bias=np.zeros(4))
        with pytest.raises(ValueError, match=r"topk_ids has shape \(3, 2\); need \(2, 2\)"):
            reference.load_balance_loss(np.zeros((2, 4)), np.zeros((3, 2), int), spec)
        with pytest.raises(ValueError, match=r"mask has shape \(3,\); need \(2,\)"):
            reference.router_z_loss(np.zeros((2, 4)), mask=np.ones(3, bool))
        with pytest.raises(ValueError, match="logits has shape"):
            reference.router_z_loss(np.zeros((2, 0)))
        with pytest.raises(ValueError, match=r"topk_ids has shape \(3, 2\); need \(2, 2\)"):
            reference.fused_moe(
                np.zeros((2, 1)), np.zeros((3, 4)), np.zeros((4, 2, 1)), np.zeros((4, 1, 1)), spec=spec
            )

    def test_params_that_disagree_are_refused(self) -> None:
        spec, params, x = random_problem(12, (5,))
        with pytest.raises(ValueError, match=r"missing \['router'\], not wanted \['gate'\]"):
            reference.moe({"gate": params["router"], "w13": params["w13"], "w2": params["w2"]}, x, spec)
        with pytest.raises(ValueError, match=r"router has shape \(7, 6\); need \(6, 7\)"):
            reference.moe(params | {"router": params["router"].T}, x, spec)

    def test_wrong_classes_of_dtype_are_refused(self) -> None:
        spec, params, x = random_problem(13, (5,))
        ids, weights = np.zeros((5, 2), int), np.ones((5, 2))
        experts: dict[str, Any] = {"w13": params["w13"], "w2": params["w2"], "spec": spec}
        with pytest.raises(TypeError, match="topk_ids has dtype float64; need integers"):
            reference.fused_experts(x, weights, weights, **experts)
        with pytest.raises(TypeError, match="mask has dtype int64; need bool"):
            reference.fused_experts(x, ids, weights, mask=np.ones(5, np.int64), **experts)
        with pytest.raises(TypeError, match="x has dtype complex128; need real numbers"):
            reference.fused_experts(x + 1j, ids, weights, **experts)


class TestRoutingCorners:
    """What happens when there are fewer usable experts than slots."""

    def test_a_group_is_ranked_by_the_experts_it_includes(self):
        # Group 1 has one usable expert, group 0 none: expert 2 must not be lost with its group.
        spec = make_spec(num_experts=4, top_k=1, num_expert_groups=2, top_k_groups=1)
        ids, weights = reference.route(np.array([[np.nan, np.nan, 1.0, np.nan]]), spec)
        assert ids.tolist() == [[2]]
        assert weights.tolist() == [[1.0]]

    def test_an_expert_of_a_dropped_group_that_fills_a_slot_weighs_nothing(self):
        # Group 1 (logits 3, 3) is kept and has two usable experts for three slots.
        spec = make_spec(num_experts=8, top_k=3, num_expert_groups=2, top_k_groups=1, scoring=Scoring.SIGMOID)
        ids, weights = reference.route(np.array([[0.0, 0, 0, 0, 3, 3, np.nan, np.nan]]), spec)
        assert ids[0, :2].tolist() == [4, 5]
        np.testing.assert_allclose(weights, [[0.5, 0.5, 0.0]])

    def test_softmax_scores_that_all_underflow_renormalise_to_zero_not_nan(self):
        # softmax([0, -1000, -1000]) = [1, 0, 0], and the bias takes the choice away from expert 0.
        spec = make_spec(num_experts=3, top_k=2, correction_bias=True)
        bias = np.array([-5.0, 0, 0])
        ids, weights = reference.route(np.array([[0.0, -1000, -1000]]), spec, correction_bias=bias)
        assert ids.tolist() == [[1, 2]]
        assert weights.tolist() == [[0.0, 0.0]]


class TestLosses:
    def test_c16_load_balance_by_hand(self) -> None:
        # f = (1, 0, 0, 0); P_0 = e^10 / (e^10 + 3) = 0.99986382; 4 * P_0. A second softmax: 1.901.
        logits, ids = np.tile([10.0, 0.0, 0.0, 0.0], (5, 1)), np.zeros((5, 1), int)
        assert_near(reference.load_balance_loss(logits, ids, make_spec(top_k=1)), 3.9994553)

    @pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_after_topk"])
    @pytest.mark.parametrize("ids", [[[0], [1], [2], [3]], [[0, 1], [2, 3], [0, 1], [2, 3]]])
    def test_c16_uniform_routing_gives_one_for_every_top_k(self, ids: list[list[int]], scoring: str) -> None:
        spec = make_spec(top_k=len(ids[0]), scoring=scoring)
        assert_near(reference.load_balance_loss(np.zeros((4, 4)), ids, spec), 1.0, rtol=1e-14)

    @pytest.mark.parametrize(
        ("scoring", "logits", "expected"),
        [
            ("softmax", [0.0, LN3], 1.5),  # 2 * 3/4
            ("softmax_after_topk", [0.0, LN3], 1.5),  # over all experts here too
            ("sigmoid", [0.0, LN3], 1.2),  # 1/2 and 3/4, normalised 2/5 and 3/5; 2 * 3/5
            ("softmax", [np.nan, 0.0], 2.0),  # NaN is an excluded expert
        ],
    )
    def test_c16_normalised_scores(self, scoring: str, logits: list[float], expected: float) -> None:
        spec = make_spec(num_experts=2, top_k=1, scoring=scoring)
        assert_near(reference.load_balance_loss([logits], [[1]], spec), expected)

    def test_c16_mean_over_tokens(self) -> None:
        # P = mean of (3/4, 1/4) and (1/2, 1/2) = (5/8, 3/8); f = (1/4, 3/4): 2 * (5/32 + 9/32).
        spec = make_spec(num_experts=2)
        loss = reference.load_balance_loss([[LN3, 0.0], [0.0, 0.0]], [[0, 1], [1, 1]], spec)
        assert_near(loss, 0.875)

    def test_c16_dropped_slots_count_nowhere(self) -> None:
        # f = (1, 0) from the one valid slot: 2 * 3/4. Were the slot of -1 counted, half of that.
        spec = make_spec(num_experts=2)
        assert_near(reference.load_balance_loss([[LN3, 0.0]], [[0, -1]], spec), 1.5)
        assert_near(reference.load_balance_loss([[LN3, 0.0]], [[2, 0]], spec), 1.5)
        assert reference.load_balance_loss([[LN3, 0.0]], [[-1, 2]], spec) == 0.0

    @pytest.mark.parametrize("padding", [9.0, np.nan])
    @pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
    def test_c17_padding_tokens_count_nowhere(self, scoring: str, padding: float) -> None:
        spec = make_spec(scoring=scoring)
        logits = np.random.default_rng(17).normal(size=(16, 4))
        logits[8:, 0] = padding
        mask = np.arange(16) < 8
        ids, _ = reference.route(logits, spec)
        loss = reference.load_balance_loss(logits, ids, spec, mask=mask)
        assert loss == reference.load_balance_loss(logits[:8], ids[:8], spec)
        assert loss != reference.load_balance_loss(logits, ids, spec)
        assert reference.router_z_loss(logits, mask=mask) == reference.router_z_loss(logits[:8])

    def test_no_real_token_gives_zero(self) -> None:
        mask = np.zeros(3, bool)
        ids = np.zeros((3, 2), int)
        assert reference.load_balance_loss(np.full((3, 4), np.nan), ids, make_spec(), mask=mask) == 0.0
        assert reference.router_z_loss(np.full((3, 4), np.nan), mask=mask) == 0.0

    def test_router_z_loss_by_hand(self) -> None:
        # (ln 2)^2 = 0.48045301, (ln 4)^2 = 1.92181206, their mean; NaN excluded: (ln 1)^2 = 0.
        assert_near(reference.router_z_loss([[0.0, 0.0], [LN3, 0.0]]), 1.2011325)
        assert reference.router_z_loss([[np.nan, 0.0]]) == 0.0
        assert_near(reference.router_z_loss([[1000.0, 1000.0]]), (1000.0 + LN2) ** 2)


Tensors = Mapping[str, NDArray]


class Family(NamedTuple):
    """A golden checkpoint: its layer's spec, and where each parameter is ({i}: layer, {e}: expert)."""

    spec: MoESpec
    params: Mapping[str, Callable[[Tensors, int], NDArray]]


def named(name: str) -> Callable[[Tensors, int], NDArray]:
    return lambda tensors, layer: tensors[name.format(i=layer)]


def transposed(name: str) -> Callable[[Tensors, int], NDArray]:
    return lambda tensors, layer: tensors[name.format(i=layer)].transpose(0, 2, 1)


def joined(*names: str) -> Callable[[Tensors, int], NDArray]:
    return lambda tensors, layer: np.concatenate([tensors[name.format(i=layer)] for name in names])


def experts(num_experts: int, *names: str) -> Callable[[Tensors, int], NDArray]:
    def stack(tensors: Tensors, layer: int) -> NDArray:
        each = ([tensors[name.format(i=layer, e=e)] for name in names] for e in range(num_experts))
        return np.stack([np.concatenate(parts) for parts in each])

    return stack


MLP = "model.layers.{i}.mlp."
GATE, UP, DOWN = "gate_proj.weight", "up_proj.weight", "down_proj.weight"


def expert_list(num_experts: int) -> dict[str, Callable[[Tensors, int], NDArray]]:
    prefix = MLP + "experts.{e}."
    return {
        "router": named(MLP + "gate.weight"),
        "w13": experts(num_experts, prefix + GATE, prefix + UP),
        "w2": experts(num_experts, prefix + DOWN),
    }


FAMILIES = {
    "mixtral": Family(
        MoESpec(num_experts=8, top_k=2, hidden_size=64, intermediate_size=96),
        {
            "router": named("model.layers.{i}.block_sparse_moe.gate.weight"),
            "w13": experts(
                8,
                "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight",
                "model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight",
            ),
            "w2": experts(8, "model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight"),
        },
    ),
    "qwen3_moe": Family(
        MoESpec(num_experts=16, top_k=4, hidden_size=64, intermediate_size=48), expert_list(16)
    ),
    "olmoe": Family(
        MoESpec(num_experts=16, top_k=4, hidden_size=64, intermediate_size=80, renormalize=False),
        expert_list(16),
    ),
    "qwen2_moe": Family(
        MoESpec(
            num_experts=12,
            top_k=3,
            hidden_size=64,
            intermediate_size=40,
            renormalize=False,
            shared_intermediate_size=56,
            shared_expert_gate=True,
        ),
        expert_list(12)
        | {
            "shared_w13": joined(MLP + "shared_expert." + GATE, MLP + "shared_expert." + UP),
            "shared_w2": named(MLP + "shared_expert." + DOWN),
            "shared_gate": lambda tensors, layer: tensors[
                (MLP + "shared_expert_gate.weight").format(i=layer)
            ][0],
        },
    ),
    "deepseek_v3": Family(
        MoESpec(
            num_experts=16,
            top_k=4,
            hidden_size=64,
            intermediate_size=48,
            scoring=Scoring.SIGMOID,
            correction_bias=True,
            num_expert_groups=4,
            top_k_groups=2,
            group_score=GroupScore.TOP2_SUM,
            routed_scaling_factor=2.5,
            shared_intermediate_size=48,
        ),
        expert_list(16)
        | {
            "correction_bias": named(MLP + "gate.e_score_correction_bias"),
            "shared_w13": joined(MLP + "shared_experts." + GATE, MLP + "shared_experts." + UP),
            "shared_w2": named(MLP + "shared_experts." + DOWN),
        },
    ),
    "gpt_oss": Family(
        MoESpec(
            num_experts=8,
            top_k=4,
            hidden_size=64,
            intermediate_size=64,
            swiglu_alpha=1.702,
            swiglu_limit=7.0,
            swiglu_up_offset=1.0,
            gate_up=GateUp.INTERLEAVED,
            expert_bias=True,
            scoring=Scoring.SOFTMAX_AFTER_TOPK,
            router_bias=True,
        ),
        {
            "router": named(MLP + "router.weight"),
            "router_bias": named(MLP + "router.bias"),
            "w13": transposed(MLP + "experts.gate_up_proj"),
            "b13": named(MLP + "experts.gate_up_proj_bias"),
            "w2": transposed(MLP + "experts.down_proj"),
            "b2": named(MLP + "experts.down_proj_bias"),
        },
    ),
}


def golden_layers() -> list[tuple[str, int]]:
    folders = sorted(path.parent for path in GOLDENS.glob("*/config.json"))
    counts = {f.name: json.loads((f / "config.json").read_text())["num_hidden_layers"] for f in folders}
    return [(name, layer) for name, count in counts.items() for layer in range(count)]


class TestGoldens:
    def test_every_golden_folder_is_covered(self) -> None:
        assert {name for name, _ in golden_layers()} == set(FAMILIES)

    @pytest.mark.parametrize(("name", "layer"), golden_layers())
    def test_layer_equals_the_golden_output(self, name: str, layer: int) -> None:
        spec, sources = FAMILIES[name]
        tensors = load_file(GOLDENS / name / "model.safetensors")
        golden = load_file(GOLDENS / name / "golden.safetensors")
        params = {parameter: source(tensors, layer) for parameter, source in sources.items()}
        y = reference.moe(params, golden[f"layers.{layer}.moe_in"], spec)
        expected = golden[f"layers.{layer}.moe_out"]
        assert y.shape == expected.shape
        assert np.max(np.abs(y - expected)) <= 1e-5 * np.max(np.abs(expected))
