"""The Swap-AB kernel: interpreted on a CPU, lowered on a CPU, run on a Hopper GPU.

Interpreted, one phase after the other with a race detector, the kernel shows that its items cover the
matrices, that its rings and barriers order every access to shared memory, and that its numbers are right.
What the interpreter has no word for is replaced (`interpret` in `moe_pallas.kernels._mgpu`), so this is not
proved there: the asynchronous gather of token rows (`test_gather.py` has its addresses), the transposed
store of results, the flags by which CTAs wait for each other, the number of a launch, the routing inside the
kernel, and that a wait for WGMMA stands where it must. Tests marked gpu do all of it. Left out on a CPU are
also sizes whose last tile or piece of a row overlaps the one before: both write the same bits to the same
place, which the race detector rightly reports.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from failure_cases import assert_same_bits, experts_of
from interpreted import interpreted, make_routing, without_races
from jax import export, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from moe_pallas import GradientConfig, MoE, MoESpec, Routing, fused_experts, fused_moe, reference
from moe_pallas.configs.schema import SwapABConfig
from moe_pallas.kernels import _mgpu, swap_ab
from moe_pallas.oracle import assume_device
from moe_pallas.spec import H200
from moe_pallas.testing import LOADS, assert_close, random_logits, random_params, random_tokens

# Interpreted


def interpret(
    spec: MoESpec,
    x: NDArray,
    routing: Routing,
    params: dict[str, NDArray],
    config: SwapABConfig,
    num_ctas: int = 2,
) -> NDArray:
    arrays = [params.get(name) for name in ("w13", "w2", "b13", "b2")]
    program = interpreted(swap_ab.fused_experts, spec=spec, config=config, num_ctas=num_ctas)
    return without_races(program, x, routing, *arrays)


def make_tiny(**options: Any) -> MoESpec:
    return MoESpec(**({"num_experts": 3, "top_k": 2, "hidden_size": 128, "intermediate_size": 128} | options))


def by_name(names: str, cases: dict[str, tuple[Any, ...]]) -> pytest.MarkDecorator:
    """One test for each case."""
    params = [pytest.param(*case, id=name) for name, case in cases.items()]
    return pytest.mark.parametrize(names.split(), params)


CLAMPED = {"swiglu_alpha": 1.702, "swiglu_limit": 0.9, "swiglu_up_offset": 1.0}


def small(**options: int) -> SwapABConfig:
    return SwapABConfig(**({"block_m": 8, "num_stages": 3} | options))


# Each: the layer, tokens, ids' range, the configuration, CTAs.
INTERPRETED: dict[str, tuple[MoESpec, int, dict[str, int], SwapABConfig, int]] = {
    "biases and a clamp": (make_tiny(expert_bias=True, **CLAMPED), 5, {}, small(), 4),
    "interleaved": (make_tiny(gate_up="interleaved", expert_bias=True, **CLAMPED), 3, {}, small(), 2),
    "relu2, weight on the input": (
        make_tiny(activation="relu2", weight_on="input", expert_bias=True, intermediate_size=256),
        5,
        {"low": -1},
        small(),
        3,
    ),
    "gated, weight on the input": (make_tiny(weight_on="input"), 9, {"low": -1}, small(), 2),
    "one token, silu": (make_tiny(num_experts=4, top_k=3, activation="silu"), 1, {}, small(), 4),
    "one expert, gelu": (make_tiny(num_experts=1, top_k=1, activation="gelu"), 3, {}, small(), 1),
    "one hot expert, geglu_tanh": (
        make_tiny(num_experts=4, top_k=1, activation="geglu_tanh"),
        11,
        {"low": 2, "high": 3},
        small(),
        2,
    ),
    "dropped ids": (make_tiny(hidden_size=256), 7, {"low": -2, "high": 4}, small(), 2),
    "all dropped": (make_tiny(), 3, {"low": -3, "high": 0}, small(), 2),
    "duplicate ids, float16": (make_tiny(top_k=3), 6, {"low": 1, "high": 3}, small(num_stages=6), 2),
    "several blocks an expert": (make_tiny(num_experts=2), 20, {}, small(num_stages=5), 3),
    "half a block of 32": (make_tiny(num_experts=1, top_k=1), 17, {}, small(block_m=32), 2),
    "every width": (make_tiny(num_experts=4, top_k=1), 64, {"high": 3}, small(block_m=64), 4),
    "down_splits": (make_tiny(intermediate_size=256, expert_bias=True), 9, {}, small(down_splits=2), 3),
    "tiles of fewer rows": (
        make_tiny(num_experts=2, top_k=1, expert_bias=True),
        5,
        {},
        small(up_rows=32, down_rows=16),
        3,
    ),
    "tiles of fewer rows, not gated": (
        make_tiny(num_experts=2, top_k=1, activation="relu2"),
        5,
        {},
        small(up_rows=16, down_rows=32),
        2,
    ),
    # The interpreter has no flags: nobody may wait for another CTA's part.
    "up_splits": (make_tiny(hidden_size=256, expert_bias=True), 12, {}, small(up_splits=2), 1),
}


@by_name("spec num_tokens ids config num_ctas", INTERPRETED)
def test_interpreted(
    spec: MoESpec,
    num_tokens: int,
    ids: dict[str, int],
    config: SwapABConfig,
    num_ctas: int,
    request: pytest.FixtureRequest,
) -> None:
    dtype = "float16" if "float16" in request.node.callspec.id else "bfloat16"
    params, x = random_params(spec, dtype=dtype), random_tokens(spec, num_tokens, dtype=dtype)
    routing = make_routing(spec, num_tokens, **ids)
    y = interpret(spec, x, routing, params, config, num_ctas)
    assert_close(y, reference.fused_experts(x, *routing, **experts_of(params), spec=spec))


def test_interpreted_nan_of_others_stays_out() -> None:
    """Of an expert without tokens, of a token without experts, and of rows between blocks."""
    spec = make_tiny(expert_bias=True)
    params, x = random_params(spec, dtype="bfloat16"), random_tokens(spec, 6, dtype="bfloat16")
    ids, weights = make_routing(spec, 6, high=2)
    ids = 2 * ids  # experts 0 and 2
    ids[3] = -1
    clean = interpret(spec, x, Routing(ids, weights), params, small())
    assert_close(clean, reference.fused_experts(x, ids, weights, **experts_of(params), spec=spec))
    for name in ("w13", "w2", "b13", "b2"):
        params[name][1] = np.nan
    x[3], weights[3] = np.nan, np.nan
    assert_same_bits(interpret(spec, x, Routing(ids, weights), params, small()), clean)


def test_l7_interpreted_layers_are_whole() -> None:
    """More items than CTAs: the first, the middle and the last ones are all there."""
    spec = make_tiny(num_experts=2, top_k=1, hidden_size=256, intermediate_size=384)
    params, x = random_params(spec, dtype="bfloat16"), random_tokens(spec, 19, dtype="bfloat16")
    routing = make_routing(spec, 19)
    y = interpret(spec, x, routing, params, small(), num_ctas=2)
    assert_close(y, reference.fused_experts(x, *routing, **experts_of(params), spec=spec))


def hand_over(x: jax.Array, *, wait: bool, interpret: Any) -> jax.Array:
    """One warpgroup writes to shared memory, another reads it."""

    def body(x_gmem: Any, y_gmem: Any, smem: Any, barrier: Any) -> None:
        @pl.when(lax.axis_index("wg") == 0)
        def _() -> None:
            smem[...] = x_gmem[...]
            plgpu.barrier_arrive(barrier)

        @pl.when(lax.axis_index("wg") == 1)
        def _() -> None:
            if wait:
                plgpu.barrier_wait(barrier)
            y_gmem[...] = smem[...]
            if not wait:
                plgpu.barrier_wait(barrier)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        num_threads=2,
        thread_name="wg",
        scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()],
        interpret=interpret,
    )(x)


def test_a_race_is_seen() -> None:
    x = np.ones(128, np.float32)
    assert_same_bits(without_races(interpreted(hand_over, wait=True), x), x)
    # jax 0.11 prints, 0.12 raises.
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match="RACE"):
        without_races(interpreted(hand_over, wait=False), x)


# Programs: lowered on a CPU for an H200 by tests without a mark, run by those marked gpu

KERNELS = GradientConfig(kernels=True)
SPEC = MoESpec(num_experts=16, top_k=4, hidden_size=512, intermediate_size=256)
LAYERS = 3  # of a stack


@functools.cache
def moe_program(spec: MoESpec, backend: str = "swap_ab") -> Any:
    """fused_moe of (x, logits, w13, w2, **rest). One for each layer, so that a shape is compiled once."""
    return jax.jit(functools.partial(fused_moe, spec=spec, backend=backend))


@functools.cache
def experts_program(spec: MoESpec, backend: str = "swap_ab") -> Any:
    """fused_experts of (x, routing, w13, w2, **rest)."""
    return jax.jit(functools.partial(fused_experts, spec=spec, backend=backend))


def moe_inputs(
    spec: MoESpec, num_tokens: int, *, dtype: str = "bfloat16", load: str = "uniform", seed: int = 0
) -> tuple[tuple[NDArray, ...], dict[str, NDArray]]:
    """(x, logits, w13, w2), and the layer's other arrays."""
    params = random_params(spec, dtype=dtype, seed=seed)
    x = random_tokens(spec, num_tokens, dtype=dtype, seed=seed)
    logits = random_logits(num_tokens, spec.num_experts, load=load, seed=seed)
    rest = {name: params[name] for name in ("b13", "b2", "correction_bias") if name in params}
    return (x, logits, params["w13"], params["w2"]), rest


