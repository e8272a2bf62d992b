"""The search for configurations, with clocks made up; and once as it is run, by the portable backend."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import search
from benchmarks.cases import MODELS, Cell
from benchmarks.roofline import floor_us
from benchmarks.search import Job, Outcome, candidates, merge, read_table, report, tune
from benchmarks.session import Options
from moe_pallas import MoESpec, select_backend
from moe_pallas.configs.heuristics import default_config
from moe_pallas.configs.lookup import Config, file_name
from moe_pallas.spec import H200

ROOT = Path(__file__).resolve().parent.parent
DEVICE, DATE = "NVIDIA H200", "2026-11-30"


def job(tokens: int, backend: str = "swap_ab", model: str = "olmoe", quant: str = "none") -> Job:
    return Job(Cell(case=model, spec=MODELS[model], tokens=tokens, dtype="bfloat16", quant=quant), backend)


class Clock:
    """A timer to which configurations with other stages than the model's choice are the fastest."""

    def __init__(self, gain: float = 2.0, fails: Sequence[Config] = (), stops_at: int = 0) -> None:
        self.gain, self.fails, self.stops_at = gain, fails, stops_at
        self.calls: list[tuple[int, int, bool]] = []

    def __call__(
        self, cell: Cell, backend: str, configs: Sequence[Config], is_final: bool
    ) -> dict[Config, float]:
        if cell.tokens == self.stops_at:
            raise KeyboardInterrupt
        self.calls.append((cell.tokens, len(configs), is_final))
        return {
            config: 100.0 if config.num_stages == configs[0].num_stages else 100.0 / self.gain
            for config in configs
            if config not in self.fails
        }


@pytest.mark.parametrize("backend", ["swap_ab", "grouped_gemm"])
@pytest.mark.parametrize("quant", ["none", "fp8_tensor", "fp8_block"])
def test_candidates_are_legal_and_begin_with_the_model_s_choice(backend: str, quant: str) -> None:
    some = job(64, backend, quant=quant)
    problem = some.cell.problem
    few, more = candidates(some, 4, near=False), candidates(some, 4)
    assert few[0] == more[0] == default_config(backend, problem)
    assert 1 <= len(few) <= 5 and set(few) < set(more) and len(set(more)) == len(more)
    assert all(config.validate(problem) is None for config in more)
    assert {config.num_stages for config in more} > {few[0].num_stages}


def test_the_fastest_is_found_and_used(tmp_path: Path) -> None:
    clock = Clock()
    assert tune([job(8)], clock, tmp_path, DEVICE) == Outcome(found=1)
    (entry,) = read_table(tmp_path, DEVICE).values()
    assert (entry.time_us, entry.model_us) == (50.0, 100.0)
    assert entry.config.num_stages != default_config("swap_ab", entry.problem).num_stages
    selection = select_backend(job(8).cell.problem, device=H200, tables=tmp_path)
    assert (selection.config, selection.source) == (entry.config, "table entry")
    # All, then the fastest few and the model's choice.
    (_, many, first), (_, finalists, final) = clock.calls
    assert (first, final) == (False, True) and 1 < finalists <= search.FINALISTS + 1 < many


def test_what_is_as_fast_as_the_model_s_choice_does_not_replace_it(tmp_path: Path) -> None:
    clock = Clock(gain=1.004)
    tune([job(8)], clock, tmp_path, DEVICE)
    (entry,) = read_table(tmp_path, DEVICE).values()
    assert entry.config == default_config("swap_ab", entry.problem)
    assert entry.time_us == entry.model_us and len(clock.calls) == 1


def test_tables_are_merged(tmp_path: Path) -> None:
    tune([job(8), job(1)], Clock(), tmp_path, DEVICE)
    tune([job(64), job(512, "grouped_gemm")], Clock(), tmp_path, DEVICE)
    table = read_table(tmp_path, DEVICE)
    assert sorted(entry.problem.num_tokens for entry in table.values()) == [1, 8, 64, 512]
    again = Clock(gain=4)
    assert tune([job(8)], again, tmp_path, DEVICE, again=True) == Outcome(found=1)
    new = read_table(tmp_path, DEVICE)
    assert new.keys() == table.keys()
    assert new[job(8).key].time_us == 25.0 and new[job(1).key] == table[job(1).key]
    merge(tmp_path, "another device", [table[job(1).key]], DATE)
    assert {path.name for path in tmp_path.iterdir()} == {file_name(DEVICE), "another_device.json"}


