"""Gradients behind the kernels: interpreted on a CPU, wired up with stand-ins, run on a Hopper GPU.

The truth is `test_failure_cases_gradients`': JAX's differentiation, in float64, of a dense layer. What the
interpreter does not prove stands in `test_grouped_gemm`; what programs launch is `test_aot`'s.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from failure_cases import assert_close_by_expert, assert_same_bits, experts_of, poison_memory
from interpreted import interpreted, make_routing, without_races
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray
from test_failure_cases_gradients import expected_gradients

from moe_pallas import (
    GradientConfig,
    MoE,
    MoESpec,
    Problem,
    Routing,
    fused_experts,
    fused_moe,
    route,
    select_backend,
    xla,
)
from moe_pallas.configs.schema import GroupedGemmConfig
from moe_pallas.kernels import gradients, grouped_gemm
from moe_pallas.kernels._activation import activate, activate_with_slopes
from moe_pallas.oracle import assume_device
from moe_pallas.spec import H200, Activation, WeightOn
from moe_pallas.testing import random_logits, random_params, random_tokens

Arrays = dict[str, Any]
CONFIG = GroupedGemmConfig()
KERNELS = GradientConfig(kernels=True)
SAVE = GradientConfig(kernels=True, save="products")
CLAMPED = {"swiglu_alpha": 1.702, "swiglu_limit": 0.9, "swiglu_up_offset": 1.0}


def make_spec(**options: Any) -> MoESpec:
    return MoESpec(**({"num_experts": 3, "top_k": 2, "hidden_size": 128, "intermediate_size": 128} | options))


def cotangent(x: NDArray, seed: int = 5) -> NDArray:
    return np.random.default_rng([seed, 3]).standard_normal(x.shape).astype(x.dtype)


def check(
    got: gradients.Gradients,
    params: Arrays,
    x: NDArray,
    routing: Routing,
    d_y: NDArray,
    spec: MoESpec,
    rtol: float = 1e-2,
) -> None:
    """Each expert and each token by itself against the truth; what was dropped has none."""
    ids = np.asarray(routing.topk_ids)
    live = (ids >= 0) & (ids < spec.num_experts)
    weights = np.where(live, routing.topk_weights, 0)
    d_params, d_x, d_weights = expected_gradients(params, x, weights, ids, d_y, spec)
    for name, want in d_params.items():
        assert_close_by_expert(getattr(got, name), want, rtol, name)
        idle = np.setdiff1d(np.arange(spec.num_experts), ids[live])
        assert not np.asarray(getattr(got, name))[idle].astype(np.float32).any(), name
    assert_close_by_expert(np.asarray(got.x)[None], d_x[None], rtol, "x")
    assert not np.asarray(got.x)[~live.any(1)].astype(np.float32).any()
    # Weights on the input: a sum of slope · dh · p, and p is rounded twice in it.
    rtol *= 2 if spec.weight_on is WeightOn.INPUT else 1
    d_weights = np.where(live, d_weights, 0)
    assert_close_by_expert(np.asarray(got.topk_weights)[None], d_weights[None], rtol, "weights")
    assert not np.asarray(got.topk_weights)[~live].any()


# The kernels, interpreted

# Each: the layer, tokens, the ids' range, CTAs.
INTERPRETED: dict[str, tuple[MoESpec, int, tuple[int, int | None], int]] = {
    "dropped ids, interleaved, biases, a clamp, a run past the end": (
        make_spec(gate_up="interleaved", expert_bias=True, intermediate_size=192, **CLAMPED), 9, (-1, 2), 2,
    ),
    "weights on the input, biases, relu2, both consumers": (
        make_spec(weight_on="input", expert_bias=True, activation="relu2", num_experts=1, top_k=1),
        67, (0, None), 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name: str) -> None:
    """NaN stands where nobody may look: in tokens of no expert and in experts without tokens."""
    spec, num_tokens, (low, high), num_ctas = INTERPRETED[name]
    params, x = (
        experts_of(random_params(spec, dtype="bfloat16")),
        random_tokens(spec, num_tokens, dtype="bfloat16"),
    )
    routing, d_y = make_routing(spec, num_tokens, low=low, high=high), cotangent(x)
    if low < 0:
        routing.topk_ids[3] = -1
    dirty, dirty_x, dirty_d_y = {k: v.copy() for k, v in params.items()}, x.copy(), d_y.copy()
    for value in dirty.values():
        value[np.setdiff1d(np.arange(spec.num_experts), routing.topk_ids)] = np.nan
    nowhere = (routing.topk_ids < 0).all(1)
    dirty_x[nowhere], dirty_d_y[nowhere] = np.nan, np.nan
    arrays = [dirty.get(n) for n in ("w13", "w2", "b13", "b2")]
    weight_dtype = jnp.float32 if "relu2" in name else None
    options: Any = {"spec": spec, "weight_dtype": weight_dtype, "config": CONFIG, "num_ctas": num_ctas}
    program = interpreted(gradients.gradients, **options)
    got = without_races(program, dirty_d_y, dirty_x, routing, *arrays)
    assert got.w13.dtype == (weight_dtype or jnp.bfloat16)
    check(got, params, x, routing, d_y, spec)


def test_saved_products_interpreted() -> None:
    """A forward pass that saves gives the same output; no product is rounded across a clamp."""
    spec = make_spec(swiglu_limit=0.5, top_k=1, num_experts=2)
    params, x = experts_of(random_params(spec, dtype="bfloat16")), random_tokens(spec, 12, dtype="bfloat16")
    routing = make_routing(spec, 12)
    arrays = x, routing, params["w13"], params["w2"], None, None
    plain, saving = (
        interpreted(grouped_gemm.fused_experts, spec=spec, config=CONFIG, num_ctas=1, saves=saves)
        for saves in (False, True)
    )
    y, products = without_races(saving, *arrays)
    assert_same_bits(y, without_races(plain, *arrays))
    first = 0
    for expert in range(2):
        rows = x[routing.topk_ids[:, 0] == expert].astype(np.float64)
        want = rows @ params["w13"][expert].T.astype(np.float64)
        got = products[first : first + len(rows)].astype(np.float64)
        np.testing.assert_allclose(got, want, rtol=2**-6, atol=1e-5)
        sure = np.abs(np.abs(want) - 0.5) > 1e-5
        np.testing.assert_array_equal((got <= 0.5)[sure], (want <= 0.5)[sure])
        first += -(-len(rows) // 8) * 8


@pytest.mark.parametrize("activation", [a.value for a in Activation])
def test_slopes_are_the_derivatives(activation: str) -> None:
    specs = [make_spec(activation=activation)]
    specs += [make_spec(activation=activation, **CLAMPED)] if activation == "swiglu" else []
    for spec in specs:
        gate, up = jnp.asarray(np.random.default_rng(0).normal(0, 2, (2, 1000)), jnp.float32)
        args = (gate, up) if spec.gated else (gate,)
        value, slopes = activate_with_slopes(*args, spec=spec)
        want, pull_back = jax.vjp(functools.partial(activate, spec=spec), *args)
        np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-6)
        for slope, derivative in zip(slopes, pull_back(jnp.ones_like(gate)), strict=True):
            np.testing.assert_allclose(slope, derivative, rtol=1e-4, atol=2e-5)


# The operations around them, with stand-ins by XLA for the kernels


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Kernels as XLA computes them; the list says which were called."""
    called: list[str] = []

    def forward(x: Any, routing: Any, *rest: Any, config: Any, saves: bool = False) -> Any:
        called.append("saving" if saves else "forward")
        y = xla.fused_experts(x, routing, *rest).astype(x.dtype)
        return (y, jnp.zeros((8, 8), x.dtype) + x[0, 0]) if saves else y

    def backward(
        d_y: Any, x: Any, routing: Any, *rest: Any, products: Any, weight_dtype: Any, config: Any
    ) -> gradients.Gradients:
        called.append("backward" if products is None else "backward of saved")
        # Kernels know nothing of a mesh: no sum over it is theirs to make.
        x, routing, rest = jax.tree.map(
            lambda v: v if v is rest[-1] else xla.vary_like(v, d_y), (x, routing, rest)
        )
        *arrays, spec = rest
        ids, weights = routing

        def run(x: Any, weights: Any, *arrays: Any) -> jax.Array:
            return xla.fused_experts(x, Routing(ids, weights), *arrays, spec).astype(x.dtype)

        d_x, d_weights, d_w13, d_w2, *d_biases = jax.vjp(run, x, weights, *arrays)[1](d_y)
        return gradients.Gradients(
            d_x, d_weights, d_w13.astype(weight_dtype), d_w2.astype(weight_dtype), *d_biases
        )

    monkeypatch.setattr(grouped_gemm, "fused_experts", forward)
    monkeypatch.setattr(grouped_gemm, "routes", lambda problem, config: False)
    monkeypatch.setattr(gradients, "gradients", backward)
    with assume_device(H200):
        yield called