def stacked(count: int, num_tokens: int) -> tuple[NDArray, ...]:
    """(x, logits, w13, w2) of several layers, each with an axis in front."""
    layers = [moe_inputs(SPEC, num_tokens, seed=seed)[0] for seed in range(count)]
    return tuple(map(np.stack, zip(*layers, strict=True)))


def call(*args: Any, **rest: Any) -> jax.Array:
    return fused_moe(*args, spec=SPEC, backend="swap_ab", **rest)


def loss(backend: str, *args: Any, **rest: Any) -> jax.Array:
    x = args[0]
    weights = jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
    y = fused_moe(*args, spec=SPEC, backend=backend, gradients=KERNELS, **rest)
    return jnp.sum(weights * y.astype(jnp.float32))


def with_gradients(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The value, which needs the kernel, and the gradients, which need others."""
    return jax.value_and_grad(function, argnums=(0, 1, 2, 3))


swap_ab_loss, xla_loss = functools.partial(loss, "swap_ab"), functools.partial(loss, "xla")


def through_layers(x: jax.Array, logits: jax.Array, w13: jax.Array, w2: jax.Array) -> jax.Array:
    """A stack of layers in a scan; operands but x with the layers' axis."""

    def layer(x: jax.Array, own: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        return x + call(x, *own), None

    return lax.scan(layer, x, (logits, w13, w2))[0]


def two_layers(*args: Any) -> list[jax.Array]:
    """Two layers of which neither waits for the other."""
    return [call(*(array[i] for array in args)) for i in range(2)]


def sharded(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    device = jax.devices()[0]
    mesh = jax.make_mesh((1,), ("tokens",), axis_types=(AxisType.Auto,), devices=[device])
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


OVER_TOKENS = (P("tokens"), P("tokens"), P(), P())


def sharded_loss(*args: Any) -> jax.Array:
    parts = sharded(lambda *own: swap_ab_loss(*own)[None], OVER_TOKENS, P("tokens"))(*args)
    return jnp.sum(parts)


def as_structs(*args: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)


def count_launches(function: Callable[..., Any], *args: Any, **rest: Any) -> int:
    """How often the kernel stands in a program for an H200."""
    with assume_device(H200):
        # A function of its own: what was traced for another device must not be found again.
        program = jax.jit(lambda *args, **rest: function(*args, **rest)).trace(*args, **rest)
        text = program.lower(lowering_platforms=("cuda",)).as_text()
    return text.count("stablehlo.custom_call @mosaic_gpu")


BACKWARD, OF_BIASES = 8, 4  # launches of a backward pass
ONE, STACK = moe_inputs(SPEC, 8)[0], stacked(LAYERS, 8)
FLAT_VMAP = jax.vmap(call, in_axes=(0, 0, None, None))

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "alone": (call, ONE, 1),
    "leading axes": (call, (ONE[0].reshape(2, 4, -1), ONE[1].reshape(2, 4, -1), *ONE[2:]), 1),
    "no leading axes": (call, (ONE[0][0], ONE[1][0], *ONE[2:]), 1),
    "scan": (through_layers, (ONE[0], *STACK[1:]), 1),
    "gradients": (with_gradients(swap_ab_loss), ONE, 1 + BACKWARD),
    "checkpoint": (with_gradients(jax.checkpoint(swap_ab_loss)), ONE, 1 + BACKWARD),
    "vmap over tokens": (FLAT_VMAP, (*STACK[:2], *ONE[2:]), 1),
    "vmap over layers": (jax.vmap(call), STACK, 1),
    "gradients of vmap": (jax.vmap(with_gradients(swap_ab_loss)), STACK, 1 + BACKWARD),
    "two layers": (two_layers, STACK, 2),
    "shard_map": (sharded(call, OVER_TOKENS, P("tokens")), ONE, 1),
    "gradients in shard_map": (with_gradients(sharded_loss), ONE, 1 + BACKWARD),
}


@by_name("function args launches", PROGRAMS)
def test_program_is_lowered(function: Callable[..., Any], args: Any, launches: int) -> None:
    assert count_launches(function, *as_structs(*args)) == launches


# JAX does not promise that another release can still run a kernel of this one.
EXPORTABLE = export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")


def test_a_program_is_exported() -> None:
    with assume_device(H200):
        program = export.export(jax.jit(call), platforms=("cuda",), disabled_checks=[EXPORTABLE])
        assert "mosaic_gpu" in program(*as_structs(*ONE)).mlir_module()


@pytest.mark.parametrize(
    "options",
    [
        {"scoring": "sigmoid", "correction_bias": True, "routed_scaling_factor": 2.5},
        {"scoring": "softmax_after_topk"},
        {"renormalize": False},
        {"num_expert_groups": 4, "top_k_groups": 2},
        {"weight_on": "input", "activation": "relu2", "expert_bias": True},
    ],
)
def test_padding_is_lowered(options: dict[str, Any]) -> None:
    """One launch, or two more for a plan, with a traced count and a mask; and those of gradients."""
    launches = 3 if "weight_on" in options else 1
    spec = dataclasses.replace(SPEC, **options)
    args, rest = moe_inputs(spec, 8)
    structs, rest = as_structs(*args), as_structs(rest)[0]
    program = functools.partial(fused_moe, spec=spec, backend="swap_ab")
    for given in (
        {"num_tokens": jax.ShapeDtypeStruct((), jnp.int32)},
        {"mask": jax.ShapeDtypeStruct((8,), jnp.bool)},
    ):
        assert count_launches(program, *structs, **rest, **given) == launches

        def total(*args: Any, **rest: Any) -> jax.Array:
            return jnp.sum(program(*args, gradients=KERNELS, **rest).astype(jnp.float32))

        backward = BACKWARD + (OF_BIASES if spec.expert_bias else 0)
        assert count_launches(with_gradients(total), *structs, **rest, **given) == launches + backward


# What else runs on a GPU: the layer and the number of tokens.
SHAPES: dict[str, tuple[MoESpec, int]] = {
    "odd multiples of 64": (dataclasses.replace(SPEC, hidden_size=192, intermediate_size=192), 9),
    "tails": (dataclasses.replace(SPEC, hidden_size=704, intermediate_size=320), 9),
    "tails, not gated": (
        dataclasses.replace(SPEC, hidden_size=704, intermediate_size=320, activation="relu2"),
        9,
    ),
    "one expert": (dataclasses.replace(SPEC, num_experts=1, top_k=1), 12),
    "many experts": (
        MoESpec(num_experts=1536, top_k=8, hidden_size=128, intermediate_size=128),
        8,
    ),
    "every expert": (MoESpec(num_experts=7, top_k=7, hidden_size=256, intermediate_size=128), 7),
    "many choices": (MoESpec(num_experts=64, top_k=32, hidden_size=128, intermediate_size=128), 64),
    "many slots": (MoESpec(num_experts=512, top_k=10, hidden_size=128, intermediate_size=128), 64),
    "more logits than are routed inside": (
        MoESpec(num_experts=512, top_k=10, hidden_size=128, intermediate_size=128),
        65,
    ),
    "more tokens than are routed inside": (SPEC, 300),
}


@by_name("spec num_tokens", SHAPES)
def test_shape_is_lowered(spec: MoESpec, num_tokens: int) -> None:
    routing = make_routing(spec, num_tokens)
    shapes = [(num_tokens, spec.hidden_size), *(spec.param_shapes[name] for name in ("w13", "w2"))]
    x, *weights = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    logits = jax.ShapeDtypeStruct((num_tokens, spec.num_experts), jnp.float32)
    launches = 3 if num_tokens > 128 or num_tokens * spec.num_experts > 2**15 else 1
    assert count_launches(moe_program(spec), x, logits, *weights) == launches
    assert count_launches(experts_program(spec), x, *as_structs(routing), *weights) == launches


def test_flags_look_like_no_other_constant() -> None:
    """XLA merges equal constants, and the kernel writes to this one: a user's must not be the same."""
    for count in (0, 3, 1000):
        words = _mgpu.new_flags(count).view(np.int64)
        assert len(words) == _mgpu.HEADER_FLAGS + count
        assert not np.delete(words, range(4, 8)).any()  # counters and flags
        assert np.count_nonzero(words[4:8]) == 3


# On a GPU


def check_moe(spec: MoESpec, args: tuple[NDArray, ...], rest: dict[str, NDArray], **given: Any) -> NDArray:
    """Run fused_moe and compare it with the truth. ``given``: mask or num_tokens."""
    y = np.asarray(moe_program(spec)(*args, **rest, **given))
    mask = given.get("mask")
    if (count := given.get("num_tokens")) is not None:
        mask = np.arange(len(args[0])) < int(count)
    expected = reference.fused_moe(*args, spec=spec, mask=mask, **rest)
    assert_close(y, expected, context=f"{spec} T={len(args[0])}")
    return y


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 9, 16, 33, 64, 100, 128, 129, 256])
def test_tokens(num_tokens: int) -> None:
    """From logits of every load, and from given ids: some dropped, some twice, all at one expert."""
    for seed, load in enumerate(LOADS):
        check_moe(SPEC, *moe_inputs(SPEC, num_tokens, load=load, seed=seed))
    (x, _, w13, w2), _ = moe_inputs(SPEC, num_tokens)
    for ids in ({}, {"low": -2, "high": 18}, {"low": 5, "high": 6}, {"low": -1, "high": 0}):
        routing = make_routing(SPEC, num_tokens, **ids)
        y = experts_program(SPEC)(x, routing, w13, w2)
        assert_close(y, reference.fused_experts(x, *routing, w13, w2, spec=SPEC), context=f"{ids}")


