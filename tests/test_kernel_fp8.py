"""FP8 in the kernels: interpreted on a CPU, run on a Hopper GPU.

Interpreted, x is quantised before the kernel and h by the portable rules, so what is not proved there is how
the kernel quantises: that is for the tests marked gpu, which compare with the NumPy truth.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from failure_cases import assert_same_bits
from interpreted import interpreted, make_routing, without_races
from numpy.typing import NDArray
from quantised import SCHEMES, numpy_of, quantised_params

from moe_pallas import MoESpec, Problem, QuantScheme, Routing, fused_experts, fused_moe, reference
from moe_pallas.configs.schema import GroupedGemmConfig, SwapABConfig
from moe_pallas.kernels import grouped_gemm, swap_ab
from moe_pallas.oracle import assume_device, select_backend
from moe_pallas.spec import H200
from moe_pallas.testing import LOADS, assert_close, random_logits, random_params, random_tokens

NAMES = [name for name, scheme in SCHEMES.items() if scheme.activations != "tensor"]
SPEC = MoESpec(num_experts=16, top_k=4, hidden_size=512, intermediate_size=256)


def inputs(
    spec: MoESpec, num_tokens: int, scheme: QuantScheme, seed: int = 0, dtype: str = "bfloat16"
) -> tuple[NDArray, dict[str, Any]]:
    """Tokens, and the layer's arrays with quantised experts."""
    params = random_params(spec, dtype=dtype, seed=seed)
    x = random_tokens(spec, max(num_tokens, 1), dtype=dtype, seed=seed)
    return x[:num_tokens], numpy_of(quantised_params(params, x, spec, scheme))


def experts_of(params: dict[str, Any]) -> dict[str, Any]:
    return {name: params[name] for name in ("w13", "w2", "b13", "b2") if name in params}


def truth(x: NDArray, routing: Routing, params: dict[str, Any], spec: MoESpec, **rest: Any) -> NDArray:
    return reference.fused_experts(x, *routing, **experts_of(params), spec=spec, **rest)


INTERPRETED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tensor, static, interleaved": ("tensor-static", 2, {"gate_up": "interleaved", "expert_bias": True}),
    "channel, token": ("channel", 1, {"expert_bias": True}),
    "block, interleaved": ("block", 2, {"gate_up": "interleaved", "hidden_size": 512}),
    "block, relu2": ("block", 1, {"activation": "relu2", "intermediate_size": 256}),
}


@pytest.mark.parametrize(("name", "slabs", "options"), INTERPRETED.values(), ids=INTERPRETED)
def test_swap_ab_interpreted(name: str, slabs: int, options: dict[str, Any]) -> None:
    sizes = {"num_experts": 2, "top_k": 2, "hidden_size": 256, "intermediate_size": 128}
    spec = MoESpec(**(sizes | options))
    x, params = inputs(spec, 6, SCHEMES[name])
    routing = make_routing(spec, 6, low=-1)
    arrays = [params.get(key) for key in ("w13", "w2", "b13", "b2")]
    config = SwapABConfig(block_m=8, num_stages=3, slabs=slabs)
    program = interpreted(swap_ab.fused_experts, spec=spec, config=config, num_ctas=2)
    y = without_races(program, x, routing, *arrays)
    assert_close(y, truth(x, routing, params, spec), quantised=True)


GROUPED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tensor, static, interleaved, three steps": (
        "tensor-static",
        70,
        {
            "gate_up": "interleaved",
            "hidden_size": 256,
            "intermediate_size": 384,
            "num_experts": 1,
            "top_k": 1,
        },
    ),
    "channel, token": ("channel", 9, {"gate_up": "interleaved", "expert_bias": True}),
    "block, two steps": ("block", 9, {"hidden_size": 256}),
    "block, relu2": ("block", 9, {"activation": "relu2", "intermediate_size": 256}),
}


@pytest.mark.parametrize(("name", "num_tokens", "options"), GROUPED.values(), ids=GROUPED)
def test_grouped_gemm_interpreted(name: str, num_tokens: int, options: dict[str, Any]) -> None:
    sizes = {"num_experts": 2, "top_k": 2, "hidden_size": 128, "intermediate_size": 128}
    spec = MoESpec(**(sizes | options))
    x, params = inputs(spec, num_tokens, SCHEMES[name])
    routing = make_routing(spec, num_tokens, low=-1)
    arrays = [params.get(key) for key in ("w13", "w2", "b13", "b2")]
    program = interpreted(grouped_gemm.fused_experts, spec=spec, config=GroupedGemmConfig(), num_ctas=2)
    y = without_races(program, x, routing, *arrays)
    assert_close(y, truth(x, routing, params, spec), quantised=True)


