"""Forward and backward pass of a layer, timed: ``python -m benchmarks.train``.

    python -m benchmarks.train --models qwen3-30b-a3b,olmoe --tokens 16384 --time_budget_s 400
    python -m benchmarks.train --tiny            the benchmark itself, on a CPU; times mean nothing

A step is one jitted program: from x, float32 router logits and weights to y and the gradients of all four,
for a given cotangent of y. Baselines have the same routing and combine by XLA, differentiated by JAX, around
their own grouped product and its own gradient. Before a variant is timed, its gradients are held against
float64: those of some tokens and their logits, and of some features of an expert with many rows and of one
with few. What is off by more is red and not timed.

Rates: a pass forward is 6 · T · top_k · D · F operations, one backward twice that; what is computed again
does not count. ``kernel_us`` are durations of kernels (CUPTI), ``kernel_tflops`` the rates of those that
multiply.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags, logging

from benchmarks import cases, kernel_times, results, timing
from benchmarks.cases import Cell
from benchmarks.gradient_gate import ERROR_ALLOWED, Truth, step_of
from benchmarks.inputs import Inputs
from benchmarks.variants import VARIANTS
from moe_pallas import GradientConfig, UnsupportedError, fused_moe, select_backend

_MODELS = flags.DEFINE_list("models", ["qwen3-30b-a3b", "olmoe", "mixtral-8x7b"], "Models.")
_TOKENS = flags.DEFINE_list("tokens", ["16384", "32768"], "Token counts.")
_LOAD = flags.DEFINE_enum("load", "uniform", cases.LOADS, "Of the experts.")
_VARIANTS = flags.DEFINE_list(
    "variants", ["inputs", "products", "tokamax", "lax_ragged_dot"], "What is timed."
)
_NUM_ROUNDS = flags.DEFINE_integer("num_rounds", 5, "Visits to each variant.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 0.3, "Aimed at for the visits to one variant together.")
_TIME_BUDGET = flags.DEFINE_float("time_budget_s", 0, "Begin no cell after so many seconds; 0: never stop.")
_OUTPUT = flags.DEFINE_string(
    "output", None, "Result file; benchmarks/results/DEVICE/train.json if not given."
)
_TINY = flags.DEFINE_bool("tiny", False, "A tiny model by the portable backend.")

Function = Callable[..., Any]
_OURS = ("inputs", "products")


def layer_of(name: str, cell: Cell) -> Function:
    """``f(x, logits, w13, w2) → y``."""
    if name in _OURS:
        backend = "xla" if _TINY.value else "grouped_gemm"
        config = GradientConfig(kernels=True, save=name)
        return functools.partial(fused_moe, spec=cell.spec, backend=backend, gradients=config)
    variant = VARIANTS[name]
    return variant.layer(cell, variant.configs(cell)[0])


def objection_to(name: str, cell: Cell) -> str | None:
    """Why a variant can't be timed."""
    if name in _OURS:
        try:
            select_backend(cell.problem, "xla" if _TINY.value else "grouped_gemm")
        except UnsupportedError as error:
            return str(error)
        return None
    platform = jax.devices()[0].platform
    if name == "lax_ragged_dot" and platform == "gpu":
        # Three products of every row with every expert, each with a masked copy of the rows.
        need = 2 * cell.spec.num_experts * cell.rows * max(cell.spec.hidden_size, cell.spec.w13_rows)
        if need > 60e9:
            return f"skipped: predicted {need / 1e9:.0f} GB of temporary memory (E-fold work)"
    return VARIANTS[name].supports(cell, platform)


def kernel_flops(cell: Cell) -> dict[str, int]:
    """Operations of the kernels that multiply, by name."""
    spec = cell.spec
    wide = 2 * cell.rows * spec.hidden_size * spec.w13_rows
    narrow = 2 * cell.rows * spec.hidden_size * spec.intermediate_size
    return {
        "grouped_gemm_down": narrow,
        "grouped_gemm_back": narrow,
        "grouped_gemm_back_x": wide,
        "weight_gradient_13": wide,
        "weight_gradient_2": narrow,
    }