def test_an_interrupted_search_keeps_what_it_found_and_goes_on(tmp_path: Path) -> None:
    jobs = [job(1), job(8), job(64)]
    assert tune(jobs, Clock(stops_at=8), tmp_path, DEVICE) == Outcome(found=1, is_stopped=True)
    assert [entry.problem.num_tokens for entry in read_table(tmp_path, DEVICE).values()] == [1]
    clock, shown = Clock(), []
    outcome = tune(jobs, clock, tmp_path, DEVICE, progress=lambda text, finished: shown.append(text))
    assert outcome == Outcome(found=2, skipped=1)
    assert {tokens for tokens, *_ in clock.calls} == {8, 64}
    assert shown[0].endswith("in the table")
    assert [path.name for path in tmp_path.iterdir()] == [file_name(DEVICE)]


def test_a_killed_write_leaves_the_old_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune([job(1)], Clock(), tmp_path, DEVICE)
    before = (tmp_path / file_name(DEVICE)).read_text()

    def killed(*paths: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    assert tune([job(8)], Clock(), tmp_path, DEVICE) == Outcome(is_stopped=True)
    assert (tmp_path / file_name(DEVICE)).read_text() == before


def test_out_of_time_no_job_is_begun(tmp_path: Path) -> None:
    assert tune([job(1)], Clock(), tmp_path, DEVICE, is_late=lambda: True) == Outcome()
    assert read_table(tmp_path, DEVICE) == {}


def test_what_fails_is_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, *others = candidates(job(8), 16)
    fastest = [config for config in others if config.num_stages != first.num_stages]
    outcome = tune([job(8)], Clock(fails=fastest), tmp_path / "some", DEVICE)
    assert outcome == Outcome(found=1)
    (entry,) = read_table(tmp_path / "some", DEVICE).values()
    assert entry.config == first
    outcome = tune([job(8), job(64)], Clock(fails=[first]), tmp_path / "first", DEVICE)
    assert outcome.failed == ("olmoe T=8 bfloat16 uniform swap_ab",) and outcome.found == 1
    assert "could not be timed" in capsys.readouterr().err


def test_a_malformed_table_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / file_name(DEVICE)
    path.write_text("{}")
    with pytest.raises(ValueError, match="is no table of configurations"):
        tune([job(8)], Clock(), tmp_path, DEVICE)
    assert path.read_text() == "{}"


def test_regret_is_reported(tmp_path: Path) -> None:
    tune([job(8)], Clock(gain=1.21), tmp_path, DEVICE)
    tune([job(1)], Clock(gain=1.0), tmp_path, DEVICE)
    head, *rows, summary = report(read_table(tmp_path, DEVICE))
    assert "regret" in head and [row.split()[-1] for row in rows] == ["0.0%", "21.0%"]
    assert summary == (
        "swap_ab none: regret of the cost model, geometric mean 10.0%, worst 21.0%, over 2 problems"
    )


def test_the_harness_times_each_configuration() -> None:
    spec = MoESpec(num_experts=8, top_k=2, hidden_size=128, intermediate_size=128)
    cell = Cell(case="tiny", spec=spec, tokens=2, dtype="bfloat16")
    roofs = {"read_gb_per_s": 10.0, "matmul_tflops": {"bfloat16": 0.5}}
    assert floor_us(cell, roofs) > 0
    options, shown = Options(num_layers=2, rounds=2, seconds=0.002, detail_tokens=()), []
    harness = search.Harness(roofs, options, portable=True, progress=shown.append)
    chosen = default_config("swap_ab", cell.problem)
    configs = [chosen, dataclasses.replace(chosen, num_stages=4)]
    times = harness(cell, "swap_ab", configs, False)
    assert times.keys() == set(configs) and all(time > 0 for time in times.values())
    assert harness.red == [] and "compile 2/2" in " ".join(shown)
    # The kernels themselves can't run here: both fail, and say so.
    assert search.Harness(roofs, options)(cell, "swap_ab", configs[:1], False) == {}


def test_from_the_command_line(tmp_path: Path) -> None:
    flags = [
        "--tiny",
        "--tokens=1",
        "--num_candidates=1",
        "--noneighbours",
        "--num_rounds=2",
        "--seconds=0.002",
    ]
    command = [sys.executable, "-m", "benchmarks.tune", *flags]
    environment = os.environ | {"MOE_PALLAS_TABLES": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 found, 0 were in the table" in done.stderr and "over 1 problems" in done.stdout
    (path,) = tmp_path.iterdir()
    (entry,) = json.loads(path.read_text())["entries"]
    assert (entry["kernel"], entry["num_tokens"]) == ("swap_ab", 1)
    del environment["MOE_PALLAS_TABLES"]
    for wrong, words in (([], "says where the tables are"), (["--tables", "t", "--quants", "x"], "no x;")):
        done = subprocess.run([*command, *wrong], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 1 and words in done.stdout + done.stderr