SPEC = make_spec(expert_bias=True)


def inputs(num_tokens: int = 20, dtype: str = "bfloat16") -> tuple[Arrays, jax.Array, jax.Array]:
    params = jax.tree.map(jnp.asarray, experts_of(random_params(SPEC, dtype=dtype)))
    return (
        params,
        jnp.asarray(random_tokens(SPEC, num_tokens, dtype=dtype)),
        jnp.asarray(random_logits(num_tokens, 3)),
    )


def loss(backend: str, params: Arrays, x: jax.Array, logits: jax.Array, **options: Any) -> jax.Array:
    y = fused_moe(x, logits, **params, spec=SPEC, backend=backend, **({"gradients": KERNELS} | options))
    return jnp.sum(jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape) * y.astype(jnp.float32))


def assert_close(got: Any, want: Any, rtol: float = 1e-2) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype
        one, other = (np.asarray(v, np.float64) for v in (one, other))
        assert np.linalg.norm(one - other) <= rtol * np.linalg.norm(other)


def gradient(backend: str, **options: Any) -> Any:
    return jax.grad(functools.partial(loss, backend, **options), argnums=(0, 1, 2))


@pytest.mark.parametrize("save", ["inputs", "products"])
def test_wired(stand_ins: list[str], save: str) -> None:
    args, config = inputs(), GradientConfig(kernels=True, save=save)
    options = {"num_tokens": jnp.int32(13)} if save == "inputs" else {"mask": jnp.arange(20) % 3 == 0}
    got = jax.jit(gradient("grouped_gemm", gradients=config, **options))(*args)
    assert_close(got, jax.jit(gradient("xla", **options))(*args), 1e-6)
    assert set(stand_ins) == (
        {"forward", "backward"} if save == "inputs" else {"saving", "backward of saved"}
    )


