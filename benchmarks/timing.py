"""GPU time of a layer as a serving step sees it.

A *step* is one jitted program that calls the layer ``num_layers`` times, each time with other weights (as
many distinct sets as fit into the memory budget, at least two) and another routing. What a layer reads was
last touched several layers ago, far more bytes than the L2 holds, so every layer finds it cold. All outputs
are returned, and each layer waits behind an optimization barrier for the one before, so nothing is dropped,
hoisted out of its layer or merged across layers. Weights are separate arguments: a slice of one stacked
array would be copied.

    time_us            wall time of ``calls`` steps queued back to back, divided by calls · num_layers, with
                       XLA's command buffers (CUDA graphs) made of everything that can be in one. The host
                       runs ahead of the device, so this is device time, its gaps between kernels
                       included; the few µs between two graphs are spread over num_layers.
    queued_us          of it, until the host has queued the last of these steps: if nearly all, the host is
                       what was measured
    time_us_no_graphs  the same program without command buffers: what launching kernel by kernel costs
    host_us            for the call of a step to return while the device idles, divided by num_layers
    kernel_us          sum of the kernels' own durations (profiler), gaps excluded: `benchmarks.kernel_times`

Each number is the median over rounds that visit all variants in turn; its spread is (p90 - p10) / median
over those rounds. An H200 at its power limit lowers its clocks after some 50 ms of matrix products without
a pause (1980 to 1380 MHz were seen). A layer of a prefill is shorter than that, so the device rests before
each visit of a step that arithmetic bounds.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax
import numpy as np
from jax import lax

Function = Callable[..., Any]

# Everything that can be captured is, one-kernel loop bodies too; XLA's default wants five operations.
GRAPHS = {"xla_gpu_graph_min_graph_size": 1}
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}

_MAX_CALLS = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Median and spread over rounds, in µs of one layer; the median time that the host took to queue it."""

    time_us: float
    queued_us: float
    spread: float
    rounds: int
    calls: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A compiled step and its arguments."""

    compiled: Function
    args: tuple[Any, ...]
    num_layers: int

    def __call__(self) -> Any:
        """Queue one step; returns the layers' outputs."""
        return self.compiled(*self.args)


def chain_length(floor_us: float) -> int:
    """Layers in a step: enough work for the host to be ahead, and the graph's launch to vanish."""
    return 32 if floor_us < 50 else 8 if floor_us < 250 else 4 if floor_us < 1000 else 2


def step_function(layer: Function, num_layers: int, name: str) -> Function:
    """Chain ``layer(x, routing, w13, w2)`` into ``step(x, routings, weights) → outputs``.

    Args:
      layer: The layer, or its experts alone.
      num_layers: Calls in one step.
      name: Of the compiled module, by which the profiler's kernels are found.
    """
    layer = jax.jit(layer)  # traced once for all calls

    def step(x: Any, routings: Sequence[Any], weights: Sequence[tuple[Any, Any]]) -> list[Any]:
        outputs: list[Any] = []
        for i in range(num_layers):
            operands = (x, routings[i % len(routings)])
            if outputs:
                operands, outputs[-1] = lax.optimization_barrier((operands, outputs[-1]))
            outputs.append(layer(*operands, *weights[i % len(weights)]))
        return outputs

    step.__name__ = step.__qualname__ = name
    return step


def compile_step(
    layer: Function,
    args: tuple[Any, ...],
    num_layers: int,
    name: str,
    options: Mapping[str, Mapping[str, Any]],
) -> dict[str, Function]:
    """Lower a step once and compile it under several sets of compiler options.

    Args:
      layer: See `step_function`, as for num_layers and name.
      args: Of the step, arrays or their shapes.
      num_layers: Calls in one step.
      name: Of the compiled module.
      options: Name → compiler options, which are dropped where there is no GPU to understand them.

    Returns:
      Name → compiled step.
    """
    lowered = jax.jit(step_function(layer, num_layers, name)).lower(*args)
    on_gpu = jax.default_backend() == "gpu"
    return {
        key: lowered.compile(compiler_options=dict(value) if on_gpu else None)
        for key, value in options.items()
    }


def compile_all[K, V](
    jobs: Mapping[K, Callable[[], V]],
    *,
    deadline: float = float("inf"),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[K, V | BaseException]:
    """Run compile jobs in threads; a job that fails gives its exception.

    Args:
      jobs: Key → job.
      deadline: Time (`time.monotonic`) from which no further job is begun; those left give TimeoutError.
      progress: Called with the number done and the total.
    """
    done: dict[K, V | BaseException] = {}

    def guarded(job: Callable[[], V]) -> V:
        if time.monotonic() > deadline:
            raise TimeoutError("not compiled: the time budget ran out")
        return job()

    with ThreadPoolExecutor(max(2, min(16, os.cpu_count() or 2))) as pool:
        futures = {pool.submit(guarded, job): key for key, job in jobs.items()}
        for future in as_completed(futures):
            error = future.exception()
            done[futures[future]] = future.result() if error is None else error
            progress(len(done), len(futures))
    return done


def measure[K](
    steps: Mapping[K, Step], *, rounds: int = 7, seconds: float = 0.15, rest: float = 0.0
) -> dict[K, Timing | Exception]:
    """Time steps against each other, round robin.

    Args:
      steps: Key → step.
      rounds: Visits to each step.
      seconds: Aimed at for all visits to one step together; a visit is at least one call.
      rest: Idle time before a visit, for each second that a visit should take.

    Returns:
      Key → `Timing`, or what the step raised.
    """
    results: dict[K, Timing | Exception] = {}
    calls: dict[K, int] = {}
    for key, step in steps.items():
        try:
            calls[key] = int(np.clip(seconds / rounds / _warm_up(step), 1, _MAX_CALLS))
        except Exception as error:  # out of memory, or a kernel that fails: the others are still measured
            results[key] = error
    times: dict[K, list[tuple[float, float]]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key in calls:
            time.sleep(rest * seconds / rounds)
            try:
                times[key].append(_seconds_per_call(steps[key], calls[key]))
            except Exception as error:
                results[key] = error
    for key, values in times.items():
        if key not in results:
            layers_us, queued_us = np.transpose(values) / steps[key].num_layers * 1e6
            low, middle, high = (float(v) for v in np.percentile(layers_us, [10, 50, 90]))
            results[key] = Timing(
                time_us=middle,
                queued_us=float(np.median(queued_us)),
                spread=(high - low) / middle,
                rounds=rounds,
                calls=calls[key],
            )
    return results


def _seconds_per_call(step: Step, calls: int) -> tuple[float, float]:
    """Until all is done, and until all is queued."""
    outputs = None
    start = time.perf_counter()
    for _ in range(calls):
        outputs = step()
    queued = time.perf_counter()
    jax.block_until_ready(outputs)
    return (time.perf_counter() - start) / calls, (queued - start) / calls


def _warm_up(step: Step) -> float:
    """Run a step until its graph is made (XLA makes it in the second run); returns seconds of one call."""
    seconds = [_seconds_per_call(step, 1)[0]]
    while len(seconds) < 3 or (len(seconds) < 6 and min(seconds) < 0.01):
        seconds.append(_seconds_per_call(step, 1)[0])
    return min(seconds)


def host_time_us(step: Step, repeats: int = 10) -> float:
    """Median time for the call of a step to return, the device idle, in µs per layer."""
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < repeats and time.perf_counter() - begin < 0.3:
        start = time.perf_counter()
        outputs = step()
        times.append(time.perf_counter() - start)
        jax.block_until_ready(outputs)
    return float(np.median(times)) / step.num_layers * 1e6
