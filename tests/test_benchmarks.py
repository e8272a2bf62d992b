"""The benchmark harness on a CPU: what it counts, gates, writes, compares and generates."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData

from benchmarks import cases, gpu_check, gradient_gate, kernel_times, results, roofline, run, tables, timing
from benchmarks.cases import Cell
from benchmarks.inputs import Inputs
from benchmarks.session import Options
from benchmarks.variants import OURS, VARIANTS, Variant
from moe_pallas import MoESpec, QTensor, QuantScheme, dequantize, fused_moe, quantize
from moe_pallas.oracle import BACKENDS
from moe_pallas.spec import QUANTS, ActivationScales

ROOT = Path(__file__).resolve().parent.parent
TINY = cases.TINY_MODELS["tiny"]
QUICK = Options(num_layers=2, rounds=2, seconds=0.002, detail_tokens=(4,))
ROOFS = {"read_gb_per_s": 10.0, "matmul_tflops": {"bfloat16": 0.5}}


def measure(
    variants: list[Variant], tokens: list[int], options: Options = QUICK, **how: Any
) -> dict[str, Any]:
    """`run.measure` without its output; ``how["shown"]``, a list, gets what it printed."""
    out, shown = io.StringIO(), how.pop("shown", [])
    with redirect_stdout(out), redirect_stderr(io.StringIO()):
        result = run.measure(
            cases.cells(
                {"tiny": TINY},
                tokens,
                ["bfloat16"],
                how.pop("loads", ["uniform"]),
                how.pop("quants", ["none"]),
            ),
            variants,
            options,
            tiny=True,
            **how,
        )
    shown.append(out.getvalue())
    return result


def fake(layer: Callable[..., jax.Array], name: str = "fake", **fields: Any) -> Variant:
    return Variant(name=name, kind=OURS, layer=lambda cell, config: layer, **fields)


def right(x: jax.Array, logits: jax.Array, w13: jax.Array, w2: jax.Array) -> jax.Array:
    """A correct layer that compiles faster than xla does: every expert computes every token."""
    weights, ids = jax.lax.top_k(jax.nn.softmax(logits), TINY.top_k)
    dense = (jax.nn.one_hot(ids, TINY.num_experts) * weights[..., None]).sum(1) / weights.sum(
        -1, keepdims=True
    )
    gate, up = jnp.split(jnp.einsum("td,efd->etf", x, w13, preferred_element_type=jnp.float32), 2, axis=-1)
    h = (jax.nn.silu(gate) * up).astype(x.dtype)
    y = jnp.einsum("etf,edf->etd", h, w2, preferred_element_type=jnp.float32)
    return jnp.einsum("etd,te->td", y, dense).astype(x.dtype)


# What is counted.


def test_models_and_tokens_are_those_of_the_rivals() -> None:
    sizes = {
        name: (s.hidden_size, s.intermediate_size, s.num_experts, s.top_k) for name, s in cases.MODELS.items()
    }
    assert sizes == {
        "qwen3-30b-a3b": (2048, 768, 128, 8),
        "qwen3-235b-a22b": (4096, 1536, 128, 8),
        "mixtral-8x7b": (4096, 14336, 8, 2),
        "qwen3-next-80b": (2048, 512, 512, 10),
        "deepseek-v3-tp8": (7168, 256, 256, 8),
        "gpt-oss-120b": (2880, 2880, 128, 4),
        "olmoe": (2048, 1024, 64, 8),
    }
    assert cases.TOKENS == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192)
    rivals = results.rivals()
    assert {row["case"] for row in rivals} == sizes.keys()
    assert {row["tokens"] for row in rivals} == set(cases.TOKENS)


def test_bytes_flops_and_floor_by_hand() -> None:
    spec = MoESpec(num_experts=2, top_k=1, hidden_size=4, intermediate_size=3)
    cell = Cell(case="by hand", spec=spec, tokens=5, dtype="bfloat16", load="one_hot")
    assert cell.experts_hit == 1
    assert cell.expert_bytes == (2 * 3 * 4 + 4 * 3) * 2 == 72
    assert cell.min_bytes == 72 + 2 * (5 * 4 * 2) == 152
    assert cell.flops == 6 * 5 * 1 * 4 * 3 == 360
    # 152 B at 1 GB/s are 0.152 us; 360 FLOPs at 1 TFLOP/s 0.00036 us, at 1 GFLOP/s 0.36 us.
    assert cell.floor_us(1.0, 1.0) == pytest.approx(0.152)
    assert cell.floor_us(1.0, 1e-3) == pytest.approx(0.36)
    roofs = {
        "read_gb_per_s": 1.0,
        "matmul_tflops": {"bfloat16": 1e-3, "float32": None, "float8_e4m3fn": 2e-3},
    }
    assert roofline.floor_us(cell, roofs) == pytest.approx(0.36)
    assert roofline.floor_us(dataclasses.replace(cell, dtype="float32"), roofs) == pytest.approx(0.304)
    fp8 = dataclasses.replace(cell, quant="fp8_block")
    assert (fp8.expert_bytes, fp8.min_bytes, fp8.flops) == (36, 36 + 80, 360)
    assert roofline.floor_us(fp8, roofs) == pytest.approx(0.18)


def test_ungated_experts_have_two_matrices() -> None:
    spec = MoESpec(num_experts=2, top_k=2, hidden_size=4, intermediate_size=3, activation="relu2")
    cell = Cell(case="by hand", spec=spec, tokens=1, dtype="float32")
    assert (cell.experts_hit, cell.expert_bytes, cell.flops) == (2, 2 * 3 * 4 * 4, 4 * 1 * 2 * 4 * 3)


@pytest.mark.parametrize(
    ("quant", "tflops"), [("none", 774), ("fp8_tensor", 1440), ("fp8_block", 1440)], ids=lambda value: value
)
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3-tp8"])
@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_floors_agree_with_those_of_the_rivals(name: str, tokens: int, quant: str, tflops: float) -> None:
    """The same formula elsewhere gave the rivals' floors; only the random routing differs."""
    cell = Cell(case=name, spec=cases.MODELS[name], tokens=tokens, dtype="bfloat16", quant=quant)
    key = (name, tokens, "bfloat16", quant, "uniform")
    row = next(r for r in results.rivals() if results.cell_of(r) == key)
    assert cell.floor_us(4550, tflops) == pytest.approx(row["floor_us"], rel=0.03)


