"""Everything that is measured for one model, dtype and quant: compiled steps, gate, times.

    Session(cells, …)   which variant and configuration can do which cell
    .compile()          all programs, in threads; weights and truth are computed meanwhile
    .run()              cell by cell: gate, then the variants that passed against each other
    .profile()          kernels of the detailed cells

Profiling comes after all timing of a run, so that no profiler is attached while anything is timed.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gate, kernel_times
from benchmarks.cases import Cell
from benchmarks.inputs import Inputs
from benchmarks.roofline import floor_us, rest
from benchmarks.timing import (
    GRAPHS,
    NO_GRAPHS,
    Step,
    Timing,
    compile_all,
    compile_step,
    host_time_us,
    measure,
)
from benchmarks.variants import BOUND, Variant
from moe_pallas import Routing, route

Row = dict[str, Any]

LAYER, NO_GRAPH, EXPERTS = "layer", "layer, no graphs", "experts only"
DETAIL_TOKENS = (1, 8, 64, 512, 4096)
_KERNELS_KEPT = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How to measure.

    Attributes:
      num_layers: In a step; 0: by the cell's floor, see `chain_length`.
      memory_bytes: For all weight sets together; there are two at least.
      rounds: Visits to each variant.
      seconds: Aimed at for one variant's visits to one cell.
      detail_tokens: Token counts that are also timed without graphs and experts only, and profiled.
      checked_layers: Layers of a step whose outputs go through the gate.
      deadline: Time (`time.monotonic`) at which to stop.
    """

    num_layers: int = 0
    memory_bytes: float = 26e9
    rounds: int = 7
    seconds: float = 0.15
    detail_tokens: Sequence[int] = DETAIL_TOKENS
    checked_layers: int = 2
    deadline: float = float("inf")


class Entry(NamedTuple):
    """A variant in one configuration."""

    variant: Variant
    config: str


