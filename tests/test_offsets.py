"""Weights of more than 2^31 elements, and of more than 2^32 bytes: every address is 64 bits wide."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_pallas import MoESpec, Routing, fused_experts
from moe_pallas.testing import assert_close, random_tokens

# 5.0e9 elements in w13, 2.5e9 in w2: an offset that wraps at 2^31 elements lands 128 experts away in w13.
SPEC = MoESpec(num_experts=300, top_k=4, hidden_size=4096, intermediate_size=2048)


def check(spec: MoESpec, backend: str, num_tokens: int) -> None:
    """Experts that differ by a factor; tokens go to the last four, which are also computed alone."""

    def weights(seed: int, rows: int, columns: int) -> jax.Array:
        one = jax.random.normal(jax.random.key(seed), (rows, columns), jnp.float32) * columns**-0.5
        factors = 0.5 + jnp.arange(spec.num_experts) / spec.num_experts
        return (one * factors[:, None, None]).astype(jnp.bfloat16)

    sizes = spec.hidden_size, spec.intermediate_size
    w13 = jax.jit(functools.partial(weights, 0, 2 * sizes[1], sizes[0]))()
    w2 = jax.jit(functools.partial(weights, 1, *sizes))()
    x = random_tokens(spec, num_tokens, dtype="bfloat16")
    ids = np.broadcast_to(np.arange(4, dtype=np.int32), (num_tokens, 4))
    factors = np.random.default_rng(0).random((num_tokens, 4), np.float32)
    few = dataclasses.replace(spec, num_experts=4)
    args = (
        jnp.asarray(x, jnp.float32),
        Routing(ids, factors),
        *(w[-4:].astype(jnp.float32) for w in (w13, w2)),
    )
    expected = fused_experts(*args, spec=few, backend="xla")
    routing = Routing(ids + spec.num_experts - 4, factors)
    y = jax.jit(functools.partial(fused_experts, spec=spec, backend=backend))(x, routing, w13, w2)
    assert_close(np.asarray(y), np.asarray(expected))


def test_check_on_few_weights() -> None:
    check(dataclasses.replace(SPEC, num_experts=9, hidden_size=128, intermediate_size=64), "xla", 5)


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "num_tokens"), [("swap_ab", 3), ("swap_ab", 200), ("grouped_gemm", 200)])
def test_last_experts_of_many_weights(backend: str, num_tokens: int) -> None:
    check(SPEC, backend, num_tokens)
