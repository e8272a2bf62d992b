"""Measure: ``python -m benchmarks.run``.

    python -m benchmarks.run --models qwen3-30b-a3b --tokens 1,8,64 --json result.json
    python -m benchmarks.run --quants fp8_tensor,fp8_block --backends xla,swap_ab,grouped_gemm
    python -m benchmarks.run --tiny                      the harness itself, on a CPU
    python -m benchmarks.run --compare a.json b.json     what became faster
    python -m benchmarks.run --plot roofline.png --json result.json --draw_only

``--help`` lists the flags; `benchmarks` says how to read the figures, and what the quants are.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import operator
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

from absl import app, flags, logging

from benchmarks import cases, results, roofline
from benchmarks.choices import ALL, choose, counts
from benchmarks.session import Options, Session
from benchmarks.table import Progress, Table
from benchmarks.variants import BASELINE, VARIANTS, Variant

_MODELS = flags.DEFINE_list("models", [ALL], f"Models: {', '.join(cases.MODELS)}; or all.")
_TOKENS = flags.DEFINE_list("tokens", [ALL], f"Token counts; all: {', '.join(map(str, cases.TOKENS))}.")
_DTYPES = flags.DEFINE_list("dtypes", ["bfloat16"], "Dtypes of activations, and of weights if not quantised.")
_QUANTS = flags.DEFINE_list(
    "quants", ["none"], f"How weights and activations are quantised: {', '.join(cases.QUANTS)}; or all."
)
_LOADS = flags.DEFINE_list("loads", ["uniform"], f"Expert loads: {', '.join(cases.LOADS)}.")
_BACKENDS = flags.DEFINE_list("backends", [ALL], f"What to time: {', '.join(VARIANTS)}; or all.")
_JSON = flags.DEFINE_string("json", None, "Result file, written after every cell.")
_COMPARE = flags.DEFINE_string("compare", None, "Compare two result files: --compare A B. Measures nothing.")
_PLOT = flags.DEFINE_string("plot", None, "Draw the roofline picture into this file (needs matplotlib).")
_DRAW_ONLY = flags.DEFINE_bool("draw_only", False, "Draw --plot from the file --json; measure nothing.")
_TIME_BUDGET = flags.DEFINE_float("time_budget_s", 0, "Stop measuring after so many seconds; 0: never.")
_NUM_ROUNDS = flags.DEFINE_integer("num_rounds", 7, "Visits to each variant in a cell.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 0.15, "Aimed at for the visits to one variant in one cell together.")
_NUM_LAYERS = flags.DEFINE_integer("num_layers", 0, "Layers in a step; 0: 8, 4 or 2, by the cell's floor.")
_MEMORY = flags.DEFINE_float("weight_gb", 26, "For the weight sets of a model; there are two at least.")
_DETAIL = flags.DEFINE_list(
    "detail_tokens",
    [str(t) for t in Options.detail_tokens],
    "Token counts that are also timed without command buffers and experts only, and profiled.",
)
_PROFILE = flags.DEFINE_bool("profile", True, "Add kernel times, after all else.")
_COMMIT = flags.DEFINE_string("commit", None, "Commit that is measured, where git can't tell.")
_TINY = flags.DEFINE_bool("tiny", False, "Tiny models: to see the harness work on a CPU. Times mean nothing.")


def measure(
    cells: Sequence[cases.Cell],
    variants: Sequence[Variant],
    options: Options,
    *,
    json: str | None = None,
    tiny: bool = False,
    commit: str | None = None,
    profile: bool = True,
) -> dict[str, Any]:
    """Measure cells, printing the table and writing the result file on the way.

    Args:
      cells: What to measure.
      variants: What with.
      options: How.
      json: Result file or None.
      tiny: Whether roofs are measured with sizes for a CPU.
      commit: Recorded in the result.
      profile: Whether to run the profiler at the end.

    Returns:
      The result: a header and ``rows``.
    """
    progress = Progress(len(cells))
    progress("roofs")
    roofs = roofline.measure_roofs(list(dict.fromkeys(cell.dtype for cell in cells)), tiny=tiny)
    how = dataclasses.asdict(options)
    how["deadline"] = None
    failures: list[str] = []
    head = results.header(commit, roofs=roofs, options=how, failures=failures)
    table = Table([v.name for v in variants if v.kind == BASELINE])
    table.head(head)
    shared = operator.attrgetter("case", "dtype", "quant")
    groups = [list(group) for _, group in itertools.groupby(cells, key=shared)]
    sessions: list[Session] = []
    rows: list[results.Row] = []

    def save() -> None:
        if json:
            results.write(json, head, rows)

    for group in groups:
        name = " ".join(shared(group[0]))
        session = Session(
            group,
            variants,
            roofs,
            options,
            lambda what, done, total, name=name: progress(f"{name}: {what} {done}/{total}"),  # type: ignore[misc]
        )
        start = time.monotonic()
        try:
            if start < options.deadline:
                session.compile()
            print(f"{name}: compiled in {time.monotonic() - start:.0f} s", file=sys.stderr)
            for new in session.run():
                rows += new
                table.cell(new)
                save()
                progress(name, finished=1)
            sessions.append(session)
        except Exception:  # a model that does not fit, say; the others are still wanted
            traceback.print_exc()
            failures.append(name)
        session.inputs.release()
    if profile:
        for session in sessions:
            if time.monotonic() < options.deadline:
                progress(f"{session.cells[0].case}: kernels")
                session.profile()
                session.inputs.release()
                save()  # the rows are the sessions' own, so what was added is in them
    save()
    table.details(rows)
    progress("done", last=True)
    return {**head, "rows": rows}


def main(argv: Sequence[str]) -> None:
    """Do what the flags say."""
    logging.set_verbosity(logging.WARNING)  # else absl prints what jax looks for and does not find
    if _COMPARE.value:
        if len(argv) != 2:
            raise app.UsageError("--compare takes two result files: --compare A B")
        for line in results.compare(results.read(_COMPARE.value), results.read(argv[1])):
            print(line)
        return
    if len(argv) > 1:
        raise app.UsageError(f"there are no arguments beside flags; got {argv[1:]}")
    if _PLOT.value and importlib.util.find_spec("matplotlib") is None:
        raise app.UsageError("--plot needs matplotlib: pip install 'moe_pallas[bench]'")
    if _DRAW_ONLY.value:
        if not (_JSON.value and _PLOT.value):
            raise app.UsageError("--draw_only needs --json and --plot")
        roofline.plot(results.read(_JSON.value), _PLOT.value)
        return
    # The weights of a large model, a bound's copy of them and XLA's temporary memory must all fit.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    models = cases.TINY_MODELS if _TINY.value else cases.MODELS
    tokens = cases.TINY_TOKENS if _TINY.value else cases.TOKENS
    chosen = cases.cells(
        {name: models[name] for name in choose("models", _MODELS.value, list(models))},
        tokens if _TOKENS.value == [ALL] else counts("tokens", _TOKENS.value),
        _DTYPES.value,
        choose("loads", _LOADS.value, list(cases.LOADS)),
        choose("quants", _QUANTS.value, list(cases.QUANTS)),
    )
    variants = [VARIANTS[name] for name in choose("backends", _BACKENDS.value, list(VARIANTS))]
    options = Options(
        num_layers=_NUM_LAYERS.value,
        memory_bytes=_MEMORY.value * 1e9,
        rounds=_NUM_ROUNDS.value,
        seconds=_SECONDS.value,
        detail_tokens=tuple(counts("detail_tokens", _DETAIL.value)),
        deadline=time.monotonic() + _TIME_BUDGET.value if _TIME_BUDGET.value else float("inf"),
    )
    result = measure(
        chosen,
        variants,
        options,
        json=_JSON.value,
        tiny=_TINY.value,
        commit=_COMMIT.value,
        profile=_PROFILE.value,
    )
    if _PLOT.value:
        roofline.plot(result, _PLOT.value)
    if red := [row for row in result["rows"] if row["status"] == "red"]:
        print(f"{len(red)} rows are RED: wrong results, not timed.", file=sys.stderr)
    if result["failures"]:
        print(f"Not measured, see above: {', '.join(result['failures'])}", file=sys.stderr)
    if red or result["failures"]:
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
