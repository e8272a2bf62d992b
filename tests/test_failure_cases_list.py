"""Every failure case is either tested or listed as not applicable yet."""

from __future__ import annotations

import re
from pathlib import Path

from failure_cases import CASES, NOT_YET


def ids_in_test_names() -> set[str]:
    names = []
    here = Path(__file__).parent
    for path in [*sorted(here.glob("test_failure_cases_*.py")), here / "test_swap_ab.py"]:
        names += re.findall(r"^ *def test_([a-z]\d+)_", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {name.upper() for name in names}


def test_every_case_is_tested_or_not_applicable_yet() -> None:
    tested = ids_in_test_names()
    assert tested - CASES.keys() == set(), "tests of unknown cases"
    assert NOT_YET.keys() - CASES.keys() == set(), "unknown cases"
    assert tested & NOT_YET.keys() == set(), "tested, so no longer to be listed"
    assert CASES.keys() - tested - NOT_YET.keys() == set(), "neither tested nor listed"


def test_reasons_are_given() -> None:
    for reason in (*CASES.values(), *NOT_YET.values()):
        assert len(reason.split()) > 3