OPTIONS: dict[str, dict[str, Any]] = {
    "sigmoid": {"scoring": "sigmoid"},
    "softmax after top-k": {"scoring": "softmax_after_topk", "routed_scaling_factor": 2.5},
    "plain softmax": {"renormalize": False},
    "plain sigmoid": {"scoring": "sigmoid", "renormalize": False, "routed_scaling_factor": 0.5},
    "correction bias": {"scoring": "sigmoid", "correction_bias": True, "routed_scaling_factor": 2.5},
    "correction bias of a softmax": {"correction_bias": True},
    "groups": {"num_expert_groups": 4, "top_k_groups": 2, "scoring": "sigmoid", "correction_bias": True},
    "biases and a clamp": {"expert_bias": True, **CLAMPED},
    "interleaved": {"gate_up": "interleaved", "expert_bias": True, **CLAMPED},
    "geglu_tanh": {"activation": "geglu_tanh"},
    "relu2": {"activation": "relu2", "expert_bias": True},
    "silu": {"activation": "silu"},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "gelu": {"activation": "gelu"},
    "geglu": {"activation": "geglu"},
    "weight on the input": {"weight_on": "input", "expert_bias": True},
    "relu2, weight on the input": {"weight_on": "input", "activation": "relu2"},
}


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict[str, Any]) -> None:
    spec = dataclasses.replace(SPEC, **options)
    for seed, load in enumerate(LOADS):
        check_moe(spec, *moe_inputs(spec, 19, load=load, seed=seed))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtypes(dtype: str) -> None:
    """Of tokens and weights, of logits and of biases."""
    spec = dataclasses.replace(SPEC, expert_bias=True)
    (x, logits, w13, w2), rest = moe_inputs(spec, 19, dtype=dtype)
    check_moe(spec, (x, logits.astype(x.dtype), w13, w2), rest)
    check_moe(spec, (x, logits, w13, w2), {name: b.astype(np.float32) for name, b in rest.items()})


