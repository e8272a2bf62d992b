"""Random problems and comparison with the float64 truth: for this project's tests and benchmarks, and yours.

Everything here is NumPy, so that inputs are the same on every device and backend.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from moe_pallas.spec import MoESpec

LOADS = ("uniform", "zipf", "one_hot")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Bounds on the error of a layer's output, relative to the RMS of the row it stands in.

    Attributes:
      max: On any element.
      rms: On the RMS over all elements.
    """

    max: float
    rms: float


# An output of dtype with unit roundoff u (2**-8, 2**-11) has two roundings of that size on its way: the
# activation's result and the output itself. One is at most u of its value, 0.42 u in RMS, so both together
# have an RMS error of 0.6 u: 2.3e-3 in bfloat16 (measured: 2.3e-3 to 2.5e-3), 2.9e-4 in float16. The largest
# of 1e6 elements is 5 times its row's RMS, so its own rounding alone is up to 5 u: 2e-2 and 2.4e-3. The
# bounds are 1.5 to 1.7 times that: one more rounding on the way is seen.
# float32: u = 2**-24, and sums of K terms in any order, K up to 16384: sqrt(K) · u = 8e-6.
TOLERANCES = {
    "bfloat16": Tolerance(max=3e-2, rms=4e-3),
    "float16": Tolerance(max=4e-3, rms=5e-4),
    "float32": Tolerance(max=5e-5, rms=1e-5),
}
# What FP8 products add to that. Codes of x and weights are the truth's own, bit for bit, and products of
# codes lose nothing. But h has float32's error when it is rounded to e4m3, some 5e-7 of itself, and where a
# tie lies within that error it goes to the other neighbour, 1/16 to 1/8 of itself away: a share of
# 2 · 5e-7 / 0.09 = 1e-5 of the elements. So the RMS error of h, and likewise of y, is sqrt(1e-5) · 0.09
# = 3e-4 of its RMS (measured: up to 9e-5). One such element, of up to 4 RMS and times a weight of up to 4
# RMS, moves an element of y by up to 2 / sqrt(F) of its row's RMS, 0.09 for F = 512 (measured: up to 2e-3);
# most elements see none of it.
FP8_TOLERANCE = Tolerance(max=0.1, rms=5e-4)
# What a Hopper GPU's FP8 WGMMA adds to that. It aligns products to the largest of those that it sums up and
# keeps some 13 bits behind it, so that a sum of 128 or 256 columns is off by some 2^-12 to 2^-11 of its RMS,
# and h with it. By the reasoning above a share of 2 · 5e-4 / 0.09 = 1 % of the elements of h goes to the
# other neighbour: sqrt(0.01) · 0.09 = 9e-3 of the RMS (measured: 1.5e-3 to 1.1e-2, most in single tokens).
FP8_WGMMA_TOLERANCE = Tolerance(max=0.05, rms=1.5e-2)


