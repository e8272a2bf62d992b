"""JSON from files that nobody vouches for, and how to quote from it in a message.

A leaf: standard library only. What `parse_json` returns is bounded in depth and says everything once; whether
its fields make sense is for the caller to check, and how large a file may be, before it is read.
"""

from __future__ import annotations

import json
from typing import Any

_MAX_DEPTH = 64  # far past any real file's, and well within Python's stack for ==, repr and hash
_INT64_DIGITS = 19
_MAX_NAME = 1024


def parse_json(content: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Integers past 64 bits become floats: no count, size or offset is one, and arithmetic on thousands of
    digits is a trap of its own.

    Args:
      content: UTF-8, one object.

    Returns:
      The object.

    Raises:
      ValueError: Not UTF-8, no JSON, no object, nested more than 64 deep, or with a name twice in one object.

    Example:
      >>> parse_json(b'{"a": 1, "a": 2}')
      Traceback (most recent call last):
      ValueError: it says 'a' twice
    """
    too_deep = f"it is nested more than {_MAX_DEPTH} deep"
    try:
        parsed = json.loads(content.decode("utf-8"), object_pairs_hook=_once, parse_int=_int)
    except RecursionError:
        raise ValueError(too_deep) from None
    level = [parsed]
    for _ in range(_MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
    if level:
        raise ValueError(too_deep)
    if not isinstance(parsed, dict):
        raise ValueError(f"it holds a JSON {type(parsed).__name__}; need an object")
    return parsed


def is_name(text: Any) -> bool:
    """Whether a name can be shown: a text of at most 1024 characters that prints as it stands."""
    return isinstance(text, str) and len(text) <= _MAX_NAME and text.isprintable()


def clipped(text: str, limit: int = 200) -> str:
    """Cut a text to what a message can hold.

    Example:
      >>> clipped("x" * 1000, limit=6)
      'xxxxxx… (1000 characters)'
    """
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def shortened(items: list[str], limit: int = 8) -> str:
    """Join a list for a message: all of a short one, the head and the length of a long one."""
    rest = f", … ({len(items)} in all)" if len(items) > limit else ""
    return ", ".join(items[:limit]) + rest


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"it says {clipped(ascii(twice))} twice")
    return result


def _int(digits: str) -> int | float:
    return int(digits) if len(digits.lstrip("-")) <= _INT64_DIGITS else float(digits)


def _inside(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
