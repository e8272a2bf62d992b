"""The search for the fastest configuration of a kernel: what is tried, how it is timed, and where it is kept.

Tried are the configuration that the cost model chooses, the best by predicted time of all that may be, and
the neighbours of the first of each. All are timed together. Unless the model's choice is as good as the
fastest, it and the fastest few are timed again, for longer: the winner of many short visits is partly the
luckiest.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cases import Cell
from benchmarks.results import geometric_mean
from benchmarks.session import Options, Session
from benchmarks.variants import OURS, Variant
from moe_pallas import fused_moe
from moe_pallas.configs.heuristics import default_config, neighbours, search_space
from moe_pallas.configs.lookup import Config, Entry, Key, dump, file_name, key_of, parse
from moe_pallas.configs.predict import predicted_us

FINALISTS = 3
_AS_GOOD = 1.005  # a difference that a run does not repeat

# timer(cell, backend, configs, is_final) → µs of those that could be timed.
Timer = Callable[[Cell, str, Sequence[Config], bool], Mapping[Config, float]]


class Job(NamedTuple):
    """A cell, and the kernel to find a configuration of."""

    cell: Cell
    backend: str

    @property
    def key(self) -> Key:
        return key_of(self.backend, self.cell.problem)

    def __str__(self) -> str:
        return f"{self.cell} {self.backend}"


def candidates(job: Job, count: int, *, near: bool = True) -> list[Config]:
    """What to try: the model's choice first, ``count`` more by predicted time, and ``near`` neighbours."""
    problem = job.cell.problem
    chosen = default_config(job.backend, problem)
    space = sorted(search_space(job.backend, problem), key=functools.partial(predicted_us, problem))
    found = [chosen, *space[:count]]
    if near:
        found += [config for start in found[:2] for config in neighbours(start, problem)]
    return list(dict.fromkeys(found))


def search(job: Job, timer: Timer, configs: Sequence[Config], date: str) -> Entry:
    """Find the fastest of some configurations, of which the first is the model's choice.

    Raises:
      RuntimeError: The first could not be timed.
    """
    chosen = configs[0]
    times = timer(job.cell, job.backend, configs, False)
    fastest = sorted(times, key=times.__getitem__)[:FINALISTS]
    if chosen in times and times[chosen] <= _AS_GOOD * times[fastest[0]]:
        times = {chosen: times[chosen]}
    else:
        times = timer(job.cell, job.backend, list(dict.fromkeys([chosen, *fastest])), True)
    if chosen not in times:
        raise RuntimeError(f"{job}: the cost model's choice could not be timed")
    best = min(times, key=times.__getitem__)
    return Entry(
        kernel=job.backend,
        problem=job.cell.problem,
        config=best,
        time_us=float(f"{times[best]:.5g}"),
        model_us=float(f"{times[chosen]:.5g}"),
        date=date,
    )


class Outcome(NamedTuple):
    """What a search did: jobs done, found in the table, failed; and whether Ctrl-C ended it."""

    found: int = 0
    skipped: int = 0
    failed: tuple[str, ...] = ()
    is_stopped: bool = False


