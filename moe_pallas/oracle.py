"""The oracle: which backend serves a call. Pure Python on static facts; needs no device."""

from __future__ import annotations

import dataclasses

from moe_pallas.spec import Problem

BACKENDS = ("xla",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """The oracle's answer.

    Attributes:
      backend: Name of the backend that runs the call.
      reason: Why this one.
    """

    backend: str
    reason: str


def select_backend(problem: Problem, backend: str = "auto") -> Selection:
    """Choose the backend for a call.

    Args:
      problem: The call.
      backend: ``"auto"``, or the name of a backend, which is then used or refused.

    Returns:
      `Selection`.

    Raises:
      ValueError: No backend has that name.

    Example:
      >>> from moe_pallas import MoESpec, Problem, select_backend
      >>> spec = MoESpec(num_experts=8, top_k=2, hidden_size=64, intermediate_size=96)
      >>> select_backend(Problem(spec=spec, num_tokens=1, dtype="bfloat16")).backend
      'xla'
    """
    check_backend(backend)
    if backend == "auto":
        return Selection(backend="xla", reason="the portable backend is the only one so far")
    return Selection(backend=backend, reason="asked for explicitly")


def check_backend(backend: str) -> None:
    """Raise ValueError unless ``backend`` is "auto" or the name of one."""
    if backend not in ("auto", *BACKENDS):
        names = ", ".join(repr(name) for name in ("auto", *BACKENDS))
        raise ValueError(f"There is no backend {backend!r}; there are {names}.")
