"""FP8: casts and scales against NumPy, bit for bit; layers against the truth; pytrees; gradients; errors."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from typing import Any

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from quantised import SCHEMES, bits, dequantised, numpy_of, quantised_params, relative_error

from moe_pallas import (
    GateUp,
    MoE,
    MoESpec,
    Problem,
    QTensor,
    QuantScheme,
    Routing,
    UnsupportedError,
    dequantize,
    fused_experts,
    fused_moe,
    quantize,
    quantize_experts,
    reference,
    reference_fp8,
    select_backend,
    xla,
)
from moe_pallas.interop import with_gate_up
from moe_pallas.quant import quantize_activations, round_activations
from moe_pallas.spec import H200, QUANTS
from moe_pallas.testing import assert_close, random_logits, random_params, random_tokens

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ORDERS = (None, "stacked", "interleaved")
# Every layer is a program to compile: what all schemes have in common is tested with some of them.
SOME = {name: SCHEMES[name] for name in ("tensor", "tensor-static", "block")}
schemes = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
some_schemes = pytest.mark.parametrize("scheme", SOME.values(), ids=SOME)
SPEC = MoESpec(num_experts=6, top_k=2, hidden_size=200, intermediate_size=136)


def normal(*shape: int, seed: int = 0) -> NDArray:
    return np.random.default_rng([seed, 8]).standard_normal(shape).astype(np.float32)


# Casts.

_cast = jax.jit(functools.partial(quantize_activations, activations="static"))


def static_cast(x: NDArray, scale: float = 1.0) -> NDArray:
    """The codes of x (K,) by one given scale."""
    return np.asarray(_cast(jnp.asarray(x)[None], input_scale=jnp.float32(scale))[0])[0]


def test_every_code_is_a_fixed_point() -> None:
    codes = np.arange(256, dtype=np.uint8).view(E4M3)
    got = static_cast(codes.astype(np.float32))
    finite = np.isfinite(codes.astype(np.float32))
    np.testing.assert_array_equal(got.astype(np.float32)[finite], codes.astype(np.float32)[finite])
    assert np.isnan(got.astype(np.float32)[~finite]).all()


def test_ties_go_to_even_and_everything_else_to_the_nearest() -> None:
    numbers = np.unique(np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float64))
    numbers = numbers[np.isfinite(numbers)]
    middles = (numbers[1:] + numbers[:-1]) / 2  # exact in float32
    x = np.concatenate([middles, numbers]).astype(np.float32)
    x = np.unique(np.concatenate([x, np.nextafter(x, np.float32(9e9)), np.nextafter(x, np.float32(-9e9))]))
    got = static_cast(x).astype(np.float64)
    distance = np.abs(numbers[:, None] - x.astype(np.float64))
    assert (np.abs(got - x) == distance.min(0)).all()
    tied = (distance == distance.min(0)).sum(0) == 2
    assert tied.sum() == len(middles)
    assert (bits(static_cast(x))[tied] % 2 == 0).all()


@hypothesis.given(
    hnp.arrays(np.float32, (64,), elements=st.floats(width=32)), st.floats(-130.0, 120.0, width=32)
)
def test_codes_are_numpys_for_any_bits_and_scale(x: NDArray, log2_scale: float) -> None:
    scale = np.float32(2.0**log2_scale)
    expected, _ = reference_fp8.quantize_activations(x[None], "static", scale)
    got = static_cast(x, float(scale))
    np.testing.assert_array_equal(bits(got), bits(expected[0]))
    assert (np.isnan(got.astype(np.float32)) == ~np.isfinite(x)).all()


@hypothesis.given(
    hnp.arrays(np.float32, (3, 130), elements=st.floats(width=32)),
    st.sampled_from(["tensor", "token", "group"]),
)
def test_dynamic_scales_are_numpys_for_any_bits(x: NDArray, activations: str) -> None:
    values, scale = jax.jit(quantize_activations, static_argnums=1)(x, activations)
    expected_values, expected_scale = reference_fp8.quantize_activations(x, activations)
    np.testing.assert_array_equal(np.asarray(scale), expected_scale)
    np.testing.assert_array_equal(bits(values), bits(expected_values))
    assert (np.asarray(scale) >= 2.0**-126).all() and np.isfinite(scale).all()


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16, np.float16], ids=str)
@pytest.mark.parametrize("scheme", [SCHEMES["tensor-static"], SCHEMES["channel"], SCHEMES["block"]])
@pytest.mark.parametrize("order", ORDERS)
def test_weights_are_numpys(order: str | None, scheme: QuantScheme, dtype: Any) -> None:
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((3, 264, 200)) * np.exp2(rng.integers(-9, 9, (3, 264, 1)))
    weights = weights.astype(dtype)
    weights[0, :140], weights[1, 3, 5], weights[2, 7, 9] = 0, np.nan, np.inf
    is_static = scheme.activations == "static"
    q = quantize(weights, scheme, gate_up=order, input_scale=0.5 if is_static else None)
    values, scale = reference_fp8.quantize(weights, scheme, order)
    np.testing.assert_array_equal(bits(q.values), bits(values))
    np.testing.assert_array_equal(np.asarray(q.scale), scale)
    exact = reference_fp8.dequantize(values, scale, scheme, order)
    np.testing.assert_allclose(dequantize(q), exact, rtol=2**-23)
    assert (np.isnan(exact) == ~np.isfinite(weights.astype(np.float32))).all()
    # An element is at most 1/16 of itself off, or half a step of e4m3's subnormal numbers.
    finite = np.isfinite(exact)
    worst = np.maximum(np.abs(weights.astype(np.float64)) / 16, scale.max() * 2**-10) * (1 + 1e-6)
    assert (np.abs(exact - weights.astype(np.float64)) <= worst)[finite].all()


@pytest.mark.parametrize(
    ("gate_up", "rows"),
    [
        (None, [0] * 128 + [1] * 64),
        (GateUp.STACKED, [0] * 128 + [1] * 64 + [2] * 128 + [3] * 64),  # F = 192
        (GateUp.INTERLEAVED, [0, 1] * 128 + [2, 3] * 64),
    ],
)
def test_which_block_a_number_belongs_to(gate_up: GateUp | None, rows: list[int]) -> None:
    scheme = SCHEMES["block"]
    columns = [0] * 128 + [1] * 128 + [2]
    scale = 2.0 ** np.arange((rows[-1] + 1) * 3).reshape(1, -1, 3).astype(np.float32)
    values = np.ones((1, len(rows), len(columns)), E4M3)
    q = QTensor(values=jnp.asarray(values), scale=jnp.asarray(scale), scheme=scheme, gate_up=gate_up)
    np.testing.assert_array_equal(dequantize(q)[0], scale[0][np.ix_(rows, columns)])


def test_interleaved_scales_stand_as_their_rows_do() -> None:
    weights = normal(2, 2 * 150, 130)
    for scheme in ("fp8_tensor", "fp8_channel", "fp8_block"):
        stacked = quantize(np.concatenate([weights[:, 0::2], weights[:, 1::2]], 1), scheme, gate_up="stacked")
        mixed = quantize(weights, scheme, gate_up="interleaved")
        half = stacked.scale.shape[1] // 2
        np.testing.assert_array_equal(mixed.scale[:, 0::2], stacked.scale[:, :half])
        np.testing.assert_array_equal(mixed.scale[:, 1::2], stacked.scale[:, half:])
        np.testing.assert_array_equal(bits(mixed.values)[:, 1::2], bits(stacked.values)[:, 150:])


# Layers.


def case(spec: MoESpec, scheme: QuantScheme, dtype: str = "float32", tokens: int = 33) -> tuple[Any, NDArray]:
    params, x = random_params(spec, dtype=dtype), random_tokens(spec, tokens, dtype=dtype)
    return quantised_params(params, x, spec, scheme), x


@functools.partial(jax.jit, static_argnums=0)
def apply(layer: MoE, params: Any, x: Any, **rest: Any) -> jax.Array:
    return layer.apply(params, x, **rest)


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        *((scheme, "float32") for scheme in SCHEMES.values()),
        (SCHEMES["block"], "bfloat16"),
        (SCHEMES["tensor-static"], "float16"),
    ],
)
def test_a_layer_is_the_references(scheme: QuantScheme, dtype: str) -> None:
    q, x = case(SPEC, scheme, dtype)
    y = apply(MoE(SPEC), q, x)
    expected = reference.moe(numpy_of(q), x, SPEC)
    assert y.dtype == dtype
    assert_close(y, expected, quantised=True)
    if dtype == "float32":  # all but the few elements that h's ties reach
        rms = np.sqrt(np.mean(expected**2, -1, keepdims=True))
        assert np.quantile(np.abs(y - expected) / rms, 0.9) < 5e-6


OPTIONS: dict[str, dict[str, Any]] = {
    "biases, interleaved, clamped": {
        "gate_up": "interleaved",
        "expert_bias": True,
        "swiglu_limit": 1.5,
        "swiglu_alpha": 1.702,
        "swiglu_up_offset": 1.0,
    },
    "weights on the input": {"weight_on": "input"},
    "not gated": {"activation": "relu2"},
    "shared expert": {"shared_intermediate_size": 72, "shared_expert_gate": True},
    "one expert": {"num_experts": 1, "top_k": 1},
    "odd sizes": {"top_k": 6, "hidden_size": 37, "intermediate_size": 5},
}


@pytest.mark.parametrize(
    ("options", "scheme"),
    list(zip(OPTIONS.values(), itertools.cycle((SCHEMES["tensor-static"], SCHEMES["block"])), strict=False)),
    ids=OPTIONS,
)
def test_options_of_a_layer(options: dict[str, Any], scheme: QuantScheme) -> None:
    spec = dataclasses.replace(SPEC, **options)
    q, x = case(spec, scheme)
    mask = np.arange(33) % 5 != 2
    y = apply(MoE(spec), q, x, mask=mask)
    assert_close(y, reference.moe(numpy_of(q), x, spec, mask=mask), quantised=True)


@schemes
def test_the_error_is_that_of_e4m3(scheme: QuantScheme) -> None:
    """e4m3 has an RMS error of 2.6 % a number. x and h rounded: 4.5 %; weights as well: 6.4 %."""
    spec = MoESpec(num_experts=8, top_k=2, hidden_size=512, intermediate_size=384)
    params, x = random_params(spec), random_tokens(spec, 64)
    q = numpy_of(quantised_params(params, x, spec, scheme))
    y = reference.moe(q, x, spec)
    assert 0.03 < relative_error(y, reference.moe(dequantised(q), x, spec)) < 0.05
    assert 0.05 < relative_error(y, reference.moe(params, x, spec)) < 0.07


def test_a_walk_over_copies_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    q, x = case(SPEC, SCHEMES["block"], tokens=70)
    expected = reference.moe(numpy_of(q), x, SPEC)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))
    for copy_bytes in (1, 2**19):
        monkeypatch.setattr(xla, "_COPY_BYTES", copy_bytes)
        assert_close(jax.jit(MoE(SPEC).apply)(q, x), expected, quantised=True)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_few_tokens(num_tokens: int) -> None:
    q, _ = case(SPEC, SCHEMES["tensor"])
    x = random_tokens(SPEC, num_tokens)
    assert_close(apply(MoE(SPEC), q, x), reference.moe(numpy_of(q), x, SPEC), quantised=True)


@some_schemes
def test_padding_and_dropped_tokens_have_no_part_in_scales(scheme: QuantScheme) -> None:
    q, x = case(SPEC, scheme)
    logits = random_logits(33, 6)
    ids, weights = reference.route(logits, SPEC)
    ids[5], mask = -1, np.arange(33) < 30
    run = jax.jit(functools.partial(fused_experts, spec=SPEC))
    routing = Routing(jnp.asarray(ids), jnp.asarray(weights, jnp.float32))
    expected = run(x, routing, q["w13"], q["w2"], mask=mask)
    x[5], x[30:] = np.nan, 1e30
    y = run(x, routing, q["w13"], q["w2"], mask=mask)
    np.testing.assert_array_equal(y, expected)
    assert (np.asarray(y)[[5, 30, 31, 32]] == 0).all()
    x[5], x[30:] = 0, 0
    truth = reference.fused_experts(
        x, ids, weights, **numpy_of({k: q[k] for k in ("w13", "w2")}), spec=SPEC, mask=mask
    )
    assert_close(y, truth, quantised=True)


def test_weights_are_never_dequantised_all_at_once() -> None:
    spec = MoESpec(num_experts=64, top_k=2, hidden_size=256, intermediate_size=256)
    params = jax.eval_shape(
        lambda key: quantize_experts(MoE(spec).init(key), spec, "fp8_block"), jax.random.key(0)
    )
    x = jax.ShapeDtypeStruct((8, 256), jnp.float32)
    memory = jax.jit(MoE(spec).apply).lower(params, x).compile().memory_analysis()
    one_matrix, rows = 512 * 256 * 4, 8 * 2 + 8
    assert memory.temp_size_in_bytes < 3 * one_matrix + 8 * rows * (256 + 512) * 4
    gradient = jax.jit(jax.grad(lambda x, p: MoE(spec).apply(p, x).sum()))
    memory = gradient.lower(x, params).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * one_matrix + 16 * rows * (256 + 512) * 4


# Pytrees and transformations.


def test_it_is_a_pytree() -> None:
    q = quantize(normal(4, 12, 8), SCHEMES["tensor-static"], gate_up="stacked", input_scale=0.5)
    assert [leaf.shape for leaf in jax.tree.leaves(q)] == [(4, 12, 8), (4, 2, 1), (4, 2)]
    again = jax.tree.map(lambda leaf: leaf, q)
    assert again.scheme == q.scheme and again.gate_up is q.gate_up
    np.testing.assert_array_equal(dequantize(q[1]), dequantize(q)[1])
    np.testing.assert_array_equal(dequantize(q[1:3]), dequantize(q)[1:3])
    assert q[...] is q
    for index in ((0, 1), (..., 0)):
        with pytest.raises(IndexError, match="only its 1 leading axes"):
            q[index]
    np.testing.assert_array_equal(jax.vmap(dequantize)(q), dequantize(q))
    np.testing.assert_array_equal(jax.jit(dequantize)(q), dequantize(q))
    assert len(jax.tree.leaves(quantize(normal(4, 8), "fp8_block"))) == 2
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(q)]
    assert paths == [".values", ".scale", ".input_scale"]


def test_scan_and_vmap_over_stacked_layers() -> None:
    scheme = SCHEMES["tensor-static"]
    spec = MoESpec(num_experts=3, top_k=2, hidden_size=40, intermediate_size=24)
    x = random_tokens(spec, 9)
    cases = [quantised_params(random_params(spec, seed=seed), x, spec, scheme) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *cases)
    layer = MoE(spec)
    each = jnp.stack([apply(layer, params, x) for params in cases])
    scanned = jax.jit(lambda p, x: jax.lax.scan(lambda _, p: (None, layer.apply(p, x)), None, p)[1])
    np.testing.assert_allclose(scanned(stacked, x), each, rtol=1e-5, atol=1e-5)
    mapped = jax.jit(jax.vmap(layer.apply, (0, None)))(stacked, x)
    np.testing.assert_allclose(mapped, each, rtol=1e-5, atol=1e-5)


def test_experts_can_be_placed_on_devices() -> None:
    spec = dataclasses.replace(SPEC, num_experts=8)
    q, x = case(spec, SCHEMES["block"])
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    by_expert = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("expert"))
    placed = q | {name: jax.device_put(q[name], by_expert) for name in ("w13", "w2")}
    assert placed["w13"].scale.addressable_shards[0].data.shape[0] == 2
    assert_close(apply(MoE(spec), placed, x), reference.moe(numpy_of(q), x, spec), quantised=True)


@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_channel", "fp8_block"])
def test_another_gate_up_order_is_the_same_layer(scheme: str) -> None:
    spec = MoESpec(num_experts=2, top_k=1, hidden_size=130, intermediate_size=150)
    q = quantize_experts(random_params(spec), spec, scheme)
    mixed_spec, mixed = with_gate_up(spec, q, "interleaved")
    x = random_tokens(spec, 5)
    np.testing.assert_allclose(
        reference.moe(numpy_of(mixed), x, mixed_spec),
        reference.moe(numpy_of(q), x, spec),
        rtol=1e-9,
        atol=1e-12,
    )
    direct = quantize_experts(with_gate_up(spec, random_params(spec), "interleaved")[1], mixed_spec, scheme)
    np.testing.assert_array_equal(direct["w13"].scale, mixed["w13"].scale)
    np.testing.assert_array_equal(bits(direct["w13"].values), bits(mixed["w13"].values))


def test_flax_modules_take_quantised_experts() -> None:
    flax = pytest.importorskip("flax")
    from moe_pallas import flax_linen, flax_nnx

    spec = MoESpec(num_experts=2, top_k=1, hidden_size=8, intermediate_size=8)
    q, x = case(spec, SCHEMES["block"], tokens=3)
    expected = apply(MoE(spec), q, x)
    linen = flax_linen.MoE(spec)
    np.testing.assert_array_equal(jax.jit(linen.apply)({"params": q}, x), expected)
    module = flax_nnx.MoE(spec, rngs=flax.nnx.Rngs(0))
    flax.nnx.update(module, q)
    np.testing.assert_array_equal(flax.nnx.jit(lambda m, x: m(x))(module, x), expected)


# Gradients.


def test_gradients_go_straight_through() -> None:
    """They are those of the layer with dequantised weights, at the rounded x and h."""
    spec = dataclasses.replace(SPEC, weight_on="input")
    q, x = case(spec, SCHEMES["channel"], tokens=7)
    logits = random_logits(7, 6)
    plain = dequantised(q)

    def loss(x: Any, logits: Any, w: dict[str, Any]) -> jax.Array:
        return jnp.square(fused_moe(x, logits, w["w13"], w["w2"], spec=spec)).sum()

    gradients = jax.jit(jax.grad(loss, (0, 1)))
    got = gradients(x, logits, {k: q[k] for k in ("w13", "w2")})
    expected = gradients(x, logits, {k: plain[k] for k in ("w13", "w2")})
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == e.dtype == jnp.float32
        assert relative_error(g, np.asarray(e)) < 0.15


def test_rounding_has_the_gradient_of_the_identity() -> None:
    x = jnp.asarray([[0.3, -5000.0, 0.0, 7.7]])
    for activations, scale in (("static", jnp.float32(1.0)), ("group", None)):
        gradient = jax.grad(lambda x, a=activations, s=scale: (3.0 * round_activations(x, a, s)).sum())(x)
        np.testing.assert_array_equal(gradient, np.full((1, 4), 3.0))


def test_quantised_weights_are_frozen() -> None:
    q, x = case(SPEC, SCHEMES["tensor-static"], tokens=5)
    gradient = jax.jit(jax.grad(lambda p: MoE(SPEC).apply(p, x).sum()))(q)
    assert jax.tree.structure(gradient) == jax.tree.structure(q)
    for name in ("w13", "w2"):
        for leaf in jax.tree.leaves(gradient[name]):
            assert not np.asarray(leaf).astype(np.float32).any()
    assert np.asarray(gradient["router"]).any()


# The choice of a backend, and errors.


@pytest.mark.parametrize("quant", QUANTS[1:])
def test_a_problem_knows_its_scheme(quant: str) -> None:
    spec = MoESpec(num_experts=8, top_k=2, hidden_size=256, intermediate_size=256)
    problem = Problem(spec=spec, num_tokens=1, dtype="bfloat16", quant=quant)
    assert problem.weight_dtype == "float8_e4m3fn"
    assert problem.activation_scales == QuantScheme.named(quant).activations


def test_scales_of_a_whole_call_are_for_the_portable_backend() -> None:
    spec = MoESpec(num_experts=8, top_k=2, hidden_size=256, intermediate_size=256)
    quant: Any = {"quant": "fp8_tensor", "activation_scales": "tensor"}
    for num_tokens in (1, 4096):
        problem = Problem(spec=spec, num_tokens=num_tokens, dtype="bfloat16", **quant)
        selection = select_backend(problem, device=H200)
        assert selection.backend == "xla" and "activations='token'" in selection.reason
        with pytest.raises(UnsupportedError, match="activations='token'"):
            select_backend(problem, "swap_ab", device=H200)


@pytest.mark.parametrize(
    ("error", "words", "fields"),
    [
        (ValueError, "one of 'none', 'fp8_tensor'.*'int8'", {"quant": "int8"}),
        (
            TypeError,
            "'float8_e4m3fn' with quant='fp8_block'; got 'float32'",
            {"quant": "fp8_block", "weight_dtype": "float32"},
        ),
        (TypeError, "weight_dtype", {"weight_dtype": "float8_e4m3fn"}),
        (ValueError, "needs quantised weights", {"activation_scales": "token"}),
        (ValueError, "go together", {"quant": "fp8_block", "activation_scales": "token"}),
    ],
)
def test_problems_that_contradict_themselves(
    error: type[Exception], words: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(error, match=words):
        Problem(spec=SPEC, num_tokens=1, dtype="bfloat16", **fields)


@pytest.mark.parametrize(
    ("weights", "activations", "words"),
    [
        ("block", "token", "go together"),
        ("tensor", "group", "go together"),
        ("rows", "token", "QuantScheme.weights is one of 'tensor'"),
    ],
)
def test_schemes_that_do_not_exist(weights: str, activations: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        QuantScheme(weights=weights, activations=activations)
    with pytest.raises(ValueError, match="'fp8_channel', 'fp8_block', or a QuantScheme; got 'fp8'"):
        QuantScheme.named("fp8")


def good() -> dict[str, Any]:
    q, x = case(SPEC, SCHEMES["block"], tokens=3)
    return {"x": x, "router_logits": random_logits(3, 6), "w13": q["w13"], "w2": q["w2"]}


def swap(q: QTensor, **fields: Any) -> QTensor:
    return dataclasses.replace(q, **fields)


def with_codes(g: dict[str, Any], dtype: Any) -> dict[str, Any]:
    return {"w13": swap(g["w13"], values=g["w13"].values.astype(dtype))}


WRONG: dict[str, tuple[type[Exception], str, Any]] = {
    "only one is quantised": (
        ValueError,
        r"one scheme; got QuantScheme.* and None",
        lambda g: {"w2": dequantize(g["w2"])},
    ),
    "two schemes": (
        ValueError,
        "one scheme",
        lambda g: {"w2": quantize(dequantize(g["w2"]), "fp8_channel")},
    ),
    "codes without scales": (
        TypeError,
        "w13 is float8_e4m3fn without scales",
        lambda g: {"w13": g["w13"].values},
    ),
    "codes of another type": (
        TypeError,
        r"w13\.values is float32; need float8_e4m3fn",
        lambda g: with_codes(g, jnp.float32),
    ),
    "e5m2": (TypeError, r"w13\.values is float8_e5m2", lambda g: with_codes(g, jnp.float8_e5m2)),
    "bytes": (
        TypeError,
        r"w13\.values is uint8",
        lambda g: {"w13": swap(g["w13"], values=bits(g["w13"].values))},
    ),
    "no scales": (
        TypeError,
        r"w2\.scale is an array; got NoneType",
        lambda g: {"w2": swap(g["w2"], scale=None)},
    ),
    "codes transposed": (
        ValueError,
        "looks transposed",
        lambda g: {"w2": swap(g["w2"], values=g["w2"].values.swapaxes(1, 2))},
    ),
    "another gate_up": (
        ValueError,
        "gate_up is None.*needs GateUp.STACKED",
        lambda g: {"w13": swap(g["w13"], gate_up=None)},
    ),
    "an input scale too many": (
        ValueError,
        "input_scale was given",
        lambda g: {"w2": swap(g["w2"], input_scale=jnp.ones((6, 1)))},
    ),
}


@pytest.mark.parametrize(("error", "words", "wrong"), WRONG.values(), ids=WRONG)
def test_operands_are_checked(error: type[Exception], words: str, wrong: Any) -> None:
    arguments = good()
    with pytest.raises(error, match=words):
        fused_moe(**(arguments | wrong(arguments)), spec=SPEC)


def test_static_scales_are_checked() -> None:
    q, x = case(SPEC, SCHEMES["tensor-static"], tokens=3)
    with pytest.raises(ValueError, match="input_scale was not given; it belongs to 'static'"):
        MoE(SPEC).apply(q | {"w2": swap(q["w2"], input_scale=None)}, x)
    with pytest.raises(
        ValueError, match=re.escape("params['w13'].input_scale has shape (6, 1); need (6, 2)")
    ):
        MoE(SPEC).apply(q | {"w13": swap(q["w13"], input_scale=jnp.ones((6, 1)))}, x)


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (TypeError, "weights is one of 'bfloat16'", {"weights": np.ones((2, 2), int)}),
        (ValueError, "need matrices", {"weights": np.ones(3, np.float32)}),
        (ValueError, "even", {"gate_up": "stacked", "weights": np.ones((3, 3), np.float32)}),
        (ValueError, "input_scale was given", {"input_scale": 1.0}),
        (ValueError, "input_scale was not given", {"scheme": SCHEMES["tensor-static"]}),
        (
            ValueError,
            r"shape \(3,\).*\(1,\)",
            {"scheme": SCHEMES["tensor-static"], "input_scale": np.ones(3, np.float32)},
        ),
        (ValueError, "'fp8_tensor'", {"scheme": "fp4"}),
    ],
)
def test_quantize_checks_its_arguments(error: type[Exception], words: str, arguments: dict[str, Any]) -> None:
    given = {"weights": np.ones((4, 4), np.float32), "scheme": "fp8_block"} | arguments
    with pytest.raises(error, match=words):
        quantize(given.pop("weights"), given.pop("scheme"), **given)


def test_quantize_experts_checks_its_arguments() -> None:
    params = random_params(SPEC)
    with pytest.raises(ValueError, match="has no 'w2'"):
        quantize_experts({"w13": params["w13"]}, SPEC, "fp8_block")
    with pytest.raises(ValueError, match="shape"):
        quantize_experts(params | {"w13": params["w2"]}, SPEC, "fp8_block")
    q = quantize_experts(params, SPEC, "fp8_block")
    assert q["router"] is params["router"]
    with pytest.raises(TypeError, match="quantised already, to fp8_block"):
        quantize_experts(q, SPEC, "fp8_block")


def test_a_router_is_not_quantised() -> None:
    q, x = case(SPEC, SCHEMES["channel"], tokens=3)
    with pytest.raises(TypeError, match=r"params\['router'\].*float8_e4m3fn"):
        MoE(SPEC).apply(q | {"router": quantize(q["router"], "fp8_channel")}, x)
