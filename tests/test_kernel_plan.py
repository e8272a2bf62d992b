"""The plan of many tokens, made by kernels: against `moe_pallas.route` and a plain construction in NumPy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import simt_emulator
from numpy.typing import NDArray
from test_kernel_routing import KINDS, expected_routing, make_spec, name_of, some_logits

from moe_pallas import MoESpec, Routing, fused_experts, fused_moe
from moe_pallas.kernels import _choice, _plan, _routing
from moe_pallas.oracle import assume_device
from moe_pallas.plan import BlockPlan
from moe_pallas.spec import H200

BLOCK_M = 128
BY_BLOCK = ("block_expert", "block_row", "block_first", "block_size")


def num_rows(spec: MoESpec, num_tokens: int) -> int:
    slots = num_tokens * spec.top_k
    return slots + 7 * min(spec.num_experts, slots) + BLOCK_M


# The plan in NumPy


def make_plan(ids: NDArray, weights: NDArray, spec: MoESpec, block_m: int = BLOCK_M) -> dict[str, NDArray]:
    """What must be found; ids outside [0, E) are dropped. ``weight_of_row`` is NaN where there is no row."""
    flat, num_experts = ids.reshape(-1).astype(np.int64), spec.num_experts
    kept = (flat >= 0) & (flat < num_experts)
    order = np.flatnonzero(kept)[np.argsort(flat[kept], kind="stable")]
    sizes = np.bincount(flat[kept], minlength=num_experts)
    firsts, rows = np.cumsum(sizes) - sizes, np.cumsum(-(-sizes // 8) * 8) - -(-sizes // 8) * 8
    row_of_slot = np.full(flat.size, -1)
    row_of_slot[order] = np.arange(order.size) - firsts[flat[order]] + rows[flat[order]]
    blocks = [(e, i) for e in range(num_experts) for i in range(0, sizes[e], block_m)]
    weight_of_row = np.full(num_rows(spec, len(ids)), np.nan, np.float32)
    weight_of_row[row_of_slot[order]] = weights.reshape(-1)[order]
    found = {
        "num_blocks": [len(blocks)],
        "block_expert": [e for e, _ in blocks],
        "block_row": [rows[e] + i for e, i in blocks],
        "block_first": [firsts[e] + i for e, i in blocks],
        "block_size": [min(sizes[e] - i, block_m) for e, i in blocks],
        "token_of": order // spec.top_k,
        "row_of_slot": row_of_slot,
        "weight_of_slot": weights.reshape(-1),
        "weight_of_row": weight_of_row,
    }
    return {name: np.asarray(x) for name, x in found.items()}


def check(
    plan: BlockPlan, ids: NDArray, weights: NDArray, spec: MoESpec, rtol: float, block_m: int = BLOCK_M
) -> None:
    expected = make_plan(ids, weights, spec, block_m)
    found = {name: np.asarray(x) for name, x in plan._asdict().items() if x is not None}
    assert ("weight_of_row" in found) == (spec.weight_on.value == "input")
    for name, x in found.items():
        wanted = expected[name]
        assert len(x) >= len(wanted), name
        x = x[: len(wanted)]
        if x.dtype == np.float32:
            x = np.where(np.isnan(wanted), np.nan, x) if name == "weight_of_row" else x
            np.testing.assert_allclose(x, wanted, rtol=rtol, atol=1e-12, err_msg=name)
        else:
            np.testing.assert_array_equal(x, wanted, err_msg=name)


# What it is run on: a GPU, or all its threads in NumPy


def emulate(
    phase: Callable[[dict[str, Any]], None],
    name: str,
    num_ctas: int,
    scratch_words: int,
    outputs: dict[str, Any],
    inputs: dict[str, Any],
) -> dict[str, NDArray]:
    """Do as `_plan._launch`: one CTA after the other, the last one first."""
    garbage = functools.partial(np.full, fill_value=-559038737, dtype=np.int32)
    made = {key: garbage(x.shape).view(x.dtype) for key, x in outputs.items()}
    for cta in reversed(range(num_ctas)):
        with simt_emulator.as_cta(cta):
            simt_emulator.in_every_thread(phase, **inputs, **made, scratch=garbage((scratch_words,)))
    return made


Run = Callable[..., BlockPlan]


def run_plan(
    inputs: dict[str, Any], *, spec: MoESpec, num_ctas: int = 132, block_m: int = BLOCK_M
) -> BlockPlan:
    """By ids if there are any, else by logits."""
    arrays = {name: inputs.get(name) for name in ("ids", "weights", "logits", "bias", "real")}
    ids, weights, logits, bias, real = arrays.values()
    num_tokens = len(ids) if logits is None else len(logits)
    statics: Any = {
        "block_m": block_m,
        "num_rows": num_rows(spec, num_tokens),
        "num_ctas": num_ctas,
    }
    if logits is None:
        return _plan.plan_ids(Routing(ids, weights), spec, **statics)
    return _plan.plan_logits(logits, bias, real, spec, **statics)


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Run:
    if request.param == "gpu":
        return lambda inputs, **statics: jax.jit(functools.partial(run_plan, **statics))(inputs)

    def emulated(inputs: dict[str, Any], **statics: Any) -> BlockPlan:
        with simt_emulator.emulating(_plan, _routing, _choice):
            return run_plan(inputs, **statics)

    monkeypatch.setattr(_plan, "_launch", emulate)
    return emulated


def inside(ids: NDArray, spec: MoESpec) -> NDArray:
    return (ids >= 0) & (ids < spec.num_experts)


# layer, tokens, CTAs
CASES = [
    (make_spec(128, 8), 1, 4),
    (make_spec(128, 8), 13, 132),
    (make_spec(128, 8), 300, 132),
    (make_spec(128, 8), 1000, 8),
    (make_spec(8, 2), 1000, 8),
    (make_spec(1, 1), 500, 3),
    (make_spec(7, 3, weight_on="input"), 211, 3),
    (make_spec(33, 32), 50, 2),
    (make_spec(64, 6, renormalize=False, routed_scaling_factor=2.5), 100, 5),
    (make_spec(60, 4, scoring="sigmoid", correction_bias=True), 100, 5),
    (make_spec(512, 10), 100, 5),
    (make_spec(1536, 8), 100, 3),
]


@pytest.mark.parametrize(("spec", "num_tokens", "num_ctas"), CASES, ids=name_of)
def test_logits_are_planned_as_route_and_make_blocks_do(
    run: Run, spec: MoESpec, num_tokens: int, num_ctas: int
) -> None:
    bias = None
    if spec.correction_bias:
        bias = np.random.default_rng(0).standard_normal(spec.num_experts).astype(np.float32)
    for kind in KINDS:
        logits = some_logits(kind, num_tokens, spec.num_experts)
        plan = run({"logits": logits, "bias": bias}, spec=spec, num_ctas=num_ctas)
        check(plan, *expected_routing(logits, spec, bias), spec, rtol=3e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("num_experts", [5, 128])
def test_narrow_logits_are_widened(run: Run, num_experts: int, dtype: str) -> None:
    spec = make_spec(num_experts, 4)
    for kind in KINDS:
        with np.errstate(over="ignore"):  # 3e38 is inf in float16
            logits = some_logits(kind, 100, num_experts).astype(jnp.dtype(dtype))
        plan = run({"logits": logits}, spec=spec, num_ctas=4)
        check(plan, *expected_routing(logits, spec, None), spec, rtol=3e-6)


@pytest.mark.parametrize("given", ["count", "flags"])
@pytest.mark.parametrize("num_tokens", [1, 150])
def test_tokens_that_are_not_real_go_nowhere(run: Run, given: str, num_tokens: int) -> None:
    spec = make_spec(16, 4)
    for count in (-3, 0, round(0.6 * num_tokens), num_tokens, num_tokens + 9):
        real = np.arange(num_tokens) < count
        if given == "flags":
            real = np.random.default_rng(1).permutation(real)
        logits = some_logits("random", num_tokens, 16)
        logits[~real] = np.nan
        ids, weights = expected_routing(logits, spec, None)
        flags = real.astype(np.int32) if given == "flags" else np.array([count], np.int32)
        plan = run({"logits": logits, "real": flags}, spec=spec, num_ctas=5)
        check(plan, np.where(real[:, None], ids, -1), np.where(real[:, None], weights, 0), spec, rtol=3e-6)


IDS: dict[str, tuple[int, int, int, int]] = {
    # experts, top_k, tokens, CTAs
    "many steps of a warp": (16, 4, 1000, 2),
    "ids are held in registers": (16, 4, 1000, 8),
    "a CTA of few tokens": (9, 3, 27, 132),
    "one slot": (4, 1, 1, 8),
    "many choices": (40, 40, 33, 2),
    "many experts": (1536, 8, 200, 3),
    "more experts than slots": (700, 2, 5, 3),
    "an odd number of experts": (771, 3, 300, 4),
    "sums of more than 16 bits": (768, 2, 36000, 24),
}


@pytest.mark.parametrize("weight_on", ["input", "output"])
@pytest.mark.parametrize("name", IDS)
def test_given_ids(run: Run, name: str, weight_on: str) -> None:
    num_experts, top_k, num_tokens, num_ctas = IDS[name]
    spec, rng = make_spec(num_experts, top_k, weight_on=weight_on), np.random.default_rng(2)
    shape = (num_tokens, top_k)
    skewed = np.minimum(rng.zipf(1.3, shape), num_experts) - 1
    ranges = [(-2, num_experts + 2), (0, min(4, num_experts)), (num_experts - 1, num_experts), (-1, 0)]
    for ids in [skewed, *(rng.integers(*limits, shape) for limits in ranges)]:
        ids = ids.astype(np.int32)
        weights = rng.random(shape).astype(np.float32)
        weights[~inside(ids, spec)] = np.nan
        weights[~inside(ids, spec) & (rng.random(shape) < 0.5)] = 3.0
        check(run({"ids": ids, "weights": weights}, spec=spec, num_ctas=num_ctas), ids, weights, spec, rtol=0)


@pytest.mark.parametrize("block_m", [8, 64, 128])
@pytest.mark.parametrize("sizes", [(128, 0, 129, 1), (8, 7, 9, 0, 0), (0, 0, 500)])
def test_sizes_at_the_edges_of_a_block(run: Run, sizes: tuple[int, ...], block_m: int) -> None:
    ids = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes), dtype=np.int32), sizes))
    spec, ids = make_spec(len(sizes), 1), ids[:, None]
    weights = np.random.default_rng(1).random(ids.shape).astype(np.float32)
    plan = run({"ids": ids, "weights": weights}, spec=spec, num_ctas=4, block_m=block_m)
    check(plan, ids, weights, spec, rtol=0, block_m=block_m)


def test_the_largest_ids_are_dropped(run: Run) -> None:
    spec = make_spec(2, 2)
    ids = np.array([[2**31 - 1, -(2**31)], [1, 1], [2, -1], [0, 1]], np.int32)
    weights = np.ones(ids.shape, np.float32)
    check(run({"ids": ids, "weights": weights}, spec=spec, num_ctas=2), ids, weights, spec, rtol=0)


# On a GPU: many tokens, and calls that follow each other


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [8192, 65536])
@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (8, 2), (512, 10), (1536, 8)])
def test_many_tokens(num_experts: int, top_k: int, num_tokens: int) -> None:
    spec, rng = make_spec(num_experts, top_k, weight_on="input"), np.random.default_rng(0)
    run = jax.jit(functools.partial(run_plan, spec=spec))
    logits = rng.standard_normal((num_tokens, num_experts)).astype(np.float32)
    for inputs in (logits, logits + np.linspace(0, 8, num_experts, dtype=np.float32)):
        check(run({"logits": inputs}), *expected_routing(inputs, spec, None), spec, rtol=3e-6)
    weights = rng.random((num_tokens, top_k)).astype(np.float32)
    for low, high in [(-2, num_experts + 2), (0, 1), (-1, 0), (num_experts - 2, num_experts)]:
        ids = rng.integers(low, high, weights.shape).astype(np.int32)
        check(run({"ids": ids, "weights": weights}), ids, weights, spec, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 500, 8192])
def test_fifty_calls_repeat_bitwise(num_tokens: int) -> None:
    """Other tokens in between; all calls are queued before the first is looked at."""
    spec = make_spec(128, 8)
    run = jax.jit(functools.partial(run_plan, spec=spec))
    inputs = [some_logits(kind, num_tokens, 128) for kind in KINDS]
    plans = [[run({"logits": logits}) for logits in inputs] for _ in range(50)]
    for again in plans:
        for plan, first, logits in zip(again, plans[0], inputs, strict=True):
            weights = np.asarray(first.weight_of_slot)
            check(plan, expected_routing(logits, spec, None)[0], weights, spec, rtol=0)


# Without a GPU


def shapes_of(spec: MoESpec, num_tokens: int, by: str) -> dict[str, jax.ShapeDtypeStruct]:
    struct = jax.ShapeDtypeStruct
    if by == "ids":
        slots = (num_tokens, spec.top_k)
        return {"ids": struct(slots, jnp.int32), "weights": struct(slots, jnp.float32)}
    return {"logits": struct((num_tokens, spec.num_experts), jnp.float32), "real": struct((1,), jnp.int32)}


def slots_and_blocks(inputs: dict[str, Any], *, spec: MoESpec) -> tuple[jax.Array, ...]:
    plan = run_plan(inputs, spec=spec)
    return plan.row_of_slot, plan.block_expert


@pytest.mark.aot
@pytest.mark.parametrize("by", ["logits", "ids"])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_tokens"),
    [(128, 8, 512), (128, 8, 65536), (512, 10, 8192), (1536, 8, 8192), (1536, 32, 65536), (1, 1, 1)],
)
def test_it_fits_in_the_registers(
    h200: aot.Compiler, num_experts: int, top_k: int, num_tokens: int, by: str
) -> None:
    spec = make_spec(num_experts, top_k)
    case = aot.Case(
        name="plan",
        function=functools.partial(slots_and_blocks, spec=spec),
        args=(shapes_of(spec, num_tokens, by),),
        kernels=("plan_count", "plan_place"),
        max_launches=2,
        max_registers=168,  # what each of 384 threads can have
        max_temp_bytes=4 * (5 * (num_tokens * top_k + num_experts) + 70 * num_experts) + 10_000,
    )
    assert case.violations(h200.compile(case.function, *case.args)) == []


@pytest.mark.parametrize(
    ("spec", "num_tokens", "by_logits", "by_ids"),
    [
        (make_spec(1536, 32), 65536, None, None),
        (make_spec(8, 2, num_expert_groups=2, top_k_groups=1), 9, "num_expert_groups=2", None),
        (make_spec(64, 33), 9, "top_k=33", None),
        (make_spec(1537, 2), 9, "num_experts=1537", "num_experts=1537"),
        (make_spec(8, 2), 0, "num_tokens=0", "num_tokens=0"),
        (make_spec(64, 8), 132 * 8192, "65536 slots", "65536 slots"),
        (make_spec(64, 8), 132 * 7500, "bytes of shared memory", None),
        (make_spec(1536, 2), 1_400_000, "2150400000 logits", None),
    ],
    ids=str,
)
def test_what_it_declines(spec: MoESpec, num_tokens: int, by_logits: str | None, by_ids: str | None) -> None:
    for supports, reason in ((_plan.supports_logits, by_logits), (_plan.supports_ids, by_ids)):
        said = supports(spec, num_tokens, 132)
        assert said is None if reason is None else reason in str(said)


def made_by_xla(spec: MoESpec, given: str) -> set[str]:
    """Of a layer's routing and plan, what is left to XLA."""
    num_tokens = 300
    shapes = shapes_of(spec, num_tokens, given)
    routing = Routing(shapes["ids"], shapes["weights"]) if given == "ids" else shapes["logits"]
    x, w13, w2 = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((num_tokens, spec.hidden_size), spec.param_shapes["w13"], spec.param_shapes["w2"])
    )
    layer = functools.partial(
        fused_experts if given == "ids" else fused_moe, spec=spec, backend="grouped_gemm"
    )
    with assume_device(H200):
        traced = jax.jit(lambda *args: layer(*args)).trace(x, routing, w13, w2)
        program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("plan_place" in program) == ("stablehlo.sort" not in program)
    return {name for name, mark in {"routing": "top_k", "plan": "stablehlo.sort"}.items() if mark in program}


def test_the_layer_takes_the_way_that_is_open() -> None:
    options: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128}
    for weight_on in ("input", "output"):
        spec = MoESpec(num_experts=8, top_k=2, weight_on=weight_on, **options)
        assert made_by_xla(spec, "logits") == made_by_xla(spec, "ids") == set()
    spec = MoESpec(num_experts=8, top_k=2, num_expert_groups=2, top_k_groups=1, **options)
    assert made_by_xla(spec, "logits") == {"routing"}
    assert made_by_xla(spec, "ids") == set()
    spec = MoESpec(num_experts=1540, top_k=2, **options)
    assert made_by_xla(spec, "logits") == {"routing", "plan"}
    assert made_by_xla(spec, "ids") == {"plan"}
