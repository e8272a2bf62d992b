"""Failure cases of FP8 and its scales (F): see failure_cases.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from failure_cases import IMPLEMENTATIONS, assert_same_bits, run_experts
from numpy.typing import NDArray
from quantised import SCHEMES, bits, dequantised, numpy_of, relative_error

from moe_pallas import (
    MoESpec,
    QTensor,
    QuantScheme,
    Routing,
    fused_experts,
    quantize,
    reference,
    reference_fp8,
)
from moe_pallas.quant import quantize_activations
from moe_pallas.spec import GateUp
from moe_pallas.testing import assert_close

implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
STATIC = SCHEMES["tensor-static"]


def make_spec(**options: Any) -> MoESpec:
    sizes = {"num_experts": 4, "top_k": 1, "hidden_size": 16, "intermediate_size": 8, "activation": "relu2"}
    return MoESpec(**(sizes | options))


def normal(*shape: int, seed: int = 0) -> NDArray:
    return np.random.default_rng([seed, len(shape)]).standard_normal(shape).astype(np.float32)


def integers(*shape: int, seed: int = 0, high: int = 3) -> NDArray:
    return np.random.default_rng([seed, 7]).integers(-high, high + 1, shape).astype(np.float32)


def qtensor(values: NDArray, scale: Any, scheme: QuantScheme, **rest: Any) -> QTensor:
    scale = jnp.asarray(scale, jnp.float32)
    return QTensor(values=jnp.asarray(values.astype(E4M3)), scale=scale, scheme=scheme, **rest)


def run(implementation: str, x: NDArray, ids: Any, w13: QTensor, w2: QTensor, spec: MoESpec) -> NDArray:
    ids = np.asarray(ids, np.int32)
    return run_experts(implementation, x, ids, np.ones(ids.shape, np.float32), w13, w2, spec=spec)


def test_f1_casts_saturate() -> None:
    x = np.array([[1000, 448, 464, 465, -1000, np.inf, np.nan]], np.float32)
    got, _ = quantize_activations(jnp.asarray(x), "static", jnp.float32(1))
    expected, _ = reference_fp8.quantize_activations(x, "static", 1.0)
    assert_same_bits(bits(got), bits(expected))
    np.testing.assert_array_equal(
        expected.astype(np.float32), [[448, 448, 448, 448, -448, np.nan, np.nan]]
    )  # what is not finite stays visible


@implementations
def test_f1_a_layer_saturates_too(implementation: str) -> None:
    """x and h past what their stored scales reach are 448 times these scales, in every implementation."""
    spec = make_spec(hidden_size=1, intermediate_size=1)
    w13 = qtensor(np.ones((4, 1, 1)), np.ones((4, 1, 1)), STATIC, input_scale=jnp.full((4, 1), 2.0**-4))
    w2 = qtensor(np.ones((4, 1, 1)), np.ones((4, 1, 1)), STATIC, input_scale=jnp.ones((4, 1)))
    y = run(implementation, np.array([[2.0], [28], [1e9], [1e30]], np.float32), [[0]] * 4, w13, w2, spec)
    np.testing.assert_array_equal(y, [[4], [448], [448], [448]])


@pytest.mark.parametrize("activations", ["token", "group", "tensor"])
@pytest.mark.parametrize("amax", [0.0, 1e-45, 6.3e-38, 1e-36, 1e-30])
def test_f2_tiny_rows_have_no_nan(activations: str, amax: float) -> None:
    x = (normal(3, 64) * 0.2).clip(-1, 1)
    x[:, 5] = 1
    x = (x * np.float64(amax)).astype(np.float32)
    values, scale = quantize_activations(jnp.asarray(x), activations)
    assert np.isfinite(scale).all() and (np.asarray(scale) > 0).all()
    got = np.asarray(values).astype(np.float64) * np.asarray(scale).astype(np.float64)
    assert np.abs(got - x).max() <= 2**-4 * max(amax, 1.4e-36)
    if amax == 0:
        assert not bits(values).any()


@implementations
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-18, 3e-10])
def test_f2_tiny_activations_have_no_nan(implementation: str, size: float) -> None:
    """relu2 squares: what is 1e-18 at the first product is 1e-36 at the second."""
    spec = make_spec()
    w13, w2 = (quantize(normal(*shape), "fp8_channel") for shape in ((4, 8, 16), (4, 16, 8)))
    x = normal(4, 16) * np.float32(size)
    y = run(implementation, x, [[0], [1], [2], [3]], w13, w2, spec)
    assert np.isfinite(y).all() and np.abs(y).max() <= 1e4 * size**2
    assert (y != 0).any() == (size > 1e-20)


@implementations
def test_f3_zero_blocks_are_zeros(implementation: str) -> None:
    weights = 3 * normal(2, 256, 256).clip(-1, 1)
    weights[:, :128, :128] = 0
    weights[:, 128:, 128:] *= 1e-9
    q = quantize(weights, "fp8_block")
    scale = np.asarray(q.scale)
    assert (scale[:, 0, 0] == 1).all() and (scale > 0).all() and np.isfinite(scale).all()
    assert not bits(q.values)[:, :128, :128].any()
    spec = make_spec(num_experts=2, hidden_size=256, intermediate_size=256)
    w2 = quantize(np.broadcast_to(np.eye(256, dtype=np.float32), (2, 256, 256)), "fp8_block")
    x = normal(2, 256)
    x[:, 128:] = 0
    y = run(implementation, x, [[0], [1]], q, w2, spec)
    assert (y[:, :128] == 0).all() and (y[:, 128:] > 0).any()


@implementations
@pytest.mark.parametrize("size", [192, 80, 64])
def test_f4_widths_that_are_no_multiple_of_a_block(implementation: str, size: int) -> None:
    """Gate and up have blocks of their own: the last one of each is smaller, and none holds rows of both."""
    spec = make_spec(activation="swiglu", hidden_size=256, intermediate_size=size, top_k=2)
    gate, up = normal(4, size, 256), 2**10 * normal(4, size, 256, seed=1)
    w13 = quantize(np.concatenate([gate, up], 1) / 16, "fp8_block", gate_up="stacked")
    w2 = quantize(normal(4, 256, size, seed=2) / 16, "fp8_block")
    blocks = -(-size // 128)
    assert w13.scale.shape == (4, 2 * blocks, 2) and w2.scale.shape == (4, 2, blocks)
    ratio = np.asarray(w13.scale)[:, blocks:] / np.asarray(w13.scale)[:, :blocks]
    assert ((ratio > 2**9) & (ratio < 2**11)).all()
    x, ids = normal(16, 256), np.argsort(normal(16, 4))[:, :2].astype(np.int32)
    y = run(implementation, x, ids, w13, w2, spec)
    plain = dequantised({"w13": w13, "w2": w2})
    exact = reference.fused_experts(x, ids, np.ones((16, 2)), **plain, spec=spec)
    assert relative_error(y, exact) < 0.05  # x and h are rounded


@implementations
def test_f6_gate_and_up_have_scales_of_their_own(implementation: str) -> None:
    spec = make_spec(activation="swiglu")
    codes = integers(4, 16, 16)
    codes[:, 8:] *= 4  # so that up, stored for a scale of 1/4, stands for numbers like gate's
    scale = np.broadcast_to(np.array([1.0, 0.25])[:, None], (4, 2, 1))
    one = np.ones((4, 2, 1))
    identity = quantize(np.broadcast_to(np.eye(16, 8, dtype=np.float32), (4, 16, 8)), STATIC, input_scale=1.0)
    rest = {"scheme": STATIC, "gate_up": GateUp.STACKED, "input_scale": jnp.ones((4, 2))}
    x, ids = integers(8, 16, seed=1), np.arange(8)[:, None] % 4
    y = run(implementation, x, ids, qtensor(codes, scale, **rest), identity, spec)
    same = codes.copy()
    same[:, 8:] /= 4
    np.testing.assert_array_equal(y, run(implementation, x, ids, qtensor(same, one, **rest), identity, spec))
    w13 = same.astype(np.float64)
    a = np.einsum("td,tnd->tn", x.astype(np.float64), w13[ids[:, 0]])
    h = a[:, :8] / (1 + np.exp(-a[:, :8])) * a[:, 8:]
    np.testing.assert_allclose(y[:, :8], h.astype(np.float32).clip(-448, 448).astype(E4M3).astype(float))


WEIGHT_SCALES = np.array([1, 2.0**-6, 2.0**-12, 2.0**3])
INPUT_SCALES = np.array([1, 0.5, 2, 4.0])


@implementations
@pytest.mark.parametrize("scheme", [STATIC, SCHEMES["tensor"], SCHEMES["channel"]], ids=lambda s: s.name)
def test_f7_each_expert_has_its_own_scale(implementation: str, scheme: QuantScheme) -> None:
    spec = make_spec(intermediate_size=16)
    codes = np.abs(np.broadcast_to(integers(1, 16, 16), (4, 16, 16)))
    identity = np.broadcast_to(np.eye(16), (4, 16, 16))
    shape = scheme.scale_shape((4, 16, 16))
    scale = np.broadcast_to(WEIGHT_SCALES[:, None, None], shape)
    static = scheme is STATIC
    scales = {"input_scale": jnp.asarray(INPUT_SCALES[:, None] / 4, jnp.float32)} if static else {}
    w13 = qtensor(codes, np.ones(shape), scheme, **scales)
    scales = {"input_scale": jnp.asarray(INPUT_SCALES[:, None], jnp.float32)} if static else {}
    w2 = qtensor(identity, scale, scheme, **scales)
    x = np.zeros((4, 16), np.float32)
    x[:, 3] = 1
    y = run(implementation, x, [[0], [1], [2], [3]], w13, w2, spec)
    h = codes[0, :, 3] ** 2  # 0, 1, 4, 9: codes of each of the scales
    expected = h[None] * WEIGHT_SCALES[:, None]
    if static:
        np.testing.assert_array_equal(y, expected)
    else:  # amax/448 is no power of two
        np.testing.assert_allclose(y, expected, rtol=0.06)
        np.testing.assert_allclose(y / WEIGHT_SCALES[:, None], np.broadcast_to(y[0], (4, 16)), rtol=1e-6)


@implementations
def test_f8_scales_of_blocks_stand_where_they_should(implementation: str) -> None:
    """Every block has another power of two, D = 256 and F = 384 differ: exact, or not at all."""
    spec = make_spec(num_experts=2, hidden_size=256, intermediate_size=384, activation="silu")
    scheme = SCHEMES["block"]
    x = np.zeros((12, 256), np.float32)
    at = np.repeat([5, 130, 255], 2)
    x[np.arange(6), at] = x[np.arange(6, 12), at] = 448  # amax/448 is 1: x is its own code
    ids = np.array([[0], [1]] * 6)
    w13_codes = np.zeros((2, 384, 256), np.float32)
    w13_codes[:, [0, 127, 128, 383]] = 1
    w13_scale = 2.0 ** -np.arange(12).reshape(2, 3, 2)
    w2_codes = integers(2, 256, 384)
    w2_scale = 2.0 ** np.random.default_rng(0).permutation(12).reshape(2, 2, 3)
    w13, w2 = qtensor(w13_codes, w13_scale, scheme), qtensor(w2_codes, w2_scale, scheme)
    y = run(implementation, x, ids, w13, w2, spec)
    rows = reference_fp8.dequantize(np.asarray(w13.values), np.asarray(w13.scale), scheme)
    by_hand = np.kron(w13_scale, np.ones((128, 128))) * w13_codes
    np.testing.assert_array_equal(rows, by_hand)
    plain = {"w13": by_hand, "w2": np.kron(w2_scale, np.ones((128, 128))) * w2_codes}
    a = np.einsum("td,tnd->tn", x.astype(np.float64), plain["w13"][ids[:, 0]])
    h = reference_fp8.round_activations(a / (1 + np.exp(-a)), "group")
    expected = np.einsum("tf,tdf->td", h, plain["w2"][ids[:, 0]])
    assert_close(y.astype(np.float32), expected)
    right = {"w13": w13, "w2": w2}
    for name, weights in right.items():
        turned = dataclasses.replace(weights, scale=weights.scale.swapaxes(1, 2))
        with pytest.raises(ValueError, match=rf"{name}\.scale has shape"):
            run(implementation, x, ids, **(right | {name: turned}), spec=spec)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32, jnp.uint8], ids=str)
def test_f10_scales_are_never_reinterpreted(dtype: Any) -> None:
    spec = make_spec()
    w13, w2 = (quantize(normal(*shape), "fp8_tensor") for shape in ((4, 8, 16), (4, 16, 8)))
    routing = Routing(jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1)))
    wrong = dataclasses.replace(w2, scale=w2.scale.astype(dtype))
    with pytest.raises(TypeError, match=r"w2\.scale is .*need float32.*astype"):
        fused_experts(jnp.ones((2, 16)), routing, w13, wrong, spec=spec)
    with pytest.raises(TypeError, match="float32"):
        reference.fused_experts(np.ones((2, 16)), *numpy_of(routing), w13, wrong, spec=spec)
    scalar = dataclasses.replace(w2, scale=jnp.float32(1))
    with pytest.raises(ValueError, match=r"w2\.scale has shape \(\)"):
        fused_experts(jnp.ones((2, 16)), routing, w13, scalar, spec=spec)


@implementations
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["tensor", "channel", "block", "tensor-static"])
def test_f11_a_nan_is_its_tokens_own(implementation: str, name: str, bad: float) -> None:
    spec, scheme = make_spec(hidden_size=256, intermediate_size=128), SCHEMES[name]
    scale = 0.02 if scheme is STATIC else None
    w13, w2 = (
        quantize(normal(*shape) / 16, scheme, input_scale=scale) for shape in ((4, 128, 256), (4, 256, 128))
    )
    x, ids = normal(8, 256), np.arange(8)[:, None] % 4
    # The largest of the batch is elsewhere: token 3's share of a common scale is not at stake.
    x[0, 0] = 20
    clean = run(implementation, x, ids, w13, w2, spec)
    x[3, 17] = bad
    y = run(implementation, x, ids, w13, w2, spec)
    assert np.isnan(y[3]).all()
    others = np.arange(8) != 3
    assert_same_bits(y[others], clean[others])


@implementations
def test_f11_a_nan_scale_is_its_experts_own(implementation: str) -> None:
    spec = make_spec()
    w13, w2 = (quantize(normal(*shape), "fp8_channel") for shape in ((4, 8, 16), (4, 16, 8)))
    x, ids = normal(8, 16), np.arange(8)[:, None] % 4
    clean = run(implementation, x, ids, w13, w2, spec)
    spoilt = dataclasses.replace(w13, scale=w13.scale.at[2].set(jnp.nan))
    y = run(implementation, x, ids, spoilt, w2, spec)
    assert np.isnan(y[ids[:, 0] == 2]).all()
    assert_same_bits(y[ids[:, 0] != 2], clean[ids[:, 0] != 2])
