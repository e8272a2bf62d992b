"""Expert activations inside a kernel: those of `moe_pallas.activations`, with an erf of our own.

And their derivatives: JAX's own differentiation makes operations that Mosaic GPU does not have.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from moe_pallas.activations import activate_branches
from moe_pallas.spec import Activation, MoESpec


def activate(gate: jax.Array, up: jax.Array | None = None, *, spec: MoESpec) -> jax.Array:
    """Apply the activation to gate and up, or to the only branch there is (``up`` None); float32."""
    if spec.activation not in (Activation.GEGLU, Activation.GELU):
        return activate_branches(gate, up, spec)
    gelu = 0.5 * gate * (1.0 + _erf(gate * math.sqrt(0.5)))
    return gelu if up is None else gelu * up


def activate_with_slopes(
    gate: jax.Array, up: jax.Array | None = None, *, spec: MoESpec
) -> tuple[jax.Array, list[jax.Array]]:
    """Apply the activation, and find its derivative by gate and by up, or by the only branch; float32."""
    if spec.activation is not Activation.SWIGLU:
        value, slope = _SLOPES[spec.activation](gate)
        return (value, [slope]) if up is None else (value * up, [slope * up, value])
    assert up is not None
    passes: list[jax.Array] = []
    if (limit := spec.swiglu_limit) is not None:
        passes = [gate <= limit, jnp.abs(up) <= limit]
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    value, slope = _silu(gate, spec.swiglu_alpha)
    up = up + spec.swiglu_up_offset
    slopes = [slope * up, value]
    if passes:
        slopes = [jnp.where(is_free, x, 0.0) for is_free, x in zip(passes, slopes, strict=True)]
    return value * up, slopes


def _silu(z: jax.Array, alpha: float = 1.0) -> tuple[jax.Array, jax.Array]:
    sigmoid = jax.nn.sigmoid(alpha * z)
    return z * sigmoid, sigmoid * (1.0 + alpha * z * (1.0 - sigmoid))


def _gelu(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    share = 0.5 * (1.0 + _erf(z * math.sqrt(0.5)))
    return z * share, share + z * jnp.exp(-0.5 * z * z) * (1 / math.sqrt(2 * math.pi))


def _gelu_tanh(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    factor, cubic = math.sqrt(2 / math.pi), 0.044715
    tanh = jnp.tanh(factor * (z + cubic * (z * z * z)))
    share, inner_slope = 0.5 * (1.0 + tanh), factor * (1.0 + 3.0 * cubic * (z * z))
    return z * share, share + 0.5 * z * (1.0 - tanh * tanh) * inner_slope


def _relu2(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    positive = jnp.maximum(z, 0.0)
    return positive * positive, 2.0 * positive


_SLOPES = {
    Activation.GEGLU: _gelu,
    Activation.GEGLU_TANH: _gelu_tanh,
    Activation.RELU2: _relu2,
    Activation.SILU: _silu,
    Activation.GELU: _gelu,
    Activation.GELU_TANH: _gelu_tanh,
}


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