def test_a_buffer_used_twice(stand_ins: list[str]) -> None:
    args = inputs()

    def twice(backend: str, params: Arrays, x: jax.Array, logits: jax.Array) -> jax.Array:
        run = functools.partial(fused_moe, **params, spec=SPEC, backend=backend, gradients=KERNELS)
        y = run(x, logits) + x
        return jnp.sum(jnp.square((run(y, logits) + y).astype(jnp.float32)))

    got, want = (
        jax.jit(jax.grad(functools.partial(twice, backend), argnums=(0, 1, 2)))(*args)
        for backend in ("grouped_gemm", "xla")
    )
    assert_close(got, want, 1e-5)
    assert stand_ins.count("backward") == 2


@pytest.mark.parametrize(
    ("save", "policy"), [("inputs", "none"), ("inputs", "nothing"), ("products", "names")]
)
def test_scan_and_checkpoint(stand_ins: list[str], save: str, policy: str) -> None:
    params, x, _ = inputs(20)
    layer_params = jax.tree.map(lambda v: jnp.stack([v, -v]), params)
    router = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 128)), jnp.float32) / 10

    def total(backend: str, remat: bool, layers: Any, x: jax.Array) -> jax.Array:
        def step(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            params, router = layer
            logits = x.astype(jnp.float32) @ router.T
            config = GradientConfig(kernels=True, save=save)
            return x + fused_moe(x, logits, **params, spec=SPEC, backend=backend, gradients=config), None

        if remat:
            policies = jax.checkpoint_policies
            step = jax.checkpoint(
                step,
                policy=policies.nothing_saveable
                if policy == "nothing"
                else policies.save_only_these_names(GradientConfig.PRODUCTS),
            )
        return jnp.sum(jnp.sin(jax.lax.scan(step, x, layers)[0].astype(jnp.float32)))

    layers = (layer_params, router)
    got = jax.jit(jax.grad(functools.partial(total, "grouped_gemm", policy != "none"), argnums=(0, 1)))(
        layers, x
    )
    want = jax.jit(jax.grad(functools.partial(total, "xla", False), argnums=(0, 1)))(layers, x)
    assert_close(got, want, 1e-5)


def test_vmap(stand_ins: list[str]) -> None:
    params, x, logits = inputs(12)
    xs = jnp.stack([x, x[::-1]])
    one = gradient("grouped_gemm", gradients=SAVE)
    got = jax.jit(jax.vmap(one, in_axes=(None, 0, None)))(params, xs, logits)
    plain = jax.jit(gradient("xla"))
    for i, each in enumerate(xs):
        want = plain(params, each, logits)
        assert_close(jax.tree.map(lambda v, i=i: v[i], got), want, 1e-6)


@pytest.mark.parametrize("save", ["inputs", "products"])
def test_shard_map(stand_ins: list[str], save: str) -> None:
    """Tokens are split; gradients of what every device has are summed."""
    args = inputs(32)
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))

    def total(backend: str, params: Arrays, x: jax.Array, logits: jax.Array) -> jax.Array:
        run = functools.partial(
            fused_moe, spec=SPEC, backend=backend, gradients=GradientConfig(kernels=True, save=save)
        )
        y = jax.shard_map(
            lambda params, x, logits: run(x, logits, **params),
            mesh=mesh,
            in_specs=(P(), P("data"), P("data")),
            out_specs=P("data"),
        )(params, x, logits)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    got, want = (
        jax.jit(jax.grad(functools.partial(total, backend), argnums=(0, 1, 2)))(*args)
        for backend in ("grouped_gemm", "xla")
    )
    assert_close(got, want)  # a sum over devices of what was rounded