def test_regimes() -> None:
    names = [cases.regime_of(t) for t in cases.TOKENS]
    assert names == ["decode"] * 7 + ["middle"] * 4 + ["prefill"] * 2


def test_a_token_is_routed_the_same_at_every_t() -> None:
    for load in cases.LOADS:
        few, many = (Cell(case="t", spec=TINY, tokens=t, dtype="bfloat16", load=load).logits for t in (3, 64))
        np.testing.assert_array_equal(few, many[:3])


# Quantised weights.


def test_quants_are_those_that_problems_know() -> None:
    assert cases.QUANTS == QUANTS
    cell = Cell(case="tiny", spec=TINY, tokens=1, dtype="bfloat16", quant="fp8_tensor")
    problem = cell.problem
    assert (problem.quant, problem.activation_scales) == ("fp8_tensor", ActivationScales.STATIC)
    assert cell.scheme != QuantScheme.named("fp8_tensor")  # whose scales are made in the call


@pytest.mark.parametrize("quant", cases.SCHEMES)
def test_weights_are_the_unquantised_ones_rounded(quant: str) -> None:
    scheme = cases.SCHEMES[quant]
    plain, quantised = (
        Inputs([Cell(case="tiny", spec=TINY, tokens=1, dtype="bfloat16", quant=q)], [0.0], 2, 0)
        for q in ("none", quant)
    )
    for name, w, q in zip(("w13", "w2"), plain.weights[1], quantised.weights[1], strict=True):
        largest = {"w13": 6.0, "w2": 20.0}[name] if quant == "fp8_tensor" else None
        gate_up = TINY.gate_up if name == "w13" else None
        want = quantize(w, scheme, gate_up=gate_up, input_scale=largest and largest / 448)
        jax.tree.map(np.testing.assert_array_equal, q, want)
    shapes = quantised.shapes(quantised.cells[0], VARIANTS["xla"])[1]
    assert shapes[1] == jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), quantised.weights[1])


def test_stored_scales_suit_what_they_are_for() -> None:
    """The largest of 1e7 numbers use the upper half of FP8's range, and none is beyond it."""
    rng = np.random.default_rng(0)
    gate, up = rng.standard_normal((2, 10_000_000), np.float32)
    for values, largest in ((up, 6.0), (gate / (1 + np.exp(-gate)) * up, 20.0)):
        assert largest / 2 < np.abs(values).max() < largest


@pytest.mark.parametrize("name", [name for name, v in VARIANTS.items() if v.kind != OURS])
def test_only_our_backends_take_fp8(name: str) -> None:
    cell = Cell(case="olmoe", spec=cases.MODELS["olmoe"], tokens=4096, dtype="bfloat16", quant="fp8_block")
    for platform in ("gpu", "cpu"):
        assert "unsupported" in str(VARIANTS[name].supports(cell, platform))


def unrounded(x: jax.Array, logits: jax.Array, w13: QTensor, w2: QTensor) -> jax.Array:
    """A layer of the right weights whose activations are not in FP8."""
    return right(x, logits, dequantize(w13, x.dtype), dequantize(w2, x.dtype))


@pytest.fixture(scope="module")
def finished_fp8() -> tuple[dict[str, Any], str]:
    """A run of a right and a wrong layer in all of `cases.QUANTS` but "none", and what it printed."""
    shown: list[str] = []
    variants = [VARIANTS["xla"], VARIANTS["lax_ragged_dot"], fake(unrounded, "unrounded")]
    options = dataclasses.replace(QUICK, detail_tokens=())
    return measure(variants, [4], options, quants=list(cases.SCHEMES), shown=shown), shown[0]