def tune(
    jobs: Sequence[Job],
    timer: Timer,
    directory: Path,
    device: str,
    *,
    count: int = 16,
    near: bool = True,
    again: bool = False,
    progress: Callable[[str, int], None] = lambda text, finished: None,
    is_late: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Search job by job; what is found stands in the table before the next begins.

    Args:
      jobs: What to find configurations for.
      timer: Times them.
      directory: Of the device's table.
      device: Its name.
      count: Configurations to try by predicted time.
      near: Whether to try neighbours.
      again: Whether to search where the table has an entry.
      progress: Called with what is being done, and how many more jobs are done.
      is_late: Whether to begin no further job.
    """
    outcome = Outcome()
    for job in jobs:
        if is_late():
            break
        if not again and job.key in read_table(directory, device):
            outcome = outcome._replace(skipped=outcome.skipped + 1)
            progress(f"{job}: in the table", 1)
            continue
        configs = candidates(job, count, near=near)
        progress(f"{job}: {len(configs)} configurations", 0)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        try:
            entry = search(job, timer, configs, now)
            merge(directory, device, [entry], now)
        except KeyboardInterrupt:
            return outcome._replace(is_stopped=True)
        except Exception:  # a model that does not fit, say; the others are still wanted
            traceback.print_exc()
            outcome = outcome._replace(failed=(*outcome.failed, str(job)))
            progress(f"{job}: failed", 1)
            continue
        outcome = outcome._replace(found=outcome.found + 1)
        progress(f"{job}: {entry.time_us:.1f} us, the model's {entry.model_us:.1f}", 1)
    return outcome


def read_table(directory: Path, device: str) -> dict[Key, Entry]:
    """A directory's table for a device as it is now; empty without one."""
    path = directory / file_name(device)
    return parse(path.read_text(encoding="utf-8"), str(path)) if path.exists() else {}


def merge(directory: Path, device: str, entries: Iterable[Entry], date: str) -> None:
    """Put entries into a table, in place of those with their keys; nobody ever sees half of it."""
    table = read_table(directory, device) | {entry.key: entry for entry in entries}
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / file_name(device)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(dump(table.values(), device, date), encoding="utf-8")
    os.replace(temporary, path)


def report(table: Mapping[Key, Entry]) -> Iterator[str]:
    """Say what the model's choices cost over the best found: each, then mean and worst."""
    groups: dict[tuple[str, str], list[float]] = {}
    columns = f"{'quant':12} {'T':>5} {'model us':>9} {'best us':>9} regret"
    yield f"{'kernel':13} {'layer (D F E top_k)':25} {columns}"
    for entry in table.values():
        regret, spec = entry.model_us / entry.time_us, entry.problem.spec
        groups.setdefault((entry.kernel, entry.problem.quant), []).append(regret)
        layer = f"{spec.hidden_size} {spec.intermediate_size} {spec.num_experts} {spec.top_k}"
        yield (
            f"{entry.kernel:13} {layer:25} {entry.problem.quant:12} {entry.problem.num_tokens:5} "
            f"{entry.model_us:9.1f} {entry.time_us:9.1f} {regret - 1:6.1%}"
        )
    for (kernel, quant), regrets in groups.items():
        yield (
            f"{kernel} {quant}: regret of the cost model, geometric mean {geometric_mean(regrets) - 1:.1%}, "
            f"worst {max(regrets) - 1:.1%}, over {len(regrets)} problems"
        )


def label(config: Config) -> str:
    """A configuration as the name of one."""
    return ",".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items())


class Harness:
    """Times configurations by the harness, gate included.

    Args:
      roofs: From `measure_roofs`.
      options: How to time at first; finals take four times as long.
      portable: Whether the portable backend stands in for the kernel: to see the search work on a CPU.
      progress: Called with what is being done.
    """

    def __init__(
        self,
        roofs: dict[str, Any],
        options: Options,
        *,
        portable: bool = False,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.roofs, self.portable, self.progress = roofs, portable, progress
        self.options = {False: options, True: dataclasses.replace(options, seconds=4 * options.seconds)}
        self.red: list[str] = []

    def __call__(
        self, cell: Cell, backend: str, configs: Sequence[Config], is_final: bool
    ) -> dict[Config, float]:
        named = {label(config): config for config in configs}

        def layer(cell: Cell, name: str) -> Callable[..., Any]:
            how: Any = {"backend": "xla"} if self.portable else {"config": named[name]}
            return functools.partial(fused_moe, spec=cell.spec, **how)

        variant = Variant(name=backend, kind=OURS, layer=layer, configs=lambda cell: tuple(named))

        def progress(what: str, done: int, total: int) -> None:
            self.progress(f"{cell} {backend}: {what} {done}/{total}")

        session = Session([cell], [variant], self.roofs, self.options[is_final], progress)
        try:
            session.compile()
            rows = [row for some in session.run() for row in some]
        finally:
            session.inputs.release()
        for row in rows:
            if row["status"] != "ok":
                print(f"{cell} {backend} {row['config']}: {row['status']}: {row['reason']}", file=sys.stderr)
            if row["status"] == "red":
                self.red.append(f"{cell} {backend} {row['config']}")
        return {named[row["config"]]: row["time_us"] for row in rows if row["status"] == "ok"}
