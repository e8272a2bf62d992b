"""Result files: what they hold, how they are written while a run goes on, compared and printed."""

from __future__ import annotations

import datetime
import json
import math
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib

from benchmarks.cases import REGIMES, regime_of

Row = dict[str, Any]

FOLDER = Path(__file__).parent / "results"
_RIVALS = Path(__file__).parent / "rivals.json"
_CELL = ("case", "tokens", "dtype", "quant", "load")

CONDITIONS = {
    "time_us": "per layer, from x (T, D) and float32 router logits (T, E) to y (T, D): wall time of `calls` "
    "steps queued back to back / (calls * num_layers). A step is one jitted program of num_layers layer "
    "calls over weight_sets distinct weights and 8 routings at most, with command buffers of everything "
    "(xla_gpu_graph_min_graph_size=1; XLA's default scheduling mode runs the kernels of a graph in order).",
    "queued_us": "the same until the host had queued the steps: near time_us, the host is what was timed",
    "time_us_no_graphs": "the same with xla_gpu_enable_command_buffer=''",
    "experts_only_us": "the same as time_us from x and a given routing to y",
    "host_us": "median time for the call of a step to return, device idle, / num_layers",
    "kernel_us": "sum of the durations of a layer's kernels, from the profiler, without graphs",
    "launches": "kernels, copies and fills of a layer",
    "spread": "(p90 - p10) / median over `rounds` visits, all variants of a cell in turn",
    "floor_us": "max(min_bytes / read_gb_per_s, flops / matmul_tflops[dtype, or float8_e4m3fn if "
    "quantised]); min_bytes: weights of the experts hit (1 byte each if quantised, without their scales: "
    "at most 0.5 %), x and y in dtype, each once",
    "quant": "none: weights in dtype. fp8_tensor: e4m3, a scale a matrix (gate and up each their own), "
    "activations by stored scales. fp8_channel: a scale an output channel, x by token, h by token and 128 "
    "columns. fp8_block: a scale a 128x128 block, activations by token and 128 columns. x and y are in "
    "dtype; quantising them is part of the layer",
    "error": "|y - truth| / |truth| over sampled tokens, truth in float64 (moe_pallas.reference), "
    "of the same quantised weights and with activations rounded by the same rules",
    "status": "ok; red: error over the tolerance, nothing timed; failed, skipped: see reason; not reached: "
    "the time budget ran out",
    "bytes_until_reuse": "weights read between two uses of the same ones: weight_sets * those of the experts "
    "hit (an H200's L2 has 60 MB)",
    "data": "weights N(0, 1/fan_in), tokens N(0, 1); stored scales of activations are made for |x| up to 6, "
    "|h| up to 20",
    "bound": "rows of kind 'bound' are no MoE layers: both products and the activation, on rows laid out "
    "beforehand",
}


def header(commit: str | None = None, **extra: Any) -> dict[str, Any]:
    """What a result file says about its run, beside the rows."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "commit": commit or _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "conditions": CONDITIONS,
        **extra,
    }


def device_folder(device: str) -> str:
    """Name of a device's folder: ``"NVIDIA H200"`` → ``"nvidia_h200"``."""
    return re.sub(r"\W+", "_", device.strip().lower())


def write(path: str | Path, head: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Write a result file, one row a line; a reader or a killed run never sees half of one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    body = json.dumps(head, indent=1, allow_nan=False)[:-2]
    lines = ",\n".join("  " + json.dumps(_rounded(row), allow_nan=False) for row in rows)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(f'{body},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    os.replace(temporary, path)


def read(path: str | Path) -> dict[str, Any]:
    """Read a result file."""
    result: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return result


def rivals() -> list[Row]:
    """Rows of rivals.json: other frameworks' times on an H200, measured elsewhere."""
    rows: list[Row] = read(_RIVALS)["rows"]
    return rows


def cell_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a row measures, whatever measured it: rows with the same are to be compared."""
    return tuple(row.get(name, "uniform" if name == "load" else "none") for name in _CELL)


def best(rows: Iterable[Row]) -> Row | None:
    """The fastest of the rows that have a time."""
    return min((row for row in rows if row.get("time_us")), key=lambda row: row["time_us"], default=None)


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Describe result b against result a: times, ratio a / b (over 1: b is faster), geometric means."""
    sides = [_best_times(result) for result in (a, b)]
    for name in ("device", "jax", "commit", "date"):
        yield f"{name:8} A {a.get(name)}   B {b.get(name)}"
    yield f"\n{'cell':58} {'backend':18} {'A us':>9} {'B us':>9} {'A/B':>7}"
    ratios: dict[tuple[str, str, str], list[float]] = {}
    for key in sorted(sides[0].keys() | sides[1].keys(), key=str):
        cell, backend = key
        times = [side.get(key) for side in sides]
        name, quant = f"{cell[0]} T={cell[1]} {cell[2]} {cell[3]} {cell[4]}", cell[3]
        shown = " ".join(f"{time:9.1f}" if time else f"{'-':>9}" for time in times)
        if times[0] and times[1]:
            ratio = times[0] / times[1]
            ratios.setdefault((backend, quant, regime_of(cell[1])), []).append(ratio)
            yield f"{name:58} {backend:18} {shown} {ratio:7.3f}"
        else:
            yield f"{name:58} {backend:18} {shown} {'-':>7}"
    yield "\ngeometric mean of A/B (over 1: B is faster)"
    for (backend, quant, regime), values in sorted(ratios.items()):
        low, high = REGIMES[regime]
        span = f"T {low:.0f} … {high:.0f}" if math.isfinite(high) else f"T >= {low:.0f}"
        mean = f"{geometric_mean(values):7.3f}  over {len(values)} cells"
        yield f"{backend:18} {quant:11} {regime:8} {span:14} {mean}"


def geometric_mean(values: Sequence[float]) -> float:
    """exp(mean(log))."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _best_times(result: Mapping[str, Any]) -> dict[tuple[tuple[Any, ...], str], float | None]:
    """(cell, backend) → time of its best configuration; None: there is a row, but no time."""
    times: dict[tuple[tuple[Any, ...], str], float | None] = {}
    for row in result["rows"]:
        key, old = (cell_of(row), row["backend"]), times.get((cell_of(row), row["backend"]))
        new = row["time_us"]
        times[key] = min(old, new) if old and new else old or new
    return times


def _rounded(row: Row) -> Row:
    """Five digits are more than any clock here is good for, and keep the files readable."""
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()}


def _commit() -> str | None:
    if (commit := _output("git", "rev-parse", "HEAD")) is None:
        return None
    return commit + ("-dirty" if _output("git", "status", "--porcelain", "--untracked-files=no") else "")


def _output(*command: str) -> str | None:
    """First line that a command prints, "" if none; None if it can't be run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=FOLDER.parent)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().split("\n")[0] if done.returncode == 0 else None