def test_fp8_layers_are_measured(finished_fp8: tuple[dict[str, Any], str]) -> None:
    result, shown = finished_fp8
    assert [row["quant"] for row in result["rows"]] == [quant for quant in cases.SCHEMES for _ in range(3)]
    for row in result["rows"]:
        cell = Cell(case="tiny", spec=TINY, tokens=4, dtype="bfloat16", quant=row["quant"])
        assert row["min_bytes"] == cell.experts_hit * 3 * 32 * 48 + 2 * 4 * 32 * 2
        assert row["floor_us"] == roofline.floor_us(cell, result["roofs"])
        if row["backend"] == "xla":
            assert (row["status"], row["error"] < 4e-3) == ("ok", True), row
            assert any(
                line.startswith("tiny ") and f" {row['quant']} " in line and " xla " in line
                for line in shown.splitlines()
            )
        elif row["backend"] == "lax_ragged_dot":
            assert (row["status"], "unsupported" in row["reason"]) == ("skipped", True)


def test_a_layer_that_leaves_activations_unrounded_is_red(finished_fp8: tuple[dict[str, Any], str]) -> None:
    rows = [row for row in finished_fp8[0]["rows"] if row["backend"] == "unrounded"]
    assert [(row["status"], row["time_us"]) for row in rows] == [("red", None)] * 3
    assert all("off by more than" in row["reason"] for row in rows)


def test_picture_has_a_panel_for_each_quant(
    finished_fp8: tuple[dict[str, Any], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[str] = []
    draw = roofline._draw_roofs
    monkeypatch.setattr(roofline, "_draw_roofs", lambda *args: (drawn.append(args[2]), draw(*args)))
    roofline.plot(finished_fp8[0], tmp_path / "roofline.png")
    assert drawn == ["float8_e4m3fn"] * 3


# Variants.


def test_every_backend_can_be_timed() -> None:
    assert [name for name, variant in VARIANTS.items() if variant.kind == OURS] == list(BACKENDS)


@pytest.mark.parametrize(
    ("name", "case", "tokens", "reason"),
    [
        ("xla", "mixtral-8x7b", 8192, None),
        ("lax_ragged_dot", "mixtral-8x7b", 4096, None),
        ("lax_ragged_dot", "mixtral-8x7b", 8192, "predicted 60 ms"),
        ("lax_ragged_dot", "qwen3-235b-a22b", 8192, "predicted 69 GB"),
        ("ragged_dot_mgpu", "qwen3-30b-a3b", 1, None),
        ("ragged_dot_mgpu", "qwen3-next-80b", 1, "512 of them"),
        ("bound_one_group", "mixtral-8x7b", 4096, None),
        ("bound_one_group", "mixtral-8x7b", 64, "no bound"),
        ("bound_batched", "mixtral-8x7b", 64, None),
    ],
)
def test_what_variants_support_on_a_gpu(name: str, case: str, tokens: int, reason: str | None) -> None:
    cell = Cell(case=case, spec=cases.MODELS[case], tokens=tokens, dtype="bfloat16")
    said = VARIANTS[name].supports(cell, "gpu")
    assert said is None if reason is None else reason in str(said)


def test_mosaic_baselines_are_skipped_on_a_cpu_with_the_reason() -> None:
    cell = Cell(case="tiny", spec=TINY, tokens=1, dtype="bfloat16")
    assert "needs an NVIDIA Hopper GPU" in str(VARIANTS["ragged_dot_mgpu"].supports(cell, "cpu"))
    assert VARIANTS["tokamax"].supports(cell, "cpu") is not None


def test_bounds_have_the_rows_and_only_the_experts_that_are_hit() -> None:
    cell = Cell(case="tiny", spec=TINY, tokens=5, dtype="bfloat16", load="one_hot")
    assert cell.experts_hit == 2
    rows = VARIANTS["bound_batched"].rows(cell)
    assert rows is not None
    assert rows.shape == (2, 5)
    cut = VARIANTS["bound_batched"].weights(cell)
    assert cut is not None
    assert cut(np.zeros((8, 3, 4))).shape == (2, 3, 4)


# A run.


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], Path, str]]:
    """A whole run of all variants: the result, its file, and what it printed."""
    path, shown = tmp_path_factory.mktemp("run") / "sub" / "result.json", []
    names = ["xla", "lax_ragged_dot", "ragged_dot_mgpu", "bound_one_group", "bound_batched"]
    result = measure([VARIANTS[name] for name in names], [1, 4], json=str(path), commit="abc", shown=shown)
    yield result, path, shown[0]