@pytest.mark.gpu
@by_name("spec num_tokens", SHAPES)
def test_shapes(spec: MoESpec, num_tokens: int) -> None:
    for load in ("uniform", "one_hot"):
        (x, logits, w13, w2), rest = moe_inputs(spec, num_tokens, load=load)
        check_moe(spec, (x, logits, w13, w2), rest)
    routing = make_routing(spec, num_tokens, low=-1)
    y = experts_program(spec)(x, routing, w13, w2)
    assert_close(y, reference.fused_experts(x, *routing, w13, w2, spec=spec))


CONFIGS: list[tuple[dict[str, int], int | None]] = [
    ({"block_m": 8, "num_stages": 3}, None),
    ({"block_m": 8, "num_stages": 6}, 5),
    ({"block_m": 8, "num_stages": 6, "up_splits": 4, "down_splits": 2}, None),
    ({"block_m": 16, "num_stages": 5, "up_splits": 2}, 1),
    ({"block_m": 32, "num_stages": 4, "down_splits": 2}, 37),
    ({"block_m": 64, "num_stages": 4}, None),
    ({"block_m": 16, "num_stages": 4, "up_rows": 40, "down_rows": 24}, None),
    ({"block_m": 8, "num_stages": 4, "up_rows": 8, "down_rows": 56, "up_splits": 2}, 131),
    ({"block_m": 64, "num_stages": 3, "up_splits": 4, "down_splits": 2}, 2),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("config", "num_ctas"), CONFIGS)
