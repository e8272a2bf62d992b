"""The exception classes of our own; everything else is ValueError or TypeError."""

from __future__ import annotations


class UnsupportedError(NotImplementedError):
    """A legal problem that the requested backend or loader can't do.

    Args:
      backend: What was asked, for example ``"xla"`` or ``"from_huggingface"``.
      reason: Why it can't be done: what was got and what is needed.
      hint: What would work instead.

    Example:
      >>> from moe_pallas import MoESpec, Problem, UnsupportedError, explain
      >>> spec = MoESpec(num_experts=8, top_k=2, hidden_size=64, intermediate_size=96)
      >>> try:
      ...     explain(Problem(spec=spec, num_tokens=4, dtype="float32"), backend="swap_ab")
      ... except UnsupportedError as error:
      ...     print(error.backend)
      swap_ab
    """

    def __init__(self, backend: str, reason: str, hint: str) -> None:
        self.backend, self.reason, self.hint = backend, reason, hint
        super().__init__(f"{backend}: {reason} What works: {hint}")

    def __reduce__(self) -> tuple[type[UnsupportedError], tuple[str, str, str]]:
        return type(self), (self.backend, self.reason, self.hint)


class RecompileError(RuntimeError):
    """Something was about to be compiled inside `moe_pallas.warmup.no_recompile`."""
