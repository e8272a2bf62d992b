"""Routing as the first phase of a kernel: its lists against `moe_pallas.route` and plain NumPy."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import simt_emulator
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_pallas import MoESpec, Scoring, route
from moe_pallas.configs.lists import list_sizes, supports_ids, supports_logits
from moe_pallas.kernels import _choice, _routing, _simt

CTAS = 3  # each writes out its own lists, which must be the same

BENCHMARKED = [(128, 8), (8, 2), (512, 10), (256, 8), (128, 4), (64, 8)]
SIZES = [(*size, tokens) for size in BENCHMARKED for tokens in (1, 8, 64)]
ODD_SIZES = [(1, 1, 1), (1, 1, 8), (7, 3, 33), (33, 32, 5), (130, 9, 13), (1536, 8, 256), (1536, 32, 1)]


def make_spec(num_experts: int, top_k: int, **more: Any) -> MoESpec:
    return MoESpec(num_experts=num_experts, top_k=top_k, hidden_size=64, intermediate_size=64, **more)


def write_out(source: Any, target: Any) -> None:
    """Copy a list from shared to global memory."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def copy(ctx: Any, source: Any, target: Any) -> None:
        read, write = _simt.Memory(source), _simt.Memory(target)

        def one(index: _simt.Int) -> list[_simt.Int]:
            write.store(index, read.load(index))
            return []

        _simt.for_range(_simt.thread_index(), read.size, _routing.NUM_THREADS, [], one)

    copy(source, target)


def run_phase(
    inputs: dict[str, Any], *, spec: MoESpec, num_tokens: int, block_m: int, ctas: int = CTAS
) -> _routing.Lists:
    """Run the phase alone, by ids if there are any, else by logits; the lists of each CTA."""
    lists, scratch = _routing.list_scratch(num_tokens, spec, block_m)
    shapes = list(lists)
    given = list(inputs)

    def body(*refs: Any) -> None:
        arguments = dict(zip(given, refs, strict=False))
        outputs = refs[len(given) :][: len(shapes)]
        *parts, words = refs[len(given) + len(shapes) :]
        found = _routing.Lists(*parts)
        statics: Any = {"spec": spec, "num_tokens": num_tokens, "block_m": block_m}
        if "ids" in arguments:
            _routing.route_ids(arguments["ids"], arguments["weights"], found, words, **statics)
        else:
            _routing.route_logits(
                arguments["logits"], arguments.get("bias"), arguments.get("real"), found, words, **statics
            )
        for part, output in zip(parts, outputs, strict=True):
            write_out(part, output.at[lax.axis_index("cta")])

    outputs = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((ctas, *x.shape), x.dtype) for x in shapes],
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="wg",
        scratch_types=[*shapes, scratch],
        kernel_name="routing_phase",
    )(*inputs.values())
    return _routing.Lists(*outputs)


# Without a GPU


def shapes_of(spec: MoESpec, num_tokens: int, by: str) -> dict[str, jax.ShapeDtypeStruct]:
    struct = jax.ShapeDtypeStruct
    if by == "ids":
        slots = (num_tokens, spec.top_k)
        return {"ids": struct(slots, jnp.int32), "weights": struct(slots, jnp.float32)}
    shapes = {"logits": struct((num_tokens, spec.num_experts), jnp.float32)}
    if spec.correction_bias:
        shapes["bias"] = struct((spec.num_experts,), jnp.float32)
    return shapes | {"real": struct((1,), jnp.int32)}


@pytest.mark.parametrize("by", ["logits", "ids"])
@pytest.mark.parametrize(("num_experts", "top_k", "num_tokens"), SIZES + ODD_SIZES)
def test_it_lowers(num_experts: int, top_k: int, num_tokens: int, by: str) -> None:
    spec = make_spec(num_experts, top_k)
    run = functools.partial(run_phase, spec=spec, num_tokens=num_tokens, block_m=8)
    lowered = jax.jit(run).trace(shapes_of(spec, num_tokens, by)).lower(lowering_platforms=("cuda",))
    assert "routing_phase" in lowered.as_text()


@pytest.mark.aot
@pytest.mark.parametrize(("num_experts", "top_k", "num_tokens"), SIZES + ODD_SIZES)
def test_it_fits_in_the_registers(h200: aot.Compiler, num_experts: int, top_k: int, num_tokens: int) -> None:
    spec = make_spec(num_experts, top_k)
    case = aot.Case(
        name="routing",
        function=functools.partial(run_phase, spec=spec, num_tokens=num_tokens, block_m=8),
        args=(shapes_of(spec, num_tokens, "logits"),),
        kernels=("routing_phase",),
        max_launches=1,
        max_registers=168,  # what each of 384 threads can have
    )
    assert case.violations(h200.compile(case.function, *case.args)) == []


