"""The one JAX definition of each expert activation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moe_pallas.spec import Activation, GateUp, MoESpec


def activate(a: jax.Array, spec: MoESpec) -> jax.Array:
    """Apply the expert activation to the first GEMM's output.

    The formulas are `moe_pallas.Activation`'s; gate and up are taken apart as ``spec.gate_up`` says.

    Args:
      a: (..., 2F) float32 if ``spec.gated``, else (..., F). Pre-activations, bias included.
      spec: The layer.

    Returns:
      (..., F) float32.
    """
    if not spec.gated:
        return activate_branches(a, None, spec)
    return activate_branches(*split_gate_up(a, spec), spec)


def activate_branches(gate: jax.Array, up: jax.Array | None, spec: MoESpec) -> jax.Array:
    """Apply the activation to gate and up, or to the only branch there is (``up`` None); float32."""
    if up is None:
        return _PLAIN[spec.activation](gate)
    match spec.activation:
        case Activation.SWIGLU:
            if spec.swiglu_limit is not None:
                gate = jnp.minimum(gate, spec.swiglu_limit)
                up = jnp.clip(up, -spec.swiglu_limit, spec.swiglu_limit)
            return gate * jax.nn.sigmoid(spec.swiglu_alpha * gate) * (up + spec.swiglu_up_offset)
        case Activation.GEGLU:
            return jax.nn.gelu(gate, approximate=False) * up
        case Activation.GEGLU_TANH:
            return jax.nn.gelu(gate, approximate=True) * up
    raise AssertionError(f"{spec.activation!r} is gated but has no formula here")


def split_gate_up(a: jax.Array, spec: MoESpec) -> tuple[jax.Array, jax.Array]:
    """Take (..., 2F) apart into gate and up, each (..., F)."""
    if spec.gate_up is GateUp.INTERLEAVED:
        return a[..., 0::2], a[..., 1::2]
    gate, up = jnp.split(a, 2, axis=-1)
    return gate, up


_PLAIN = {
    Activation.RELU2: lambda z: jnp.square(jnp.maximum(z, 0.0)),
    Activation.SILU: jax.nn.silu,
    Activation.GELU: lambda z: jax.nn.gelu(z, approximate=False),
    Activation.GELU_TANH: lambda z: jax.nn.gelu(z, approximate=True),
}
