"""Kernels in Mosaic GPU's interpreter, on a CPU."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from moe_pallas import MoESpec, Routing


def without_races(run: Callable[[], Any]) -> NDArray:
    """The array that ``run`` returns, or AssertionError if the interpreter reports a race."""
    return without_races_in(run)


def without_races_in(run: Callable[[], Any]) -> Any:
    """The arrays that ``run`` returns, in any structure, or AssertionError likewise."""
    with contextlib.redirect_stdout(io.StringIO()) as said, jax.default_device(jax.devices("cpu")[0]):
        result = jax.tree.map(np.asarray, run())
    assert "RACE" not in said.getvalue(), said.getvalue()
    return result


def make_routing(
    spec: MoESpec, num_tokens: int, *, low: int = 0, high: int | None = None, seed: int = 0
) -> Routing:
    """Random ids in [low, high), some twice in a token, and weights."""
    rng = np.random.default_rng([seed, num_tokens])
    shape = (num_tokens, spec.top_k)
    ids = rng.integers(low, spec.num_experts if high is None else high, shape).astype(np.int32)
    return Routing(ids, rng.uniform(0.1, 1, shape).astype(np.float32))
