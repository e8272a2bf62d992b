"""Durations of single kernels, from JAX's profiler (CUPTI underneath)."""

from __future__ import annotations

import collections
import dataclasses
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelTimes:
    """Kernels of one program, per run of it.

    Attributes:
      us: Kernel name → µs, largest first; all launches of a name added up.
      launches: Number of kernels, copies and fills.
    """

    us: dict[str, float]
    launches: float

    @property
    def total_us(self) -> float:
        """Sum over all kernels."""
        return sum(self.us.values())


def profile(runs: Mapping[str, Callable[[], Any]], *, repeats: int = 2) -> dict[str, KernelTimes]:
    """Run programs under the profiler.

    Args:
      runs: Name of the jitted function (unique among ``runs``) → one run of it, already compiled.
      repeats: Runs of each; durations are averages over them.

    Returns:
      The names of which kernels were seen; empty where there is no GPU.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # thousands of Python frames otherwise, and they slow the host down
    options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for run in runs.values():
                for _ in range(repeats):
                    jax.block_until_ready(run())
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        planes = [plane for file in files for plane in ProfileData.from_file(str(file)).planes]
        seen = kernels_by_module(planes)
    if seen and not any(f"jit_{name}" in seen for name in runs):
        print(f"The profile has no kernels of these programs, only of {sorted(seen)[:20]}.", file=sys.stderr)
    return {
        name: KernelTimes(
            us={kernel: us / repeats for kernel, us in seen[f"jit_{name}"][0].items()},
            launches=seen[f"jit_{name}"][1] / repeats,
        )
        for name in runs
        if f"jit_{name}" in seen
    }


def kernels_by_module(planes: Iterable[Any]) -> dict[str, tuple[dict[str, float], int]]:
    """Add up the kernel events of a profile.

    Only the stream lines of GPU planes count: the profiler derives further lines (modules, operations)
    that show the same time again.

    Returns:
      Module name → (kernel name → µs, largest first; number of events). Events without a module go to "".
    """
    us: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    events: collections.Counter[str] = collections.Counter()
    for plane in planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                module = str(_stats(event).get("hlo_module", "")).split("(")[0]
                us[module][event.name] += event.duration_ns / 1e3
                events[module] += 1
    return {module: (dict(kernels.most_common()), events[module]) for module, kernels in us.items()}


def _stats(event: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        # jaxlib's classes have no __module__, at which Python grumbles when it first sees one.
        warnings.simplefilter("ignore", DeprecationWarning)
        return dict(event.stats)
