"""Routing: router logits (T, E) → `Routing`, and the losses that train a router.

    logits --clean--> scores --(+ correction bias, groups)--> choice --top-k--> ids
                         └-------------- at ids, renormalised, scaled --------> weights

Rules that every backend follows (`route` states them): ties go to the lowest expert id, NaN counts as
-inf, -inf excludes an expert, a row without any included expert has NaN weights.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moe_pallas.spec import GroupScore, MoESpec, Scoring, check_array, check_spec

_EPSILON = 1e-20  # added to the sum when renormalising: sigmoid scores may all underflow to 0


class Routing(NamedTuple):
    """Where each token goes, and with what weight.

    Attributes:
      topk_ids: (..., top_k) int32. Expert ids; outside [0, E) = dropped (-1 by convention).
      topk_weights: (..., top_k) float32.

    Example:
      >>> import jax.numpy as jnp
      >>> from moe_pallas import Routing
      >>> Routing(topk_ids=jnp.array([[3, 0]]), topk_weights=jnp.array([[0.75, 0.25]])).topk_ids.shape
      (1, 2)
    """

    topk_ids: jax.Array
    topk_weights: jax.Array


def route(
    logits: jax.Array,
    spec: MoESpec,
    *,
    correction_bias: jax.Array | None = None,
    topk_ids: jax.Array | None = None,
) -> Routing:
    """Choose ``top_k`` experts for each token.

    score = softmax(logits) or sigmoid(logits); choice = logits, or score + correction_bias where there is
    one; ids = the top_k largest choices inside the best ``top_k_groups`` groups; weight = score at ids,
    divided by (their sum + 1e-20) if ``renormalize``, times ``routed_scaling_factor``. With
    SOFTMAX_AFTER_TOPK the choice is made on logits (+ correction_bias), and weight = softmax over the chosen
    logits.

    Args:
      logits: (..., E) float. Router logits, router bias included (not probabilities). Computed with in
        float32.
      spec: The layer.
      correction_bias: (E,) float, finite. Needed exactly when ``spec.correction_bias``.
      topk_ids: (..., top_k) integers. Replay: the choice of another pass, which is not made again, whatever
        logits, biases and groups are now; only weights are. Ids outside [0, E) are dropped: -1, weight 0.

    Returns:
      `Routing`, ids in descending order of choice, or as they were given.

    Raises:
      ValueError: Shapes that disagree with ``spec``, or a correction bias missing or not expected.
      TypeError: Logits or a correction bias that are no floats; a spec that is no `MoESpec`.

    Notes:
      Ties go to the lowest expert id (groups: the lowest group). A NaN logit counts as -inf, +inf as the
      largest finite float32. An expert with logit -inf is excluded, and so is one outside of the best
      groups: chosen only when no other is left, and then with weight 0; groups are ranked by the
      experts they include. In a row that includes no expert all weights are NaN and ids are
      0 … top_k - 1, so that the token's output is NaN and no other token's is.
      Gradients flow through the weights; the choice has none.

    Example:
      >>> import jax.numpy as jnp
      >>> from moe_pallas import MoESpec, route
      >>> spec = MoESpec(num_experts=4, top_k=2, hidden_size=8, intermediate_size=8)
      >>> route(jnp.array([[2.0, 1.0, 0.0, -1.0]]), spec).topk_ids.tolist()
      [[0, 1]]
    """
    check_router_inputs(logits, spec, correction_bias)
    logits = _clean(logits.astype(jnp.float32))
    scores = logits if spec.scoring is Scoring.SOFTMAX_AFTER_TOPK else _scores(logits, spec)
    choice = logits if correction_bias is None else scores + correction_bias.astype(jnp.float32)
    choice = jnp.where(jnp.isneginf(logits), -jnp.inf, choice)
    some_included = jnp.any(logits > -jnp.inf, axis=-1, keepdims=True)
    if topk_ids is not None:
        is_valid, ids = _valid_ids(topk_ids, logits, spec)
        chosen = jnp.take_along_axis(lax.stop_gradient(choice), ids, axis=-1)
        chosen = jnp.where(is_valid, chosen, -jnp.inf)
        weights = _weights(jnp.take_along_axis(scores, ids, axis=-1), chosen, spec)
        weights = jnp.where(is_valid, jnp.where(some_included, weights, jnp.nan), 0.0)
        return Routing(jnp.where(is_valid, ids, -1), weights)
    if spec.num_expert_groups > 1:
        ranked = jnp.where(jnp.isneginf(logits), -jnp.inf, scores if correction_bias is None else choice)
        choice = jnp.where(_in_best_groups(ranked, spec), choice, -jnp.inf)
    choice = jnp.where(choice == 0, 0.0, choice)  # -0 and 0 are a tie; top_k tells them apart
    chosen, ids = lax.top_k(lax.stop_gradient(choice), spec.top_k)
    weights = _weights(jnp.take_along_axis(scores, ids, axis=-1), chosen, spec)
    return Routing(ids.astype(jnp.int32), jnp.where(some_included, weights, jnp.nan))


def _valid_ids(topk_ids: jax.Array, logits: jax.Array, spec: MoESpec) -> tuple[jax.Array, jax.Array]:
    """Check ids against logits; which are in [0, E), and int32 ids with 0 for the others."""
    check_array("topk_ids", topk_ids)
    need = (*logits.shape[:-1], spec.top_k)
    if topk_ids.shape != need:
        raise ValueError(
            f"topk_ids has shape {topk_ids.shape}; need the logits' leading axes and top_k: {need}."
        )
    if not jnp.issubdtype(topk_ids.dtype, jnp.integer):
        raise TypeError(f"topk_ids are integers (-1 = dropped); got {topk_ids.dtype}.")
    is_valid = (topk_ids >= 0) & (topk_ids < spec.num_experts)
    return is_valid, jnp.where(is_valid, topk_ids, 0).astype(jnp.int32)


def check_router_inputs(logits: jax.Array, spec: MoESpec, correction_bias: jax.Array | None) -> None:
    """Raise the errors that `route` promises."""
    check_spec(spec)
    check_array("router_logits", logits)
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"Router logits are floats; got {logits.dtype}. Pass logits, not expert ids.")
    if logits.ndim < 1 or logits.shape[-1] != spec.num_experts:
        raise ValueError(
            f"Router logits have shape {logits.shape}; need (..., num_experts) = (..., {spec.num_experts})."
        )
    if (correction_bias is not None) != spec.correction_bias:
        got = "none was given" if correction_bias is None else "one was given"
        raise ValueError(
            f"spec.correction_bias={spec.correction_bias}, but of the array correction_bias {got}. Pass it, "
            "(E,), exactly when the spec has one."
        )
    if correction_bias is None:
        return
    check_array("correction_bias", correction_bias)
    if correction_bias.shape != (spec.num_experts,):
        raise ValueError(f"correction_bias has shape {correction_bias.shape}; need ({spec.num_experts},).")
    if not jnp.issubdtype(correction_bias.dtype, jnp.floating):
        raise TypeError(f"correction_bias is a float array; got {correction_bias.dtype}.")


def check_mask(mask: jax.Array, lead: tuple[int, ...]) -> None:
    """Raise unless ``mask`` is a boolean array of the tokens' shape."""
    check_array("mask", mask)
    if mask.dtype != jnp.bool_:
        raise TypeError(f"mask is bool (True = real token); got {mask.dtype}. Use mask.astype(bool).")
    if mask.shape != lead:
        raise ValueError(f"mask has shape {mask.shape}; need that of the tokens, {lead}.")


