"""The roofs of the device, measured in the same run as all else, and the picture of rows under them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.cases import Cell, product_dtype
from benchmarks.timing import GRAPHS, Step, Timing, measure
from moe_pallas.spec import FP8

REST = 2.0  # seconds idle for each that a step bound by arithmetic runs: see `benchmarks.timing`


def measure_roofs(dtypes: Sequence[str], *, tiny: bool = False) -> dict[str, Any]:
    """Measure what the device can do at best.

    Args:
      dtypes: Dtypes whose matrix products are wanted, beside bfloat16 and float8_e4m3fn.
      tiny: Sizes for a CPU, and no rests: the figures mean nothing then.

    Returns:
      read_gb_per_s: sum of 3.2 GB of bfloat16; copy_gb_per_s: bytes read plus bytes written by x + 1 over
      half of it; matmul_tflops: {dtype: rate of a 8192³ product A·Bᵀ of random numbers, accumulated in
      float32, the better of XLA's choice and cuBLASLt alone}; kernel_us: one of 64 tiny kernels in one
      graph, each waiting for the one before. null: the device can't, or the product failed.
    """
    rows, size = (4, 64) if tiny else (3 << 15, 8192)
    options = GRAPHS if jax.default_backend() == "gpu" else None
    steps: dict[Any, Step] = {}

    def add(key: str, fn: Any, *args: jax.Array, layers: int = 1, **extra: Any) -> None:
        use = None if options is None else {**options, **extra}
        compiled = jax.jit(fn).lower(*args).compile(compiler_options=use)
        steps[key] = Step(compiled=compiled, args=args, num_layers=layers)

    data = jax.random.normal(jax.random.key(0), (rows, 1 << 14), jnp.bfloat16)
    half = data[: rows // 2]
    add("read", lambda v: v.astype(jnp.float32).sum(), data)
    add("copy", lambda v: v + 1, half)
    add("kernel", _tiny_chain, jnp.zeros(1024, jnp.float32), layers=64)
    wanted = list(dict.fromkeys(["bfloat16", *dtypes, FP8]))
    failures = {}
    for dtype in wanted:
        keys = jax.random.split(jax.random.key(1))
        pair = [jax.random.normal(key, (size, size), jnp.bfloat16).astype(dtype) for key in keys]
        for choice, triton in (("default", True), ("cublas", False)):
            try:
                add(f"{dtype} {choice}", _product, *pair, xla_gpu_enable_triton_gemm=triton)
            except Exception as error:  # a dtype that this device can't multiply has no roof
                failures[f"{dtype} {choice}"] = str(error).split("\n")[0][:200]
    times: dict[Any, Timing] = {}
    for key, value in measure(steps, seconds=0.4, rest=0.0 if tiny else REST).items():
        if isinstance(value, Timing):
            times[key] = value
        else:
            failures[str(key)] = str(value).split("\n")[0][:200]
    rates: dict[str, float | None] = dict.fromkeys(wanted)
    for key, timing in times.items():
        if (dtype := key.split(" ")[0]) in rates:
            rates[dtype] = max(rates[dtype] or 0.0, 2 * size**3 / (timing.time_us * 1e6))
    return {
        "read_gb_per_s": data.nbytes / (times["read"].time_us * 1e3),
        "copy_gb_per_s": 2 * half.nbytes / (times["copy"].time_us * 1e3),
        "matmul_tflops": rates,
        "kernel_us": times["kernel"].time_us,
        "time_us": {key: timing.time_us for key, timing in times.items()},
        "spread": {key: timing.spread for key, timing in times.items()},
        "failures": failures,
    }


def _tiny_chain(v: jax.Array) -> jax.Array:
    for _ in range(64):
        v = lax.optimization_barrier(v + 1)  # or XLA would add 64 at once
    return v


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    is_float32 = a.dtype == jnp.float32
    return lax.dot_general(
        a,
        b,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if is_float32 else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32 if is_float32 else jnp.bfloat16,
    )


def floor_us(cell: Cell, roofs: Mapping[str, Any]) -> float:
    """Time of a cell that no implementation can beat on a device with these roofs."""
    rate = roofs["matmul_tflops"].get(cell.product_dtype) or math.inf
    return cell.floor_us(roofs["read_gb_per_s"], rate)


def rest(cell: Cell, roofs: Mapping[str, Any]) -> float:
    """How long the device rests before a cell is timed, for each second that it runs."""
    rate = roofs["matmul_tflops"].get(cell.product_dtype) or math.inf
    return REST if cell.flops / rate > cell.min_bytes / (roofs["read_gb_per_s"] / 1e3) else 0.0


def plot(result: Mapping[str, Any], path: str | Path) -> None:
    """Draw a result file's rows under its roofs: rate over FLOPs per byte, a panel per dtype and quant.

    Needs matplotlib (the ``bench`` extra).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in result["rows"] if row["time_us"] and row["kind"] != "bound"]
    kinds = sorted({(row["dtype"], row["quant"]) for row in rows}) or [("bfloat16", "none")]
    figure, panels = pyplot.subplots(1, len(kinds), figsize=(9 * len(kinds), 6), squeeze=False)
    for panel, (dtype, quant) in zip(panels[0], kinds, strict=True):
        own = [row for row in rows if (row["dtype"], row["quant"]) == (dtype, quant)]
        _draw_roofs(panel, result["roofs"], product_dtype(dtype, quant))
        for backend in sorted({row["backend"] for row in own}):
            points = [row for row in own if row["backend"] == backend]
            intensity = [row["flops"] / row["min_bytes"] for row in points]
            panel.scatter(intensity, [row["tflops"] for row in points], s=14, label=backend)
        panel.set(
            xscale="log",
            yscale="log",
            xlabel="FLOPs per byte that must move",
            ylabel="TFLOP/s of the layer",
            title=", ".join([result["device"], dtype, *[quant] * (quant != "none"), result["date"][:10]]),
        )
        panel.grid(alpha=0.3)
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_roofs(panel: Any, roofs: Mapping[str, Any], dtype: str) -> None:
    read, rate = roofs["read_gb_per_s"] / 1e3, roofs["matmul_tflops"].get(dtype)
    ends = [0.5, 2e4]
    slope = [x * read for x in ends] if rate is None else [min(x * read, rate) for x in ends]
    corner = [] if rate is None else [rate / read]
    xs = [ends[0], *corner, ends[1]]
    ys = [slope[0], *([rate] if corner else []), slope[1]]
    panel.plot(xs, ys, color="black", label=f"roof: {read:.2f} TB/s, {rate or 0:.0f} TFLOP/s")
