"""The MoE layer as a Flax Linen module; needs the ``flax`` extra."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from moe_pallas import layers
from moe_pallas.configs.lookup import Config
from moe_pallas.configs.schema import GradientConfig
from moe_pallas.layers import Initializer, MoEAux, Params
from moe_pallas.sharding import Sharding
from moe_pallas.spec import MoESpec

try:
    import flax.linen as nn
    from flax.core import FrozenDict
except ImportError as error:
    raise ImportError(
        f"moe_pallas.flax_linen needs Flax: pip install 'moe_pallas[flax]'. The import failed with: {error}"
    ) from error

Partitioning = Mapping[str, tuple[str | tuple[str, ...] | None, ...]]

# The variable collection of correction_bias.
ROUTER_STATE = "router_state"


class MoE(nn.Module):
    """A Mixture-of-Experts layer: router, routed experts and, if the spec has one, a shared expert.

    The numbers are those of `moe_pallas.MoE`, and ``variables["params"]`` is its flat dict, with names and
    shapes as in ``spec.param_shapes``. One is not among the params: ``correction_bias``. It only takes part
    in the choice of experts, so its gradient is 0, but an optimizer's weight decay would still move it. It is
    in the collection ``"router_state"``, as batch norm has its ``"batch_stats"``; `to_variables` sorts a
    checkpoint's flat dict so. A lifted transform (``nn.scan``, ``nn.vmap``) of such a layer needs
    ``"router_state"`` in its ``variable_axes``.

    Where the collection ``"intermediates"`` is mutable, a call also sows its `moe_pallas.layers.MoEAux` there
    as ``"aux"``: routing, loads and the losses to train with.

    Attributes:
      spec: The layer.
      dtype: Dtype of the computation, bfloat16 | float16 | float32; None = x's (the parameters do not widen
        it, unlike in `nn.Dense`). The router computes in float32 in any case.
      param_dtype: Dtype of the parameters (correction_bias is always float32).
      backend: ``"auto"`` or a backend's name, see `moe_pallas.select_backend`.
      config: A configuration of that backend's kernel for every call, see `moe_pallas.fused_moe`, or None.
      kernel_init: Initialiser, called as ``kernel_init(key, (fan_in, fan_out), dtype)`` for each matrix by
        itself (each expert its own); biases start at 0. It can't carry metadata: use ``partitioning``.
      partitioning: Parameter name → name of the mesh axis of each dimension, for example
        ``{"w13": ("expert", None, None), "w2": ("expert", None, None)}``. The variable is then an
        ``nn.Partitioned``, which ``nn.get_partition_spec`` reports. A name that is not in it: a bare array.
        None: that of ``sharding``.
      with_partitioning: What wraps an initialiser with the names of ``partitioning``: for logical axis names
        ``nn.with_logical_partitioning``.
      sharding: How the layer lies on several devices, see `moe_pallas.Sharding`; None: on one.
      gradients: What a backward pass finds and gives, see `moe_pallas.GradientConfig`.

    Raises:
      ValueError: ``partitioning`` names a parameter that the layer does not have.
      TypeError: ``kernel_init`` returns metadata (when it is called, by ``init``).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from moe_pallas import MoESpec
      >>> from moe_pallas.flax_linen import MoE
      >>> spec = MoESpec(num_experts=8, top_k=2, hidden_size=16, intermediate_size=32)
      >>> layer, x = MoE(spec), jnp.ones((2, 5, 16))
      >>> variables = layer.init(jax.random.key(0), x)
      >>> y, state = layer.apply(variables, x, mutable=["intermediates"])
      >>> (aux,) = state["intermediates"]["aux"]
      >>> y.shape, int(aux.expert_loads.sum()), variables["params"]["w13"].shape
      ((2, 5, 16), 20, (8, 64, 16))
    """

    spec: MoESpec
    dtype: Any = None
    param_dtype: Any = jnp.float32
    backend: str = "auto"
    config: Config | None = None
    kernel_init: Initializer = layers.MoE.kernel_init
    partitioning: Partitioning | None = None
    with_partitioning: Callable[..., Any] = nn.with_partitioning
    sharding: Sharding | None = None
    gradients: GradientConfig = layers.MoE.gradients

    def __post_init__(self) -> None:
        if self.partitioning is None and self.sharding is not None:
            specs = self.sharding.param_specs(self.spec)
            self.partitioning = {name: tuple(axes) for name, axes in specs.items()}
        if self.partitioning is not None:
            if unknown := sorted(self.partitioning.keys() - self.spec.param_shapes.keys()):
                raise ValueError(
                    f"partitioning names {unknown}, which this layer does not have; it has "
                    f"{sorted(self.spec.param_shapes)}."
                )
            # Hashable, so that a module can be a static argument of jax.jit.
            self.partitioning = FrozenDict(self.partitioning)
        super().__post_init__()

    @property
    def layer(self) -> layers.MoE:
        """The same layer without Flax, for example for ``layer.select_backend``."""
        return layers.MoE(
            self.spec,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            backend=self.backend,
            config=self.config,
            kernel_init=_plain(self.kernel_init),
            sharding=self.sharding,
            gradients=self.gradients,
        )

    @overload
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        num_tokens: jax.Array | int | None = None,
        return_aux: Literal[False] = False,
    ) -> jax.Array: ...

    @overload
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        num_tokens: jax.Array | int | None = None,
        return_aux: Literal[True],
    ) -> tuple[jax.Array, MoEAux]: ...

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        num_tokens: jax.Array | int | None = None,
        return_aux: bool = False,
    ) -> jax.Array | tuple[jax.Array, MoEAux]:
        """Compute the layer.

        Args:
          x: (..., D) bfloat16 | float16 | float32. Token activations.
          mask: (...) bool. False = padding, see `moe_pallas.fused_moe`.
          num_tokens: () int. Instead of mask: the first so many tokens are real.
          return_aux: Also return `moe_pallas.layers.MoEAux`.

        Returns:
          (..., D) in ``dtype``; exactly 0 at padding. With ``return_aux`` a pair of it and `MoEAux`.

        Raises:
          ValueError, TypeError, UnsupportedError: As `moe_pallas.fused_moe`.
        """
        layer = self.layer
        params = {name: self._declare(name, layer) for name in self.spec.param_shapes}
        if not (return_aux or self.is_mutable_collection("intermediates")):
            return layer.apply(params, x, mask=mask, num_tokens=num_tokens)
        y, aux = layer.apply(params, x, mask=mask, num_tokens=num_tokens, return_aux=True)
        self.sow("intermediates", "aux", aux)
        return (y, aux) if return_aux else y

    def _declare(self, name: str, layer: layers.MoE) -> jax.Array:
        def init(key: jax.Array) -> jax.Array:
            array = layer.init_param(name, key)
            if self.sharding is None:
                return array
            return self.sharding.place(array, self.sharding.param_specs(self.spec)[name])

        make: Callable[..., Any] = init
        if self.partitioning is not None and name in self.partitioning:
            make = self.with_partitioning(init, self.partitioning[name])
        if name == "correction_bias":
            # It starts at 0: the key is a formality.
            return self.variable(ROUTER_STATE, name, lambda: make(jax.random.key(0))).value
        return self.param(name, make)


def to_variables(params: Params) -> dict[str, dict[str, jax.Array]]:
    """Sort a flat dict of parameters into the collections of `MoE`.

    Args:
      params: As `moe_pallas.MoE.init` makes them, or `moe_pallas.interop.from_huggingface`.

    Returns:
      ``{"params": ..., "router_state": {"correction_bias": ...}}``, without the latter if there is none.

    Example:
      >>> import jax
      >>> import moe_pallas
      >>> from moe_pallas.flax_linen import to_variables
      >>> spec = moe_pallas.MoESpec(
      ...     num_experts=8, top_k=2, hidden_size=16, intermediate_size=32, correction_bias=True
      ... )
      >>> variables = to_variables(moe_pallas.MoE(spec).init(jax.random.key(0)))
      >>> sorted(variables["params"]), list(variables["router_state"])
      (['router', 'w13', 'w2'], ['correction_bias'])
    """
    variables = {"params": dict(params)}
    if "correction_bias" in params:
        variables[ROUTER_STATE] = {"correction_bias": variables["params"].pop("correction_bias")}
    return variables


def _plain(kernel_init: Initializer) -> Initializer:
    """Refuse metadata from ``kernel_init``."""

    def init(*args: Any) -> jax.Array:
        array = kernel_init(*args)
        if isinstance(array, nn.meta.AxisMetadata):
            raise TypeError(
                "kernel_init returns metadata, but it makes one matrix of many. Pass the bare initialiser, "
                "and the axis names of whole parameters as partitioning={name: axes}."
            )
        return array

    return init
