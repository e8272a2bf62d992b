"""README's performance table from the result files: ``python -m benchmarks.tables`` (or ``make tables``).

The table stands between two markers in README.md and is written by nothing else; a test fails when it
disagrees with the files in ``benchmarks/results``. ``--check`` only says whether it does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.cases import MODELS, QUANTS, REGIMES, product_dtype, regime_of
from benchmarks.results import Row, best, cell_of, geometric_mean

README = Path(__file__).parent.parent / "README.md"
TITLES = {
    "none": "bfloat16",
    "fp8_tensor": "FP8 weights, a scale a matrix, activations by stored scales, bfloat16 tokens",
    "fp8_channel": "FP8 weights, a scale a channel, activations by token, bfloat16 tokens",
    "fp8_block": "FP8 weights in 128 × 128 blocks, activations by token and 128 columns, bfloat16 tokens",
}
_OTHERS = "Other JAX code: timed by the same harness, with routing in XLA."
_NO_OTHERS = "Other JAX code: what the harness times takes no FP8 weights."
BEGIN, END = "<!-- performance: begin -->", "<!-- performance: end -->"
TOKENS = (1, 8, 64, 512, 4096)

Cell = tuple[Any, ...]


def load(folder: Path = results.FOLDER) -> list[dict[str, Any]]:
    """Read all result files of all devices, oldest run first."""
    return sorted(map(results.read, folder.glob("*/*.json")), key=lambda result: str(result["date"]))


def render(runs: Sequence[Mapping[str, Any]], rivals: Sequence[Row]) -> str:
    """Make the Markdown between the markers: for each device a section for each quant that has results.

    Newer rows replace older ones.
    """
    sections = []
    for device in sorted({run["device"] for run in runs}):
        for quant in QUANTS:
            newest: dict[tuple[Any, ...], Row] = {}
            own = []
            for run in runs:
                rows = [row for row in run["rows"] if row["quant"] == quant and run["device"] == device]
                newest |= {(cell_of(row), row["backend"], row["config"]): row for row in rows}
                own += [run] if rows else []
            if own:
                lines = _section(quant, own, _by_cell(newest.values()), _by_cell(rivals))
                sections.append("\n".join(lines))
    return "\n\n".join(sections) or "No results yet."


def update(readme: str, block: str) -> str:
    """Replace what stands between the markers.

    Raises:
      ValueError: There is not exactly one pair of markers.
    """
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in tail:
        raise ValueError(f"README.md needs one line {BEGIN} and after it one line {END}.")
    return f"{head}{BEGIN}\n\n{block}\n\n{END}{tail}"


def _by_cell(rows: Iterable[Row]) -> dict[Cell, list[Row]]:
    cells: dict[Cell, list[Row]] = {}
    for row in rows:
        cells.setdefault(cell_of(row), []).append(row)
    return cells


def _section(
    quant: str,
    runs: Sequence[Mapping[str, Any]],
    cells: Mapping[Cell, list[Row]],
    rivals: Mapping[Cell, list[Row]],
) -> Iterator[str]:
    roofs = runs[-1]["roofs"]
    rate = roofs["matmul_tflops"].get(product_dtype("bfloat16", quant))
    dates = sorted({run["date"][:10] for run in runs})
    span = " … ".join(dict.fromkeys([dates[0], dates[-1]]))
    yield (
        f"**{runs[-1]['device']}**, {TITLES[quant]}, uniform routing, µs for one layer from router logits to "
        f"output (jax {runs[-1]['jax']}, {span}). Measured roofs: read "
        f"{roofs['read_gb_per_s'] / 1e3:.2f} TB/s, {'–' if rate is None else f'{rate:.0f}'} TFLOP/s."
    )
    yield ""
    yield "| model | T | floor | moe_pallas | × floor | best other JAX code | best elsewhere † |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for case in MODELS:
        for tokens in TOKENS:
            cell = (case, tokens, "bfloat16", quant, "uniform")
            if rows := cells.get(cell):
                yield _line(case, tokens, rows, rivals.get(cell, []))
    yield ""
    yield (
        "floor: max(bytes of the experts hit / read bandwidth, FLOPs / matmul rate). **Bold**: the fastest "
        f"of the row. {_OTHERS if quant == 'none' else _NO_OTHERS} † Measured elsewhere, "
        "on another H200 with other programs (`benchmarks/rivals.json`): an orientation, no head-to-head."
    )
    if summary := list(_summary(cells, rivals)):
        yield ""
        yield "| geometric mean of speed-ups | decode, T ≤ 64 | middle, T ≤ 1024 | prefill, above |"
        yield "| --- |" + " ---: |" * len(REGIMES)
        yield from summary


def _contenders(rows: Iterable[Row], rivals: Iterable[Row]) -> tuple[Row | None, Row | None, Row | None]:
    """Fastest of ours, of the baselines of the run, of the rivals elsewhere. Bounds are none of them."""
    rows = list(rows)
    ours, baseline = (best(r for r in rows if r["kind"] == kind) for kind in ("ours", "baseline"))
    return ours, baseline, best(rivals)


def _line(case: str, tokens: int, rows: Sequence[Row], rivals: Sequence[Row]) -> str:
    three = _contenders(rows, rivals)
    winner = best(row for row in three if row)
    shown = []
    for row, name in zip(three, ("backend", "backend", "rival"), strict=True):
        text = f"{_us(row['time_us'])} {row[name]}" if row else "–"
        shown.append(f"**{text}**" if row and row is winner else text)
    floor = rows[0]["floor_us"]
    over = f"{three[0]['time_us'] / floor:.2f}" if three[0] else "–"
    return f"| {case} | {tokens} | {_us(floor)} | {shown[0]} | {over} | {shown[1]} | {shown[2]} |"


def _summary(cells: Mapping[Cell, list[Row]], rivals: Mapping[Cell, list[Row]]) -> Iterator[str]:
    """One line for each kind of opponent: how many times faster ours is, by regime, over all cells."""
    for title, which in (("over the best other JAX code", 1), ("over the best elsewhere †", 2)):
        ratios: dict[str, list[float]] = {}
        for cell, rows in cells.items():
            three = _contenders(rows, rivals.get(cell, []))
            ours, other = three[0], three[which]
            if ours and other:
                ratios.setdefault(regime_of(cell[1]), []).append(other["time_us"] / ours["time_us"])
        if ratios:
            means = [f"{geometric_mean(ratios[r]):.2f}" if r in ratios else "–" for r in REGIMES]
            yield f"| {title} | " + " | ".join(means) + " |"


def _us(time_us: float) -> str:
    return f"{time_us:.1f}" if time_us < 100 else f"{time_us:.0f}"


def main(argv: Sequence[str]) -> int:
    """Write README.md, or with ``--check`` compare; returns the exit status."""
    old = README.read_text(encoding="utf-8")
    new = update(old, render(load(), results.rivals()))
    if list(argv) == ["--check"]:
        print("README.md agrees with the results." if new == old else "README.md is out of date: make tables")
        return int(new != old)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
