"""What the documentation shows runs: README's code, and the examples in docstrings."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
import types
from pathlib import Path

import pytest

import moe_pallas

README = (Path(__file__).parents[1] / "README.md").read_text()
MODULES = [m.name for m in pkgutil.walk_packages(moe_pallas.__path__, "moe_pallas.")]


def test_readme_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in first.splitlines() if line.strip()]) <= 15
    golden = Path(__file__).parent / "data" / "goldens" / "mixtral"
    namespace: dict[str, object] = {}
    exec(first + second.replace("path/to/checkpoint", str(golden)), namespace)
    assert capsys.readouterr().out == "(4, 16, 64) xla (8, 192, 64)\n"
    assert namespace["y"].shape == (4, 64)


def test_readme_names_files_that_exist() -> None:
    for path in re.findall(r"`((?:moe_pallas|examples|benchmarks|docs)/[\w./]*)`", README):
        assert (Path(__file__).parents[1] / path).exists(), path


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name: str) -> None:
    failures, _ = doctest.testmod(importlib.import_module(name))
    assert failures == 0


def test_public_names_are_few() -> None:
    """What only tests, benchmarks or type annotations need is in a submodule."""
    assert moe_pallas.__all__ == sorted(set(moe_pallas.__all__))
    assert len(moe_pallas.__all__) <= 25, "leave it in its submodule, or move another name there"
    shown = {name for name in vars(moe_pallas) if not name.startswith("_")}
    modules = {name for name in shown if isinstance(getattr(moe_pallas, name), types.ModuleType)}
    assert shown - modules == set(moe_pallas.__all__)


@pytest.mark.parametrize("name", moe_pallas.__all__)
def test_public_names_have_an_example_or_say_why_not(name: str) -> None:
    documentation = inspect.getdoc(getattr(moe_pallas, name)) or ""
    assert re.search(r"^Example:\n\s+>>> |^No example: \w+", documentation, re.MULTILINE)