def test_configurations(config: dict[str, int], num_ctas: int | None) -> None:
    """Every way to cut a problem up, again and again: blocks of many and few tokens, items that wait."""
    spec, num_tokens = dataclasses.replace(SPEC, num_experts=5, top_k=2, expert_bias=True), 100
    params, x = random_params(spec, dtype="bfloat16"), random_tokens(spec, num_tokens, dtype="bfloat16")
    arrays = [params[name] for name in ("w13", "w2", "b13", "b2")]
    run = jax.jit(
        lambda x, routing, *arrays: swap_ab.fused_experts(
            x, routing, *arrays, spec, config=SwapABConfig(**config), num_ctas=num_ctas
        )
    )
    routings = [make_routing(spec, num_tokens, **ids) for ids in ({}, {"high": 2}, {"low": -9}, {"high": 1})]
    outputs = [[run(x, routing, *arrays) for routing in routings] for _ in range(50)]
    for i, routing in enumerate(routings):
        assert_close(outputs[0][i], reference.fused_experts(x, *routing, **experts_of(params), spec=spec))
    for again in outputs[1:]:
        for y, first in zip(again, outputs[0], strict=True):
            assert_same_bits(y, first)


@pytest.mark.gpu
def test_padding() -> None:
    """A traced count and a mask; padding may hold anything."""
    args, rest = moe_inputs(SPEC, 33)
    mask = np.random.default_rng(0).random(33) < 0.5
    for count in (33, 32, 9, 8, 1, 0):
        real = np.arange(33) < count
        x, logits = (np.where(real[:, None], array, np.nan).astype(array.dtype) for array in args[:2])
        y = check_moe(SPEC, (x, logits, *args[2:]), rest, num_tokens=jnp.int32(count))
        assert not y[count:].any()
    for real in (mask, ~mask, np.zeros_like(mask), np.ones_like(mask)):
        x, logits = (np.where(real[:, None], array, np.nan).astype(array.dtype) for array in args[:2])
        y = check_moe(SPEC, (x, logits, *args[2:]), rest, mask=real)
        assert not y[~real].any()
        routing = make_routing(SPEC, 33)
        y = experts_program(SPEC)(x, routing, *args[2:], mask=real)
        assert_close(y, reference.fused_experts(x, *routing, *args[2:], spec=SPEC, mask=real))
    # Past either end of the tokens: none, all.
    assert not np.asarray(moe_program(SPEC)(*args, num_tokens=jnp.int32(-3))).any()
    whole = moe_program(SPEC)(*args, num_tokens=jnp.int32(33))
    assert_same_bits(moe_program(SPEC)(*args, num_tokens=jnp.int32(1000)), whole)


