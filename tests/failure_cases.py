"""What the failure-case tests share: the list of cases, what runs them, how results are compared.

A case is a fault that mixture-of-experts libraries have had in public. The test that carries its id
(`test_c4_…`) states the right value.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from moe_pallas import MoE, MoESpec, Routing, fused_experts, fused_moe, reference, route, xla
from moe_pallas.oracle import PORTABLE_BACKENDS

# The implementations that compute anything anywhere. A new one of them is tested by being in
# PORTABLE_BACKENDS; those of one device have files of their own (test_swap_ab.py).
IMPLEMENTATIONS = (*PORTABLE_BACKENDS, "reference")

CASES = {
    "A1": "the tail of the contraction was not masked",
    "A3": "rows past an expert's count were altered",
    "A4": "token counts that are no multiple of a tile were refused",
    "A5": "a batch without tokens crashed",
    "A6": "the expert was taken from a tile's first row",
    "A7": "a weight gradient failed for some widths only",
    "A8": "scratch was too small in the last chunk, just over the chunk size",
    "A9": "the sort by expert gave two slots the same row",
    "C1": "ties in the top-k were broken differently in different places",
    "C3": "a row of NaN logits chose one expert several times",
    "C4": "one NaN logit silently dropped the token",
    "C5": "sigmoid scores underflowed, and renormalising divided 0 by 0",
    "C7": "masked groups scored 0, which beat negative biased scores",
    "C8": "the running maximum started at -1, above biased scores",
    "C9": "the group score was max where the sum of the best two was meant",
    "C10": "router logits were rounded to bfloat16 before the choice",
    "C11": "without renormalising the weights were raw logits",
    "C12": "the router's bias was ignored, and softmax ran over all experts instead of the chosen ones",
    "C13": "the routed scaling factor was applied twice, or not at all",
    "C14": "the router failed above some token count if E is no power of two",
    "C15": "an expert was chosen again when experts ran out",
    "C16": "the balance loss took a softmax of probabilities",
    "C17": "the balance loss counted padding",
    "C18": "the prefix sum took at most 1024 experts",
    "D1": "all tokens at one expert overflowed its buffer",
    "D2": "experts without tokens left memory unwritten",
    "D3": "top_k = 1 skipped the buffer that scaling read from",
    "D4": "the weight was applied before the expert and again behind it",
    "D5": "one expert, one tile: a cumulative sum collapsed to a scalar",
    "D6": "a token's experts were taken to be distinct",
    "D7": "id -1 was used as an index",
    "D9": "rows dropped by a capacity were left unwritten",
    "D10": "rows of other shards' experts were not skipped",
    "E1": "padding was masked by multiplying, which keeps NaN",
    "E3": "garbage past the valid rows of a receive buffer was computed",
    "E4": "NaN in one expert's scale reached other experts' tokens",
    "F1": "a cast to FP8 gave NaN where others saturate",
    "F2": "the reciprocal of a tiny scale overflowed, and 0 times it was NaN",
    "F3": "the scale of a block of zeros became 0 or NaN",
    "F4": "widths that are no multiple of a scale's block were refused, or took the neighbour's scale",
    "F6": "the larger of gate's and up's scales was used for both",
    "F7": "one expert's scale was used for all",
    "F8": "scales of blocks were read in a wrong order",
    "F10": "16-bit scales were read as 32-bit ones",
    "F11": "a NaN activation got a fine scale and spoilt or hid its row",
    "G1": "gate and up were swapped",
    "G2": "stacked weights were read as interleaved ones",
    "G4": "the clamp of the activation was ignored on one path",
    "G5": "the clamp was taken behind the activation instead of before it",
    "G6": "the second bias was added once per slot, unweighted",
    "G7": "biases were lost on one path",
    "H1": "the sum over a token's experts ran in bfloat16",
    "H3": "the sum over a token's experts differed from run to run",
    "J4": "every number of tokens, mask or routing compiled a new program",
    "J8": "the fallback ran densely, with memory for every expert times every row",
    "K1": "weight gradients of experts without tokens were not zero",
    "K3": "weight gradients were wrong unless groups started at multiples of 64",
    "K4": "rows past the groups had unwritten gradients that were used",
    "K5": "dropped slots gave the router a gradient",
    "K6": "the gradient of the clamp was wrong outside the limits",
    "K7": "the gradient of the tokens lost its gate term or its up term",
    "K8": "weight gradients ignored the routing weight",
    "L1": "the kernel failed inside scan and grad",
    "L2": "rematerialising ran the forward pass twice as often as needed",
    "L3": "vmap and symbolic sizes were mishandled",
    "L4": "exporting had no stable form",
    "L6": "sharded weights gave wrong numbers",
    "L7": "interpreting dropped blocks in the middle",
    "L8": "padding inside a tile reached a reduction",
    "L9": "ring expert parallelism was wrong though others were compared with it",
    "L10": "experts that don't divide over the shards were lost",
}

# Cases about what is not there yet; each one becomes a test when that is added.
NOT_YET = {
    "D9": "there is no capacity mode; D7 tests that a row without any live slot is exactly 0",
    "L9": "there is no expert parallelism",
    "L10": "there is no expert parallelism; D10 tests that the parts of disjoint sets of experts add up",
}


@functools.partial(jax.jit, static_argnames=("spec", "backend"))
def _experts(
    x: Any, routing: Routing, w13: Any, w2: Any, rest: dict[str, Any], *, spec: Any, backend: Any
) -> Any:
    return fused_experts(x, routing, w13, w2, spec=spec, backend=backend, **rest)


@functools.partial(jax.jit, static_argnames=("spec", "backend"))
def _moe(x: Any, logits: Any, w13: Any, w2: Any, rest: Any, *, spec: MoESpec, backend: str) -> Any:
    return fused_moe(x, logits, w13, w2, spec=spec, backend=backend, **rest)


@functools.partial(jax.jit, static_argnames="layer")
def _layer(params: Any, x: Any, rest: Any, *, layer: MoE) -> Any:
    return layer.apply(params, x, **rest)


jitted_route = jax.jit(route, static_argnames="spec")


def run_experts(
    implementation: str,
    x: ArrayLike,
    ids: ArrayLike,
    weights: ArrayLike,
    w13: ArrayLike,
    w2: ArrayLike,
    *,
    spec: MoESpec,
    **rest: Any,
) -> NDArray:
    """fused_experts by one implementation. ``rest``: b13, b2, mask, num_tokens."""
    if implementation == "reference":
        return reference.fused_experts(
            x, ids, weights, w13, w2, spec=spec, **_with_mask(rest, np.shape(x)[:-1])
        )
    routing = Routing(jnp.asarray(ids, jnp.int32), jnp.asarray(weights, jnp.float32))
    return np.asarray(_experts(x, routing, w13, w2, rest, spec=spec, backend=implementation))


def run_moe(
    implementation: str,
    x: ArrayLike,
    logits: ArrayLike,
    w13: ArrayLike,
    w2: ArrayLike,
    *,
    spec: MoESpec,
    **rest: Any,
) -> NDArray:
    """fused_moe by one implementation. ``rest``: b13, b2, correction_bias, mask, num_tokens."""
    if implementation == "reference":
        return reference.fused_moe(x, logits, w13, w2, spec=spec, **_with_mask(rest, np.shape(x)[:-1]))
    return np.asarray(_moe(x, logits, w13, w2, rest, spec=spec, backend=implementation))


def run_layer(implementation: str, params: Any, x: ArrayLike, spec: MoESpec, **rest: Any) -> NDArray:
    """The whole layer by one implementation. ``rest``: mask, num_tokens."""
    if implementation == "reference":
        return reference.moe(params, x, spec, **_with_mask(rest, np.shape(x)[:-1]))
    return np.asarray(_layer(params, x, rest, layer=MoE(spec, backend=implementation)))


def _with_mask(rest: dict[str, Any], lead: tuple[int, ...]) -> dict[str, Any]:
    """The reference takes a mask only."""
    rest = dict(rest)
    if (count := rest.pop("num_tokens", None)) is not None:
        rest["mask"] = (np.arange(int(np.prod(lead))) < int(count)).reshape(lead)
    return rest


def experts_of(params: dict[str, NDArray]) -> dict[str, NDArray]:
    """The keyword arguments of fused_experts among a layer's parameters."""
    return {name: params[name] for name in ("w13", "w2", "b13", "b2") if name in params}