def test_float32_gradients_of_weights(stand_ins: list[str]) -> None:
    params, x, logits = inputs()
    masters = params | {name: params[name].astype(jnp.float32) for name in ("w13", "w2")}
    config = GradientConfig(kernels=True, float32_weights=True)
    want = jax.jit(gradient("xla"))(params, x, logits)
    for backend in ("grouped_gemm", "xla"):
        got = jax.jit(gradient(backend, gradients=config))(masters, x, logits)
        assert got[0]["w13"].dtype == got[0]["w2"].dtype == jnp.float32
        assert_close(jax.tree.map(lambda a, b: a.astype(b.dtype), got, want), want, 1e-2)
    with pytest.raises(TypeError, match="w13 and w2 are float32, and x is bfloat16"):
        loss("auto", params, x, logits, gradients=config)
    with pytest.raises(TypeError, match="need one dtype"):
        loss("auto", masters, x, logits)


def test_a_layer_hands_its_config_on(stand_ins: list[str]) -> None:
    """Float32 parameters, computed in bfloat16, that get float32 gradients; products are saved."""
    spec = dataclasses.replace(SPEC, expert_bias=False)
    params, x = random_params(spec), random_tokens(spec, 20, dtype="bfloat16")
    layer = MoE(
        spec,
        dtype=jnp.bfloat16,
        backend="grouped_gemm",
        gradients=GradientConfig(kernels=True, save="products", float32_weights=True),
    )
    got = jax.jit(jax.grad(lambda params: layer.apply(params, x).astype(jnp.float32).sum()))(params)
    assert got["w13"].dtype == got["w2"].dtype == jnp.float32
    assert "backward of saved" in stand_ins
    with pytest.raises(TypeError, match="gradients is a GradientConfig"):
        MoE(spec, gradients="products")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scoring": "sigmoid", "correction_bias": True, "num_expert_groups": 4, "top_k_groups": 2},
        {"scoring": "softmax_after_topk"},
        {"renormalize": False, "routed_scaling_factor": 2.5},
    ],
    ids=str,
)
def test_router_replay(options: dict[str, Any]) -> None:
    """A recorded choice, replayed: the same weights and gradients; a changed router does not choose anew."""
    spec = make_spec(num_experts=8, **options)
    bias = jnp.linspace(0, 1, 8, dtype=jnp.float32) if spec.correction_bias else None
    logits, other = (jnp.asarray(random_logits(9, 8, seed=seed)) for seed in range(2))
    recorded = route(logits, spec, correction_bias=bias)

    @jax.jit
    def pull(logits: jax.Array, ids: jax.Array | None) -> Any:
        weights, pull_back = jax.vjp(
            lambda logits: route(logits, spec, correction_bias=bias, topk_ids=ids).topk_weights, logits
        )
        return weights, pull_back(jnp.cos(jnp.arange(18.0)).reshape(9, 2))

    for one, again in zip(pull(logits, None), pull(logits, recorded.topk_ids), strict=True):
        np.testing.assert_allclose(jnp.asarray(again), jnp.asarray(one), rtol=1e-6, atol=1e-8)
    replayed = route(other, spec, correction_bias=bias, topk_ids=recorded.topk_ids)
    np.testing.assert_array_equal(replayed.topk_ids, recorded.topk_ids)
    assert np.asarray(replayed.topk_weights).all()
    partly = route(other, spec, correction_bias=bias, topk_ids=recorded.topk_ids.at[0, 1].set(-1))
    assert (partly.topk_ids[0, 1], partly.topk_weights[0, 1]) == (-1, 0)
    if spec.renormalize:
        np.testing.assert_allclose(partly.topk_weights[0, 0], spec.routed_scaling_factor, rtol=1e-5)
    with pytest.raises(ValueError, match="need the logits' leading axes and top_k"):
        route(logits, spec, correction_bias=bias, topk_ids=recorded.topk_ids[:3])
    with pytest.raises(TypeError, match="topk_ids are integers"):
        route(logits, spec, correction_bias=bias, topk_ids=recorded.topk_weights)