@pytest.mark.gpu
def test_a_token_does_not_depend_on_the_others() -> None:
    """Its row has the same bits alone and in a batch of any load."""
    mixed = [moe_inputs(SPEC, 33, load=load, seed=3)[0] for load in LOADS]
    everyone = np.ones(33, bool)
    for args in mixed:
        whole = np.asarray(moe_program(SPEC)(*args, mask=everyone))
        for token in (0, 7, 32):
            alone = np.asarray(moe_program(SPEC)(*args, mask=np.arange(33) == token))
            assert_same_bits(alone[token], whole[token])
            assert not np.delete(alone, token, axis=0).any()
        half = np.arange(33) % 2 == 0
        assert_same_bits(np.asarray(moe_program(SPEC)(*args, mask=half))[half], whole[half])
        counted = moe_program(SPEC)(*args, num_tokens=jnp.int32(9))
        assert_same_bits(np.asarray(counted)[:9], whole[:9])


@pytest.mark.gpu
def test_nan_stays_where_it_is() -> None:
    """In a token's row, and in an expert that nobody visits."""
    x, logits, w13, w2 = moe_inputs(SPEC, 33)[0]
    logits[:, [3, 15]] = -np.inf
    clean = check_moe(SPEC, (x, logits, w13, w2), {})
    w13[[3, 15]], w2[[3, 15]] = np.nan, np.nan
    assert_same_bits(moe_program(SPEC)(x, logits, w13, w2), clean)
    for value in (np.nan, np.inf):
        spoilt = x.copy()
        spoilt[[4, 20]] = value
        y = np.asarray(moe_program(SPEC)(spoilt, logits, w13, w2))
        assert np.isnan(y[[4, 20]].astype(np.float32)).all()
        assert_same_bits(np.delete(y, [4, 20], axis=0), np.delete(clean, [4, 20], axis=0))
    # A token without an included expert: NaN weights, a row of NaN.
    logits[11] = np.nan
    y = np.asarray(moe_program(SPEC)(x, logits, *moe_inputs(SPEC, 33)[0][2:]))
    assert np.isnan(y[11].astype(np.float32)).all()
    assert_same_bits(np.delete(y, 11, axis=0), np.delete(clean, 11, axis=0))


