"""The MoE layer, Flax-style (init / apply) without importing Flax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from moe_pallas.activations import activate
from moe_pallas.configs.lookup import Config
from moe_pallas.configs.schema import GradientConfig
from moe_pallas.experts import check_gradients, fused_moe, token_mask
from moe_pallas.oracle import Explanation, Selection, explain, resolve_backend, select_backend
from moe_pallas.quant import QTensor, check_qtensor, dequantize, round_activations, scale_of_x
from moe_pallas.routing import (
    Routing,
    count_experts,
    drop_masked,
    load_balance_loss,
    route,
    router_z_loss,
    sum_over,
)
from moe_pallas.sharding import Sharding, routed_experts
from moe_pallas.spec import ActivationScales, MoESpec, Problem, check_array, check_dtype, check_spec

Params = Mapping[str, Any]  # of jax.Array, or QTensor where it is an expert's matrix
Initializer = Callable[..., jax.Array]

_DEFAULT_GRADIENTS = GradientConfig()
_LECUN_NORMAL = jax.nn.initializers.lecun_normal()
_EXPERT_MATRICES = ("w13", "w2", "shared_w13", "shared_w2", "shared_gate")
_QUANTISABLE = ("w13", "w2", "shared_w13", "shared_w2")
_ROUTED = ("w13", "w2", "b13", "b2")
_BIASES = ("router_bias", "correction_bias", "b13", "b2")


class MoEAux(NamedTuple):
    """What a layer tells about its routing; padding and dropped slots are in none of it.

    Attributes:
      routing: `Routing` of every token (ids -1 and weights 0 at padding).
      expert_loads: (E,) int32. Routed slots of each expert.
      load_balance_loss: () float32. See `moe_pallas.routing.load_balance_loss`.
      router_z_loss: () float32. See `moe_pallas.routing.router_z_loss`.
    """

    routing: Routing
    expert_loads: jax.Array
    load_balance_loss: jax.Array
    router_z_loss: jax.Array


@dataclasses.dataclass(frozen=True)
class MoE:
    """A Mixture-of-Experts layer: router, routed experts and, if the spec has one, a shared expert.

    Holds no arrays: ``params = layer.init(key)``, ``y = layer.apply(params, x)``. Hashable, so it can be
    a static argument of ``jax.jit``.

    Args:
      spec: The layer.
      dtype: Dtype of the computation, bfloat16 | float16 | float32; None = x's. The router computes in
        float32 in any case. Where ``params`` have another dtype they are cast in every call: for serving,
        store them in the dtype of the computation.
      param_dtype: Dtype in which `init` makes the parameters (correction_bias is always float32).
      backend: ``"auto"`` or a backend's name, see `select_backend`.
      config: A configuration of that backend's kernel for every call, see `fused_moe`; None: the best known
        for each.
      kernel_init: A JAX or Flax initialiser, called as ``kernel_init(key, (fan_in, fan_out), dtype)`` for
        each matrix by itself (each expert its own); biases start at 0.
      sharding: How the layer lies on several devices, see `moe_pallas.Sharding`; None: on one.
      gradients: What a backward pass finds and gives, see `moe_pallas.GradientConfig`. With its
        ``float32_weights`` and a ``dtype`` of 16 bits, gradients of float32 experts are not rounded to it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from moe_pallas import MoE, MoESpec
      >>> layer = MoE(MoESpec(num_experts=8, top_k=2, hidden_size=16, intermediate_size=32))
      >>> params = layer.init(jax.random.key(0))
      >>> y, aux = layer.apply(params, jnp.ones((2, 5, 16)), return_aux=True)
      >>> y.shape, int(aux.expert_loads.sum())
      ((2, 5, 16), 20)
    """

    spec: MoESpec
    _: dataclasses.KW_ONLY
    dtype: Any = None
    param_dtype: Any = jnp.float32
    backend: str = "auto"
    config: Config | None = None
    kernel_init: Initializer = _LECUN_NORMAL
    sharding: Sharding | None = None
    gradients: GradientConfig = _DEFAULT_GRADIENTS

    def __post_init__(self) -> None:
        check_spec(self.spec)
        resolve_backend(self.backend, self.config)
        check_gradients(self.gradients)
        check_dtype("MoE.param_dtype", jnp.dtype(self.param_dtype).name)
        if self.dtype is not None:
            check_dtype("MoE.dtype", jnp.dtype(self.dtype).name)
            object.__setattr__(self, "dtype", jnp.dtype(self.dtype))  # one layer, one hash, one compilation
        if self.sharding is not None:
            self.sharding.check(self.spec)

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Make random parameters.

        Args:
          key: A JAX random key.

        Returns:
          Name → array, shaped as ``spec.param_shapes``. One flat dict, contraction axis last. With a
          ``sharding`` the numbers are the same, each device's part on that device.
        """
        if self.sharding is not None:
            plain = dataclasses.replace(self, sharding=None)
            return jax.jit(plain.init, out_shardings=self.sharding.param_shardings(self.spec))(key)
        shapes = self.spec.param_shapes
        keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
        return {name: self.init_param(name, keys[name]) for name in shapes}

    def init_param(self, name: str, key: jax.Array) -> jax.Array:
        """Make one parameter of `init`'s dict."""
        shape = self.spec.param_shapes[name]
        if name in _BIASES:
            return jnp.zeros(shape, jnp.float32 if name == "correction_bias" else self.param_dtype)
        *experts, fan_out, fan_in = (1, *shape) if name == "shared_gate" else shape
        make = lambda k: self.kernel_init(k, (fan_in, fan_out), self.param_dtype).T  # noqa: E731
        if experts:
            return jax.vmap(make)(jax.random.split(key, experts[0]))
        return make(key).reshape(shape)

    @overload
    def apply(
        self,
        params: Params,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        num_tokens: jax.Array | int | None = None,
        return_aux: Literal[False] = False,
    ) -> jax.Array: ...

    @overload
    def apply(
        self,
        params: Params,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        num_tokens: jax.Array | int | None = None,
        return_aux: Literal[True],
    ) -> tuple[jax.Array, MoEAux]: ...

    def apply(
        self,
        params: Params,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        num_tokens: jax.Array | int | None = None,
        return_aux: bool = False,
    ) -> jax.Array | tuple[jax.Array, MoEAux]:
        """Compute the layer.

        Args:
          params: As `init` makes them, or `moe_pallas.interop.from_huggingface`. The matrices of routed and
            shared experts may be `QTensor`s, as `moe_pallas.quantize_experts` makes them.
          x: (..., D) bfloat16 | float16 | float32. Token activations.
          mask: (...) bool. False = padding, see `fused_moe`.
          num_tokens: () int. Instead of mask: the first so many tokens are real.
          return_aux: Also return `MoEAux`.

        Returns:
          (..., D) in ``dtype``; exactly 0 at padding. With ``return_aux`` a pair of it and `MoEAux`. A shared
          expert is added to the routed experts' rounded sum, in float32, and rounded again.

        Raises:
          ValueError, TypeError, UnsupportedError: As `fused_moe`, or params that are not this layer's.
        """
        spec = self.spec
        _check_params(params, spec)
        _check_input(x, spec)
        mask = token_mask(x, mask, num_tokens)
        if self.sharding is not None and not self.sharding.is_plain and x.size:
            return self._apply_sharded(self.sharding, params, x, mask, return_aux)
        if mask is not None:
            x = jnp.where(mask[..., None], x, 0)
        dtype = x.dtype if self.dtype is None else self.dtype
        cast = self._cast(params, dtype)
        with jax.named_scope("router"):
            logits = _router_logits(params, x)
        inputs = x.astype(dtype)
        y = fused_moe(
            inputs,
            logits,
            cast["w13"],
            cast["w2"],
            spec=spec,
            b13=params.get("b13"),
            b2=params.get("b2"),
            correction_bias=params.get("correction_bias"),
            # A count is less work for a kernel than the mask made of it.
            **({"mask": mask} if num_tokens is None else {"num_tokens": num_tokens}),
            backend=self.backend,
            config=self.config,
            gradients=self.gradients,
        )
        if spec.shared_intermediate_size:
            with jax.named_scope("shared_expert"):
                shared = _shared_expert(cast, inputs, spec)
                y = (y.astype(jnp.float32) + shared).astype(dtype)
                if mask is not None:
                    y = jnp.where(mask[..., None], y, 0)
        return (y, self._aux(params, logits, mask)) if return_aux else y

    def select_backend(self, num_tokens: int, dtype: Any = jnp.bfloat16, quant: str = "none") -> Selection:
        """Say which backend serves a call of ``num_tokens`` tokens (of ``dtype``, if the layer has none).

        With a ``sharding`` they are the tokens of all devices, and the backend that of each device's experts.

        ``quant``: How the experts are quantised, see `Problem`.
        """
        return select_backend(self._problem(num_tokens, dtype, quant), self.backend, config=self.config)

    def explain(self, num_tokens: int, dtype: Any = jnp.bfloat16, quant: str = "none") -> Explanation:
        """Say why that backend, and why not the others; arguments as in ``select_backend``."""
        return explain(self._problem(num_tokens, dtype, quant), self.backend, config=self.config)

    def _problem(self, num_tokens: int, dtype: Any, quant: str) -> Problem:
        name = jnp.dtype(dtype if self.dtype is None else self.dtype).name
        spec = self.spec
        if self.sharding is not None:
            spec, num_tokens = self.sharding.seen_by_experts(spec, num_tokens)
        return Problem(spec=spec, num_tokens=num_tokens, dtype=name, quant=quant)

    def _cast(self, params: Params, dtype: Any) -> dict[str, Any]:
        """The experts' matrices in the dtype of the computation; some are cast by who multiplies them."""
        kept = ("w13", "w2") if self.gradients.float32_weights else ()
        names = [name for name in _EXPERT_MATRICES if name in params]
        return {name: params[name] if name in kept else _cast(params[name], dtype) for name in names}

    def _apply_sharded(
        self, sharding: Sharding, params: Params, x: jax.Array, mask: jax.Array | None, return_aux: bool
    ) -> jax.Array | tuple[jax.Array, MoEAux]:
        def shard(params: Params, x: jax.Array, mask: jax.Array | None) -> Any:
            lead = x.shape[:-1]
            mask = None if mask is None else mask.reshape(-1)
            y, logits = self._compute_shard(sharding, tokens, params, x.reshape(-1, x.shape[-1]), mask)
            y = y.reshape(x.shape)
            if not return_aux:
                return y
            aux = self._aux(params, logits, mask, axis_name=sharding.token_axes)
            return y, aux._replace(routing=jax.tree.map(lambda part: part.reshape(*lead, -1), aux.routing))

        tokens = math.prod(x.shape[:-1])
        # None: split as tokens are.
        out_specs: Any = MoEAux._make([Routing._make([None, None]), P(), P(), P()])
        return sharding.run(shard, self.spec, params, x, mask, (None, out_specs) if return_aux else None)

    def _compute_shard(
        self, sharding: Sharding, tokens: int, params: Params, x: jax.Array, mask: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """One shard's tokens (T, D) → their y and router logits; ``tokens``: of all shards together."""
        spec = self.spec
        dtype = x.dtype if self.dtype is None else self.dtype
        if mask is not None:
            x = jnp.where(mask[:, None], x, 0)
        cast = self._cast(params, dtype)
        experts: dict[str, Any] = {name: cast.get(name, params[name]) for name in _ROUTED if name in params}
        with jax.named_scope("router"):
            logits = _router_logits(params, x)
        inputs = x.astype(dtype)
        sums, bias = sharding.sum_axes, params.get("correction_bias")
        if sharding.experts_are_whole:
            y = fused_moe(
                inputs,
                logits,
                **experts,
                spec=spec,
                correction_bias=bias,
                mask=mask,
                backend=self.backend,
                config=self.config,
                gradients=self.gradients,
            )
        else:
            quant = cast["w13"].scheme.name if isinstance(cast["w13"], QTensor) else "none"
            backend = self.select_backend(tokens, dtype, quant).backend
            strategy = sharding.select_strategy(spec, tokens, dtype.name).strategy
            with jax.named_scope("router"):
                real = logits if mask is None else jnp.where(mask[:, None], logits, 0)
                routing = route(real, spec, correction_bias=bias)
                if mask is not None:
                    routing = drop_masked(routing, mask)
            if sums:  # here, so that gradients are summed here: once, for a shard's own tokens
                inputs, routing = lax.pcast((inputs, routing), sums, to="varying")
            options = backend, self.config, self.gradients
            y = routed_experts(sharding, strategy, inputs, routing, experts, spec, *options)
        is_split = bool(sharding.shared_axes(spec))
        if sums and not is_split:
            y = lax.psum(y, sums)
        if spec.shared_intermediate_size:
            with jax.named_scope("shared_expert"):
                shared = _shared_expert(cast, inputs if is_split else x.astype(dtype), spec)
                y = (y.astype(jnp.float32) + shared).astype(dtype)
        if sums and is_split:
            y = lax.psum(y, sums)
        if mask is not None and spec.shared_intermediate_size:
            y = jnp.where(mask[:, None], y, 0)
        return y, logits

    def _aux(
        self, params: Params, logits: jax.Array, mask: jax.Array | None, axis_name: tuple[str, ...] = ()
    ) -> MoEAux:
        # Routed a second time: the fused path keeps its routing to itself. XLA merges the two where it can.
        routing = route(logits, self.spec, correction_bias=params.get("correction_bias"))
        if mask is not None:
            routing = drop_masked(routing, mask)
        return MoEAux(
            routing,
            sum_over(count_experts(routing.topk_ids, self.spec.num_experts), axis_name),
            load_balance_loss(logits, routing, self.spec, mask=mask, axis_name=axis_name),
            router_z_loss(logits, mask=mask, axis_name=axis_name),
        )


def _router_logits(params: Params, x: jax.Array) -> jax.Array:
    logits = _matmul(x.astype(jnp.float32), params["router"].astype(jnp.float32))
    bias = params.get("router_bias")
    return logits if bias is None else logits + bias.astype(jnp.float32)


def _cast(weights: jax.Array | QTensor, dtype: Any) -> Any:
    return weights if isinstance(weights, QTensor) else weights.astype(dtype)


def _shared_expert(params: Params, x: jax.Array, spec: MoESpec) -> jax.Array:
    """(..., D) → (..., D) float32. Quantised: as the routed experts are, for all rows of x."""
    w13, w2 = params["shared_w13"], params["shared_w2"]
    inputs = x
    if isinstance(w13, QTensor):
        inputs, w13 = _round(x, w13.scheme.activations, scale_of_x(w13)), dequantize(w13)
    h = activate(_matmul(inputs, w13), spec)
    if isinstance(w2, QTensor):
        h, w2 = _round(h, w2.scheme.hidden, scale_of_x(w2)), dequantize(w2)
    else:
        h = h.astype(x.dtype)
    y = _matmul(h, w2)
    if spec.shared_expert_gate:
        y = y * jax.nn.sigmoid(_matmul(x, params["shared_gate"][None]))
    return y


def _round(x: jax.Array, activations: ActivationScales, input_scale: jax.Array | None) -> jax.Array:
    rows = round_activations(x.reshape(-1, x.shape[-1]), activations, input_scale)
    return rows.reshape(x.shape)


def _matmul(x: jax.Array, weights: jax.Array) -> jax.Array:
    """(..., K), (N, K) → (..., N) float32; float32 operands in full precision, also where TF32 is default."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum("...k,nk->...n", x, weights, precision=precision, preferred_element_type=jnp.float32)


def _check_params(params: Params, spec: MoESpec) -> None:
    if not isinstance(params, Mapping):
        raise TypeError(f"params is a dict of arrays, as init makes it; got {type(params).__name__}.")
    shapes = spec.param_shapes
    missing, unknown = sorted(shapes.keys() - params.keys()), sorted(params.keys() - shapes.keys())
    if missing or unknown:
        raise ValueError(
            f"params are not this layer's: missing {missing}, not expected {unknown}; need {sorted(shapes)}."
        )
    for name, shape in shapes.items():
        check_array(f"params[{name!r}]", params[name])
        if params[name].shape != shape:
            raise ValueError(f"params[{name!r}] has shape {params[name].shape}; need {shape}.")
        if isinstance(params[name], QTensor) and name in _QUANTISABLE:
            gated = spec.gated and name in ("w13", "shared_w13")
            check_qtensor(f"params[{name!r}]", params[name], spec.gate_up if gated else None)
        else:
            check_dtype(f"params[{name!r}]", params[name].dtype.name)


def _check_input(x: jax.Array, spec: MoESpec) -> None:
    check_array("x", x)
    check_dtype("x", x.dtype.name)
    if x.ndim < 1 or x.shape[-1] != spec.hidden_size:
        raise ValueError(f"x has shape {x.shape}; need (..., hidden_size) = (..., {spec.hidden_size}).")
