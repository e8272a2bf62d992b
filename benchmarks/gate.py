"""The correctness gate: sampled rows of a layer's output against the float64 truth, before any timing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases import Cell
from moe_pallas import QTensor, reference
from moe_pallas.testing import assert_close

_MAX_ROWS = 8


class Truth:
    """The truth for some tokens of one model under one load.

    A token's output depends on no other token, so one set of tokens, the last of every T among them, serves
    all cells: the reference converts each expert that they visit to float64 once. In FP8 that takes scales of
    activations that no other token has a part in, and that all experts share where they are stored.

    Args:
      cells: Cells that differ in ``tokens`` only.
      logits: (T, E) router logits, T the largest of the cells'. Cell i takes the first T_i rows.
      x: (T, D) NumPy array, likewise.
      w13: (E, 2F, D), an array or a `QTensor`.
      w2: (E, D, F), likewise.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        logits: np.ndarray,
        x: np.ndarray,
        w13: jax.Array | QTensor,
        w2: jax.Array | QTensor,
    ) -> None:
        spec = cells[0].spec
        self.rows = np.unique([row for cell in cells for row in (0, cell.tokens - 1)])
        ids, weights = reference.route(logits[self.rows], spec)
        experts, local_ids = np.unique(ids, return_inverse=True)
        self.expected = reference.fused_experts(
            x[self.rows].astype(np.float32),
            local_ids.reshape(ids.shape).astype(np.int32),
            weights,
            *(_on_host(w, experts) for w in (w13, w2)),
            spec=dataclasses.replace(spec, num_experts=len(experts)),
        )

    def check(self, cell: Cell, y: np.ndarray, allowed: float = 1.0) -> float:
        """Compare rows of a layer's output.

        Args:
          cell: One of the cells.
          y: (T, D). The layer's output for ``cell``.
          allowed: Error allowed, in tolerances of `moe_pallas.testing`.

        Returns:
          ‖y - truth‖ / ‖truth‖ over the sampled rows.

        Raises:
          AssertionError: A row is further off than that.
        """
        if y.shape != (cell.tokens, cell.spec.hidden_size):
            raise AssertionError(f"shape {y.shape} for {cell}")
        (among,) = np.nonzero(self.rows < cell.tokens)
        # The last rows first: a tile that is not full is where things go wrong.
        among = np.unique(np.concatenate([among[-2:], among[:: -(-len(among) // (_MAX_ROWS - 2))]]))
        got = np.asarray(y)[self.rows[among]].astype(np.float64)
        want = self.expected[among]
        near = want + (got - want) / allowed
        in_fp8 = cell.scheme is not None
        assert_close(near, want, dtype=cell.dtype, context=str(cell), quantised=in_fp8, wgmma=in_fp8)
        return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def _on_host(weights: jax.Array | QTensor, experts: np.ndarray) -> Any:
    if isinstance(weights, QTensor):
        return jax.tree.map(np.asarray, weights[experts])
    # float32 holds every 16-bit float exactly, and NumPy turns it into float64 much faster.
    return np.asarray(weights[experts].astype(jnp.float32))


def check_bound(y: np.ndarray) -> None:
    """Raise AssertionError unless the output of a bound, which is no layer, is finite and not all 0."""
    total = float(np.abs(y.ravel()[::97].astype(np.float32)).sum())
    if not (np.isfinite(total) and total > 0):
        raise AssertionError(f"sum of magnitudes {total}")
