"""Kernels in Mosaic GPU's interpreter, on a CPU."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_pallas import MoESpec, Routing


@functools.cache
def interpreted(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The function with these options, in the interpreter: one program, where without it each step is one."""
    races = plgpu.InterpretGPUParams(detect_races=True)
    return jax.jit(functools.partial(function, **options, interpret=races))


def without_races(program: Callable[..., Any], *args: Any) -> Any:
    """What the program returns, as NumPy arrays, or AssertionError if the interpreter reports a race."""
    with contextlib.redirect_stdout(io.StringIO()) as said, jax.default_device(jax.devices("cpu")[0]):
        result = jax.tree.map(np.asarray, program(*args))
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
