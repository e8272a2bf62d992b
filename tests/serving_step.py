"""Steps as a server has them, built by `moe_pallas.aot` in the tests of bundles."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_pallas import MoE, MoESpec, fused_moe, quantize_experts

SPEC = MoESpec(num_experts=8, top_k=2, hidden_size=128, intermediate_size=128)
LAYER = MoE(SPEC)
MAX_TOKENS = 6  # buckets 1, 2, 4, 6


@functools.partial(jax.jit, donate_argnames="history")
def step(params: Any, history: jax.Array, x: jax.Array, num_tokens: jax.Array) -> dict[str, jax.Array]:
    y, aux = LAYER.apply(params, x, num_tokens=num_tokens, return_aux=True)
    return {"y": y, "history": history + aux.expert_loads}


def params() -> Any:
    """Parameters with experts in FP8: a tree with a class of the package."""
    return quantize_experts(LAYER.init(jax.random.key(0)), SPEC, "fp8_tensor")


def build() -> tuple[Any, Any]:
    shapes = jax.eval_shape(params)

    def args(bucket: int) -> tuple[Any, ...]:
        history, x = jax.ShapeDtypeStruct((8,), np.int32), jax.ShapeDtypeStruct((bucket, 128), np.float32)
        return shapes, history, x, jax.ShapeDtypeStruct((), np.int32)

    return step, args


def build_layer() -> tuple[Any, Any]:
    """On a Hopper GPU, or refused."""
    shapes = jax.eval_shape(LAYER.init, jax.random.key(0))
    return MoE(SPEC, backend="swap_ab"), {
        name: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for name, x in shapes.items()
    }


def experts(x: jax.Array, logits: jax.Array, w13: jax.Array, w2: jax.Array, count: jax.Array) -> jax.Array:
    return fused_moe(x, logits, w13, w2, spec=SPEC, num_tokens=count)


def build_experts() -> tuple[Any, Any]:
    """No product outside of the kernels, which XLA may choose by measuring."""

    def args(bucket: int) -> tuple[Any, ...]:
        shapes = ((bucket, 128), SPEC.param_shapes["w13"], SPEC.param_shapes["w2"])
        x, w13, w2 = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
        logits = jax.ShapeDtypeStruct((bucket, 8), np.float32)
        return x, logits, w13, w2, jax.ShapeDtypeStruct((), np.int32)

    return experts, args