def test_which_backward_pass() -> None:
    problem = Problem(spec=SPEC, num_tokens=4, dtype="bfloat16")
    for backend in ("swap_ab", "grouped_gemm"):
        selection = select_backend(problem, backend, device=H200)
        assert selection.backward == "grouped_gemm"
        assert selection.backward_config is not None
    assert select_backend(problem, "xla", device=H200).backward == "xla"
    assert select_backend(problem).backward == "xla"
    quantised = dataclasses.replace(
        problem, quant="fp8_block", weight_dtype="float8_e4m3fn", activation_scales="group"
    )
    selection = select_backend(quantised, "grouped_gemm", device=H200)
    assert selection.backward == "xla"
    assert "frozen" in selection.backward_reason


def test_gradient_config_refuses() -> None:
    with pytest.raises(ValueError, match="save is 'inputs' or 'products'; got 'all'"):
        GradientConfig(save="all")
    with pytest.raises(TypeError, match="float32_weights is a bool"):
        GradientConfig(float32_weights=1)
    params, x, logits = inputs(3)
    with pytest.raises(TypeError, match="gradients is a GradientConfig; got str"):
        loss("auto", params, x, logits, gradients="products")


# On a GPU

OPTIONS: list[dict[str, Any]] = [
    {},
    {"expert_bias": True, **CLAMPED},
    {"expert_bias": True, "gate_up": "interleaved", **(CLAMPED | {"swiglu_limit": 7.0})},
    {"expert_bias": True, "gate_up": "interleaved", "weight_on": "input"},
    {"activation": "geglu_tanh"},
    {"activation": "geglu", "weight_on": "input"},
    {"activation": "gelu", "expert_bias": True},
    {"activation": "relu2", "expert_bias": True, "weight_on": "input"},
    {"activation": "silu"},
    {"activation": "gelu_tanh"},
    {"hidden_size": 192, "intermediate_size": 192, "gate_up": "interleaved"},
    {"hidden_size": 704, "intermediate_size": 320, "expert_bias": True},
    {"hidden_size": 704, "intermediate_size": 320, "activation": "relu2"},
    {"hidden_size": 128, "intermediate_size": 128},
    {"num_experts": 1, "top_k": 1},
    {"num_experts": 7, "top_k": 7},
    {"num_experts": 300, "top_k": 3, "hidden_size": 128, "intermediate_size": 128},
]
GPU_SPEC = MoESpec(num_experts=16, top_k=4, hidden_size=512, intermediate_size=256)


@functools.cache
def program(spec: MoESpec, save: str = "inputs") -> Any:
    """(y, gradients of params, x and the routing's weights) of (params, x, ids, weights, d_y)."""

    def run(params: Arrays, x: jax.Array, ids: jax.Array, weights: jax.Array, d_y: jax.Array) -> Any:
        def apply(params: Arrays, x: jax.Array, weights: jax.Array) -> jax.Array:
            config = GradientConfig(kernels=True, save=save)
            routing = Routing(ids, weights)
            return fused_experts(x, routing, **params, spec=spec, backend="grouped_gemm", gradients=config)

        y, pull_back = jax.vjp(apply, params, x, weights)
        return y, pull_back(d_y)

    return jax.jit(run)


def run_program(spec: MoESpec, x: NDArray, params: Arrays, routing: Routing, save: str = "inputs") -> Any:
    return jax.tree.map(np.asarray, program(spec, save)(params, x, *routing, cotangent(x)))


