"""The correctness gate of a training step: parts of its gradients against float64, before any timing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.cases import Cell

Function = Callable[..., Any]
# By whether the variant is ours, relative to the norm of a part of the truth. Of products rounded to
# bfloat16, of their activation rounded once more and of a rounded result: up to 5e-3; JAX rounds in two more
# places.
ERROR_ALLOWED = {True: 1e-2, False: 2e-2}
_TOKENS_CHECKED, _FEATURES_CHECKED = 4, 4


def step_of(layer: Function, name: str) -> Any:
    """Make the step; ``name`` is the program's."""

    def step(x: jax.Array, logits: jax.Array, w13: jax.Array, w2: jax.Array, d_y: jax.Array) -> Any:
        y, pull_back = jax.vjp(layer, x, logits, w13, w2)
        return y, *pull_back(d_y)

    step.__name__ = step.__qualname__ = name
    return jax.jit(step)


class Truth:
    """Gradients in float64: all of some tokens, and some features of two experts.

    Args:
      cell: Softmax over all experts, renormalised, plain SwiGLU, gate and up stacked.
      arrays: x, logits, w13, w2 and d_y.
    """

    def __init__(self, cell: Cell, arrays: Sequence[Any]) -> None:
        self.spec = spec = cell.spec
        assert spec.renormalize and spec.gated and not spec.expert_bias, spec
        x, logits, self._w13, self._w2, d_y = arrays
        self._x, self._d_y = np.asarray(x), np.asarray(d_y)
        logits = np.asarray(logits, np.float64)
        self.ids = np.argsort(-logits, axis=1, kind="stable")[:, : spec.top_k]
        chosen = np.take_along_axis(logits, self.ids, 1)
        weights = np.exp(chosen - chosen.max(1, keepdims=True))
        self.weights = weights / weights.sum(1, keepdims=True)
        counts = np.bincount(self.ids.reshape(-1), minlength=spec.num_experts)
        self.tokens = np.unique(np.linspace(0, cell.tokens - 1, _TOKENS_CHECKED).astype(int))
        self.experts = np.unique([counts.argmax(), np.where(counts > 0, counts, counts.max()).argmin()])
        self.features = np.unique(np.linspace(0, spec.intermediate_size - 1, _FEATURES_CHECKED).astype(int))
        self.expected = dict(self._of_tokens()) | dict(self._of_experts())

    def _matrix(self, weights: jax.Array, expert: int, rows: Any = slice(None)) -> np.ndarray:
        return np.asarray(weights[expert][rows], np.float64)

    def _of_tokens(self) -> Iterator[tuple[str, np.ndarray]]:
        size, d_x, d_logits = self.spec.intermediate_size, [], []
        for token in self.tokens:
            x, d_y = (values[token].astype(np.float64) for values in (self._x, self._d_y))
            total, d_weights = np.zeros_like(x), []
            for expert, weight in zip(self.ids[token], self.weights[token], strict=True):
                w13, w2 = self._matrix(self._w13, expert), self._matrix(self._w2, expert)
                products, back = w13 @ x, d_y @ w2
                hidden, slopes = _swiglu(products[:size], products[size:])
                d_weights.append(back @ hidden)
                total += weight * np.concatenate([slope * back for slope in slopes]) @ w13
            weights = self.weights[token]
            line = np.zeros(self.spec.num_experts)
            line[self.ids[token]] = weights * (d_weights - weights @ d_weights)
            d_x.append(total)
            d_logits.append(line)
        yield "x", np.stack(d_x)
        yield "logits", np.stack(d_logits)

    def _of_experts(self) -> Iterator[tuple[str, np.ndarray]]:
        size, d_w13, d_w2 = self.spec.intermediate_size, [], []
        for expert in self.experts:
            tokens, choices = np.nonzero(self.ids == expert)
            x, d_y = (values[tokens].astype(np.float64) for values in (self._x, self._d_y))
            weights = self.weights[tokens, choices][:, None]
            gate, up = (x @ self._matrix(self._w13, expert, self.features + first).T for first in (0, size))
            hidden, slopes = _swiglu(gate, up)
            back = d_y @ self._matrix(self._w2, expert)[:, self.features]
            d_w13.append(np.concatenate([(slope * back * weights).T @ x for slope in slopes]))
            d_w2.append(d_y.T @ (hidden * weights))
        yield "w13", np.stack(d_w13)
        yield "w2", np.stack(d_w2)

    def errors(self, gradients: Sequence[Any], is_transposed: bool) -> dict[str, float]:
        """Say how far gradients of x, logits, w13 and w2 are off; weights may come as (E, K, N)."""
        d_x, d_logits, d_w13, d_w2 = gradients
        both = np.concatenate([self.features, self.features + self.spec.intermediate_size])
        if is_transposed:
            of_experts = d_w13[self.experts][:, :, both].mT, d_w2[self.experts][:, self.features].mT
        else:
            of_experts = d_w13[self.experts][:, both], d_w2[self.experts][:, :, self.features]
        got = (d_x[self.tokens], d_logits[self.tokens], *of_experts)
        return {
            name: float(np.linalg.norm(np.asarray(value, np.float64) - want) / np.linalg.norm(want))
            for (name, want), value in zip(self.expected.items(), got, strict=True)
        }


def _swiglu(gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """The activation, and its derivatives by gate and up."""
    sigmoid = 1 / (1 + np.exp(-gate))
    value = gate * sigmoid
    return value * up, [sigmoid * (1 + gate * (1 - sigmoid)) * up, value]