@pytest.mark.gpu
def test_a_thousand_calls_repeat_bitwise() -> None:
    """Routing changes from call to call, and programs of few and many tokens follow each other."""
    weights = moe_inputs(SPEC, 1)[0][2:]
    calls = [
        (jnp.asarray(x), jnp.asarray(logits))
        for seed in range(4)
        for num_tokens, load in ((64, "uniform"), (1, "zipf"), (8, "one_hot"), (256, "zipf"), (8, "uniform"))
        for x, logits in [moe_inputs(SPEC, num_tokens, load=load, seed=seed)[0][:2]]
    ]
    weights = [jnp.asarray(array) for array in weights]
    first = [np.asarray(moe_program(SPEC)(*inputs, *weights)) for inputs in calls]
    order = np.random.default_rng(0).integers(len(calls), size=1000)
    # All queued before the first is looked at, so that calls follow each other without a pause.
    outputs = [moe_program(SPEC)(*calls[i], *weights) for i in order]
    for i, y in zip(order, outputs, strict=True):
        assert_same_bits(y, first[i])


@pytest.mark.gpu
def test_layer_with_a_shared_expert() -> None:
    spec = dataclasses.replace(
        SPEC, shared_intermediate_size=192, shared_expert_gate=True, router_bias=True, expert_bias=True
    )
    params = random_params(spec, dtype="bfloat16")
    x = random_tokens(spec, 12, dtype="bfloat16").reshape(3, 4, -1)
    apply = jax.jit(MoE(spec, backend="swap_ab").apply)
    assert_close(apply(params, x), reference.moe(params, x, spec))
    y = apply(params, x, num_tokens=jnp.int32(7)).reshape(12, -1)
    assert_close(y, reference.moe(params, x.reshape(12, -1), spec, mask=np.arange(12) < 7))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["scan", "two layers", "vmap over tokens", "vmap over layers", "shard_map"])
