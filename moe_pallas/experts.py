"""The public operations: `fused_moe` from router logits, `fused_experts` from a routing of the caller's.

Inputs are checked here, once, the same for every backend; padding is cut off here, so that backends see
only real tokens and dropped ids; then the oracle is asked. Behind a kernel, gradients are kernels' too, but
with quantised weights, where they are the portable backend's.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from moe_pallas import xla
from moe_pallas.configs.lookup import Config
from moe_pallas.configs.schema import GradientConfig
from moe_pallas.oracle import Selection, announce, select_backend
from moe_pallas.quant import QTensor, check_qtensor
from moe_pallas.routing import Routing, check_mask, check_router_inputs, drop_masked, route
from moe_pallas.spec import FP8, MoESpec, Problem, check_array, check_dtype, check_spec

_DEFAULT = GradientConfig()


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
    gradients: GradientConfig = _DEFAULT,
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
      gradients: What a backward pass finds and gives, see `GradientConfig`.

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
      (no ``jvp``, no gradient of a gradient). A kernel's backward pass needs the inputs alone, unless
      ``gradients`` says otherwise, so that ``jax.checkpoint`` runs no kernel of the forward pass again; the
      portable backend's two products it may. A call that is differentiated is routed by XLA.

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
    _check_operands(x, w13, w2, b13, b2, spec, gradients)
    real = token_mask(x, mask, num_tokens)
    selection = _select(x, w13, spec, backend, config)
    if math.prod(x.shape[:-1]) == 0:
        return jnp.zeros(x.shape, x.dtype)
    if selection.backend != "xla":
        count = None if mask is not None else num_tokens
        return _kernel_moe(
            x, router_logits, w13, w2, b13, b2, correction_bias, real, count, spec, selection, gradients
        )
    return _xla_moe(
        x, router_logits, _in_dtype(w13, x), _in_dtype(w2, x), b13, b2, correction_bias, real, spec
    )


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
    gradients: GradientConfig = _DEFAULT,
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
      gradients: Likewise.

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
    _check_operands(x, w13, w2, b13, b2, spec, gradients)
    _check_routing(x, routing, spec)
    mask = token_mask(x, mask, num_tokens)
    selection = _select(x, w13, spec, backend, config)
    if math.prod(x.shape[:-1]) == 0:
        return jnp.zeros(x.shape, x.dtype)
    routing = Routing(
        _int32_in(routing.topk_ids, -1, spec.num_experts), jnp.asarray(routing.topk_weights, jnp.float32)
    )
    if selection.backend != "xla":
        return _kernel_experts(x, routing, w13, w2, b13, b2, mask, spec, selection, gradients)
    return _xla_experts(x, routing, _in_dtype(w13, x), _in_dtype(w2, x), b13, b2, mask, spec)


def _in_dtype(weights: jax.Array | QTensor, x: jax.Array) -> jax.Array | QTensor:
    """Cast float32 weights to x's dtype; those of that dtype, and quantised ones, stay as they are."""
    return weights if isinstance(weights, QTensor) else weights.astype(x.dtype)


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
        weight_dtype=w13.dtype.name if isinstance(w13, QTensor) else x.dtype.name,  # that of the products
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
    gradients: GradientConfig,
) -> jax.Array:
    backend, config = _kernels(selection)
    if not backend.routes(_problem(x, w13, spec), config):
        routing = _route_real(logits, correction_bias, mask, spec)
        return _kernel_experts(x, routing, w13, w2, b13, b2, mask, spec, selection, gradients)
    # The kernel takes the count itself: no mask needs to be made for it.
    real = None if mask is None else mask.reshape(-1).astype(jnp.int32)
    if count is not None:
        number = count if isinstance(count, jax.Array) else np.asarray(count)
        # An int32 as it is, below 0 or not: clipping it would be a launch of its own.
        real = jnp.reshape(number if number.dtype == np.int32 else _int32_in(number, 0, 2**31 - 1), 1)

    @jax.custom_batching.sequential_vmap
    def kernel(x: Any, logits: Any, w13: Any, w2: Any, b13: Any, b2: Any, bias: Any, real: Any) -> jax.Array:
        w13, w2 = _in_dtype(w13, x), _in_dtype(w2, x)
        return backend.fused_moe(
            x, logits, w13, w2, b13, b2, spec, config=config, correction_bias=bias, real=real
        )

    def routed(x: Any, logits: Any, w13: Any, w2: Any, b13: Any, b2: Any, bias: Any, real: Any) -> jax.Array:
        """The same, but routed by XLA, so that the router has its gradient."""
        is_real = None
        if real is not None:
            is_real = real != 0 if real.shape == x.shape[:1] and count is None else jnp.arange(len(x)) < real
        routing = _route_real(logits, bias, is_real, spec)
        return _kernel_experts(x, routing, w13, w2, b13, b2, is_real, spec, selection, gradients)

    @jax.custom_vjp
    def run(*args: Any) -> jax.Array:
        return xla.vary_like(kernel(*args), *jax.tree.leaves(args))  # Pallas loses track in shard_map

    run.defvjp(lambda *args: jax.vjp(routed, *args), lambda pull_back, d_y: pull_back(d_y))
    y = run(_rows(x), _rows(logits), w13, w2, b13, b2, correction_bias, real)
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
    gradients: GradientConfig,
) -> jax.Array:
    if mask is not None:
        routing = drop_masked(routing, mask)
    args = _Args(_rows(x), Routing(*map(_rows, routing)), w13, w2, b13, b2)
    return _differentiable(spec, selection, gradients)(args).reshape(x.shape)