def test_result_file_has_what_a_result_must_have(finished: tuple[dict[str, Any], Path, str]) -> None:
    result, path, _ = finished
    written = results.read(path)
    for name in ("device", "driver", "jax", "commit", "date", "roofs", "conditions", "rows"):
        assert name in written
    assert (written["commit"], written["jax"]) == ("abc", jax.__version__)
    assert written["roofs"].keys() >= {"read_gb_per_s", "copy_gb_per_s", "matmul_tflops", "kernel_us"}
    assert written["roofs"]["read_gb_per_s"] > 0
    assert written["roofs"]["matmul_tflops"]["bfloat16"] > 0
    assert len(written["rows"]) == len(result["rows"]) == 2 * 5
    wanted = (
        "case tokens dtype quant load backend config time_us spread floor_us experts_hit error status reason"
    )
    for row in written["rows"]:
        assert row.keys() >= set(wanted.split())
        assert (row["case"], row["dtype"], row["quant"], row["load"]) == (
            "tiny",
            "bfloat16",
            "none",
            "uniform",
        )
        assert row["status"] == ("skipped" if row["backend"] == "ragged_dot_mgpu" else "ok"), row
        if row["status"] == "ok":
            assert row["time_us"] > 0
            assert row["spread"] >= 0
            assert (row["num_layers"], row["weight_sets"], row["rounds"]) == (2, 2, 2)
            assert row["tflops"] == pytest.approx(row["flops"] / row["time_us"] / 1e6, rel=1e-3)
            assert (row["error"] is None) == (row["kind"] == "bound")
        else:
            assert row["time_us"] is None
            assert "Hopper" in row["reason"]


def test_detailed_cells_have_more_times(finished: tuple[dict[str, Any], Path, str]) -> None:
    result, _, _ = finished
    for row in result["rows"]:
        detailed = row["tokens"] == 4 and row["backend"] in ("xla", "lax_ragged_dot")
        for name in ("time_us_no_graphs", "experts_only_us", "host_us"):
            assert (row.get(name, 0) > 0) == detailed


def test_table_is_printed(finished: tuple[dict[str, Any], Path, str]) -> None:
    _, _, shown = finished
    shown, _, details = shown.partition("no graphs")
    assert sum(line.startswith("tiny ") for line in details.splitlines()) == 2
    lines = [line for line in shown.splitlines() if line.startswith("tiny ")]
    assert len(lines) == 10
    assert "x lax_ragged_dot" in shown
    assert sum("skipped: needs an NVIDIA Hopper GPU" in line for line in lines) == 2
    for line in lines:
        if "bound_" in line:
            assert line.split()[-4:] == ["-"] * 4  # no ratio to a baseline, no rival, no error