def drop_masked(routing: Routing, mask: jax.Array) -> Routing:
    """Route masked tokens nowhere: ids -1, weights 0. ``mask``: (...) bool, True = real."""
    return Routing(
        jnp.where(mask[..., None], routing.topk_ids, -1),
        jnp.where(mask[..., None], routing.topk_weights, 0.0),
    )


def load_balance_loss(
    logits: jax.Array,
    routing: Routing,
    spec: MoESpec,
    *,
    mask: jax.Array | None = None,
    axis_name: str | tuple[str, ...] = (),
) -> jax.Array:
    """Auxiliary loss E · Σ_e f_e · P_e that is 1 for uniform routing and grows with imbalance.

    f_e is the share of routed slots that expert e got (Σ f = 1 for any top_k; dropped slots don't count;
    no gradient), P_e the mean over real tokens of the token's normalised score (softmax over all experts,
    or sigmoid / (Σ sigmoid + 1e-20)).

    Args:
      logits: (..., E) float. Router logits, router bias included (not probabilities).
      routing: What `route` made of them.
      spec: The layer.
      mask: (...) bool. True = real token; all real if None.
      axis_name: Inside ``shard_map``: the mesh axes that the tokens are split over; the loss is that of all.

    Returns:
      () float32; 0 if there is no real token.

    Example:
      >>> import jax.numpy as jnp
      >>> from moe_pallas import MoESpec, load_balance_loss, route
      >>> spec = MoESpec(num_experts=4, top_k=1, hidden_size=8, intermediate_size=16)
      >>> logits = 100 * jnp.eye(4)  # a token for each expert
      >>> float(load_balance_loss(logits, route(logits, spec), spec))
      1.0

    References:
      Fedus et al., "Switch Transformers", 2021, eq. 4 (there with top_k = 1).
    """
    check_router_inputs(logits, dataclasses.replace(spec, correction_bias=False), None)
    if routing.topk_ids.shape[:-1] != logits.shape[:-1]:
        raise ValueError(
            f"routing is of tokens {routing.topk_ids.shape[:-1]}, logits are of {logits.shape[:-1]}; "
            "need the same leading axes."
        )
    logits, mask = _real_logits(logits, mask)
    ids = jnp.where(mask[..., None], routing.topk_ids, -1)
    counts = sum_over(count_experts(ids, spec.num_experts), axis_name).astype(jnp.float32)
    share = counts / jnp.maximum(counts.sum(), 1.0)
    scores = _scores(_clean(logits), spec)
    if spec.scoring is Scoring.SIGMOID:
        scores = _normalise(scores)
    return spec.num_experts * jnp.sum(share * _mean_over_tokens(scores, mask, axis_name))


