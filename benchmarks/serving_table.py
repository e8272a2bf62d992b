"""What a run of `benchmarks.serving` prints, and README's table of what each optimisation is worth."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.results import Row, geometric_mean

# What serving engines reported of such optimisations in 2026, end to end.
PUBLISHED = "Published for serving engines in 2026: Swap-AB 2–4 % of tokens/s, choosing backends 10 % of "
PUBLISHED += "throughput, no compilation while serving 9 % of the time to first token."

Load = tuple[int, int]


def line(row: Mapping[str, Any]) -> str:
    """One row, for the terminal."""
    start = (
        f"{row['case']:16} {row['quant']:11} {row['concurrency']:>4} x {row['prompt']:<5} {row['variant']:11}"
    )
    if row["status"] != "ok":
        return f"{start} {row['status']}: {row['reason']}"
    shown = [
        f"{row[name]:{width}.{digits}f} {unit}" if row.get(name) is not None else f"{'-':>{width}} {unit}"
        for name, width, digits, unit in (
            ("tokens_per_s", 9, 1, "tokens/s"),
            ("step_ms", 8, 3, "ms a step"),
            ("dispatch_ms", 7, 3, "ms its call"),
            ("ttft_ms", 9, 2, "ms to first token"),
        )
    ]
    error = "" if row["error"] is None else f"error {row['error']:.1e}"
    steps = f"first steps {row['first_steps_ms']} ms" if row.get("first_steps_ms") else ""
    parts = [
        start,
        *shown,
        error,
        steps,
        f"prefill {row['prefill']}, decode {row['decode']}",
        row["reason"] or "",
    ]
    return " ".join(part for part in parts if part)


def render(runs: Sequence[Mapping[str, Any]]) -> str:
    """Make the Markdown, a section for each device, model and quant; the newest rows count."""
    sections = []
    for device in sorted({run["device"] for run in runs}):
        newest: dict[tuple[Any, ...], Row] = {}
        dates: dict[tuple[Any, ...], set[str]] = {}
        for run in runs:
            for row in run["rows"] if run["device"] == device else ():
                model = row["case"], row["quant"]
                if row["status"] != "not reached":
                    newest[*model, (row["concurrency"], row["prompt"]), row["variant"]] = row
                    dates.setdefault(model, set()).add(run["date"][:10])
        for model in dates:
            cells: dict[Load, dict[str, Row]] = {}
            for (*owner, load, variant), row in newest.items():
                if tuple(owner) == model:
                    cells.setdefault(load, {})[variant] = row
            sections.append("\n".join(_section(device, *model, sorted(dates[model]), cells)))
    return "\n\n".join([*sections, PUBLISHED]) if sections else "No results yet."


def _section(
    device: str, case: str, quant: str, dates: Sequence[str], cells: Mapping[Load, Mapping[str, Row]]
) -> Iterator[str]:
    stored = "bfloat16" if quant == "none" else f"experts in {quant}"
    yield f"**{device}**, {case}, {stored} ({' … '.join(dict.fromkeys([dates[0], dates[-1]]))})."
    yield ""
    yield (
        "| sequences × prompt | tokens/s | Swap-AB | oracle | × xla | × tokamax | first token, ms | oracle | "
        "without warm-up, ms |"
    )
    yield "| --- |" + " ---: |" * 8
    gains: dict[str, list[float]] = {}

    def gain(title: str, rows: Mapping[str, Row], other: str, field: str) -> str:
        """How many times better auto is than another variant; it is kept for the mean."""
        ours, theirs = (_value(rows, name, field) for name in ("auto", other))
        if ours is None or theirs is None:
            return "–"
        ratio = ours / theirs if field == "tokens_per_s" else theirs / ours
        gains.setdefault(title, []).append(ratio)
        return f"{ratio:.2f}" if title.startswith("×") else f"{ratio - 1:+.1%}"

    for load, rows in sorted(cells.items(), key=lambda item: item[0][::-1]):
        speed, ttft, cold = (
            _value(rows, name, field)
            for name, field in (("auto", "tokens_per_s"), ("auto", "ttft_ms"), ("no_warmup", "ttft_ms"))
        )
        shown = [
            f"{load[0]} × {load[1]}",
            "–" if speed is None else f"{speed:.0f}",
            gain("Swap-AB, tokens/s", rows, "no_swap_ab", "tokens_per_s"),
            gain("oracle, tokens/s", rows, "no_oracle", "tokens_per_s"),
            gain("× xla", rows, "xla", "tokens_per_s"),
            gain("× tokamax", rows, "tokamax", "tokens_per_s"),
            "–" if ttft is None else f"{ttft:.1f}",
            gain("oracle, time to first token", rows, "no_oracle", "ttft_ms"),
            "–" if cold is None else f"{cold:.0f}",
        ]
        gain("warm-up, time to first token", rows, "no_warmup", "ttft_ms")
        yield "| " + " | ".join(shown) + " |"
    if gains:
        yield ""
        yield "Geometric means, auto over the same without: " + "; ".join(_means(gains)) + "."
    if missing := sorted({_missing(row) for rows in cells.values() for row in rows.values()} - {""}):
        yield ""
        yield f"Not measured: {'; '.join(missing)}."


def _value(rows: Mapping[str, Row], variant: str, field: str) -> float | None:
    row = rows.get(variant)
    return None if row is None or row["status"] != "ok" else row.get(field)


def _means(gains: Mapping[str, Sequence[float]]) -> Iterable[str]:
    for title, ratios in gains.items():
        mean = geometric_mean(ratios)
        shown = f"{mean:.2f} times" if title.startswith("×") or mean >= 2 else f"{mean - 1:+.1%}"
        yield f"{title.removeprefix('× ')} {shown} ({len(ratios)} {'load' if len(ratios) == 1 else 'loads'})"


def _missing(row: Row) -> str:
    """What is to be said of a row without figures, the same for all loads."""
    return "" if row["status"] == "ok" else f"{row['variant']} ({row['status']}: {row['reason']})"
