"""The table that a run prints, and its progress bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from benchmarks.results import Row, best, cell_of, rivals

_COLUMNS = (
    ("case", "<16"),
    ("T", ">5"),
    ("dtype", "<9"),
    ("quant", "<11"),
    ("load", "<8"),
    ("backend", "<16"),
    ("config", "<16"),
    ("time_us", ">9"),
    ("spread", ">7"),
    ("TFLOP/s", ">8"),
    ("GB/s", ">6"),
    ("floor_us", ">9"),
    ("x floor", ">8"),
    ("% roof", ">7"),
)


class Table:
    """Prints rows cell by cell.

    Args:
      baselines: Names of backends that get a column of how many times slower they are.
      out: Where to; stdout if None.
    """

    def __init__(self, baselines: Sequence[str], out: TextIO | None = None) -> None:
        self.baselines, self.out = list(baselines), out or sys.stdout
        self.rivals: dict[tuple[Any, ...], list[Row]] = {}
        for row in rivals():
            self.rivals.setdefault(cell_of(row), []).append(row)

    def head(self, header: Mapping[str, Any]) -> None:
        """Print what was run where, the roofs, and the columns."""
        for name in ("device", "driver", "jax", "commit", "date"):
            print(f"{name:7} {header[name]}", file=self.out)
        roofs = header["roofs"]
        rates = ", ".join(f"{k} {v:.0f}" if v else f"{k} -" for k, v in roofs["matmul_tflops"].items())
        print(
            f"roofs   read {roofs['read_gb_per_s']:.0f} GB/s, copy {roofs['copy_gb_per_s']:.0f} GB/s, matmul "
            f"TFLOP/s: {rates}; tiny kernel in a graph {roofs['kernel_us']:.2f} us",
            file=self.out,
        )
        for name, why in roofs["failures"].items():
            print(f"no roof {name}: {why}", file=self.out)
        print(
            "x NAME: times faster than that baseline of this run. elsewhere: best rival measured elsewhere "
            "(rivals.json). bound_*: upper bounds, no layers.\n",
            file=self.out,
        )
        names = [f"{name:{width}}" for name, width in _COLUMNS]
        names += [f"x {name:>{max(len(name), 6)}}" for name in self.baselines]
        print(" ".join([*names, f"{'elsewhere':>30}", "   error"]), file=self.out, flush=True)

    def cell(self, rows: Iterable[Row]) -> None:
        """Print the rows of one cell."""
        rows = list(rows)
        base = {name: best(row for row in rows if row["backend"] == name) for name in self.baselines}
        for row in rows:
            print(self._line(row, base), file=self.out)
        self.out.flush()

    def details(self, rows: Iterable[Row]) -> None:
        """Print what is known beyond time_us: without graphs, experts only, host, kernels; all per layer."""
        rows = [row for row in rows if row.get("time_us_no_graphs")]
        if not rows:
            return
        names = ("time_us", "time_us_no_graphs", "experts_only_us", "host_us", "kernel_us", "launches")
        titles = ("time_us", "no graphs", "experts", "host", "kernels", "launches")
        head = f"\n{'case':<16} {'T':>5} {'quant':<11} {'load':<8} {'backend':<16} {'config':<16}"
        print(head, *(f"{title:>9}" for title in titles), " longest kernels, us", file=self.out)
        for row in rows:
            cells = [f"{row[name]:9.1f}" if row.get(name) is not None else f"{'-':>9}" for name in names]
            longest = ", ".join(f"{k[:40]} {us:.1f}" for k, us in list(row.get("kernels", {}).items())[:3])
            start = f"{row['case']:<16} {row['tokens']:>5} {row['quant']:<11} {row['load']:<8}"
            print(start, f"{row['backend']:<16} {row['config']:<16}", *cells, f" {longest}", file=self.out)
        self.out.flush()

    def _line(self, row: Row, base: Mapping[str, Row | None]) -> str:
        names = ("case", "tokens", "dtype", "quant", "load", "backend", "config")
        values: list[Any] = [row[name] for name in names]
        us, floor = row["time_us"], row["floor_us"]
        if us is None:
            line = " ".join(f"{v:{w}}" for v, (_, w) in zip(values, _COLUMNS, strict=False))
            return f"{line} {row['status']}: {row['reason']}"
        values += [f"{us:.1f}", f"{row['spread']:.1%}", f"{row['tflops']:.1f}", f"{row['gb_per_s']:.0f}"]
        values += [f"{floor:.1f}", f"{us / floor:.2f}", f"{floor / us:.0%}"]
        cells = [f"{v:{w}}" for v, (_, w) in zip(values, _COLUMNS, strict=True)]
        for name in self.baselines:
            other = base[name]
            known = other is not None and row["kind"] != "bound"
            cells.append(f"{other['time_us'] / us if other and known else '-':>{max(len(name), 6) + 2}.4}")
        rival = best(self.rivals.get(cell_of(row), []))
        cells.append(f"{'{:.1f} {}'.format(rival['time_us'], rival['rival']) if rival else '-':>30.30}")
        error = row["error"]
        return " ".join([*cells, f"{error:8.1e}" if error is not None else f"{'-':>8}"])


class Progress:
    """A bar on stderr; where that is no terminal, a line now and then."""

    def __init__(self, total: int, out: TextIO | None = None) -> None:
        self.total, self.out = total, out or sys.stderr
        self.start, self.shown = time.monotonic(), 0.0
        self.done = 0

    def __call__(self, text: str, *, finished: int = 0, last: bool = False) -> None:
        """Show what is being done, ``finished`` more cells being done."""
        self.done += finished
        now, terminal = time.monotonic(), self.out.isatty()
        if not last and now - self.shown < (0.1 if terminal else 15):
            return
        self.shown = now
        share = self.done / max(self.total, 1)
        bar = "#" * round(24 * share)
        line = f"[{bar:<24}] {self.done}/{self.total} cells, {now - self.start:.0f} s, {text}"
        end = "\n" if last or not terminal else ""
        print(f"\r{line:<100.100}" if terminal else line, file=self.out, end=end, flush=True)