def router_z_loss(
    logits: jax.Array, *, mask: jax.Array | None = None, axis_name: str | tuple[str, ...] = ()
) -> jax.Array:
    """Mean over real tokens of logsumexp(logits)², which keeps logits small.

    Args:
      logits: (..., E) float. Router logits.
      mask: (...) bool. True = real token; all real if None.
      axis_name: As in `load_balance_loss`.

    Returns:
      () float32; 0 if there is no real token.

    Example:
      >>> import jax.numpy as jnp
      >>> from moe_pallas import router_z_loss
      >>> round(float(router_z_loss(jnp.zeros((3, 8)))), 2)  # log(8)²
      4.32

    References:
      Zoph et al., "ST-MoE", 2022, eq. 5.
    """
    logits, mask = _real_logits(logits, mask)
    squares = jnp.square(jax.nn.logsumexp(_clean(logits), axis=-1, keepdims=True))
    return _mean_over_tokens(squares, mask, axis_name)[0]


def count_experts(topk_ids: jax.Array, num_experts: int) -> jax.Array:
    """Count the slots of each expert: (...) int32 ids → (E,) int32; ids outside [0, E) don't count."""
    ids = topk_ids.reshape(-1)
    ids = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    return jnp.zeros(num_experts, jnp.int32).at[ids].add(1, mode="drop")


def sum_over(values: jax.Array, axis_name: str | tuple[str, ...]) -> jax.Array:
    """Sum over mesh axes, inside ``shard_map``; over none if ``axis_name`` is empty."""
    return lax.psum(values, axis_name) if axis_name else values


def _clean(logits: jax.Array) -> jax.Array:
    finite_max = float(jnp.finfo(jnp.float32).max)
    return jnp.where(jnp.isnan(logits), -jnp.inf, jnp.minimum(logits, finite_max))


def _scores(logits: jax.Array, spec: MoESpec) -> jax.Array:
    if spec.scoring is Scoring.SIGMOID:
        return jax.nn.sigmoid(logits)
    return jax.nn.softmax(logits, axis=-1)


def _normalise(scores: jax.Array) -> jax.Array:
    """``scores / (sum + 1e-20)`` over the last axis, with finite gradients when all scores underflow."""
    total = scores.sum(-1, keepdims=True)
    # The quotient's derivative has 1 / (sum + 1e-20)², past float32's range: enlarge both sides first.
    scale = jnp.where(total < 1e-15, 1 / _EPSILON, 1.0)
    return scores * scale / (total * scale + _EPSILON * scale)


def _in_best_groups(ranked: jax.Array, spec: MoESpec) -> jax.Array:
    """(..., E) ranks → (..., E) bool: is the expert in one of the ``top_k_groups`` best groups?"""
    groups, size = spec.num_expert_groups, spec.num_experts // spec.num_expert_groups
    by_group = lax.stop_gradient(ranked).reshape(*ranked.shape[:-1], groups, size)
    best, _ = lax.top_k(by_group, 1 if spec.group_score is GroupScore.MAX else min(2, size))
    # An excluded expert (-inf) adds nothing, unless the group has no other.
    score = jnp.where(jnp.isneginf(best[..., 0]), -jnp.inf, jnp.where(jnp.isneginf(best), 0.0, best).sum(-1))
    score = jnp.where(score == 0, 0.0, score)  # as in route
    _, kept = lax.top_k(score, spec.top_k_groups)
    is_kept = (kept[..., None] == jnp.arange(groups, dtype=kept.dtype)).any(-2)
    return jnp.repeat(is_kept, size, axis=-1)


def _weights(at_ids: jax.Array, chosen: jax.Array, spec: MoESpec) -> jax.Array:
    """Turn the chosen experts' scores (or logits) into weights; ``chosen`` is -inf where none was left."""
    if spec.scoring is Scoring.SOFTMAX_AFTER_TOPK:
        weights = jax.nn.softmax(jnp.where(jnp.isneginf(chosen), -jnp.inf, at_ids), axis=-1)
    else:
        weights = jnp.where(jnp.isneginf(chosen), 0.0, at_ids)
        if spec.renormalize:
            weights = _normalise(weights)
    return weights * spec.routed_scaling_factor


def _real_logits(logits: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Float32 logits with masked rows zeroed, so that neither their values nor their gradients are seen."""
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"Router logits are floats; got {logits.dtype}.")
    if mask is None:
        mask = jnp.ones(logits.shape[:-1], bool)
    check_mask(mask, logits.shape[:-1])
    return jnp.where(mask[..., None], logits.astype(jnp.float32), 0.0), mask


def _mean_over_tokens(values: jax.Array, mask: jax.Array, axis_name: str | tuple[str, ...] = ()) -> jax.Array:
    """(..., N) → (N,): mean over the real tokens."""
    total = jnp.where(mask[..., None], values, 0.0).reshape(-1, values.shape[-1]).sum(0)
    number = sum_over(mask.sum(), axis_name).astype(jnp.float32)
    return sum_over(total, axis_name) / jnp.maximum(number, 1.0)