def assert_close(
    actual: Any,
    expected: Any,
    *,
    dtype: str = "",
    context: str = "",
    quantised: bool = False,
    wgmma: bool = False,
) -> None:
    """Raise AssertionError unless ``actual`` is as close to the float64 truth as its dtype allows.

    Args:
      actual: (..., D) array of any float dtype, of any array library.
      expected: (..., D) array: the truth.
      dtype: Row of `TOLERANCES`; the dtype of ``actual`` if empty.
      context: Printed with a failure: spec, seed, configuration.
      quantised: The products are in FP8; adds `FP8_TOLERANCE`.
      wgmma: And a Hopper GPU's tensor cores sum them up; adds `FP8_WGMMA_TOLERANCE`.

    Notes:
      Each element is measured against the RMS of its row in ``expected``, so a single bad row, column or
      element among millions is seen. Rows of zeros must be exactly zero; NaN must stand where NaN is
      expected, and nowhere else. The truth must be computed from the very numbers that ``actual`` was
      computed from: of float32 weights that a bfloat16 layer casts, give the reference the cast ones.
    """
    got = np.asarray(actual)
    dtype = dtype or got.dtype.name
    if dtype not in TOLERANCES:
        raise ValueError(f"dtype is one of {', '.join(map(repr, TOLERANCES))}; got {dtype!r}.")
    got, want = got.astype(np.float64), np.asarray(expected).astype(np.float64)
    if got.shape != want.shape:
        raise AssertionError(f"shape {got.shape}, expected {want.shape}. {context}")
    if got.size == 0:
        return
    both_nan = np.isnan(got) & np.isnan(want)
    difference = np.where(both_nan, 0.0, got - want)
    with np.errstate(invalid="ignore"):
        row_rms = np.sqrt(np.mean(np.square(np.where(np.isnan(want), 0.0, want)), axis=-1, keepdims=True))
    scaled = np.where(
        difference == 0, 0.0, difference / np.where(row_rms == 0, np.finfo(float).tiny, row_rms)
    )
    allowed = [TOLERANCES[dtype], *[FP8_TOLERANCE] * quantised, *[FP8_WGMMA_TOLERANCE] * wgmma]
    tolerance = Tolerance(max=sum(t.max for t in allowed), rms=sum(t.rms for t in allowed))
    bad = ~(np.abs(scaled) <= tolerance.max)  # NaN is bad
    rms = float(np.sqrt(np.mean(np.square(scaled))))
    if bad.any() or not rms <= tolerance.rms:
        first = ", ".join(
            f"{tuple(map(int, at))}: {got[tuple(at)]} for {want[tuple(at)]}" for at in np.argwhere(bad)[:5]
        )
        cause = "" if bad.any() else "Too far off on the whole (RMS). "
        raise AssertionError(
            f"{cause}{int(bad.sum())} of {got.size} elements off by more than {tolerance.max:g} of their "
            f"row's RMS (worst {np.nanmax(np.abs(scaled)):.3g}; RMS {rms:.3g}, allowed {tolerance.rms:g}) in "
            f"{dtype}. First: {first or 'none'}. {context}"
        )


def random_logits(num_tokens: int, num_experts: int, *, load: str = "uniform", seed: int = 0) -> np.ndarray:
    """Make router logits whose top-k gives a certain expert load.

    Args:
      num_tokens: T.
      num_experts: E.
      load: ``"uniform"``: every set of experts equally likely. ``"zipf"``: the expert of rank r is drawn with
        probability ∝ 1 / r, ranks shuffled. ``"one_hot"``: all tokens agree on one order of experts.
      seed: Of the random generator.

    Returns:
      (T, E) float32.
    """
    rng = np.random.default_rng([seed, 1])
    if load not in LOADS:
        raise ValueError(f"load is one of {', '.join(map(repr, LOADS))}; got {load!r}.")
    ranks = rng.permutation(num_experts)
    # The top k of log p + Gumbel noise are k draws from p without replacement.
    noise = rng.gumbel(size=(num_tokens, num_experts))
    match load:
        case "uniform":
            logits = noise
        case "zipf":
            logits = noise - np.log(ranks + 1.0)
        case "one_hot":
            logits = np.broadcast_to(-0.25 * ranks, noise.shape) + 1e-3 * rng.uniform(size=noise.shape)
    return logits.astype(np.float32)


def random_params(spec: MoESpec, *, dtype: str = "float32", seed: int = 0) -> dict[str, np.ndarray]:
    """Make random parameters, shaped as ``spec.param_shapes``.

    Matrices are N(0, 1/fan_in), so that unit-variance tokens give unit-variance pre-activations, which is
    where activations are curved; biases are N(0, 1/4).

    Args:
      spec: The layer.
      dtype: Of all but correction_bias, which is float32.
      seed: Of the random generator.
    """
    rng = np.random.default_rng([seed, 2])
    params = {}
    for name, shape in spec.param_shapes.items():
        scale = 0.5 if name in ("b13", "b2", "router_bias", "correction_bias") else shape[-1] ** -0.5
        values = scale * rng.standard_normal(shape)
        params[name] = values.astype(np.float32 if name == "correction_bias" else _numpy_dtype(dtype))
    return params


def random_tokens(spec: MoESpec, num_tokens: int, *, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Make (T, D) tokens, N(0, 1)."""
    rng = np.random.default_rng([seed, 3])
    return rng.standard_normal((num_tokens, spec.hidden_size)).astype(_numpy_dtype(dtype))


def _numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
