"""What the files around the package promise: pins, versions, and a search for Python that explains itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# What the Makefile installs; `bench` is left out.
INSTALLED_EXTRAS = ["aot", "cuda", "flax", "checkpoints", "examples", "test", "lint"]


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_name(requirement: str) -> str:
    return normalised(re.match(r"[\w.-]+", requirement).group())


PINS = {
    normalised(line.split("==")[0]): line.split("==")[1]
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
}


def test_every_requirement_is_pinned() -> None:
    wanted = list(PROJECT["dependencies"])
    for extra in INSTALLED_EXTRAS:
        wanted += PROJECT["optional-dependencies"][extra]
    assert {requirement_name(requirement) for requirement in wanted} - PINS.keys() == set()


def test_jax_is_pinned_at_the_oldest_release_allowed() -> None:
    """The pinned environment tests the floor of what the package accepts; JAX=latest tests the top."""
    for name in ["jax", "jaxlib"]:
        assert f"{name}>={PINS[name]}" in PROJECT["dependencies"]
    for name in ["jax-cuda13-plugin", "jax-cuda13-pjrt"]:
        assert PINS[name] == PINS["jax"]


def test_python_floor_is_the_same_everywhere() -> None:
    chosen = (ROOT / ".python-version").read_text(encoding="utf-8").strip()
    assert chosen == "3.12"
    assert PROJECT["requires-python"] == f">={chosen}"
    assert f'needed="{chosen}"' in (ROOT / ".ci/venv.sh").read_text(encoding="utf-8")


def test_package_says_that_it_is_typed() -> None:
    assert (ROOT / "moe_pallas/py.typed").is_file()


def test_what_builds_the_packages_is_pinned() -> None:
    assert {"build", "packaging", "pyproject-hooks"} <= PINS.keys()


def test_packages_take_everything_in_the_package() -> None:
    """`make package` looks into both; here is what would leave a file out, seen at once."""
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    assert hatch["targets"]["wheel"] == {"packages": ["moe_pallas"]}
    assert "/moe_pallas" in hatch["targets"]["sdist"]["include"]
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()  # hatchling leaves these out
    data = {path.suffix for path in (ROOT / "moe_pallas").rglob("*") if path.is_file()} - {".pyc"}
    assert not {f"*{suffix}" for suffix in data} & set(ignored)


def fake_program(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def make_environment(tmp_path: Path, path: list[Path], python: str = "") -> subprocess.CompletedProcess[str]:
    """Run .ci/venv.sh with a PATH of fakes and the few tools that it needs, linked one by one."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    for tool in ["sh", "sed", "head", "cat"]:
        source = next(Path(d, tool) for d in os.environ["PATH"].split(os.pathsep) if Path(d, tool).exists())
        (tools / tool).symlink_to(source)
    return subprocess.run(
        ["sh", str(ROOT / ".ci/venv.sh"), str(tmp_path / "venv"), "test"],
        env={"PATH": os.pathsep.join(map(str, [*path, tools])), "PYTHON": python},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


FAILING_SHIM = "echo 'command not found' >&2; exit 127"
TOO_OLD = "cat >/dev/null; echo 'is Python 3.11'"
# Good enough by the test of it; then says how it is used, and stops.
GOOD = 'if [ "$1" = "-" ]; then exit 0; fi; echo "used: $*"; exit 7'


def test_search_passes_over_pythons_that_fail_or_are_old(tmp_path: Path) -> None:
    fake_program(tmp_path / "shims", "python3.12", FAILING_SHIM)
    fake_program(tmp_path / "shims", "python3", TOO_OLD)
    fake_program(tmp_path / "system", "python3", GOOD)
    fake_program(tmp_path / "system", "python3.13", FAILING_SHIM)
    done = make_environment(tmp_path, [tmp_path / "shims", tmp_path / "system"])
    assert done.returncode == 7
    assert f"with {tmp_path}/system/python3 " in done.stdout
    assert f"used: -m venv --clear {tmp_path}/venv" in done.stdout


@pytest.mark.parametrize("name", ["python3.12", "python3", "python3.13", "python3.14"])
def test_search_knows_the_name(tmp_path: Path, name: str) -> None:
    good = fake_program(tmp_path / "bin", name, GOOD)
    assert f"with {good} " in make_environment(tmp_path, [tmp_path / "bin"]).stdout


def test_search_explains_what_it_tried(tmp_path: Path) -> None:
    shim = fake_program(tmp_path / "bin", "python3.12", FAILING_SHIM)
    old = fake_program(tmp_path / "bin", "python3", TOO_OLD)
    done = make_environment(tmp_path, [tmp_path / "bin"])
    assert done.returncode == 1
    assert f"{shim} does not run" in done.stderr
    assert f"{old} is Python 3.11" in done.stderr
    assert "PYTHON=/path/to/python3.12" in done.stderr


def test_search_explains_an_empty_path(tmp_path: Path) -> None:
    done = make_environment(tmp_path, [])
    assert done.returncode == 1
    assert "there is no python3.12, python3, python3.13 or python3.14 on the PATH" in done.stderr


@pytest.mark.parametrize(
    ("nvidia_smi", "extras"),
    [
        ("echo 580.159.04; echo 580.159.04", "[test,cuda]"),
        ("echo 1000.1", "[test,cuda]"),
        ("echo 575.57.08", "[test]"),
        ("echo 'NVIDIA-SMI has failed because there is no driver'; exit 9", "[test]"),
        ("echo 'No devices were found'; exit 6", "[test]"),
        ("exit 1", "[test]"),
    ],
)
def test_cuda_is_installed_where_the_driver_can_run_it(tmp_path: Path, nvidia_smi: str, extras: str) -> None:
    fake_program(tmp_path / "bin", "python3.12", GOOD)
    fake_program(tmp_path / "bin", "nvidia-smi", nvidia_smi)
    done = make_environment(tmp_path, [tmp_path / "bin"])
    assert f"installing .{extras} " in done.stdout
    assert ("575.57.08 is too old for CUDA 13" in done.stderr) == ("575" in nvidia_smi)


def test_explicit_python_is_used_or_refused(tmp_path: Path) -> None:
    fake_program(tmp_path / "bin", "python3.12", GOOD)
    other = fake_program(tmp_path / "elsewhere", "mine", GOOD)
    assert f"with {other} " in make_environment(tmp_path, [tmp_path / "bin"], str(other)).stdout


def test_explicit_python_that_is_too_old_is_not_replaced(tmp_path: Path) -> None:
    fake_program(tmp_path / "bin", "python3.12", GOOD)
    old = fake_program(tmp_path / "elsewhere", "mine", TOO_OLD)
    done = make_environment(tmp_path, [tmp_path / "bin"], str(old))
    assert done.returncode == 1
    assert f"{old} is Python 3.11" in done.stderr


def add_compiler(tmp_path: Path, pip: str) -> subprocess.CompletedProcess[str]:
    """Run .ci/aot.sh on an environment whose pip is a fake."""
    (tmp_path / "aot").mkdir()
    fake_program(tmp_path / "bin", "python", f'if [ "$1" = "-" ]; then exec {sys.executable} -; fi; {pip}')
    return subprocess.run(
        ["sh", str(ROOT / ".ci/aot.sh"), str(tmp_path), "--constraint", "constraints.txt"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_compiler_is_of_the_version_of_jax_and_beside_the_environment(tmp_path: Path) -> None:
    done = add_compiler(tmp_path, f'echo "used: $*"; mkdir {tmp_path}/aot')
    assert done.returncode == 0
    used = f"used: -m pip install --quiet --target {tmp_path}/aot --constraint constraints.txt "
    assert f"{used}jax-cuda13-plugin=={jax.__version__} nvidia-" in done.stdout
    assert (tmp_path / "aot/.made").is_file()


def test_compiler_that_cannot_be_had_is_done_without(tmp_path: Path) -> None:
    done = add_compiler(tmp_path, f"mkdir {tmp_path}/aot; exit 1")
    assert done.returncode == 0
    assert "the tests marked aot will be skipped" in done.stderr
    assert not (tmp_path / "aot").exists()
