"""What the page on serving shows runs, and what it says of the compilation cache holds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from failure_cases import assert_same_bits

from moe_pallas.warmup import no_recompile, token_buckets

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
FIRST, STEP, CACHE, LOAD, EXPORT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(BUILD,) = re.findall(r"^python -m (.*)$", PAGE, re.MULTILINE)


def fewer(code: str) -> str:
    """The same with at most 8 tokens: four programs."""
    return code.replace("256", "8").replace("257", "9")


def run_python(folder: Path, *arguments: str) -> str:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command, variables = [sys.executable, *arguments], os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    page: dict = {}
    exec(fewer(FIRST + STEP), page)
    assert capsys.readouterr().out == "[1, 2, 4, 8] True\n"
    assert list(page["programs"]) == [1, 2, 4, 8]
    assert (len(token_buckets(256)), len(token_buckets(8192))) == (9, 14)  # as the page says


def test_exported_programs_are_the_same() -> None:
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    page: dict = {}
    exec(fewer(FIRST + STEP), page)
    compiled = page["programs"]
    exec(EXPORT, page)
    exported = page["programs"]
    assert list(exported) == list(compiled) == [1, 2, 4, 8]
    x = np.random.default_rng(0).standard_normal((4, 64), np.float32)
    call = page["params"], np.zeros(8, np.int32), x, np.int32(3)
    with no_recompile():
        for got, expected in zip(exported[4](*call), compiled[4](*call), strict=True):
            assert_same_bits(got, expected)


def test_the_command_builds_what_the_server_loads(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(fewer(f"{FIRST}\n{STEP}\ndef build():\n    return step, args\n"))
    said = run_python(tmp_path, "-m", *fewer(BUILD).replace("h200", "here").split())
    assert said.startswith("step.bundle: 4 programs, ")
    assert run_python(tmp_path, "-c", f"{LOAD}\nprint(list(programs))") == "[1, 2, 4, 8]\n"


COUNT = """
import collections
import jax
counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.rpartition("/")[2]]))
"""
TELL = """
print(counts["cache_hits"], counts["cache_misses"])
"""


def test_a_second_start_compiles_nothing_with_the_compilation_cache(tmp_path: Path) -> None:
    cache = CACHE.replace("/var/cache/moe_pallas", str(tmp_path / "cache"))
    hits, misses = [], []
    for _ in range(2):
        *_, last = run_python(tmp_path, "-c", COUNT + cache + fewer(FIRST) + TELL).splitlines()
        hits.append(int(last.split()[0]))
        misses.append(int(last.split()[1]))
    assert (hits[0], misses[1]) == (0, 0)
    assert hits[1] == misses[0] > 4