class _Args(NamedTuple):
    """What the experts are differentiated by, and their ids."""

    x: Any
    routing: Any
    w13: Any
    w2: Any
    b13: Any
    b2: Any

    def in_one_dtype(self) -> _Args:
        return self._replace(w13=_in_dtype(self.w13, self.x), w2=_in_dtype(self.w2, self.x))


def _differentiable(spec: MoESpec, selection: Selection, gradients: GradientConfig) -> Any:
    """The selected kernel as a function of `_Args`, with its gradient; ``vmap`` calls it in turn."""
    backend, config = _kernels(selection)
    backward_config = selection.backward_config if gradients.kernels else None
    saves = backward_config is not None and gradients.save == "products"

    @jax.custom_batching.sequential_vmap
    def compute(args: _Args) -> jax.Array:
        return backend.fused_experts(*args.in_one_dtype(), spec, config=config)

    @jax.custom_batching.sequential_vmap
    def compute_and_save(args: _Args) -> tuple[jax.Array, jax.Array]:
        from moe_pallas.kernels import grouped_gemm

        assert backward_config is not None
        return grouped_gemm.fused_experts(*args.in_one_dtype(), spec, config=backward_config, saves=True)

    @jax.custom_batching.sequential_vmap
    def pull_back(args: _Args, products: jax.Array | None, d_y: jax.Array) -> _Args:
        from moe_pallas.kernels import gradients as kernels

        assert backward_config is not None
        given: Any = {"products": products, "weight_dtype": args.w13.dtype, "config": backward_config}
        return _Args(*kernels.gradients(d_y, *args.in_one_dtype(), spec, **given))

    @jax.custom_vjp
    def run(args: _Args) -> jax.Array:
        return xla.vary_like(compute(args), *jax.tree.leaves(args))  # Pallas loses track in shard_map

    def forward(args: _Args) -> tuple[jax.Array, tuple[_Args, jax.Array | None]]:
        if not saves:
            return run(args), (args, None)
        y, products = (xla.vary_like(made, *jax.tree.leaves(args)) for made in compute_and_save(args))
        return y, (args, checkpoint_name(products, GradientConfig.PRODUCTS))

    def backward(residuals: tuple[_Args, jax.Array | None], d_y: jax.Array) -> tuple[_Args]:
        args, products = residuals
        if backward_config is None:

            def portable(args: _Args) -> jax.Array:
                return xla.fused_experts(*args.in_one_dtype(), spec).astype(args.x.dtype)

            return jax.vjp(portable, args)[1](d_y)
        found = pull_back(args, products, d_y)

        def like(gradient: jax.Array, primal: jax.Array) -> jax.Array:
            gradient = xla.vary_like(gradient, d_y, *jax.tree.leaves(args))
            return xla.like_primal(gradient.astype(primal.dtype), primal)

        ids: Any = np.zeros(args.routing.topk_ids.shape, jax.dtypes.float0)
        weights = like(found.routing, args.routing.topk_weights)
        floats = args._replace(routing=None), found._replace(routing=None)
        made = jax.tree.map(lambda primal, gradient: like(gradient, primal), *floats)
        return (made._replace(routing=Routing(ids, weights)),)

    run.defvjp(forward, backward)
    return run


def _kernels(selection: Selection) -> tuple[Any, Any]:
    """Module and configuration of the selected kernels."""
    from moe_pallas.kernels import grouped_gemm, swap_ab  # Pallas is imported when a kernel is used

    assert selection.config is not None, selection
    return {"swap_ab": swap_ab, "grouped_gemm": grouped_gemm}[selection.backend], selection.config


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


def check_gradients(gradients: GradientConfig) -> None:
    """Raise TypeError unless it is a `GradientConfig`."""
    if not isinstance(gradients, GradientConfig):
        raise TypeError(f"gradients is a GradientConfig; got {type(gradients).__name__}.")


def _check_operands(
    x: jax.Array,
    w13: jax.Array | QTensor,
    w2: jax.Array | QTensor,
    b13: jax.Array | None,
    b2: jax.Array | None,
    spec: MoESpec,
    gradients: GradientConfig,
) -> None:
    check_spec(spec)
    check_gradients(gradients)
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
        if name in ("w13", "w2") and gradients.float32_weights:
            if array.dtype != jnp.float32 or x.dtype == jnp.float32:
                raise TypeError(
                    "With float32_weights w13 and w2 are float32, and x is bfloat16 or float16; got "
                    f"{name} in {array.dtype}, x in {x.dtype}."
                )
            continue
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