@pytest.mark.parametrize("name", NAMES)
def test_auto_takes_a_kernel(name: str) -> None:
    scheme = SCHEMES[name]
    quant: Any = {"quant": scheme.name, "activation_scales": scheme.activations}
    for num_tokens, backend in ((8, "swap_ab"), (4096, "grouped_gemm")):
        problem = Problem(spec=SPEC, num_tokens=num_tokens, dtype="bfloat16", **quant)
        assert select_backend(problem, device=H200).backend == backend


@pytest.mark.parametrize(("backend", "launches"), [("swap_ab", 1), ("grouped_gemm", 6)])
@pytest.mark.parametrize("name", ["tensor-static", "channel", "block"])
def test_layer_is_lowered(name: str, backend: str, launches: int) -> None:
    """For an H200: one launch; for prefill two for the plan, one for x, two products, the combine."""
    x, params = inputs(SPEC, 8, SCHEMES[name])
    args = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (x, random_logits(8, 16), experts_of(params))
    )

    def layer(x: jax.Array, logits: jax.Array, experts: dict[str, Any]) -> jax.Array:
        return fused_moe(x, logits, **experts, spec=SPEC, backend=backend)

    with assume_device(H200):
        text = jax.jit(layer).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == launches


# On a GPU


@functools.cache
def moe_program(spec: MoESpec, backend: str) -> Any:
    return jax.jit(functools.partial(fused_moe, spec=spec, backend=backend))


@functools.cache
def experts_program(spec: MoESpec, backend: str) -> Any:
    return jax.jit(functools.partial(fused_experts, spec=spec, backend=backend))


def check_moe(
    spec: MoESpec, x: NDArray, logits: NDArray, params: dict[str, Any], backend: str, **rest: Any
) -> NDArray:
    arrays = experts_of(params)
    y = np.asarray(moe_program(spec, backend)(x, logits, **arrays, **rest))
    mask = rest.get("mask")
    if "num_tokens" in rest:
        mask = np.arange(len(x)) < int(rest["num_tokens"])
    expected = reference.fused_moe(x, logits, **arrays, spec=spec, mask=mask)
    assert_close(y, expected, quantised=True, wgmma=True, context=f"{spec} T={len(x)}")
    return y


BACKENDS = ["swap_ab", "grouped_gemm"]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_tokens", [1, 8, 33, 129, 300])
@pytest.mark.parametrize("name", NAMES)
def test_tokens(name: str, num_tokens: int, backend: str) -> None:
    """From logits of every load, and from given ids: some dropped, some twice, all at one expert."""
    x, params = inputs(SPEC, num_tokens, SCHEMES[name])
    for seed, load in enumerate(LOADS):
        check_moe(SPEC, x, random_logits(num_tokens, 16, load=load, seed=seed), params, backend)
    for ids in ({}, {"low": -2, "high": 18}, {"low": 5, "high": 6}, {"low": -1, "high": 0}):
        routing = make_routing(SPEC, num_tokens, **ids)
        y = experts_program(SPEC, backend)(x, routing, **experts_of(params))
        assert_close(y, truth(x, routing, params, SPEC), quantised=True, wgmma=True, context=f"{ids}")


