"""Serving without compilation: buckets, programs compiled ahead of time, and the guard."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_pallas import MoE, MoESpec, Routing, fused_experts, quantize_experts, reference
from moe_pallas.errors import RecompileError
from moe_pallas.testing import assert_close
from moe_pallas.warmup import no_recompile, pad_tokens, token_buckets, warmup

SPEC = MoESpec(num_experts=8, top_k=2, hidden_size=16, intermediate_size=24)
LAYER = MoE(SPEC)
PARAMS = jax.tree.map(np.asarray, LAYER.init(jax.random.key(0)))
EXPERTS = {name: PARAMS[name] for name in ("w13", "w2")}


def random_tokens(rng: np.random.Generator, num_tokens: int) -> np.ndarray:
    return rng.standard_normal((num_tokens, SPEC.hidden_size), np.float32)


@jax.jit
def step(experts: dict[str, Any], x: jax.Array, routing: Routing, num_tokens: jax.Array) -> jax.Array:
    return fused_experts(x, routing, **experts, spec=SPEC, num_tokens=num_tokens)


def step_args(bucket: int) -> tuple[Any, ...]:
    x, ids, factors = (
        jax.ShapeDtypeStruct((bucket, size), dtype)
        for size, dtype in ((16, np.float32), (2, np.int32), (2, np.float32))
    )
    return EXPERTS, x, Routing(ids, factors), jax.ShapeDtypeStruct((), np.int32)


# Buckets


def test_fourteen_buckets_serve_up_to_8192_tokens() -> None:
    buckets = token_buckets(8192)
    assert len(buckets) <= 14
    assert (buckets[0], buckets[-1]) == (1, 8192)
    assert all(next(b for b in buckets if b >= tokens) < 2 * tokens for tokens in range(1, 8193))


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 100])
def test_the_last_bucket_is_the_largest_batch(most: int) -> None:
    buckets = token_buckets(most)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == most


@pytest.mark.parametrize("tokens", [0, 1, 5, 8, 12])
def test_a_batch_is_padded_to_its_bucket(tokens: int) -> None:
    x = np.full((tokens, 3), np.inf, jnp.bfloat16)
    padded, num_tokens = pad_tokens(x, token_buckets(12))
    assert padded.shape == ({0: 1, 1: 1, 5: 8, 8: 8, 12: 12}[tokens], 3)
    assert padded.dtype == x.dtype
    assert (num_tokens, num_tokens.dtype) == (tokens, np.int32)
    np.testing.assert_array_equal(padded[:tokens], x)
    assert not padded[tokens:].any()


def test_what_no_bucket_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="has 13 tokens, the largest bucket 12"):
        pad_tokens(np.zeros((13, 3)), token_buckets(12))
    with pytest.raises(ValueError, match="max_tokens is at least 1; got 0"):
        token_buckets(0)


# Warm-up


def test_random_steps_after_warmup_compile_nothing() -> None:
    """2,000 of them: the layer and its experts with any routing, for random T."""
    layer_programs, programs = warmup(LAYER, 200, PARAMS), warmup(step, 200, step_args)
    rng = np.random.default_rng(0)
    with no_recompile():
        for number in range(1000):
            tokens = int(200 ** rng.random())
            x, num_tokens = pad_tokens(random_tokens(rng, tokens), programs)
            y = np.asarray(layer_programs[len(x)](PARAMS, x, num_tokens))[:tokens]
            ids, _ = pad_tokens(rng.integers(-1, 8, (tokens, 2), np.int32), programs)
            factors, _ = pad_tokens(rng.standard_normal((tokens, 2), np.float32), programs)
            z = np.asarray(programs[len(x)](EXPERTS, x, Routing(ids, factors), num_tokens))
            assert not z[tokens:].any()
            if number % 50 == 0:
                assert_close(y, reference.moe(PARAMS, x[:tokens], SPEC))
                routing = ids[:tokens], factors[:tokens]
                assert_close(z[:tokens], reference.fused_experts(x[:tokens], *routing, **EXPERTS, spec=SPEC))


def test_a_jitted_function_is_warm_itself() -> None:
    warmup(step, 4, step_args)
    x, ids = np.ones((4, 16), np.float32), np.zeros((4, 2), np.int32)
    with no_recompile():
        step(EXPERTS, x, Routing(ids, np.ones((4, 2), np.float32)), np.int32(3))


def test_a_layer_is_warm_in_its_own_dtype_and_with_quantised_experts() -> None:
    params = quantize_experts(PARAMS, SPEC, "fp8_tensor")
    programs = warmup(MoE(SPEC, dtype=jnp.bfloat16), 2, params)
    with no_recompile():
        y = programs[2](params, np.ones((2, 16), jnp.bfloat16), np.int32(1))
    assert y.dtype == jnp.bfloat16


def test_programs_refuse_other_shapes() -> None:
    programs = warmup(LAYER, 2, PARAMS)
    with no_recompile(), pytest.raises(TypeError):
        programs[2](PARAMS, np.ones((3, 16), np.float32), np.int32(1))


def test_warmup_runs_nothing_and_tells_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def count(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: ran.append(1))
        return x + 1

    ran: list[int] = []
    told: list[tuple[Any, ...]] = []
    with caplog.at_level(logging.INFO, "moe_pallas"):
        warmup(count, 3, lambda n: (np.ones(n, np.float32),), progress=lambda *news: told.append(news))
    jax.effects_barrier()
    assert ran == []
    assert [news[:3] for news in told] == [(1, 3, 1), (2, 3, 2), (3, 3, 3)]
    assert all(seconds > 0 for *_, seconds in told)
    assert "compiled for 3 tokens in" in caplog.text
    assert "program 3 of 3" in caplog.text


# The guard


def fresh() -> Callable[..., jax.Array]:
    """A function that JAX has no program for."""

    def scale(x: jax.Array, factor: jax.Array) -> jax.Array:
        return x * factor

    return jax.jit(scale)


X, FACTOR = np.ones((3, 5), np.float32), np.float32(2)
SAYS = r"jit\(scale\) would be compiled inside no_recompile\(\), for float32\[3, 5\], float32\[\]"


def test_a_compilation_is_refused_with_name_and_shapes() -> None:
    scale = fresh()
    with pytest.raises(RecompileError, match=SAYS), no_recompile():
        scale(X, FACTOR)
    with pytest.raises(RecompileError, match=SAYS), no_recompile():
        scale(X, FACTOR)  # lowered by now
    assert scale(X, FACTOR).shape == (3, 5)
    with no_recompile():
        scale(X, FACTOR)


def test_a_new_shape_of_a_warm_layer_is_refused() -> None:
    apply = jax.jit(LAYER.apply)
    apply(PARAMS, np.ones((4, 16), np.float32))
    says = r"jit\(apply\) would be .* float32\[5, 16\]\. Compile it"
    with pytest.raises(RecompileError, match=says), no_recompile():
        apply(PARAMS, np.ones((5, 16), np.float32))


def test_compiling_ahead_and_single_operations_are_refused() -> None:
    with pytest.raises(RecompileError, match=SAYS), no_recompile():
        fresh().lower(X, FACTOR).compile()
    y = jnp.ones((7, 11))
    with pytest.raises(RecompileError, match=r"float32\[7, 11\]"), no_recompile():
        y[:6]


def test_of_many_arguments_the_last_are_told() -> None:
    many = jax.jit(lambda *xs: sum(xs))
    says = r"for 8 arrays and (float32\[1\], ){11}float32\[2\]\."
    with pytest.raises(RecompileError, match=says), no_recompile():
        many(*[np.ones(1, np.float32)] * 19, np.ones(2, np.float32))


def test_nothing_is_refused_outside() -> None:
    with no_recompile():
        pass
    with pytest.raises(KeyError), no_recompile():
        raise KeyError
    fresh()(X, FACTOR)


def test_guards_are_nested() -> None:
    with pytest.raises(RecompileError, match=SAYS), no_recompile():
        with no_recompile():
            pass
        fresh()(X, FACTOR)
    fresh()(X, FACTOR)


def test_a_caught_error_is_raised_again_on_leaving() -> None:
    with pytest.raises(RecompileError, match=SAYS), no_recompile(), pytest.raises(RecompileError):
        fresh()(X, FACTOR)
    with pytest.raises(KeyError), no_recompile():  # but hides no other
        with pytest.raises(RecompileError):
            fresh()(X, FACTOR)
        raise KeyError


def test_other_threads_are_guarded() -> None:
    caught: list[BaseException] = []

    def serve() -> None:
        try:
            fresh()(X, FACTOR)
        except RecompileError as error:
            caught.append(error)

    with pytest.raises(RecompileError, match=SAYS), no_recompile():
        thread = threading.Thread(target=serve)
        thread.start()
        thread.join()
    assert len(caught) == 1
