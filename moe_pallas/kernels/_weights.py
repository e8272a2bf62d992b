"""How the kernels take weights: gate and up on an axis of their own, and the scales of FP8."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moe_pallas.quant import QTensor
from moe_pallas.spec import GateUp, MoESpec, QuantScheme, WeightScales


def take_apart(w13: jax.Array, spec: MoESpec) -> jax.Array:
    """(E, 2F, ...) of a gated layer → (E, 2, F, ...) if STACKED, (E, F, 2, ...) if INTERLEAVED."""
    apart = (2, -1) if spec.gate_up is GateUp.STACKED else (-1, 2)
    return w13.reshape(spec.num_experts, *apart, *w13.shape[2:])


def flat_scales(weights: QTensor) -> jax.Array:
    """Scales without needless axes: TENSOR (E, P), CHANNEL (E, N), BLOCK (E * blocks of rows, of columns)."""
    if weights.scheme.weights is WeightScales.BLOCK:
        return weights.scale.reshape(-1, weights.scale.shape[-1])
    return weights.scale[..., 0]


def block_start(
    scales: Any, expert: jax.Array, branch: int, row: jax.Array, num_rows: int, gate_up: GateUp | None
) -> jax.Array:
    """Where in `flat_scales` of BLOCK those stand that a row has for the first columns.

    ``row`` is one of the ``num_rows`` of a branch: 0 or 1 with ``gate_up``, else 0.
    """
    branches = 1 if gate_up is None else 2
    per_branch = -(-num_rows // QuantScheme.BLOCK)
    at = lax.div(row, jnp.int32(QuantScheme.BLOCK))
    at = branches * at + branch if gate_up is GateUp.INTERLEAVED else branch * per_branch + at
    return (expert * (branches * per_branch) + at) * scales.shape[1]