def measure_cell(cell: Cell, inputs: Inputs, names: Sequence[str]) -> list[results.Row]:
    """Check and time the variants of one cell."""
    w13, w2 = inputs.weights[0]
    x = jnp.asarray(inputs.tokens[: cell.tokens])
    d_y = jax.random.normal(jax.random.key(7), x.shape, jnp.float32).astype(x.dtype)
    arrays = (x, jnp.asarray(cell.logits), w13, w2, d_y)
    truth = Truth(cell, arrays)
    rows: dict[str, results.Row] = {}
    steps: dict[str, timing.Step] = {}
    for name in names:
        row = rows[name] = {
            "case": cell.case,
            "tokens": cell.tokens,
            "dtype": cell.dtype,
            "load": cell.load,
            "variant": name,
        }
        if why := objection_to(name, cell):
            row |= {"status": "skipped", "reason": why}
            continue
        convert = None if name in _OURS else VARIANTS[name].weights(cell)
        given = arrays if convert is None else (*arrays[:2], convert(w13), convert(w2), d_y)
        program = f"train_{name}_{cell.tokens}"
        try:
            compiled = step_of(layer_of(name, cell), program).lower(*given).compile()
            memory = compiled.memory_analysis()
            row["temp_bytes"] = memory.temp_size_in_bytes if memory else None
            errors = truth.errors(compiled(*given)[1:], convert is not None)
        except Exception as error:
            row |= {"status": "failed", "reason": f"{type(error).__name__}: {str(error)[:300]}"}
            continue
        row |= {f"error_{key}": value for key, value in errors.items()}
        if not all(value <= ERROR_ALLOWED[name in _OURS] for value in errors.values()):
            row["status"] = "red"
            continue
        steps[name] = timing.Step(compiled=compiled, args=given, num_layers=1)
    times = timing.measure(steps, rounds=_NUM_ROUNDS.value, seconds=_SECONDS.value, rest=1.0)
    for name, found in times.items():
        row = rows[name]
        if isinstance(found, Exception):
            row |= {"status": "failed", "reason": str(found)[:300]}
            continue
        tflops = 3 * cell.flops / found.time_us / 1e6
        row |= {"status": "ok", "time_us": found.time_us, "spread": found.spread, "tflops": tflops}
        program = f"train_{name}_{cell.tokens}"
        kernels = kernel_times.profile({program: steps[name]}).get(program)
        if kernels is not None:
            row["kernel_us"] = dict(list(kernels.us.items())[:20])
            row["launches"] = kernels.launches
            flops = kernel_flops(cell)
            row["kernel_tflops"] = {
                kernel: flops[kernel] / us / 1e6 for kernel, us in kernels.us.items() if kernel in flops
            }
    return list(rows.values())


def show(rows: Sequence[results.Row]) -> None:
    """Print a cell's rows, each against the first of ours that has a time."""
    best = min((r["time_us"] for r in rows if r["variant"] in _OURS and "time_us" in r), default=math.nan)
    for row in rows:
        cell = f"{row['case']} T={row['tokens']} {row['variant']:15}"
        if row["status"] != "ok":
            logging.info("%s %s %s", cell, row["status"], row.get("reason", row))
            continue
        logging.info(
            "%s %9.0f us (%.1f %%) %6.0f TFLOP/s, %.2f times ours, errors up to %.1e, %s",
            cell,
            row["time_us"],
            100 * row["spread"],
            row["tflops"],
            row["time_us"] / best,
            max(value for key, value in row.items() if key.startswith("error_")),
            {key: round(value) for key, value in row.get("kernel_tflops", {}).items()},
        )


def main(argv: Sequence[str]) -> None:
    """Do what the flags say."""
    del argv
    logging.set_verbosity(logging.INFO)
    begin = time.monotonic()
    models = cases.TINY_MODELS if _TINY.value else {name: cases.MODELS[name] for name in _MODELS.value}
    tokens = [8, 24] if _TINY.value else [int(t) for t in _TOKENS.value]
    dtype = "float32" if _TINY.value else "bfloat16"
    path = (
        _OUTPUT.value or results.FOLDER / results.device_folder(jax.devices()[0].device_kind) / "train.json"
    )
    head = results.header(benchmark="train", about=__doc__)
    rows: list[results.Row] = []
    for case, spec in models.items():
        cells = cases.cells({case: spec}, tokens, [dtype], [_LOAD.value])
        inputs = Inputs(cells, [1e6] * len(cells), 1, 0)
        for cell in cells:
            if _TIME_BUDGET.value and time.monotonic() - begin > _TIME_BUDGET.value:
                rows.append({"case": case, "tokens": cell.tokens, "status": "not reached"})
                continue
            found = measure_cell(cell, inputs, _VARIANTS.value)
            show(found)
            rows += found
            results.write(path, head, rows)
        inputs.release()
    results.write(path, head, rows)
    logging.info("written to %s", path)


if __name__ == "__main__":
    app.run(main)