OPTIONS: dict[str, dict[str, Any]] = {
    "biases and a clamp": {"expert_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 0.9},
    "interleaved": {"gate_up": "interleaved", "expert_bias": True},
    "relu2": {"activation": "relu2", "expert_bias": True},
    "gelu": {"activation": "gelu"},
    "sizes that end within a tile": {"hidden_size": 896, "intermediate_size": 384},
    "not gated, within a tile": {"hidden_size": 640, "intermediate_size": 384, "activation": "silu"},
    "groups": {"num_expert_groups": 4, "top_k_groups": 2, "scoring": "sigmoid", "correction_bias": True},
    "long rows": {"hidden_size": 7168, "intermediate_size": 128, "num_experts": 4, "top_k": 2},
    "long sums": {"hidden_size": 256, "intermediate_size": 14336, "num_experts": 2, "top_k": 1},
}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", ["tensor-static", "channel", "block"])
def test_options(name: str, options: dict[str, Any], backend: str) -> None:
    spec = dataclasses.replace(SPEC, **options)
    for num_tokens, dtype in ((1, "float16"), (19, "bfloat16")):
        x, params = inputs(spec, num_tokens, SCHEMES[name], dtype=dtype)
        rest = {key: params[key] for key in ("correction_bias",) if key in params}
        logits = random_logits(num_tokens, spec.num_experts)
        arrays = experts_of(params) | rest
        y = moe_program(spec, backend)(x, logits, **arrays)
        expected = reference.fused_moe(x, logits, **arrays, spec=spec)
        assert_close(y, expected, quantised=True, wgmma=True, context=f"{spec} T={num_tokens}")


SWAP_AB_CONFIGS: list[tuple[dict[str, int], int | None]] = [
    ({"block_m": 8, "num_stages": 3, "slabs": 2}, None),
    ({"block_m": 8, "num_stages": 12, "up_rows": 32}, 132),
    ({"block_m": 8, "num_stages": 6, "slabs": 2, "up_splits": 4, "down_splits": 2}, 5),
    ({"block_m": 16, "num_stages": 4, "slabs": 2, "up_splits": 2}, 131),
    ({"block_m": 16, "num_stages": 9, "down_splits": 2}, None),
    ({"block_m": 32, "num_stages": 4, "slabs": 2, "down_rows": 32}, 2),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("cut", "num_ctas"), SWAP_AB_CONFIGS)
@pytest.mark.parametrize("name", NAMES)
def test_swap_ab_configurations(name: str, cut: dict[str, int], num_ctas: int | None) -> None:
    """Every way to cut a problem up, again and again: blocks of many and few tokens, items that wait."""
    spec, num_tokens = dataclasses.replace(SPEC, num_experts=5, top_k=2), 100
    if SCHEMES[name].weights != "block":
        cut = cut | {"up_rows": 40, "down_rows": 24}
    x, params = inputs(spec, num_tokens, SCHEMES[name])
    config = SwapABConfig(**cut)
    run = jax.jit(
        lambda x, routing, w13, w2: swap_ab.fused_experts(
            x, routing, w13, w2, None, None, spec, config=config, num_ctas=num_ctas
        )
    )
    routings = [make_routing(spec, num_tokens, **ids) for ids in ({}, {"high": 2}, {"low": -9}, {"high": 1})]
    outputs = [[run(x, routing, params["w13"], params["w2"]) for routing in routings] for _ in range(20)]
    for i, routing in enumerate(routings):
        assert_close(outputs[0][i], truth(x, routing, params, spec), quantised=True, wgmma=True)
    for again in outputs[1:]:
        for y, first in zip(again, outputs[0], strict=True):
            assert_same_bits(y, first)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_padding_and_neighbours(name: str, backend: str) -> None:
    """Padding may hold anything; a token's bits do not depend on the other tokens."""
    x, params = inputs(SPEC, 33, SCHEMES[name])
    logits = random_logits(33, 16)
    whole = check_moe(SPEC, x, logits, params, backend, num_tokens=jnp.int32(33))
    for count in (32, 8, 1, 0):
        real = np.arange(33) < count
        poisoned = [np.where(real[:, None], array, np.nan).astype(array.dtype) for array in (x, logits)]
        y = check_moe(SPEC, *poisoned, params, backend, num_tokens=jnp.int32(count))
        assert not y[count:].any()
        assert_same_bits(y[:count], whole[:count])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_are_odd(name: str, backend: str) -> None:
    """NaN, Inf, zeros, tiny and huge numbers in tokens; a NaN scale; each stays with its own."""
    x, params = inputs(SPEC, 40, SCHEMES[name])
    logits = random_logits(40, 16)
    logits[:, [3, 15]] = -np.inf
    clean = check_moe(SPEC, x, logits, params, backend)
    spoilt = x.copy()
    spoilt[4], spoilt[20] = np.nan, np.inf
    y = np.asarray(moe_program(SPEC, backend)(spoilt, logits, **experts_of(params)))
    assert np.isnan(y[[4, 20]].astype(np.float32)).all()
    assert_same_bits(np.delete(y, [4, 20], axis=0), np.delete(clean, [4, 20], axis=0))
    odd = x.copy()
    odd[3], odd[5] = 0, -0.0
    odd[6] *= np.asarray(1e-30, x.dtype)
    odd[7] *= np.asarray(1e30, x.dtype)
    odd[8, ::3] = 0
    odd[9, 7] = 300.0
    if SCHEMES[name].activations != "static":
        check_moe(SPEC, odd, logits, params, backend)
    # The scales of an expert that nobody visits.
    for key in ("w13", "w2"):
        scale = params[key].scale.copy()
        scale[[3, 15]] = np.nan
        params[key] = dataclasses.replace(params[key], scale=scale)
    assert_same_bits(moe_program(SPEC, backend)(x, logits, **experts_of(params)), clean)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_calls_repeat_bitwise(name: str, backend: str) -> None:
    _, params = inputs(SPEC, 1, SCHEMES[name])
    arrays = jax.tree.map(jnp.asarray, experts_of(params))
    calls = [
        (jnp.asarray(random_tokens(SPEC, n, dtype="bfloat16")), jnp.asarray(random_logits(n, 16, load=load)))
        for n, load in ((64, "uniform"), (1, "zipf"), (8, "one_hot"), (200, "zipf"))
    ]
    run = moe_program(SPEC, backend)
    first = [np.asarray(run(*given, **arrays)) for given in calls]
    order = np.random.default_rng(0).integers(len(calls), size=200)
    outputs = [run(*calls[i], **arrays) for i in order]  # all queued before the first is looked at
    for i, y in zip(order, outputs, strict=True):
        assert_same_bits(y, first[i])