def test_program_equals_single_calls(name: str) -> None:
    function, args, _ = PROGRAMS[name]
    one = moe_program(SPEC)
    if name == "scan":
        expected = jnp.asarray(args[0])
        for own in zip(*args[1:], strict=True):
            expected = expected + one(expected, *own)
    elif name == "two layers":
        expected = [one(*(array[i] for array in STACK)) for i in range(2)]
    elif name == "shard_map":
        expected = one(*ONE)
    else:
        weights = ([w] * LAYERS if "tokens" in name else w for w in args[2:])
        expected = jnp.stack([one(*own) for own in zip(*args[:2], *weights, strict=True)])
    program = jax.jit(function)
    for _ in range(20):
        jax.tree.map(assert_same_bits, program(*args), expected)


GRADIENTS = {name: (name,) for name in PROGRAMS if "gradients" in name or name == "checkpoint"}


@pytest.mark.gpu
@by_name("name", GRADIENTS)
def test_gradients_are_the_portable_backends(name: str) -> None:
    function, args, _ = PROGRAMS[name]
    portable = with_gradients(xla_loss)
    expected = jax.jit(jax.vmap(portable) if "vmap" in name else portable)(*args)
    (value, got_all), (expected_value, want_all) = jax.jit(function)(*args), expected
    np.testing.assert_allclose(value, expected_value, atol=0.5)  # a sum of 4096 terms, each a rounding off
    for got, want in zip(got_all, want_all, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        difference = np.asarray(got, np.float64) - np.asarray(want, np.float64)
        assert np.linalg.norm(difference) <= 1e-2 * np.linalg.norm(np.asarray(want, np.float64))


@pytest.mark.gpu
def test_an_exported_program_runs() -> None:
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    exported = export.export(moe_program(SPEC), disabled_checks=[EXPORTABLE])(*ONE)
    again = export.deserialize(exported.serialize())
    for _ in range(3):
        assert_same_bits(jax.jit(again.call)(*ONE), moe_program(SPEC)(*ONE))
