"""The public operations: `fused_moe` from router logits, `fused_experts` from a routing of the caller's.

Inputs are checked here, once, the same for every backend; padding is cut off here, so that backends see
only real tokens and dropped ids; then the oracle is asked. A kernel's gradients are the portable backend's.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_pallas import xla
from moe_pallas.configs.lookup import Config
from moe_pallas.oracle import Selection, announce, select_backend
from moe_pallas.quant import QTensor, check_qtensor
from moe_pallas.routing import Routing, check_mask, check_router_inputs, drop_masked, route
from moe_pallas.spec import FP8, MoESpec, Problem, check_array, check_dtype, check_spec


def fused_moe(
    x: jax.Array,
    router_logits: jax.Array,
    w13: jax.Array | QTensor,
    w2: jax.Array | QTensor,
    *,
    spec: MoESpec,
    b13: jax.Array | None = None,
    b2: jax.Array | None = None,
    correction_bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    num_tokens: jax.Array | int | None = None,
    backend: str = "auto",
    config: Config | None = None,
) -> jax.Array:
    """Route tokens and compute their experts: ``y[t] = Σ_k w[t, k] · f_{e[t, k]}(x[t])``.

    ``f_e(x) = activation(x @ w13[e].T + b13[e]) @ w2[e].T + b2[e]``; e and w as `route` chooses them.

    Args:
      x: (..., D) bfloat16 | float16 | float32. Token activations.
      router_logits: (..., E) float. Router bias included; not probabilities. Best kept in float32.
      w13: (E, 2F, D) in x's dtype; (E, F, D) if the activation is not gated. Row order: ``spec.gate_up``.
        Or a `QTensor` of that shape, w2 then too and by the same scheme: see `quantize_experts`.
      w2: (E, D, F) in x's dtype. Contraction axis last, in w13 too: where D = F, a transposed matrix has the
        right shape and can't be told.
      spec: The layer. Static.
      b13: (E, 2F) float. Needed exactly when ``spec.expert_bias``, as is b2.
      b2: (E, D) float.
      correction_bias: (E,) float. Needed exactly when ``spec.correction_bias``.
      mask: (...) bool, x's shape without D. False = padding: x and logits there are never read into any
        value or gradient, whatever they hold, and the output is exactly 0.
      num_tokens: () int. Instead of mask: the first so many tokens (in row-major order) are real. May be a
        traced value, so that one compiled program serves every count (below 0: none is real, above the
        number of tokens: all are).
      backend: ``"auto"`` or a backend's name (see `select_backend`), which is then used or refused.
      config: How the backend's kernel is to cut the problem up, a `SwapABConfig` or
        `GroupedGemmConfig`; with ``"auto"`` it asks for its backend. None: see `select_backend`.

    Returns:
      (..., D) in x's dtype.

    Raises:
      ValueError: Shapes or options that disagree with ``spec`` or with each other.
      TypeError: A dtype of the wrong class, or no configuration.
      UnsupportedError: The explicitly requested backend can't do this problem, or not in this configuration.

    Notes:
      Products accumulate in float32; the activation's result is rounded to x's dtype between the two
      products; the sum over experts is in float32, rounded once. Bitwise repeatable. Shapes must be known
      when tracing: the symbolic sizes of ``jax.export`` are refused. Gradients are first-order reverse mode
      (no ``jvp``, no gradient of a gradient). ``jax.checkpoint`` runs the two products of the forward pass
      once more, unless its policy saves everything.

      Quantised weights: what enters a product is rounded to FP8, from float32 at the second, by the rules of
      `moe_pallas.quant`. Gradients go straight through that rounding; quantised weights are frozen, their
      gradient is 0.

    Example:
      >>> import jax
      >>> from moe_pallas import MoESpec, fused_moe
      >>> spec = MoESpec(num_experts=4, top_k=2, hidden_size=8, intermediate_size=16)
      >>> keys = jax.random.split(jax.random.key(0), 4)
      >>> x, logits = jax.random.normal(keys[0], (3, 8)), jax.random.normal(keys[1], (3, 4))
      >>> w13, w2 = jax.random.normal(keys[2], (4, 32, 8)), jax.random.normal(keys[3], (4, 8, 16))
      >>> fused_moe(x, logits, w13, w2, spec=spec).shape
      (3, 8)
    """
    check_router_inputs(router_logits, spec, correction_bias)
    check_array("x", x)
    if router_logits.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"x has tokens of shape {x.shape[:-1]}, router_logits of shape {router_logits.shape[:-1]}; "
            "need the same leading axes."
        )
    _check_operands(x, w13, w2, b13, b2, spec)
    real = token_mask(x, mask, num_tokens)
    selection = _select(x, w13, spec, backend, config)
    if math.prod(x.shape[:-1]) == 0:
        return jnp.zeros(x.shape, x.dtype)
    if selection.backend != "xla":
        count = None if mask is not None else num_tokens
        return _kernel_moe(x, router_logits, w13, w2, b13, b2, correction_bias, real, count, spec, selection)
    return _xla_moe(x, router_logits, w13, w2, b13, b2, correction_bias, real, spec)


def fused_experts(
    x: jax.Array,
    routing: Routing,
    w13: jax.Array | QTensor,
    w2: jax.Array | QTensor,
    *,
    spec: MoESpec,
    b13: jax.Array | None = None,
    b2: jax.Array | None = None,
    mask: jax.Array | None = None,
    num_tokens: jax.Array | int | None = None,
    backend: str = "auto",
    config: Config | None = None,
) -> jax.Array:
    """Compute the experts of a given routing: ``y[t] = Σ_k w[t, k] · f_{e[t, k]}(x[t])``.

    Args:
      x: (..., D) bfloat16 | float16 | float32. Token activations.
      routing: ``topk_ids`` (..., top_k) int32 and ``topk_weights`` (..., top_k) float. An id outside
        [0, E) is dropped (-1 by convention): it adds nothing, and its weight gets no gradient. An id that a
        token has twice counts twice.
      w13: (E, 2F, D) in x's dtype, or a `QTensor`, as in `fused_moe`.
      w2: (E, D, F) in x's dtype, or a `QTensor`.
      spec: The layer. Static.
      b13: (E, 2F) float, exactly when ``spec.expert_bias``.
      b2: (E, D) float, exactly when ``spec.expert_bias``.
      mask: (...) bool. False = padding, as in `fused_moe`.
      num_tokens: () int. Instead of mask: the first so many tokens are real.
      backend: ``"auto"`` or a backend's name.
      config: As in `fused_moe`.

    Returns:
      (..., D) in x's dtype; rows without any expert are exactly 0.

    Raises:
      ValueError, TypeError, UnsupportedError: As in `fused_moe`.

    Example:
      >>> import jax.numpy as jnp
      >>> from moe_pallas import MoESpec, Routing, fused_experts
      >>> spec = MoESpec(num_experts=4, top_k=2, hidden_size=8, intermediate_size=16)
      >>> routing = Routing(jnp.array([[3, -1]]), jnp.array([[0.5, 0.5]]))
      >>> y = fused_experts(jnp.ones((1, 8)), routing, jnp.ones((4, 32, 8)), jnp.ones((4, 8, 16)), spec=spec)
      >>> y.shape
      (1, 8)
    """
    _check_operands(x, w13, w2, b13, b2, spec)
    _check_routing(x, routing, spec)
    mask = token_mask(x, mask, num_tokens)
    selection = _select(x, w13, spec, backend, config)
    if math.prod(x.shape[:-1]) == 0:
        return jnp.zeros(x.shape, x.dtype)
    routing = Routing(
        _int32_in(routing.topk_ids, -1, spec.num_experts), jnp.asarray(routing.topk_weights, jnp.float32)
    )
    if selection.backend != "xla":
        return _kernel_experts(x, routing, w13, w2, b13, b2, mask, spec, selection)
    return _xla_experts(x, routing, w13, w2, b13, b2, mask, spec)


def _select(
    x: jax.Array, w13: jax.Array | QTensor, spec: MoESpec, backend: str, config: Config | None
) -> Selection:
    problem = _problem(x, w13, spec)
    selection = select_backend(problem, backend, config=config)
    announce(problem, selection)
    return selection


def _problem(x: jax.Array, w13: jax.Array | QTensor, spec: MoESpec) -> Problem:
    scheme = w13.scheme if isinstance(w13, QTensor) else None
    return Problem(
        spec=spec,
        num_tokens=math.prod(x.shape[:-1]),
        dtype=x.dtype.name,
        weight_dtype=w13.dtype.name,
        quant="none" if scheme is None else scheme.name,
        activation_scales=None if scheme is None else scheme.activations,
    )


def _xla_moe(
    x: jax.Array,
    logits: jax.Array,
    w13: jax.Array | QTensor,
    w2: jax.Array | QTensor,
    b13: jax.Array | None,
    b2: jax.Array | None,
    correction_bias: jax.Array | None,
    mask: jax.Array | None,
    spec: MoESpec,
) -> jax.Array:
    routing = _route_real(logits, correction_bias, mask, spec)
    return _xla_experts(x, routing, w13, w2, b13, b2, mask, spec)


def _route_real(
    logits: jax.Array, correction_bias: jax.Array | None, mask: jax.Array | None, spec: MoESpec
) -> Routing:
    if mask is not None:
        logits = jnp.where(mask[..., None], logits, 0)
    return route(logits, spec, correction_bias=correction_bias)


def _xla_experts(
    x: jax.Array,
    routing: Routing,
    w13: jax.Array | QTensor,
    w2: jax.Array | QTensor,
    b13: jax.Array | None,
    b2: jax.Array | None,
    mask: jax.Array | None,
    spec: MoESpec,
) -> jax.Array:
    if mask is not None:
        x, routing = jnp.where(mask[..., None], x, 0), drop_masked(routing, mask)
    y = xla.fused_experts(_rows(x), Routing(*map(_rows, routing)), w13, w2, b13, b2, spec)
    return y.astype(x.dtype).reshape(x.shape)


def _kernel_moe(
    x: jax.Array,
    logits: jax.Array,
    w13: jax.Array | QTensor,
    w2: jax.Array | QTensor,
    b13: jax.Array | None,
    b2: jax.Array | None,
    correction_bias: jax.Array | None,
    mask: jax.Array | None,
    count: jax.Array | int | None,
    spec: MoESpec,
    selection: Selection,
) -> jax.Array:
    backend, config = _kernels(selection)
    if not backend.routes(_problem(x, w13, spec), config):
        routing = _route_real(logits, correction_bias, mask, spec)
        return _kernel_experts(x, routing, w13, w2, b13, b2, mask, spec, selection)
    # The kernel takes the count itself: no mask needs to be made for it.
    real = None if mask is None else mask.reshape(-1).astype(jnp.int32)
    if count is not None:
        number = count if isinstance(count, jax.Array) else np.asarray(count)
        # An int32 as it is, below 0 or not: clipping it would be a launch of its own.
        real = jnp.reshape(number if number.dtype == np.int32 else _int32_in(number, 0, 2**31 - 1), 1)

    def kernel(x: Any, logits: Any, w13: Any, w2: Any, b13: Any, b2: Any, bias: Any, real: Any) -> jax.Array:
        return backend.fused_moe(
            x, logits, w13, w2, b13, b2, spec, config=config, correction_bias=bias, real=real
        )

    def portable(
        x: Any, logits: Any, w13: Any, w2: Any, b13: Any, b2: Any, bias: Any, real: Any
    ) -> jax.Array:
        is_real = None
        if real is not None:
            is_real = real != 0 if real.shape == x.shape[:1] and count is None else jnp.arange(len(x)) < real
        return _xla_moe(x, logits, w13, w2, b13, b2, bias, is_real, spec)

    y = _with_gradient(kernel, portable)(_rows(x), _rows(logits), w13, w2, b13, b2, correction_bias, real)
    return y.reshape(x.shape)


def _kernel_experts(
    x: jax.Array,
    routing: Routing,
    w13: jax.Array | QTensor,
    w2: jax.Array | QTensor,
    b13: jax.Array | None,
    b2: jax.Array | None,
    mask: jax.Array | None,
    spec: MoESpec,
    selection: Selection,
) -> jax.Array:
    backend, config = _kernels(selection)
    if mask is not None:
        routing = drop_masked(routing, mask)

    def kernel(x: Any, routing: Any, w13: Any, w2: Any, b13: Any, b2: Any) -> jax.Array:
        return backend.fused_experts(x, routing, w13, w2, b13, b2, spec, config=config)

    def portable(x: Any, routing: Any, w13: Any, w2: Any, b13: Any, b2: Any) -> jax.Array:
        return xla.fused_experts(x, routing, w13, w2, b13, b2, spec).astype(x.dtype)

    y = _with_gradient(kernel, portable)(_rows(x), Routing(*map(_rows, routing)), w13, w2, b13, b2)
    return y.reshape(x.shape)


def _kernels(selection: Selection) -> tuple[Any, Any]:
    """Module and configuration of the selected kernels."""
    from moe_pallas.kernels import grouped_gemm, swap_ab  # Pallas is imported when a kernel is used

    assert selection.config is not None, selection
    return {"swap_ab": swap_ab, "grouped_gemm": grouped_gemm}[selection.backend], selection.config


def _with_gradient(kernel: Callable[..., jax.Array], portable: Callable[..., jax.Array]) -> Any:
    """Give a kernel the gradient of a function that computes the same, and let ``vmap`` call it in turn."""
    one_by_one = jax.custom_batching.sequential_vmap(kernel)

    @jax.custom_vjp
    def run(*args: Any) -> jax.Array:
        return xla.vary_like(one_by_one(*args), *jax.tree.leaves(args))  # Pallas loses track in shard_map

    def forward(*args: Any) -> tuple[jax.Array, tuple[Any, ...]]:
        return run(*args), args

    def backward(args: tuple[Any, ...], cotangent: jax.Array) -> Any:
        return jax.vjp(portable, *args)[1](cotangent)

    run.defvjp(forward, backward)
    return run


def _rows(array: jax.Array) -> jax.Array:
    """(..., n) → (T, n)."""
    return jnp.asarray(array).reshape(-1, array.shape[-1])


def token_mask(x: jax.Array, mask: jax.Array | None, num_tokens: jax.Array | int | None) -> jax.Array | None:
    """Check ``mask`` or ``num_tokens`` against x (..., D) and return a mask (...), or None for all real."""
    lead = x.shape[:-1]
    if mask is not None and num_tokens is not None:
        raise ValueError("Give mask or num_tokens, not both: both say which tokens are real.")
    if mask is not None:
        check_mask(mask, lead)
        return mask
    if num_tokens is None:
        return None
    tokens = math.prod(lead)
    if isinstance(num_tokens, numbers.Integral) and not 0 <= num_tokens <= tokens:
        raise ValueError(
            f"num_tokens={num_tokens} is not in 0 … {tokens}, the number of tokens in x {x.shape}."
        )
    count = num_tokens if isinstance(num_tokens, jax.Array) else np.asarray(num_tokens)
    if count.shape != () or not jnp.issubdtype(count.dtype, jnp.integer):
        raise TypeError(f"num_tokens is one integer; got shape {count.shape}, dtype {count.dtype}.")
    return (jnp.arange(tokens, dtype=jnp.int32) < _int32_in(count, 0, tokens)).reshape(lead)


def _int32_in(values: jax.Array | np.ndarray, low: int, high: int) -> jax.Array:
    """Integers of any width as int32, those out of range at its nearer end: a plain cast would wrap."""
    xp: Any = jnp if isinstance(values, jax.Array) else np  # what JAX makes of 64-bit NumPy integers wraps
    if values.dtype.itemsize < 4:
        values = values.astype(np.int32)  # low and high may not fit into fewer bits
    low = max(low, 0) if xp.issubdtype(values.dtype, np.unsignedinteger) else low
    return jnp.asarray(xp.clip(values, low, high).astype(np.int32))


def _check_operands(
    x: jax.Array,
    w13: jax.Array | QTensor,
    w2: jax.Array | QTensor,
    b13: jax.Array | None,
    b2: jax.Array | None,
    spec: MoESpec,
) -> None:
    check_spec(spec)
    for name, operand in (("x", x), ("w13", w13), ("w2", w2)):
        check_array(name, operand)
    check_dtype("x", x.dtype.name)
    if x.ndim < 1 or x.shape[-1] != spec.hidden_size:
        raise ValueError(f"x has shape {x.shape}; need (..., hidden_size) = (..., {spec.hidden_size}).")
    biases = {"b13": b13, "b2": b2}
    for name, bias in biases.items():
        if (bias is not None) != spec.expert_bias:
            got = "was not given" if bias is None else "was given"
            raise ValueError(
                f"spec.expert_bias={spec.expert_bias}, but {name} {got}. Pass both biases, or none."
            )
    for name, array in {"w13": w13, "w2": w2, **biases}.items():
        if array is None:
            continue
        check_array(name, array)
        need = spec.param_shapes[name]
        if array.shape != need:
            is_turned = array.ndim == 3 and (array.shape[0], array.shape[2], array.shape[1]) == need
            raise ValueError(
                f"{name} has shape {array.shape}; need {need} "
                f"({_AXES[name]}; the contraction axis is last, {'gated' if spec.gated else 'not gated'})."
                + (f" It looks transposed: {name}.swapaxes(1, 2), once, at load." if is_turned else "")
            )
        if isinstance(array, QTensor):
            check_qtensor(name, array, spec.gate_up if name == "w13" and spec.gated else None)
            continue
        if name in ("w13", "w2") and array.dtype.name == FP8:
            raise TypeError(
                f"{name} is {FP8} without scales; need a QTensor(values=…, scale=…, scheme=…), as quantize "
                "and from_huggingface make it."
            )
        if name in ("w13", "w2") and array.dtype != x.dtype:
            raise TypeError(
                f"{name} is {array.dtype}, x is {x.dtype}; need one dtype. Cast the weights once, at load: "
                f"{name}.astype({x.dtype})."
            )
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name} is a float array; got {array.dtype}.")
    if isinstance(w13, QTensor) or isinstance(w2, QTensor):
        schemes = [w.scheme if isinstance(w, QTensor) else None for w in (w13, w2)]
        if schemes[0] != schemes[1]:
            raise ValueError(
                f"w13 and w2 are quantised by one scheme; got {schemes[0]!r} and {schemes[1]!r}. Quantise "
                "both alike: quantize_experts."
            )


_AXES = {
    "w13": "num_experts, gate and up rows, hidden_size",
    "w2": "num_experts, hidden_size, intermediate_size",
    "b13": "num_experts, gate and up rows",
    "b2": "num_experts, hidden_size",
}


def _check_routing(x: jax.Array, routing: Routing, spec: MoESpec) -> None:
    if not isinstance(routing, Routing):
        raise TypeError(
            f"routing is a Routing(topk_ids, topk_weights); got {type(routing).__name__}. For router logits "
            "there is fused_moe."
        )
    ids, weights = routing
    check_array("topk_ids", ids)
    check_array("topk_weights", weights)
    if not jnp.issubdtype(ids.dtype, jnp.signedinteger):
        raise TypeError(f"topk_ids are signed integers (-1 = dropped); got {ids.dtype}.")
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise TypeError(f"topk_weights are floats; got {weights.dtype}.")
    need = (*x.shape[:-1], spec.top_k)
    for name, array in (("topk_ids", ids), ("topk_weights", weights)):
        if array.shape != need:
            raise ValueError(f"{name} has shape {array.shape}; need x's leading axes and top_k: {need}.")