class Session:
    """Measures the cells of one model, dtype and quant.

    Args:
      cells: All of one ``case``, ``dtype`` and ``quant``.
      variants: What to time.
      roofs: From `measure_roofs`.
      options: How.
      progress: Called with what is being done, the number done, and their total.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        variants: Sequence[Variant],
        roofs: dict[str, Any],
        options: Options,
        progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    ) -> None:
        self.cells, self.options, self.progress = list(cells), options, progress
        self.roofs = roofs
        floors = [floor_us(cell, roofs) for cell in self.cells]
        self.inputs = Inputs(self.cells, floors, options.num_layers, options.memory_bytes)
        self.rows: dict[tuple[Cell, Entry], Row] = {}
        self._entries: dict[Cell, list[Entry]] = {cell: [] for cell in self.cells}
        self._programs: dict[str, dict[str, Any] | BaseException] = {}
        self._truths: dict[tuple[str, int], gate.Truth] = {}
        platform = jax.default_backend()
        for cell, floor in zip(self.cells, floors, strict=True):
            for variant in variants:
                reason = variant.supports(cell, platform)
                for config in ("",) if reason else variant.configs(cell):
                    entry = Entry(variant, config)
                    self.rows[cell, entry] = _new_row(cell, entry, floor, reason)
                    if reason is None:
                        self._entries[cell].append(entry)

    def _is_detailed(self, cell: Cell, entry: Entry) -> bool:
        return cell.tokens in self.options.detail_tokens and entry.variant.kind != BOUND

    def _name(self, cell: Cell, entry: Entry) -> str:
        """Of a program; loads with the same shapes have the same programs."""
        variant, layers = entry.variant, self.inputs.num_layers(cell)
        groups = cell.experts_hit if variant.kind == BOUND else cell.spec.num_experts
        parts = (cell.case, f"T{cell.tokens}", cell.quant, variant.name, entry.config, f"{layers}x{groups}")
        return re.sub(r"\W+", "_", "_".join(parts))

    def _compile_entry(self, cell: Cell, entry: Entry) -> dict[str, Any]:
        """Kind → program. In one job, since XLA tunes a product once if its programs come one by one."""
        name, layers = self._name(cell, entry), self.inputs.num_layers(cell)
        x, weights = self.inputs.shapes(cell, entry.variant)
        logits = jax.ShapeDtypeStruct((cell.tokens, cell.spec.num_experts), jnp.float32)
        detailed = self._is_detailed(cell, entry)
        kinds = {LAYER: GRAPHS} | ({NO_GRAPH: NO_GRAPHS} if detailed else {})
        layer = entry.variant.layer(cell, entry.config)
        routings = self.inputs.num_routings(cell)
        programs = compile_step(layer, (x, [logits] * routings, weights), layers, name, kinds)
        if detailed and entry.variant.experts:
            routing = jax.eval_shape(functools.partial(route, spec=cell.spec), logits)
            experts = entry.variant.experts(cell, entry.config)
            args = (x, [routing] * routings, weights)
            programs |= compile_step(experts, args, layers, f"{name}_experts", {EXPERTS: GRAPHS})
        return programs

    def _compile_router(self, tokens: int) -> dict[str, Any]:
        spec = self.inputs.spec
        logits = jax.ShapeDtypeStruct((tokens, spec.num_experts), jnp.float32)
        return {"route": jax.jit(functools.partial(route, spec=spec)).lower(logits).compile()}

    def compile(self) -> None:
        """Compile everything; meanwhile make the weights and compute the truth."""
        jobs: dict[str, Callable[[], dict[str, Any]]] = {}
        for cell in self.cells:
            for entry in self._entries[cell]:
                jobs[self._name(cell, entry)] = functools.partial(self._compile_entry, cell, entry)
            if cell.tokens in self.options.detail_tokens:
                jobs[f"route {cell.tokens}"] = functools.partial(self._compile_router, cell.tokens)
        with ThreadPoolExecutor(1) as pool:
            truth = pool.submit(self._compute_truths)
            self._programs = compile_all(
                jobs,
                deadline=self.options.deadline,
                progress=functools.partial(self.progress, "compile"),
            )
            truth.result()

    def _programs_of(self, cell: Cell, entry: Entry) -> dict[str, Any]:
        """Kind → program; raises what compiling them raised."""
        programs = self._programs[self._name(cell, entry)]
        if isinstance(programs, BaseException):
            raise programs
        return programs

    def _compute_truths(self) -> None:
        for load in dict.fromkeys(cell.load for cell in self.cells):
            cells = [cell for cell in self.cells if cell.load == load]
            largest = max(cells, key=lambda cell: cell.tokens)
            for layer in range(min(self.options.checked_layers, self.inputs.num_layers(largest))):
                weights = self.inputs.weights[layer]
                logits = self.inputs.logits(largest, layer)
                self._truths[load, layer] = gate.Truth(cells, logits, self.inputs.tokens, *weights)

    def run(self) -> Iterator[list[Row]]:
        """Measure cell by cell; yields the rows of each. After the deadline rows are left as they are."""
        for done, cell in enumerate(self.cells):
            self.progress("measure", done, len(self.cells))
            if time.monotonic() < self.options.deadline:
                self._run_cell(cell)
            yield [row for (owner, _), row in self.rows.items() if owner is cell]

    def _run_cell(self, cell: Cell) -> None:
        logits = self.inputs.layer_logits(cell)
        routings: list[Routing] = []
        if isinstance(programs := self._programs.get(f"route {cell.tokens}"), dict):
            routings = [Routing(*programs["route"](value)) for value in logits]
        converted: dict[Any, Any] = {}  # variants with the same conversion share what it makes
        steps: dict[str, dict[Entry, Step]] = {LAYER: {}, NO_GRAPH: {}, EXPERTS: {}}
        for entry in self._entries[cell]:
            row, convert = self.rows[cell, entry], entry.variant.weights(cell)
            try:
                programs = self._programs_of(cell, entry)
                if convert not in converted:
                    converted[convert] = self.inputs.step_weights(cell, convert)
                x, weights = self.inputs.rows(cell, entry.variant), converted[convert]
                for kind, program in programs.items():
                    taken = routings if kind == EXPERTS else logits
                    step = Step(
                        compiled=program, args=(x, taken, weights), num_layers=self.inputs.num_layers(cell)
                    )
                    row["error"] = self._check(cell, entry, step)
                    steps[kind][entry] = step
            except AssertionError as error:
                row.update(status="red", reason=f"{kind}: {_first_line(error)}")
                steps = {kind: {e: s for e, s in some.items() if e != entry} for kind, some in steps.items()}
            except TimeoutError as error:
                row.update(reason=_first_line(error))
            except Exception as error:
                row.update(status="failed", reason=_first_line(error))
        self._time(cell, steps)

    def _check(self, cell: Cell, entry: Entry, step: Step) -> float | None:
        """Gate: the third call's outputs, the first that surely come from a graph."""
        for _ in range(3):
            outputs = step()
        if entry.variant.kind == BOUND:
            gate.check_bound(np.asarray(outputs[0]))
            return None
        layers = range(min(step.num_layers, self.options.checked_layers))
        allowed = entry.variant.error_allowed
        errors = [self._truths[cell.load, i].check(cell, np.asarray(outputs[i]), allowed) for i in layers]
        return max(errors, default=None)

    def _time(self, cell: Cell, steps: dict[str, dict[Entry, Step]]) -> None:
        options = self.options
        how: Any = {"rest": rest(cell, self.roofs)}
        for entry, timing in measure(
            steps[LAYER], rounds=options.rounds, seconds=options.seconds, **how
        ).items():
            row = self.rows[cell, entry]
            if isinstance(timing, Timing):
                row.update(
                    status="ok",
                    time_us=timing.time_us,
                    queued_us=timing.queued_us,
                    spread=timing.spread,
                    tflops=cell.flops / (timing.time_us * 1e6),
                    gb_per_s=cell.min_bytes / (timing.time_us * 1e3),
                    num_layers=self.inputs.num_layers(cell),
                    weight_sets=self.inputs.num_weight_sets(cell),
                    bytes_until_reuse=self.inputs.num_weight_sets(cell)
                    * cell.experts_hit
                    * cell.expert_bytes,
                    rounds=timing.rounds,
                    calls=timing.calls,
                )
            else:
                row.update(status="failed", reason=_first_line(timing))
        for kind, field in ((NO_GRAPH, "time_us_no_graphs"), (EXPERTS, "experts_only_us")):
            some = {e: step for e, step in steps[kind].items() if self.rows[cell, e]["status"] == "ok"}
            for entry, timing in measure(some, rounds=5, seconds=options.seconds / 2, **how).items():
                if isinstance(timing, Timing):
                    self.rows[cell, entry][field] = timing.time_us
        for entry in steps[NO_GRAPH]:
            if self.rows[cell, entry]["status"] == "ok":
                self.rows[cell, entry]["host_us"] = host_time_us(steps[LAYER][entry])

    def profile(self) -> None:
        """Add the kernels' own times to the rows that were timed without graphs."""
        runs: dict[str, Step] = {}
        rows: dict[str, Row] = {}
        converted: dict[Any, Any] = {}
        longest = max(self.cells, key=self.inputs.num_weight_sets)
        for cell in self.cells:
            for entry in self._entries[cell]:
                row, name = self.rows[cell, entry], self._name(cell, entry)
                # The kernels of two loads of one program can't be told apart: the first load is taken.
                if row["status"] != "ok" or not self._is_detailed(cell, entry) or name in runs:
                    continue
                if (convert := entry.variant.weights(cell)) not in converted:
                    converted[convert] = self.inputs.step_weights(longest, convert)
                weights = converted[convert][: self.inputs.num_weight_sets(cell)]
                x, logits = self.inputs.rows(cell, entry.variant), self.inputs.layer_logits(cell)
                program = self._programs_of(cell, entry)[NO_GRAPH]
                runs[name] = Step(
                    compiled=program, args=(x, logits, weights), num_layers=self.inputs.num_layers(cell)
                )
                rows[name] = row
        for name, kernels in kernel_times.profile(runs).items() if runs else ():
            layers = runs[name].num_layers
            rows[name].update(
                kernel_us=kernels.total_us / layers,
                launches=kernels.launches / layers,
                kernels={k: round(us / layers, 3) for k, us in list(kernels.us.items())[:_KERNELS_KEPT]},
            )


def _new_row(cell: Cell, entry: Entry, floor: float, reason: str | None) -> Row:
    return {
        "case": cell.case,
        "tokens": cell.tokens,
        "dtype": cell.dtype,
        "quant": cell.quant,
        "load": cell.load,
        "backend": entry.variant.name,
        "kind": entry.variant.kind,
        "config": entry.config,
        "status": "skipped" if reason else "not reached",
        "reason": reason,
        "time_us": None,
        "spread": None,
        "floor_us": floor,
        "experts_hit": cell.experts_hit,
        "error": None,
        "min_bytes": cell.min_bytes,
        "flops": cell.flops,
    }


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
    return f"{type(error).__name__}: {lines[0]}"[:300]
