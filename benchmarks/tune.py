"""Find the fastest configurations of the kernels: ``python -m benchmarks.tune``.

    python -m benchmarks.tune --tables ~/tables --models mixtral-8x7b --tokens 1,8,64 --quants none,fp8_block
    MOE_PALLAS_TABLES=~/tables python serve.py           what was found is used
    python -m benchmarks.tune --tables ~/tables --report_only
    python -m benchmarks.tune --tables /tmp/t --tiny     the search itself, on a CPU

A table is written after every problem. Ctrl-C keeps what is there; started again, the search goes on where it
was. A problem that has an entry is not measured again but with ``--again``. At the end stands the regret: how
much slower the cost model's choices are than the best found.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import app, flags, logging

from benchmarks import cases, roofline, search
from benchmarks.choices import ALL, choose, counts
from benchmarks.session import Options
from benchmarks.table import Progress
from moe_pallas import MoESpec, UnsupportedError, select_backend
from moe_pallas.configs.lookup import CONFIGS, VARIABLE
from moe_pallas.spec import H200

# Large enough for the kernels, small enough for a CPU.
TINY_MODELS = {"tiny": MoESpec(num_experts=8, top_k=2, hidden_size=128, intermediate_size=128)}
_AUTO = "auto"

_TABLES = flags.DEFINE_string("tables", None, f"Directory of the tables; else what {VARIABLE} says.")
_MODELS = flags.DEFINE_list("models", [ALL], f"Models: {', '.join(cases.MODELS)}; or all.")
_TOKENS = flags.DEFINE_list("tokens", [ALL], f"Token counts; all: {', '.join(map(str, cases.TOKENS))}.")
_QUANTS = flags.DEFINE_list("quants", ["none"], f"Of {', '.join(cases.QUANTS)}; or all.")
_BACKENDS = flags.DEFINE_list(
    "backends", [_AUTO], f"Kernels: {', '.join(CONFIGS)}; auto: the one that would be chosen."
)
_COUNT = flags.DEFINE_integer("num_candidates", 16, "Tried by predicted time.", lower_bound=1)
_NEAR = flags.DEFINE_bool(
    "neighbours", True, "Try what differs in one field from the best by the model, too."
)
_AGAIN = flags.DEFINE_bool("again", False, "Measure again what the table has, too.")
_REPORT_ONLY = flags.DEFINE_bool(
    "report_only", False, "Print the regret of what the table has; measure nothing."
)
_TIME_BUDGET = flags.DEFINE_float(
    "time_budget_s", 0, "Begin no problem after so many seconds; 0: never stop."
)
_NUM_ROUNDS = flags.DEFINE_integer("num_rounds", 7, "Visits to each configuration.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 0.05, "Aimed at for the visits to one configuration together.")
_MEMORY = flags.DEFINE_float("weight_gb", 26, "For the weight sets of a model; there are two at least.")
_TINY = flags.DEFINE_bool("tiny", False, "A tiny model by the portable backend. Times mean nothing.")


def main(argv: Sequence[str]) -> None:
    """Do what the flags say."""
    logging.set_verbosity(logging.WARNING)
    if len(argv) > 1:
        raise app.UsageError(f"there are no arguments beside flags; got {argv[1:]}")
    if not (directory := _TABLES.value or os.environ.get(VARIABLE)):
        raise app.UsageError(f"--tables or {VARIABLE} says where the tables are")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    folder, device = Path(directory).expanduser(), jax.devices()[0].device_kind
    outcome, red = search.Outcome(), []
    if not _REPORT_ONLY.value:
        jobs = _jobs()
        progress = Progress(len(jobs))
        options = Options(
            num_layers=2 if _TINY.value else 0,
            memory_bytes=_MEMORY.value * 1e9,
            rounds=_NUM_ROUNDS.value,
            seconds=_SECONDS.value,
            detail_tokens=(),
        )
        deadline = time.monotonic() + _TIME_BUDGET.value if _TIME_BUDGET.value else float("inf")
        progress("roofs")
        roofs = roofline.measure_roofs(["bfloat16"], tiny=_TINY.value)
        timer = search.Harness(roofs, options, portable=_TINY.value, progress=progress)
        red = timer.red
        outcome = search.tune(
            jobs,
            timer,
            folder,
            device,
            count=_COUNT.value,
            near=_NEAR.value,
            again=_AGAIN.value,
            progress=lambda text, finished: progress(text, finished=finished),
            is_late=lambda: time.monotonic() > deadline,
        )
        progress("stopped" if outcome.is_stopped else "done", last=True)
    for line in search.report(search.read_table(folder, device)):
        print(line)
    print(f"{outcome.found} found, {outcome.skipped} were in the table.", file=sys.stderr)
    for what, some in (("RED: wrong results", red), ("failed, see above", outcome.failed)):
        if some:
            print(f"{what}: {'; '.join(some)}", file=sys.stderr)
    if outcome.is_stopped:
        sys.exit(130)
    if red or outcome.failed:
        sys.exit(1)


def _jobs() -> list[search.Job]:
    models = TINY_MODELS if _TINY.value else cases.MODELS
    known = cases.TINY_TOKENS if _TINY.value else cases.TOKENS
    chosen = cases.cells(
        {name: models[name] for name in choose("models", _MODELS.value, list(models))},
        known if _TOKENS.value == [ALL] else counts("tokens", _TOKENS.value),
        ["bfloat16"],
        ["uniform"],
        choose("quants", _QUANTS.value, list(cases.QUANTS)),
    )
    backends = choose("backends", _BACKENDS.value, list(CONFIGS), [_AUTO])
    jobs = []
    for cell in chosen:
        for backend in backends:
            try:
                selected = select_backend(cell.problem, backend, device=H200 if _TINY.value else None).backend
            except UnsupportedError as error:
                print(f"{cell}: {error}", file=sys.stderr)
                continue
            if selected in CONFIGS:
                jobs.append(search.Job(cell, selected))
            else:
                print(f"{cell}: no kernel can do it", file=sys.stderr)
    return list(dict.fromkeys(jobs))


if __name__ == "__main__":
    app.run(main)
