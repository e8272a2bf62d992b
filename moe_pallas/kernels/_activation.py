"""Expert activations inside a kernel: those of `moe_pallas.activations`, with an erf of our own."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from moe_pallas.activations import activate_branches
from moe_pallas.spec import Activation, MoESpec


def activate(gate: jax.Array, up: jax.Array | None, spec: MoESpec) -> jax.Array:
    """Apply the activation to gate and up, or to the only branch there is (``up`` None); float32."""
    if spec.activation not in (Activation.GEGLU, Activation.GELU):
        return activate_branches(gate, up, spec)
    gelu = 0.5 * gate * (1.0 + _erf(gate * math.sqrt(0.5)))
    return gelu if up is None else gelu * up


def _erf(x: jax.Array) -> jax.Array:
    """Error function to 1.5e-7, absolute; Mosaic GPU has none.

    References:
      Abramowitz and Stegun, "Handbook of Mathematical Functions", 1964, formula 7.1.26.
    """
    magnitude = jnp.abs(x)
    t = 1.0 / (1.0 + 0.3275911 * magnitude)
    series = jnp.zeros_like(t)
    for coefficient in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = (series + coefficient) * t
    positive = 1.0 - series * jnp.exp(-magnitude * magnitude)
    return jnp.where(x < 0, -positive, positive)