@pytest.mark.parametrize(
    ("spec", "num_tokens", "reason"),
    [
        (make_spec(8, 2, num_expert_groups=2, top_k_groups=1), 1, "num_expert_groups=2"),
        (make_spec(1537, 2), 1, "num_experts=1537"),
        (make_spec(64, 33), 1, "top_k=33"),
        (make_spec(8, 2), 257, "num_tokens=257"),
        (make_spec(8, 2), 0, "num_tokens=0"),
    ],
)
def test_what_it_declines(spec: MoESpec, num_tokens: int, reason: str) -> None:
    assert reason in str(supports_logits(spec, num_tokens))


def test_weights_on_the_input_are_declined() -> None:
    spec = make_spec(8, 2, weight_on="input")
    for supports in (supports_logits, supports_ids):
        assert "weight_on" in str(supports(spec, 1))


@pytest.mark.parametrize("block_m", [8, 16, 32, 64])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (128, 8), (1, 1), (3, 3)])
@pytest.mark.parametrize("num_tokens", [1, 2, 9, 64, 70])
def test_the_lists_are_long_enough(num_experts: int, top_k: int, num_tokens: int, block_m: int) -> None:
    spec, rng = make_spec(num_experts, top_k), np.random.default_rng(num_tokens)
    sizes = list_sizes(num_tokens, spec, block_m)
    assert sizes.max_blocks <= min(num_experts, sizes.max_slots) + sizes.max_slots // block_m
    assert num_tokens > block_m or sizes.max_blocks == min(num_experts, sizes.max_slots)
    for ids in [np.arange(num_tokens * top_k).reshape(num_tokens, top_k) % num_experts] + [
        np.stack([rng.permutation(num_experts)[:top_k] for _ in range(num_tokens)]) for _ in range(20)
    ]:
        blocks = list(blocks_of(ids, num_experts, block_m))
        assert len(blocks) <= sizes.max_blocks
        assert sum(-(-len(tokens) // 8) * 8 for _, tokens in blocks) <= sizes.max_rows


# The lists in NumPy


def blocks_of(ids: np.ndarray, num_experts: int, block_m: int) -> Iterator[tuple[int, list[int]]]:
    """(expert, its tokens) of each block; of one token, in the order of its choices."""
    order = range(num_experts) if len(ids) > 1 else [e for e in dict.fromkeys(ids[0].tolist()) if e >= 0]
    for expert in order:
        tokens = np.flatnonzero((ids == expert).any(1)).tolist()
        for start in range(0, len(tokens), block_m):
            yield expert, tokens[start : start + block_m]


def make_lists(ids: np.ndarray, weights: np.ndarray, spec: MoESpec, block_m: int) -> dict[str, Any]:
    """What the phase must find, with only the parts that are in use; ids are -1 where dropped."""
    blocks = list(blocks_of(ids, spec.num_experts, block_m))
    sizes = [len(tokens) for _, tokens in blocks]
    rows = np.cumsum([0, *(-(-size // 8) * 8 for size in sizes)])[:-1]
    place = {(e, t): (b, i) for b, (e, tokens) in enumerate(blocks) for i, t in enumerate(tokens)}
    slots = [(e, t) for t, row in enumerate(ids.tolist()) for e in row]
    return {
        "num_blocks": [len(blocks)],
        "block_expert": [expert for expert, _ in blocks],
        "block_row": rows,
        "block_first": np.cumsum([0, *sizes])[:-1],
        "block_size": sizes,
        "token_of": [t for _, tokens in blocks for t in tokens],
        "row_of_slot": [-1 if e < 0 else rows[place[e, t][0]] + place[e, t][1] for e, t in slots],
        "block_of_slot": [place[e, t][0] for e, t in slots if e >= 0],
        "weight_of_slot": np.where(ids < 0, 0, weights).ravel(),
    }


def in_use(lists: _routing.Lists, cta: int, ids: np.ndarray) -> dict[str, np.ndarray]:
    """The parts of a CTA's lists that are in use."""
    found = {name: np.asarray(x)[cta] for name, x in lists._asdict().items()}
    found["num_blocks"] = found["num_blocks"][:1]
    blocks = int(found["num_blocks"][0])
    for name in ("block_expert", "block_row", "block_first", "block_size"):
        found[name] = found[name][:blocks]
    tokens = int(found["block_size"].sum())
    found["token_of"] = found["token_of"][:tokens]
    found["block_of_slot"] = found["block_of_slot"][ids.ravel() >= 0]
    return found


def check(
    lists: _routing.Lists, ids: np.ndarray, weights: np.ndarray, spec: MoESpec, block_m: int, rtol: float
) -> None:
    expected = make_lists(ids, weights, spec, block_m)
    first = in_use(lists, 0, ids)
    for name, found in first.items():
        wanted = np.asarray(expected[name], found.dtype)
        if found.dtype == np.float32:
            np.testing.assert_allclose(found, wanted, rtol=rtol, atol=1e-12, err_msg=name)
        else:
            np.testing.assert_array_equal(found, wanted, err_msg=name)
    for cta in range(1, CTAS):
        for name, found in in_use(lists, cta, ids).items():
            assert found.tobytes() == first[name].tobytes(), (name, cta)


# What it is run on: a GPU, or all its threads in NumPy


def emulate_phase(inputs: dict[str, Any], *, spec: MoESpec, num_tokens: int, block_m: int) -> _routing.Lists:
    """Do as `run_phase`, without a GPU."""
    lists, scratch = _routing.list_scratch(num_tokens, spec, block_m)

    def garbage(x: Any) -> np.ndarray | None:
        return None if x is None else np.full(x.shape, -559038737, np.int32).view(x.dtype)

    found = _routing.Lists(*(garbage(x) for x in lists))
    statics: Any = {"spec": spec, "num_tokens": num_tokens, "block_m": block_m}

    with simt_emulator.emulating(_routing, _choice):
        if "ids" in inputs:
            _routing.route_ids(inputs["ids"], inputs["weights"], found, garbage(scratch), **statics)
        else:
            arguments = inputs["logits"], inputs.get("bias"), inputs.get("real")
            _routing.route_logits(*arguments, found, garbage(scratch), **statics)
    return _routing.Lists(*(None if x is None else np.stack([x] * CTAS) for x in found))


@pytest.fixture(params=[pytest.param("gpu", marks=pytest.mark.gpu), "emulated"])
def run(request: pytest.FixtureRequest) -> Any:
    """``run(inputs, spec=, num_tokens=, block_m=)``: the lists."""
    if request.param == "emulated":
        return emulate_phase
    return jax.jit(run_phase, static_argnames=("spec", "num_tokens", "block_m", "ctas"))


def some_logits(kind: str, num_tokens: int, num_experts: int) -> np.ndarray:
    rng = np.random.default_rng([num_tokens, num_experts])
    logits = (2 * rng.standard_normal((num_tokens, num_experts))).astype(np.float32)
    match kind:
        case "ties":
            logits = np.round(logits)  # -0 among them
        case "special":
            strange = np.array([np.nan, np.inf, -np.inf, -np.inf, 3e38, -3e38, 0.0, -0.0], np.float32)
            logits = np.where(rng.random(logits.shape) < 0.5, logits, rng.choice(strange, logits.shape))
            for i, row in enumerate([[np.nan], [-np.inf], [-np.inf, np.nan], [np.inf]]):
                logits[i + 1 :: 7] = np.resize(np.array(row, np.float32), num_experts)
            logits[5::7, 1:] = -np.inf  # one expert, and the rest to fill up with
        case "one_hot":
            logits[:] = logits[:1]
    return logits


KINDS = ["random", "ties", "special", "one_hot"]

CASES = [
    *[(spec, tokens, 8) for spec in (make_spec(*size) for size in BENCHMARKED) for tokens in (1, 8, 64)],
    (make_spec(128, 8), 13, 16),
    (make_spec(8, 2), 64, 32),
    (make_spec(128, 8), 1, 8),
    (make_spec(1, 1), 1, 8),
    (make_spec(1, 1), 40, 64),
    (make_spec(7, 3), 33, 8),
    (make_spec(33, 32), 13, 8),
    (make_spec(130, 9, renormalize=False), 25, 8),
    (make_spec(1536, 8), 256, 64),
    (make_spec(1536, 32, scoring="sigmoid"), 1, 8),
    (make_spec(128, 8, renormalize=False), 1, 8),
    (make_spec(128, 8, renormalize=False, routed_scaling_factor=2.5), 64, 8),
    (make_spec(32, 4, scoring="softmax_after_topk"), 16, 8),
    (make_spec(256, 8, scoring="sigmoid", routed_scaling_factor=2.5), 16, 8),
    (make_spec(64, 6, scoring="sigmoid", renormalize=False), 1, 8),
    (make_spec(256, 8, scoring="sigmoid", correction_bias=True), 1, 8),
    (make_spec(256, 8, scoring="sigmoid", correction_bias=True), 64, 8),
    (make_spec(60, 4, correction_bias=True), 20, 8),
    (make_spec(60, 4, correction_bias=True, renormalize=False), 1, 8),
    (make_spec(160, 6, scoring="softmax_after_topk", correction_bias=True), 20, 8),
]


def name_of(value: Any) -> str | None:
    if not isinstance(value, MoESpec):
        return None
    more = [value.scoring.value] if value.scoring is not Scoring.SOFTMAX else []
    more += ["bias"] * value.correction_bias + ["plain"] * (not value.renormalize)
    return "-".join([f"E{value.num_experts}-k{value.top_k}", *more])


def expected_routing(
    logits: np.ndarray, spec: MoESpec, bias: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    with jax.default_device(jax.devices("cpu")[0]):
        routing = jax.jit(route, static_argnums=1)(
            jnp.asarray(logits), spec, correction_bias=None if bias is None else jnp.asarray(bias)
        )
        return np.asarray(routing.topk_ids), np.asarray(routing.topk_weights)


@pytest.mark.parametrize(("spec", "num_tokens", "block_m"), CASES, ids=name_of)
def test_logits_are_routed_as_route_does(run: Any, spec: MoESpec, num_tokens: int, block_m: int) -> None:
    bias = None
    if spec.correction_bias:
        bias = np.random.default_rng(0).standard_normal(spec.num_experts).astype(np.float32)
    for kind in KINDS:
        logits = some_logits(kind, num_tokens, spec.num_experts)
        inputs = {"logits": logits} | ({} if bias is None else {"bias": bias})
        found = run(inputs, spec=spec, num_tokens=num_tokens, block_m=block_m)
        check(found, *expected_routing(logits, spec, bias), spec, block_m, rtol=3e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("num_experts", "num_tokens"), [(128, 1), (128, 16), (50, 4), (5, 3)])
def test_narrow_logits_are_widened(run: Any, num_experts: int, num_tokens: int, dtype: str) -> None:
    spec = make_spec(num_experts, 4)
    for kind in KINDS:
        with np.errstate(over="ignore"):  # 3e38 is inf in float16
            logits = some_logits(kind, num_tokens, num_experts).astype(jnp.dtype(dtype))
        found = run({"logits": logits}, spec=spec, num_tokens=num_tokens, block_m=8)
        check(found, *expected_routing(logits, spec, None), spec, 8, rtol=3e-6)


@pytest.mark.parametrize("num_tokens", [1, 8, 64])
@pytest.mark.parametrize("given", ["count", "flags"])
def test_tokens_that_are_not_real_go_nowhere(run: Any, given: str, num_tokens: int) -> None:
    spec = make_spec(128, 8)
    for count in (-3, 0, round(0.6 * num_tokens), num_tokens, num_tokens + 9):
        real = np.arange(num_tokens) < count
        if given == "flags":
            real = np.random.default_rng(1).permutation(real)
        logits = some_logits("random", num_tokens, 128)
        logits[~real] = np.nan
        ids, weights = expected_routing(logits, spec, None)
        flags = real.astype(np.int32) if given == "flags" else np.array([count], np.int32)
        ids = np.where(real[:, None], ids, -1)
        found = run({"logits": logits, "real": flags}, spec=spec, num_tokens=num_tokens, block_m=8)
        check(found, ids, weights, spec, 8, rtol=3e-6)


@pytest.mark.parametrize("block_m", [8, 32])
@pytest.mark.parametrize(("num_experts", "top_k", "num_tokens"), [(8, 4, 1), (9, 3, 40), (512, 10, 64)])
def test_given_ids(run: Any, num_experts: int, top_k: int, num_tokens: int, block_m: int) -> None:
    spec, rng = make_spec(num_experts, top_k), np.random.default_rng(2)
    shape = (num_tokens, top_k)
    for low, high in [(-2, num_experts + 2), (0, min(4, num_experts)), (3, 4), (-1, 0)]:
        ids = rng.integers(low, high, shape).astype(np.int32)  # some twice in a token
        weights = rng.random(shape).astype(np.float32)
        weights[(ids < 0) | (ids >= num_experts)] = np.nan
        inside = np.where(ids < num_experts, np.maximum(ids, -1), -1)
        found = run({"ids": ids, "weights": weights}, spec=spec, num_tokens=num_tokens, block_m=block_m)
        check(found, inside, weights, spec, block_m, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_experts", "top_k", "num_tokens"), [(128, 8, 1), (128, 8, 64), (512, 10, 64)])
def test_calls_repeat_bitwise(num_experts: int, top_k: int, num_tokens: int) -> None:
    spec = make_spec(num_experts, top_k)
    run = jax.jit(functools.partial(run_phase, spec=spec, num_tokens=num_tokens, block_m=8, ctas=132))
    logits = some_logits("random", num_tokens, num_experts)
    ids, _ = expected_routing(logits, spec, None)
    first = in_use(run({"logits": logits}), 0, ids)
    for _ in range(20):
        lists = run({"logits": logits})
        for cta in range(132):
            for name, found in in_use(lists, cta, ids).items():
                assert found.tobytes() == first[name].tobytes(), (name, cta)