def test_picture_is_drawn(finished: tuple[dict[str, Any], Path, str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    roofline.plot(finished[0], tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").stat().st_size > 10_000


# The gate.


def last_row_wrong(x: jax.Array, logits: jax.Array, w13: jax.Array, w2: jax.Array) -> jax.Array:
    return right(x, logits, w13, w2).at[-1].multiply(1.1)


def routing_wrong(x: jax.Array, logits: jax.Array, w13: jax.Array, w2: jax.Array) -> jax.Array:
    return right(x, jnp.roll(logits, 1, axis=1), w13, w2)


@pytest.mark.parametrize("layer", [last_row_wrong, routing_wrong])
def test_nothing_is_timed_for_a_wrong_variant(layer: Callable[..., jax.Array]) -> None:
    result = measure([fake(layer), fake(right, "right")], [4])
    red, good = result["rows"]
    assert (red["backend"], red["status"], red["time_us"], red["spread"]) == ("fake", "red", None, None)
    assert "off by more than" in red["reason"]
    assert red.keys().isdisjoint(["calls", "tflops", "time_us_no_graphs", "host_us", "kernel_us"])
    assert (good["status"], good["error"] < 4e-3) == ("ok", True)


def test_a_layer_wrong_in_its_second_call_is_red() -> None:
    """As a kernel would be that leaves its counters behind: the first layer of a step is right."""

    def layer(x: jax.Array, logits: jax.Array, w13: jax.Array, w2: jax.Array) -> jax.Array:
        y = right(x, logits, w13, w2)
        return jnp.where(logits[0, 0] == first, y, 1.1 * y)

    first = Cell(case="tiny", spec=TINY, tokens=4, dtype="bfloat16").logits[0, 0]
    (row,) = measure([fake(layer)], [4])["rows"]
    assert row["status"] == "red"
    (row,) = measure([fake(layer)], [4], dataclasses.replace(QUICK, checked_layers=1))["rows"]
    assert row["status"] == "ok"


def test_wrong_shape_is_red() -> None:
    (row,) = measure([fake(lambda x, logits, w13, w2: right(x, logits, w13, w2)[:, :5])], [4])["rows"]
    assert (row["status"], "shape" in row["reason"]) == ("red", True)


def test_wrong_experts_function_is_red_and_not_timed() -> None:
    variant = fake(right, experts=lambda cell, config: lambda x, routing, w13, w2: x)
    (row,) = measure([variant], [4])["rows"]
    assert (row["status"], row["time_us"]) == ("red", None)
    assert row["reason"].startswith("experts only")


def test_errors_are_recorded_and_the_others_measured() -> None:
    def broken(x: jax.Array, logits: jax.Array, w13: jax.Array, w2: jax.Array) -> jax.Array:
        raise RuntimeError("RESOURCE_EXHAUSTED: no memory\nand a long story")

    bad, good = measure([fake(broken), fake(right, "right")], [4])["rows"]
    assert (bad["status"], bad["reason"]) == ("failed", "RuntimeError: RESOURCE_EXHAUSTED: no memory")
    assert good["status"] == "ok"


# Runs that end early.


def test_interrupted_run_keeps_what_it_measured(tmp_path: Path) -> None:
    def stop_at_4(cell: Cell) -> None:
        if cell.tokens == 4 and (tmp_path / "r.json").exists():
            raise KeyboardInterrupt

    variant = fake(right, weights=lambda cell: stop_at_4(cell))
    with pytest.raises(KeyboardInterrupt):
        measure([variant], [1, 4], json=str(tmp_path / "r.json"))
    written = results.read(tmp_path / "r.json")
    assert [(row["tokens"], row["status"]) for row in written["rows"]] == [(1, "ok")]


def test_out_of_time_rows_say_so(tmp_path: Path) -> None:
    late = dataclasses.replace(QUICK, deadline=time.monotonic() - 1)
    result = measure([fake(right)], [1, 4], late, json=str(tmp_path / "r.json"))
    assert [row["status"] for row in result["rows"]] == ["not reached"] * 2
    assert len(results.read(tmp_path / "r.json")["rows"]) == 2


def test_compile_jobs_stop_at_the_deadline() -> None:
    done = timing.compile_all({"a": lambda: 1}, deadline=time.monotonic() - 1)
    assert isinstance(done["a"], TimeoutError)


def test_writing_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    results.write(path, {"device": "x"}, [{"time_us": 1.23456789}])
    assert results.read(path) == {"device": "x", "rows": [{"time_us": 1.2346}]}
    with pytest.raises(ValueError, match="JSON compliant"):
        results.write(path, {"device": "x"}, [{"time_us": math.nan}])
    assert results.read(path)["rows"] == [{"time_us": 1.2346}]


# Timing.


def test_step_calls_the_layer_with_other_weights_and_routings() -> None:
    step = timing.step_function(lambda x, routing, w13, w2: x + routing * w13 - w2, 3, "name")
    outputs = jax.jit(step)(
        jnp.float32(1), [jnp.float32(v) for v in (10, 20, 30)], [(jnp.float32(2), jnp.float32(0))] * 2
    )
    assert [float(y) for y in outputs] == [21, 41, 61]
    assert step.__name__ == "name"


def test_layers_of_a_step_wait_for_each_other() -> None:
    step = timing.step_function(lambda x, routing, w13, w2: x * w13 + routing, 2, "name")
    ones = [jnp.ones(3)] * 2
    text = jax.jit(step).lower(jnp.ones(3), ones, [(ones[0], ones[0])]).as_text()
    assert text.count("optimization_barrier") == 1


def test_chain_is_as_long_as_it_must_be() -> None:
    assert [timing.chain_length(us) for us in (5, 50, 249, 250, 999, 1000)] == [32, 8, 8, 4, 4, 2]


def test_a_long_step_takes_its_arguments_in_turn() -> None:
    """Ten layers of eight sets of weights and routings."""
    options = dataclasses.replace(QUICK, num_layers=10, detail_tokens=())
    (row,) = measure([VARIANTS["xla"]], [2], options)["rows"]
    assert (row["status"], row["num_layers"], row["weight_sets"]) == ("ok", 10, 8)


def test_measure_is_median_and_spread_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([4e-3] * 3 + [2e-3] * 3 + [1e-3, 3e-3, 2e-3, 5e-3, 4e-3])  # six warm-ups, five rounds
    monkeypatch.setattr(timing, "_seconds_per_call", lambda step, calls: (next(seconds), 1e-3))
    step = timing.Step(compiled=lambda: None, args=(), num_layers=4)
    (timed,) = timing.measure({"a": step}, rounds=5, seconds=0.1).values()
    assert isinstance(timed, timing.Timing)
    assert timed.time_us == pytest.approx(3e3 / 4)
    assert timed.spread == pytest.approx((4.6 - 1.4) / 3)
    assert timed.queued_us == pytest.approx(1e3 / 4)
    assert (timed.calls, timed.rounds) == (10, 5)


def test_the_device_rests_before_arithmetic_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    roofs = {"read_gb_per_s": 4600.0, "matmul_tflops": {"bfloat16": 800.0}}
    few, many = cases.cells({"m": cases.MODELS["mixtral-8x7b"]}, [1, 8192], ["bfloat16"], ["uniform"])
    assert (roofline.rest(few, roofs), roofline.rest(many, roofs)) == (0, roofline.REST)
    rests: list[float] = []
    monkeypatch.setattr(timing.time, "sleep", rests.append)
    step = timing.Step(compiled=lambda: jnp.ones(()), args=(), num_layers=1)
    timing.measure({"a": step}, rounds=5, seconds=0.05, rest=2.0)
    assert rests == pytest.approx([0.02] * 5)


def test_measure_goes_on_without_what_fails() -> None:
    def fail() -> None:
        raise RuntimeError("no memory")

    fine = timing.Step(compiled=lambda: jnp.ones(()), args=(), num_layers=1)
    bad = timing.Step(compiled=fail, args=(), num_layers=1)
    timed = timing.measure({"bad": bad, "fine": fine}, rounds=2, seconds=0.001)
    assert isinstance(timed["bad"], RuntimeError)
    assert isinstance(timed["fine"], timing.Timing)


# Profiles.

GPU_TRACE = """
planes {
  name: "/device:GPU:0"
  lines { name: "Stream #13(Compute)"
    events { metadata_id: 1 duration_ps: 2000000 stats { metadata_id: 9 str_value: "jit_step_a" } }
    events { metadata_id: 1 duration_ps: 4000000 stats { metadata_id: 9 str_value: "jit_step_a" } }
    events { metadata_id: 2 duration_ps: 7000000 stats { metadata_id: 9 str_value: "jit_step_a(12)" } }
    events { metadata_id: 2 duration_ps: 1000000 stats { metadata_id: 9 str_value: "jit_step_b" } }
    events { metadata_id: 2 duration_ps: 500000 } }
  lines { name: "XLA Modules"
    events { metadata_id: 1 duration_ps: 9000000 stats { metadata_id: 9 str_value: "jit_step_a" } } }
  event_metadata { key: 1 value { id: 1 name: "gemm" } }
  event_metadata { key: 2 value { id: 2 name: "softmax" } }
  stat_metadata { key: 9 value { id: 9 name: "hlo_module" } }
}
planes { name: "/host:CPU" lines { name: "Stream of thought" events { metadata_id: 1 duration_ps: 1 } } }
"""


def test_kernel_times_of_a_gpu_trace() -> None:
    data = ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(GPU_TRACE))
    assert kernel_times.kernels_by_module(data.planes) == {
        "jit_step_a": ({"softmax": 7.0, "gemm": 6.0}, 3),
        "jit_step_b": ({"softmax": 1.0}, 1),
        "": ({"softmax": 0.5}, 1),
    }


def test_profile_without_a_gpu_has_no_kernels() -> None:
    assert kernel_times.profile({"f": lambda: jnp.ones(3) + 1}) == {}


# Comparing.


def result_of(
    *times: tuple[str, int, str, float | None], quant: str = "none", **header: Any
) -> dict[str, Any]:
    rows = [
        {
            "case": case,
            "tokens": tokens,
            "dtype": "bfloat16",
            "quant": quant,
            "load": "uniform",
            "backend": backend,
            "kind": VARIANTS[backend].kind,
            "config": "",
            "time_us": us,
            "floor_us": 10.0,
        }
        for case, tokens, backend, us in times
    ]
    roofs = {"read_gb_per_s": 4550.0, "matmul_tflops": {"bfloat16": 774.0, "float8_e4m3fn": 1440.0}}
    return {
        "device": "NVIDIA H200",
        "jax": "0.11.2",
        "commit": "c",
        "date": "2026-11-30T10:00:00+00:00",
        "roofs": roofs,
        "rows": rows,
        **header,
    }


def test_compare_gives_ratios_and_geometric_means() -> None:
    a = result_of(
        ("olmoe", 1, "xla", 20.0),
        ("olmoe", 8, "xla", 80.0),
        ("olmoe", 512, "xla", 30.0),
        ("olmoe", 64, "xla", 5.0),
    )
    b = result_of(
        ("olmoe", 1, "xla", 10.0),
        ("olmoe", 8, "xla", 10.0),
        ("olmoe", 512, "xla", 60.0),
        ("olmoe", 64, "xla", None),
    )
    lines = list(results.compare(a, b))
    ratios = [line.split()[-1] for line in lines if line.startswith("olmoe")]
    assert sorted(ratios) == ["-", "0.500", "2.000", "8.000"]
    (decode,) = (line for line in lines if line.startswith("xla") and "decode" in line)
    (middle,) = (line for line in lines if line.startswith("xla") and "middle" in line)
    assert "4.000  over 2 cells" in decode  # sqrt(2 · 8)
    assert "0.500  over 1 cells" in middle


def test_compare_takes_each_backend_s_best_configuration() -> None:
    a = result_of(("olmoe", 1, "xla", 20.0), ("olmoe", 1, "xla", 16.0), ("olmoe", 1, "xla", None))
    b = result_of(("olmoe", 1, "xla", 8.0))
    assert any(line.startswith("olmoe") and line.endswith(" 2.000") for line in results.compare(a, b))


def test_compare_keeps_quants_apart() -> None:
    a, b = (
        {**(r := result_of(("olmoe", 1, "xla", bf16))), "rows": r["rows"] + fp8["rows"]}
        for bf16, fp8 in (
            (20.0, result_of(("olmoe", 1, "xla", 30.0), quant="fp8_block")),
            (10.0, result_of(("olmoe", 1, "xla", 10.0), quant="fp8_block")),
        )
    )
    means = [line.split() for line in results.compare(a, b) if line.startswith("xla")]
    assert [(line[1], line[-4]) for line in means] == [("fp8_block", "3.000"), ("none", "2.000")]


def test_compare_from_the_command_line(tmp_path: Path) -> None:
    for name, us in (("a", 30.0), ("b", 10.0)):
        (tmp_path / name).write_text(json.dumps(result_of(("olmoe", 4096, "xla", us))))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", "--compare", str(tmp_path / "a"), str(tmp_path / "b")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "prefill" in done.stdout.splitlines()[-1]
    assert "3.000" in done.stdout.splitlines()[-1]


# README.


def test_table_round_trip() -> None:
    run_of = result_of(
        ("olmoe", 1, "xla", 55.55),
        ("olmoe", 1, "lax_ragged_dot", 305.2),
        ("olmoe", 1, "bound_batched", 12.0),
        ("olmoe", 2, "xla", 50.0),
        ("mixtral-8x7b", 64, "xla", 600.0),
        ("mixtral-8x7b", 64, "ragged_dot_mgpu", None),
    )
    rivals = [{**run_of["rows"][0], "rival": "vllm", "time_us": 46.8}]
    block = tables.render([run_of], rivals)
    assert "| mixtral-8x7b | 64 | 10.0 | **600 xla** | 60.00 | – | – |" in block
    assert "| olmoe | 1 | 10.0 | 55.5 xla | 5.55 | 305 lax_ragged_dot | **46.8 vllm** |" in block
    assert "bound" not in block
    assert "| olmoe | 2 |" not in block
    assert f"| over the best elsewhere † | {46.8 / 55.55:.2f} | – | – |" in block
    readme = f"# Title\n\n{tables.BEGIN}\nold\n{tables.END}\n\nThe rest.\n"
    once = tables.update(readme, block)
    assert once == f"# Title\n\n{tables.BEGIN}\n\n{block}\n\n{tables.END}\n\nThe rest.\n"
    assert tables.update(once, block) == once


def test_fp8_has_tables_of_its_own() -> None:
    plain = result_of(("olmoe", 1, "xla", 55.0), ("olmoe", 1, "lax_ragged_dot", 305.0))
    fp8 = result_of(
        ("olmoe", 1, "xla", 30.0),
        ("olmoe", 8, "xla", 60.0),
        ("olmoe", 1, "lax_ragged_dot", None),
        quant="fp8_tensor",
        date="2026-12-01T00:00:00+00:00",
    )
    rival = {**fp8["rows"][0], "rival": "vllm", "time_us": 45.0}
    bf16_alone, block = tables.render([plain], [rival]), tables.render([plain, fp8], [rival])
    assert block.startswith(bf16_alone + "\n\n**NVIDIA H200**, FP8 weights, a scale a matrix")
    own = block.removeprefix(bf16_alone)
    assert "2026-12-01). Measured roofs: read 4.55 TB/s, 1440 TFLOP/s." in own
    assert "| olmoe | 1 | 10.0 | **30.0 xla** | 3.00 | – | 45.0 vllm |" in own
    assert "| olmoe | 8 | 10.0 | **60.0 xla** | 6.00 | – | – |" in own
    assert "| over the best elsewhere † | 1.50 | – | – |" in own
    assert "over the best other JAX code" not in own
    assert "vllm" not in bf16_alone
    assert tables.TITLES.keys() == set(cases.QUANTS)


def test_newer_rows_replace_older_ones() -> None:
    old = result_of(("olmoe", 1, "xla", 99.0), ("olmoe", 8, "xla", 77.0))
    new = result_of(("olmoe", 1, "xla", 44.0), date="2026-12-01T00:00:00+00:00")
    block = tables.render([old, new], [])
    assert "44.0 xla" in block
    assert "77.0 xla" in block
    assert "99.0" not in block
    assert "2026-11-30 … 2026-12-01" in block


def test_readme_needs_its_markers() -> None:
    for text in ("nothing", tables.BEGIN, tables.END + tables.BEGIN, (tables.BEGIN + tables.END) * 2):
        with pytest.raises(ValueError, match="needs one line"):
            tables.update(text, "block")


def test_readme_agrees_with_the_results() -> None:
    runs = tables.load()
    readme = tables.README.read_text(encoding="utf-8")
    if not runs and tables.BEGIN not in readme:
        pytest.skip("there are no results yet, and README.md has no place for them")
    assert tables.update(readme, tables.render(runs, results.rivals())) == readme, "run: make tables"


def test_committed_results_stand_in_their_device_s_folder() -> None:
    for path in results.FOLDER.glob("*/*.json"):
        result = results.read(path)
        assert path.parent.name == results.device_folder(result["device"])
        assert result["rows"]
        assert result["commit"]


def test_rivals_say_how_they_were_measured() -> None:
    rivals = results.read(ROOT / "benchmarks/rivals.json")
    assert "measured elsewhere" in rivals["what"]
    assert {"time_us", "floor_us", "vllm-0.33.0-triton"} <= rivals["conditions"].keys()
    row = next(r for r in rivals["rows"] if (r["case"], r["tokens"]) == ("qwen3-30b-a3b", 8))
    assert (row["rival"], row["time_us"], row["quant"]) == ("vllm-0.33.0-triton", 137.6, "none")


# gpu_check.


def test_cases_of_gpu_check_are_contained() -> None:
    python = [sys.executable, "-c"]
    assert gpu_check.run_case([*python, "pass"], 60) == "ok"
    assert gpu_check.run_case([*python, "raise SystemExit(3)"], 60) == "exit status 3"
    assert gpu_check.run_case([*python, "import os; os.abort()"], 60) == "killed by SIGABRT"
    start = time.monotonic()
    assert gpu_check.run_case([*python, "import time; time.sleep(60)"], 0.5) == "timeout after 0 s"
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_gpu_check_that_is_ended_leaves_no_case_running(number: signal.Signals) -> None:
    case = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    script = f"""if True:
        import signal, sys
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from benchmarks import gpu_check
        gpu_check._commands = lambda options: [("sleeper", [sys.executable, "-c", {case!r}])]
        gpu_check.main([])
    """
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        child = next(int(line) for line in process.stdout if line.strip().isdigit())
        try:
            process.send_signal(number)
            assert process.wait(60) != 0
            assert _is_gone_within(10, child)
        finally:
            process.kill()
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def test_gpu_check_that_is_ended_while_it_starts_a_case_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The case runs before its starter knows of it: the signal waits until it does."""
    started, popen = [], subprocess.Popen

    def start(*args: Any, **rest: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **rest))
        gpu_check._Ending.exit(signal.SIGTERM)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(SystemExit, match="143"):
        gpu_check.run_case([sys.executable, "-c", "import time; time.sleep(600)"], 60)
    assert started[0].wait(10) == -signal.SIGKILL
    assert gpu_check._Ending.held is None


def _is_gone_within(seconds: float, process: int) -> bool:
    """Whether a process ends in time; who ends it may not be the one to bury it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_gpu_check_runs_tiny_cases_and_sums_up() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--tiny", "--models=tiny", "--only=correctness"]
    done = subprocess.run([*command, "--quants=none,fp8_block"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tiny T=8 bfloat16 one_hot xla: error" in done.stdout
    assert "tiny T=8 bfloat16 fp8_block one_hot xla: error" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 passed, 0 failed"


def test_gpu_check_stress_sees_a_call_that_does_not_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    options = gpu_check.parse(["--tiny", "--repeats=6"])
    calls = iter(range(1000))

    def layer(cell: Cell, variant: Variant) -> Callable[..., jax.Array]:
        return lambda x, *rest: x if next(calls) < 8 else x + 1

    monkeypatch.setattr(gpu_check, "_layer", layer)
    with pytest.raises(AssertionError, match="not bitwise"):
        gpu_check.stress("tiny", options)


def test_gpu_check_correctness_sees_a_wrong_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    def layer(cell: Cell, variant: Variant) -> Callable[..., jax.Array]:
        return lambda *operands: 1.05 * fused_moe(*operands, spec=cell.spec)

    monkeypatch.setattr(gpu_check, "_layer", layer)
    with pytest.raises(AssertionError, match="off by more than"):
        gpu_check.correctness("tiny", gpu_check.parse(["--tiny"]))


def test_training_gradients_are_checked() -> None:
    """The truth of `benchmarks.gradient_gate` is JAX's gradient, and a gradient that is off is seen."""
    cell = Cell(case="tiny", spec=TINY, tokens=8, dtype="float32")
    inputs = Inputs([cell], [1.0], 1, 0)
    x = jnp.asarray(inputs.tokens)
    arrays = (x, jnp.asarray(cell.logits), *inputs.weights[0], jnp.cos(x))
    truth = gradient_gate.Truth(cell, arrays)
    layer = functools.partial(fused_moe, spec=cell.spec, backend="xla")
    found = gradient_gate.step_of(layer, "train_test")(*arrays)[1:]
    errors = truth.errors(found, is_transposed=False)
    assert set(errors) == {"x", "logits", "w13", "w2"}
    assert max(errors.values()) < 1e-5
    turned = (*found[:2], found[2].mT, found[3].mT)
    assert truth.errors(turned, is_transposed=True) == errors
    wrong = [g.at[..., -1].add(0.1 * jnp.abs(g).max()) if i != 1 else 1.05 * g for i, g in enumerate(found)]
    assert min(truth.errors(wrong, is_transposed=False).values()) > max(gradient_gate.ERROR_ALLOWED.values())
