"""What command lines of this package have in common: names out of a list, and counts."""

from __future__ import annotations

from collections.abc import Sequence

from absl import app

ALL = "all"


def choose(flag: str, asked: Sequence[str], known: Sequence[str], extra: Sequence[str] = ()) -> list[str]:
    """The names that were asked for; "all" means those known.

    Args:
      flag: Its name.
      asked: Its value.
      known: Names, in the order of "all".
      extra: Names that "all" does not mean.

    Raises:
      UsageError: A name is not known.
    """
    if list(asked) == [ALL]:
        return list(known)
    if unknown := [name for name in asked if name not in (*known, *extra)]:
        raise app.UsageError(f"--{flag}: no {', '.join(unknown)}; there are {', '.join((*known, *extra))}")
    return list(asked)


def counts(flag: str, values: Sequence[str]) -> list[int]:
    """Whole numbers above 0; raises UsageError for others."""
    if wrong := [value for value in values if not value.isdecimal() or not int(value)]:
        raise app.UsageError(f"--{flag}: counts above 0; got {', '.join(wrong)}")
    return [int(value) for value in values]