def as_gradients(found: Any) -> gradients.Gradients:
    d_params, d_x, d_weights = found
    return gradients.Gradients(d_x, d_weights, *(d_params.get(name) for name in ("w13", "w2", "b13", "b2")))


@pytest.mark.gpu
@pytest.mark.parametrize("save", ["inputs", "products"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options: dict[str, Any], dtype: str, save: str) -> None:
    spec = dataclasses.replace(GPU_SPEC, **options)
    params, x = experts_of(random_params(spec, dtype=dtype)), random_tokens(spec, 301, dtype=dtype)
    routing = make_routing(spec, 301, low=-1)
    _, found = run_program(spec, x, params, routing, save)
    check(as_gradients(found), params, x, routing, cotangent(x), spec)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes",
    [(0, 500), (500, 0), (1, 127, 128, 129), (63, 64, 65, 0), (7, 41, 64, 100, 1, 0, 43), (3001, 1, 0, 3)],
)
def test_sizes(sizes: tuple[int, ...]) -> None:
    spec = dataclasses.replace(GPU_SPEC, num_experts=len(sizes), top_k=1, expert_bias=True)
    rng = np.random.default_rng(0)
    ids = rng.permutation(np.repeat(np.arange(len(sizes), dtype=np.int32), sizes))[:, None]
    routing = Routing(ids, rng.uniform(0.1, 1, ids.shape).astype(np.float32))
    params, x = (
        experts_of(random_params(spec, dtype="bfloat16")),
        random_tokens(spec, len(ids), dtype="bfloat16"),
    )
    poison_memory()
    _, found = run_program(spec, x, params, routing)
    check(as_gradients(found), params, x, routing, cotangent(x), spec)


@pytest.mark.gpu
def test_nan_of_others_stays_out() -> None:
    """Of experts without tokens, of tokens without experts, of what memory held before."""
    params = experts_of(random_params(GPU_SPEC, dtype="bfloat16"))
    x = random_tokens(GPU_SPEC, 700, dtype="bfloat16")
    routing = make_routing(GPU_SPEC, 700, low=2, high=14)
    routing.topk_ids[300:310] = -1
    _, clean = run_program(GPU_SPEC, x, params, routing)
    for value in params.values():
        value[[0, 1, 14, 15]] = np.nan
    x[300:310] = np.nan
    held = [jnp.full((1 << 26,), jnp.nan) for _ in range(4)]
    jax.block_until_ready(held)
    del held
    _, got = run_program(GPU_SPEC, x, params, routing)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(clean), strict=True):
        assert_same_bits(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("save", ["inputs", "products"])
def test_fifty_calls_repeat_bitwise(save: str) -> None:
    """Loads change from call to call; all are queued before the first is looked at."""
    spec = dataclasses.replace(GPU_SPEC, hidden_size=1024, intermediate_size=768, expert_bias=True)
    params, x = experts_of(random_params(spec, dtype="bfloat16")), random_tokens(spec, 2000, dtype="bfloat16")
    params, x, d_y = jax.tree.map(jnp.asarray, (params, x, cotangent(x)))
    routings = [make_routing(spec, 2000, **ids) for ids in ({}, {"high": 2}, {"low": -9}, {"high": 1})]
    run = program(spec, save)
    outputs = [[run(params, x, *routing, d_y) for routing in routings] for _ in range(50)]
    for again in outputs[1:]:
        for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(outputs[0]), strict=True):
            assert_same_bits(one, other)


@pytest.mark.gpu
def test_layers_on_a_gpu() -> None:
    """From logits, in a scan with remat, against the portable backend: values, and every gradient."""
    spec = dataclasses.replace(GPU_SPEC, router_bias=True)
    layers = [random_params(spec, seed=seed, dtype="bfloat16") for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(v) for v in leaves]), *layers)
    x = jnp.asarray(random_tokens(spec, 500, dtype="bfloat16"))

    def total(backend: str, stacked: Any, x: jax.Array) -> jax.Array:
        layer = MoE(spec, backend=backend)
        step = jax.checkpoint(lambda x, params: (x + layer.apply(params, x), None))
        return jnp.sum(jnp.sin(jax.lax.scan(step, x, stacked)[0].astype(jnp.float32)))

    got, want = (
        jax.jit(jax.grad(functools.partial(total, backend), argnums=(0, 1)))(stacked, x)
        for backend in ("grouped_gemm", "xla")
    )
    # Three layers of rounding, and tokens whose router is torn between two experts.
    assert_close(got, want, 5e-2)
