"""The NumPy truth: what an MoE layer computes, in float64, one plain step after another.

Every implementation is compared with this file, so it is written to be read and not to be fast, and it
shares no code with any of them. NumPy and the standard library only (and, for FP8, ml_dtypes). Every
array is converted to float64 before the first operation, whatever float dtype it comes in. T tokens, E
experts, k = top_k, D hidden, F intermediate.

Routing, for the logits ``l`` (E,) of one token (``x @ router.T + router_bias``)::

    clean    l_e = -inf if NaN (the expert is excluded); at most the largest finite float32
    scores   s = softmax(l)   SOFTMAX        (over all E)
             s = sigmoid(l)   SIGMOID
             s = l            SOFTMAX_AFTER_TOPK
    choice   c = l            without correction bias
             c = s + bias     with it
             c_e = -inf for excluded experts and outside of the kept groups
    groups   kept: the top_k_groups with the largest MAX or TOP2_SUM of s + bias, over the group's
             included experts (-inf if it has none)
    ids      the k largest c, descending; equal values: lowest id first (groups likewise)
    weights  w = s[ids]                          (never with the correction bias)
             w / (sum(w) + 1e-20)                SOFTMAX and SIGMOID, renormalised
             softmax(l[ids])                     SOFTMAX_AFTER_TOPK
             where c[ids] = -inf: as if s = 0, l = -inf
             and then times routed_scaling_factor

A token all of whose logits are -inf or NaN gets the ids 0 … k-1 and NaN weights: its output row is NaN
and no other row is.

Experts, for one token ``x`` (D,) and the ids and weights of its slots::

    f_e(x) = activation(x @ w13[e].T + b13[e]) @ w2[e].T + b2[e]
    y      = sum over slots of  w * f_e(x)   (OUTPUT)   or   f_e(w * x)   (INPUT)

A slot whose id is outside of 0 … E-1 is dropped: it adds nothing, biases included. The same id twice
adds twice. The layer adds ``sigmoid(x . shared_gate) * f_shared(x)``, unscaled; the factor only if there
is a gate.

Quantised matrices stand for what their codes and scales say, and what enters a product with them, x (or
w * x) and the activation's result, is rounded to FP8 first: see `moe_pallas.reference_fp8`.

Tokens whose mask is False are taken out before anything is computed and come back as rows of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_pallas import reference_fp8
from moe_pallas.spec import (
    Activation,
    ActivationScales,
    GateUp,
    GroupScore,
    MoESpec,
    QuantScheme,
    Scoring,
    WeightOn,
)

Float64s = NDArray[np.float64]
Indices = NDArray[np.intp]
Bools = NDArray[np.bool_]

_LARGEST_LOGIT = float(np.finfo(np.float32).max)
_EPSILON = 1e-20

# Infinities, NaN and overflow are values here (an excluded expert, a spoilt row), not accidents.
_plain_ieee = np.errstate(divide="ignore", over="ignore", invalid="ignore")


@_plain_ieee
def route(
    logits: ArrayLike, spec: MoESpec, *, correction_bias: ArrayLike | None = None
) -> tuple[NDArray[np.int32], Float64s]:
    """Choose top_k experts for every token and weight them.

    Args:
      logits: (..., E) float. Router logits, the router's bias included. NaN counts as -inf, which
        excludes an expert.
      spec: The layer.
      correction_bias: (E,) float, finite. Needed if spec.correction_bias, else None.

    Returns:
      topk_ids: (..., k) int32, by descending choice value; the ids of a token are distinct.
      topk_weights: (..., k) float64. NaN in a row without any included expert.

    Raises:
      ValueError: A shape disagrees with the spec, or an array is missing or not wanted.
      TypeError: An array does not hold real numbers.

    Example:
      >>> from moe_pallas import MoESpec, reference
      >>> spec = MoESpec(num_experts=4, top_k=2, hidden_size=8, intermediate_size=8)
      >>> ids, weights = reference.route([[0.0, 1.0, 2.0, 1.0]], spec)
      >>> ids.tolist(), weights.round(4).tolist()
      ([[2, 1]], [[0.7311, 0.2689]])
    """
    logits = _numbers("logits", logits)
    _need_last_axis("logits", logits, spec.num_experts, "num_experts")
    bias = _optional("correction_bias", correction_bias, (spec.num_experts,), wanted=spec.correction_bias)

    rows = _float64(logits).reshape(-1, spec.num_experts)
    ids = np.zeros((len(rows), spec.top_k), np.int32)
    weights = np.zeros((len(rows), spec.top_k), np.float64)
    for t, row in enumerate(rows):
        ids[t], weights[t] = _route_token(row, None if bias is None else _float64(bias), spec)
    out_shape = (*logits.shape[:-1], spec.top_k)
    return ids.reshape(out_shape), weights.reshape(out_shape)


@_plain_ieee
def fused_experts(
    x: ArrayLike,
    topk_ids: ArrayLike,
    topk_weights: ArrayLike,
    w13: Any,
    w2: Any,
    *,
    spec: MoESpec,
    b13: ArrayLike | None = None,
    b2: ArrayLike | None = None,
    mask: ArrayLike | None = None,
) -> Float64s:
    """Send every token through the experts of a given routing and add up what they return.

    Args:
      x: (..., D) float. Token activations.
      topk_ids: (..., k) int. Expert of each slot. Outside of 0 … E-1: the slot is dropped. May repeat.
      topk_weights: (..., k) float. Weight of each slot.
      w13: (E, 2F, D) float, (E, F, D) if not gated. Gate and up rows in the order spec.gate_up. Or a
        `moe_pallas.QTensor` of that shape.
      w2: (E, D, F) float, or a `moe_pallas.QTensor`.
      spec: The layer; only its sizes, expert function and weight_on count here.
      b13: (E, 2F) or (E, F) float. Needed if spec.expert_bias, else None.
      b2: (E, D) float. Needed if spec.expert_bias, else None.
      mask: bool, shape of x without D, or None. False: the token is not computed and its row is 0.

    Returns:
      (..., D) float64.

    Raises:
      ValueError: Shapes disagree, or an array is missing or not wanted.
      TypeError: topk_ids is not an integer array, mask not a bool one, or another array not real.

    Example:
      >>> import numpy as np
      >>> from moe_pallas import MoESpec, reference
      >>> spec = MoESpec(
      ...     num_experts=2, top_k=1, hidden_size=1, intermediate_size=1, activation="relu2"
      ... )
      >>> w13, w2 = np.array([[[1.0]], [[2.0]]]), np.ones((2, 1, 1))
      >>> x, ids, weights = [[3.0], [3.0], [3.0]], [[0], [1], [-1]], [[1.0], [0.5], [1.0]]
      >>> reference.fused_experts(x, ids, weights, w13, w2, spec=spec).tolist()
      [[9.0], [18.0], [0.0]]
    """
    x = _numbers("x", x)
    _need_last_axis("x", x, spec.hidden_size, "hidden_size")
    leading = x.shape[:-1]
    topk_ids = _integers("topk_ids", topk_ids)
    _need_shape("topk_ids", topk_ids, (*leading, spec.top_k))
    topk_weights = _numbers("topk_weights", topk_weights)
    _need_shape("topk_weights", topk_weights, (*leading, spec.top_k))
    e, d, f = spec.num_experts, spec.hidden_size, spec.intermediate_size
    w13 = _weights_of("w13", w13, (e, spec.w13_rows, d), spec.gate_up if spec.gated else None)
    w2 = _weights_of("w2", w2, (e, d, f), None)
    b13 = _optional("b13", b13, (e, spec.w13_rows), wanted=spec.expert_bias)
    b2 = _optional("b2", b2, (e, d), wanted=spec.expert_bias)
    real = _real_tokens(mask, leading)

    tokens = _float64(x).reshape(-1, d)[real]
    ids = topk_ids.reshape(-1, spec.top_k)[real]
    weights = _float64(topk_weights).reshape(-1, spec.top_k)[real]
    total = np.zeros_like(tokens)
    # Ids that no expert has are met by no turn of this loop: such slots are dropped.
    visits = {expert: np.nonzero(ids == expert) for expert in range(e)}
    visits = {expert: places for expert, places in visits.items() if places[0].size}
    inputs, hidden = {}, {}
    for expert, (rows, slots) in visits.items():
        weight = weights[rows, slots][:, np.newaxis]
        inputs[expert] = weight * tokens[rows] if spec.weight_on is WeightOn.INPUT else tokens[rows]
    for expert, rounded in _rounded(inputs, w13, one_scale=True, is_hidden=False).items():
        a = rounded @ _float64(w13[expert]).T
        hidden[expert] = _activate(a if b13 is None else a + _float64(b13[expert]), spec)
    for expert, rounded in _rounded(hidden, w2, one_scale=False, is_hidden=True).items():
        outputs = rounded @ _float64(w2[expert]).T
        if b2 is not None:
            outputs = outputs + _float64(b2[expert])
        rows, slots = visits[expert]
        weight = weights[rows, slots][:, np.newaxis]
        contribution = weight * outputs if spec.weight_on is WeightOn.OUTPUT else outputs
        np.add.at(total, rows, contribution)  # unlike +=, this adds a repeated row twice
    return _put_back(total, real, (*leading, d))


def fused_moe(
    x: ArrayLike,
    router_logits: ArrayLike,
    w13: Any,
    w2: Any,
    *,
    spec: MoESpec,
    b13: ArrayLike | None = None,
    b2: ArrayLike | None = None,
    correction_bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
) -> Float64s:
    """Route the tokens by their logits and run the routed experts: `route`, then `fused_experts`.

    Args:
      x: (..., D) float. Token activations.
      router_logits: (..., E) float. The router's bias included.
      w13: (E, 2F, D) float, (E, F, D) if not gated.
      w2: (E, D, F) float.
      spec: The layer. Its shared expert and router weights play no part here, see `moe`.
      b13: (E, 2F) or (E, F) float. Needed if spec.expert_bias, else None.
      b2: (E, D) float. Needed if spec.expert_bias, else None.
      correction_bias: (E,) float. Needed if spec.correction_bias, else None.
      mask: bool, shape of x without D, or None. False: x and logits are not read, the row is 0.

    Returns:
      (..., D) float64.

    Raises:
      ValueError: Shapes disagree, or an array is missing or not wanted.
      TypeError: An array of the wrong class of dtype.

    Example:
      >>> import numpy as np
      >>> from moe_pallas import MoESpec, reference
      >>> spec = MoESpec(
      ...     num_experts=2, top_k=1, hidden_size=1, intermediate_size=1, activation="relu2"
      ... )
      >>> w13, w2 = np.array([[[1.0]], [[2.0]]]), np.ones((2, 1, 1))
      >>> reference.fused_moe([[3.0], [3.0]], [[1.0, 0.0], [0.0, 1.0]], w13, w2, spec=spec).tolist()
      [[9.0], [36.0]]
    """
    topk_ids, topk_weights = route(router_logits, spec, correction_bias=correction_bias)
    return fused_experts(x, topk_ids, topk_weights, w13, w2, spec=spec, b13=b13, b2=b2, mask=mask)


@_plain_ieee
def moe(params: Mapping[str, Any], x: ArrayLike, spec: MoESpec, *, mask: ArrayLike | None = None) -> Float64s:
    """Apply the whole layer: router, routed experts, shared expert.

    Args:
      params: Name → float array; names and shapes as in spec.param_shapes, no more and no fewer.
      x: (..., D) float. Token activations.
      spec: The layer.
      mask: bool, shape of x without D, or None. False: the token is not read and its row is 0.

    Returns:
      (..., D) float64.

    Raises:
      ValueError: Shapes or names disagree.
      TypeError: An array of the wrong class of dtype.

    Example:
      >>> import numpy as np
      >>> from moe_pallas import MoESpec, reference
      >>> spec = MoESpec(num_experts=4, top_k=2, hidden_size=8, intermediate_size=6)
      >>> params = {name: np.ones(shape) for name, shape in spec.param_shapes.items()}
      >>> reference.moe(params, np.ones((2, 3, 8)), spec).shape
      (2, 3, 8)
    """
    arrays = _checked_params(params, spec)
    x = _numbers("x", x)
    _need_last_axis("x", x, spec.hidden_size, "hidden_size")
    real = _real_tokens(mask, x.shape[:-1])

    tokens = _float64(x).reshape(-1, spec.hidden_size)[real]
    logits = tokens @ _float64(arrays["router"]).T
    if spec.router_bias:
        logits = logits + _float64(arrays["router_bias"])
    total = fused_moe(
        tokens,
        logits,
        arrays["w13"],
        arrays["w2"],
        spec=spec,
        b13=arrays.get("b13"),
        b2=arrays.get("b2"),
        correction_bias=arrays.get("correction_bias"),
    )
    if spec.shared_intermediate_size:
        w13, w2 = arrays["shared_w13"], arrays["shared_w2"]
        inputs = _rounded({0: tokens}, w13, one_scale=True, is_hidden=False)[0]
        hidden = _activate(inputs @ _float64(w13).T, spec)
        shared = _rounded({0: hidden}, w2, one_scale=True, is_hidden=True)[0] @ _float64(w2).T
        if spec.shared_expert_gate:
            shared = _sigmoid(tokens @ _float64(arrays["shared_gate"]))[:, np.newaxis] * shared
        total = total + shared
    return _put_back(total, real, x.shape)


@_plain_ieee
def load_balance_loss(
    logits: ArrayLike, topk_ids: ArrayLike, spec: MoESpec, *, mask: ArrayLike | None = None
) -> float:
    """Compute ``E * sum_e f_e * P_e``, which is 1 under uniform routing.

    ``f_e`` is the share of the routed slots that went to expert e (they sum to 1 for every top_k;
    dropped slots count nowhere), ``P_e`` the mean over the tokens of the normalised score:
    ``softmax(l)``, or ``sigmoid(l) / (sum(sigmoid(l)) + 1e-20)`` for SIGMOID.

    Args:
      logits: (..., E) float. Router logits, the router's bias included; cleaned as in `route`.
      topk_ids: (..., k) int. Ids outside of 0 … E-1 are dropped slots.
      spec: The layer.
      mask: bool, shape of logits without E, or None. False: the token counts nowhere.

    Returns:
      The loss; 0 if there is no token or no routed slot.

    Raises:
      ValueError: Shapes disagree.
      TypeError: An array of the wrong class of dtype.

    Example:
      >>> from moe_pallas import MoESpec, reference
      >>> spec = MoESpec(num_experts=2, top_k=1, hidden_size=8, intermediate_size=8)
      >>> reference.load_balance_loss([[0.0, 0.0], [0.0, 0.0]], [[0], [1]], spec)
      1.0
    """
    logits = _numbers("logits", logits)
    _need_last_axis("logits", logits, spec.num_experts, "num_experts")
    topk_ids = _integers("topk_ids", topk_ids)
    _need_shape("topk_ids", topk_ids, (*logits.shape[:-1], spec.top_k))
    real = _real_tokens(mask, logits.shape[:-1])

    rows = _float64(logits).reshape(-1, spec.num_experts)[real]
    ids = topk_ids.reshape(-1, spec.top_k)[real]
    loads = np.array([np.count_nonzero(ids == expert) for expert in range(spec.num_experts)])
    if not loads.sum():
        return 0.0
    probability_sums = np.zeros(spec.num_experts)
    for row in rows:
        clean = _clean(row)
        if spec.scoring is Scoring.SIGMOID:
            scores = _sigmoid(clean)
            probability_sums += scores / (scores.sum() + _EPSILON)
        else:
            probability_sums += _softmax(clean)
    shares, probabilities = loads / loads.sum(), probability_sums / len(rows)
    return float(spec.num_experts * np.sum(shares * probabilities))


@_plain_ieee
def router_z_loss(logits: ArrayLike, *, mask: ArrayLike | None = None) -> float:
    """Compute the mean over the tokens of ``logsumexp(l) ** 2``.

    Args:
      logits: (..., E) float. Router logits, the router's bias included; cleaned as in `route`.
      mask: bool, shape of logits without E, or None. False: the token counts nowhere.

    Returns:
      The loss; 0 if there is no token.

    Raises:
      ValueError: Shapes disagree.
      TypeError: An array of the wrong class of dtype.

    Example:
      >>> import math
      >>> from moe_pallas import reference
      >>> reference.router_z_loss([[0.0, 0.0]]) == math.log(2) ** 2
      True
    """
    logits = _numbers("logits", logits)
    if logits.ndim < 1 or logits.shape[-1] < 1:
        raise ValueError(f"logits has shape {logits.shape}; need (..., num_experts) with an expert.")
    real = _real_tokens(mask, logits.shape[:-1])
    rows = _float64(logits).reshape(-1, logits.shape[-1])[real]
    if not len(rows):
        return 0.0
    return float(np.mean([_logsumexp(_clean(row)) ** 2 for row in rows]))


# Routing of one token. logits, scores, values: (E,) float64.


def _route_token(
    logits: Float64s, correction_bias: Float64s | None, spec: MoESpec
) -> tuple[Indices, Float64s]:
    logits = _clean(logits)
    excluded = np.isneginf(logits)
    if excluded.all():
        return np.arange(spec.top_k), np.full(spec.top_k, np.nan)

    scores = _scores(logits, spec.scoring)
    biased = scores if correction_bias is None else scores + correction_bias
    choice = logits if correction_bias is None else np.where(excluded, -np.inf, biased)
    if spec.num_expert_groups > 1:
        kept = _in_kept_group(np.where(excluded, -np.inf, biased), spec)
        choice = np.where(kept, choice, -np.inf)
    ids = _largest_first(choice)[: spec.top_k]
    return ids, _weights(logits[ids], scores[ids], np.isneginf(choice[ids]), spec)


def _clean(logits: Float64s) -> Float64s:
    return np.where(np.isnan(logits), -np.inf, np.minimum(logits, _LARGEST_LOGIT))


def _scores(logits: Float64s, scoring: Scoring) -> Float64s:
    if scoring is Scoring.SOFTMAX:
        return _softmax(logits)
    if scoring is Scoring.SIGMOID:
        return _sigmoid(logits)
    return logits


def _in_kept_group(values: Float64s, spec: MoESpec) -> Bools:
    groups = values.reshape(spec.num_expert_groups, -1)
    best_of_each = 1 if spec.group_score is GroupScore.MAX else 2
    group_scores = np.full(len(groups), -np.inf)
    for g, group in enumerate(groups):
        included = np.sort(group[group > -np.inf])
        if included.size:
            group_scores[g] = included[-best_of_each:].sum()
    kept = np.zeros(len(groups), bool)
    kept[_largest_first(group_scores)[: spec.top_k_groups]] = True
    return np.repeat(kept, groups.shape[1])


def _largest_first(values: Float64s) -> Indices:
    # A stable sort leaves equal values in the order of their indices: the lowest first.
    return np.argsort(-values, kind="stable")


def _weights(logits: Float64s, scores: Float64s, unavailable: Bools, spec: MoESpec) -> Float64s:
    """All (k,), of the chosen experts. ``unavailable``: chosen only because no other was left."""
    if spec.scoring is Scoring.SOFTMAX_AFTER_TOPK:
        weights = _softmax(np.where(unavailable, -np.inf, logits))
    else:
        weights = np.where(unavailable, 0.0, scores)
        if spec.renormalize:
            weights = weights / (weights.sum() + _EPSILON)
    return weights * spec.routed_scaling_factor


# Experts. rows: expert → (n, K) float64.


class _Quantised:
    """Quantised matrices, of any array library: what `_float64` and an index find in place of an array."""

    def __init__(self, name: str, weights: Any, gate_up: GateUp | None):
        self.values, self.scale = np.asarray(weights.values), np.asarray(weights.scale)
        self.input_scale = None if weights.input_scale is None else np.asarray(weights.input_scale)
        self.scheme, self.gate_up = weights.scheme, gate_up
        if weights.gate_up != gate_up:
            raise ValueError(f"{name}.gate_up is {weights.gate_up!r}; need {gate_up!r}.")
        if self.values.dtype != reference_fp8.E4M3 or self.scale.dtype != np.float32:
            raise TypeError(
                f"{name} has values {self.values.dtype}, scale {self.scale.dtype}; need float8_e4m3fn and "
                "float32."
            )
        need = self.scheme.scale_shape(self.values.shape, 1 if gate_up is None else 2)
        _need_shape(f"{name}.scale", self.scale, need)
        if (self.input_scale is not None) != (self.scheme.activations is ActivationScales.STATIC):
            raise ValueError(f"{name}.input_scale is there exactly if activations are 'static'.")

    def __getitem__(self, expert: int) -> Float64s:
        return reference_fp8.dequantize(self.values[expert], self.scale[expert], self.scheme, self.gate_up)

    def astype(self, dtype: type[np.float64]) -> Float64s:
        return reference_fp8.dequantize(self.values, self.scale, self.scheme, self.gate_up).astype(dtype)


def _rounded(
    rows: dict[int, Float64s], weights: NDArray | _Quantised, *, one_scale: bool, is_hidden: bool
) -> dict[int, Float64s]:
    """What takes part in the product with ``weights``: the rows, or if those are quantised their FP8 numbers.

    ``one_scale``: a stored input scale is the largest of all experts', not each expert's own. ``is_hidden``:
    the rows are those of h, not of x.
    """
    if not isinstance(weights, _Quantised) or not rows:
        return rows
    sizes = [len(part) for part in rows.values()]
    scheme, scale = weights.scheme, weights.input_scale
    if scale is not None:
        scale = scale.max() if one_scale else np.repeat(scale[list(rows)], sizes, axis=0)
    rounded = reference_fp8.round_activations(
        np.concatenate(list(rows.values())), scheme.hidden if is_hidden else scheme.activations, scale
    )
    return dict(zip(rows, np.split(rounded, np.cumsum(sizes)[:-1]), strict=True))


def _activate(a: Float64s, spec: MoESpec) -> Float64s:
    """(n, 2F) → (n, F) if gated, else (n, F) → (n, F)."""
    if not spec.gated:
        if spec.activation is Activation.RELU2:
            return np.maximum(a, 0.0) ** 2
        if spec.activation is Activation.SILU:
            return a * _sigmoid(a)
        if spec.activation is Activation.GELU:
            return _gelu(a)
        assert spec.activation is Activation.GELU_TANH
        return _gelu_tanh(a)

    gate, up = _gate_and_up(a, spec.gate_up)
    if spec.activation is Activation.GEGLU:
        return _gelu(gate) * up
    if spec.activation is Activation.GEGLU_TANH:
        return _gelu_tanh(gate) * up
    assert spec.activation is Activation.SWIGLU
    if spec.swiglu_limit is not None:
        gate = np.minimum(gate, spec.swiglu_limit)  # no lower clamp on the gate
        up = np.clip(up, -spec.swiglu_limit, spec.swiglu_limit)
    return gate * _sigmoid(spec.swiglu_alpha * gate) * (up + spec.swiglu_up_offset)


def _gate_and_up(a: Float64s, gate_up: GateUp) -> tuple[Float64s, Float64s]:
    if gate_up is GateUp.INTERLEAVED:
        return a[:, 0::2], a[:, 1::2]
    half = a.shape[1] // 2
    return a[:, :half], a[:, half:]


# Elementary functions.


def _sigmoid(z: Float64s) -> Float64s:
    small = np.exp(-np.abs(z))  # in [0, 1]: never overflows
    return np.where(z < 0, small, 1.0) / (1.0 + small)


def _softmax(z: Float64s) -> Float64s:
    """(n,) → (n,). NaN if every element is -inf."""
    powers = np.exp(z - z.max())
    return powers / powers.sum()


def _logsumexp(z: Float64s) -> float:
    """(n,) → float. -inf if every element is -inf."""
    largest = z.max()
    if np.isneginf(largest):
        return -math.inf
    return float(largest + np.log(np.exp(z - largest).sum()))


# 1 + erf(z) is erfc(-z), but erfc does not cancel where z is very negative.
_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _gelu(z: Float64s) -> Float64s:
    return 0.5 * z * _erfc(-z / math.sqrt(2.0))


def _gelu_tanh(z: Float64s) -> Float64s:
    inner = math.sqrt(2.0 / math.pi) * (z + 0.044715 * z**3)
    return z * _sigmoid(2.0 * inner)  # (1 + tanh(t)) / 2 is sigmoid(2t)


# Edges: dtypes, shapes, masked tokens.


def _float64(array: NDArray | _Quantised) -> Float64s:
    return array.astype(np.float64)


def _weights_of(
    name: str, value: Any, shape: tuple[int, ...], gate_up: GateUp | None
) -> NDArray | _Quantised:
    """An array of numbers, or quantised matrices: anything with a `QuantScheme` as its ``scheme``."""
    if not isinstance(getattr(value, "scheme", None), QuantScheme):
        array = _numbers(name, value)
        _need_shape(name, array, shape)
        return array
    quantised = _Quantised(name, value, gate_up)
    _need_shape(f"{name}.values", quantised.values, shape)
    return quantised


def _numbers(name: str, value: ArrayLike) -> NDArray:
    """An array of any real dtype, as it is; converted to float64 where it is used."""
    array = np.asarray(value)
    if not np.can_cast(array.dtype, np.float64, "same_kind"):
        raise TypeError(f"{name} has dtype {array.dtype}; need real numbers (a float dtype).")
    return array


def _integers(name: str, value: ArrayLike) -> NDArray:
    array = np.asarray(value)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} has dtype {array.dtype}; need integers (int32).")
    return array


def _need_shape(name: str, array: NDArray, need: tuple[int, ...]) -> None:
    if array.shape != need:
        raise ValueError(f"{name} has shape {array.shape}; need {need}. Pass an array of that shape.")


def _need_last_axis(name: str, array: NDArray, need: int, meaning: str) -> None:
    if array.ndim < 1 or array.shape[-1] != need:
        raise ValueError(f"{name} has shape {array.shape}; need (..., {need}), the last axis is {meaning}.")


def _optional(name: str, value: ArrayLike | None, shape: tuple[int, ...], *, wanted: bool) -> NDArray | None:
    if value is None:
        if wanted:
            raise ValueError(f"{name} is None; the spec needs it with shape {shape}. Pass it.")
        return None
    if not wanted:
        raise ValueError(f"{name} is given, but the spec has none; need None. Leave it out or set the spec.")
    array = _numbers(name, value)
    _need_shape(name, array, shape)
    return array


def _checked_params(params: Mapping[str, Any], spec: MoESpec) -> dict[str, Any]:
    need, got = set(spec.param_shapes), set(params)
    if need != got:
        raise ValueError(
            f"params are {sorted(got)}; need {sorted(need)}: missing {sorted(need - got)}, "
            f"not wanted {sorted(got - need)}. Take the names from spec.param_shapes."
        )
    gated = ("w13", "shared_w13") if spec.gated else ()
    return {
        name: _weights_of(name, value, spec.param_shapes[name], spec.gate_up if name in gated else None)
        for name, value in params.items()
    }


def _real_tokens(mask: ArrayLike | None, leading: tuple[int, ...]) -> Bools:
    """The mask as (T,), all True without one."""
    if mask is None:
        return np.ones(math.prod(leading), bool)
    array = np.asarray(mask)
    if array.dtype != np.bool_:
        raise TypeError(f"mask has dtype {array.dtype}; need bool, True for real tokens.")
    _need_shape("mask", array, leading)
    return array.reshape(-1)


def _put_back(rows: Float64s, real: Bools, shape: tuple[int, ...]) -> Float64s:
    """The rows of the real tokens among rows of zeros."""
    full = np.zeros((len(real), shape[-1]))
    full[real] = rows
    return full.reshape(shape)