def grouped_matmul_for(platform: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The portable backend's grouped product as it is on a CPU or, run on a CPU all the same, elsewhere.

    The patch lasts as long as the test, because the backward pass is traced late. The function is a new one
    each time, so that no trace of the other kind is found again.
    """
    if platform == "elsewhere":
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))
        monkeypatch.setattr(xla, "_COPY_BYTES", 2**14)  # so that tiles are multiplied in several batches
    return jax.jit(lambda rows, weights, group_sizes: xla.grouped_matmul(rows, weights, group_sizes))


def poison_memory() -> None:
    """Leave NaN and 1e30 in freed memory of many sizes: what is read before it is written then shows."""
    for value in (np.nan, 1e30):
        on_host = [np.full(1 << n, value, np.float32) for n in range(6, 21) for _ in range(3)]
        on_device = [jnp.array(array, copy=True).block_until_ready() for array in on_host[::3]]
        del on_host, on_device


def assert_same_bits(actual: ArrayLike, expected: ArrayLike) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert actual.tobytes() == expected.tobytes()


def assert_close_by_expert(actual: ArrayLike, expected: ArrayLike, rtol: float, name: str = "") -> None:
    """Compare (E, …) arrays, each expert's largest error against its own largest entry.

    An expert whose expectation is 0 has to be exactly 0. One bound for all experts together would hide a
    small expert that is all wrong.
    """
    actual, expected = (np.asarray(value).astype(np.float64) for value in (actual, expected))
    assert actual.shape == expected.shape, (name, actual.shape, expected.shape)
    for expert, (got, want) in enumerate(zip(actual, expected, strict=True)):
        worst, scale = np.max(np.abs(got - want), initial=0.0), np.max(np.abs(want), initial=0.0)
        assert worst <= rtol * scale, f"{name}[{expert}]: off by {worst:.3g}, largest entry {scale:.3g}"


def assert_close_by_stripe(actual: ArrayLike, expected: ArrayLike, rtol: float, width: int = 16) -> None:
    """Compare (T, D) arrays: the RMS error of each stripe of columns against the stripe's RMS."""
    actual, expected = (np.asarray(value).astype(np.float64) for value in (actual, expected))
    assert actual.shape == expected.shape
    for start in range(0, expected.shape[-1], width):
        got, want = actual[..., start : start + width], expected[..., start : start + width]
        error, scale = np.sqrt(np.mean((got - want) ** 2)), np.sqrt(np.mean(want**2))
        assert error <= rtol * scale, f"columns {start} …: error {error:.3g}, RMS {scale:.3g}"
