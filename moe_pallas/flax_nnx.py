"""The MoE layer as a Flax NNX module; needs the ``flax`` extra."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from moe_pallas import layers
from moe_pallas.configs.lookup import Config
from moe_pallas.configs.schema import GradientConfig
from moe_pallas.layers import Initializer, MoEAux
from moe_pallas.sharding import Sharding
from moe_pallas.spec import MoESpec

try:
    from flax import nnx
except ImportError as error:
    raise ImportError(
        f"moe_pallas.flax_nnx needs Flax: pip install 'moe_pallas[flax]'. The import failed with: {error}"
    ) from error

Partitioning = Mapping[str, tuple[str | tuple[str, ...] | None, ...]]

_OPTIONAL = ("router_bias", "correction_bias", "b13", "b2", "shared_w13", "shared_w2", "shared_gate")


class CorrectionBias(nnx.Variable[jax.Array]):
    """The variable type of ``correction_bias``, which is not trained by gradients.

    It only takes part in the choice of experts, so its gradient is 0, but an optimizer's weight decay would
    still move it. As its own type, beside `nnx.Param`, it is left alone by ``nnx.grad`` and by
    ``nnx.Optimizer(..., wrt=nnx.Param)``, and is found with ``nnx.state(model, CorrectionBias)``.
    """


class MoE(nnx.Module):
    """A Mixture-of-Experts layer: router, routed experts and, if the spec has one, a shared expert.

    The numbers are those of `moe_pallas.MoE`, whose parameters are the attributes here, with names and
    shapes as in ``spec.param_shapes``; the names that this spec does not use are None. All are `nnx.Param`,
    but ``correction_bias`` is a `CorrectionBias`. ``nnx.update(layer, params)`` puts a checkpoint's flat dict
    in, ``nnx.to_pure_dict(nnx.state(layer))`` gets it out.

    Args:
      spec: The layer.
      dtype: Dtype of the computation, bfloat16 | float16 | float32; None = x's (the parameters do not widen
        it, unlike in `nnx.Linear`). The router computes in float32 in any case.
      param_dtype: Dtype of the parameters (correction_bias is always float32).
      backend: ``"auto"`` or a backend's name, see `moe_pallas.select_backend`.
      config: A configuration of that backend's kernel for every call, see `moe_pallas.fused_moe`, or None.
      kernel_init: Initialiser, called as ``kernel_init(key, (fan_in, fan_out), dtype)`` for each matrix by
        itself (each expert its own); biases start at 0. It can't carry metadata: use ``partitioning``.
      partitioning: Parameter name → name of the mesh axis (or logical axis) of each dimension, for example
        ``{"w13": ("expert", None, None), "w2": ("expert", None, None)}``. Becomes the ``out_sharding`` of
        the variable, by which Flax places it in the mesh at once (see ``nnx.use_eager_sharding``) and which
        ``nnx.get_partition_spec`` reports. A name that is not in it: no metadata. None: that of ``sharding``.
      sharding: How the layer lies on several devices, see `moe_pallas.Sharding`; None: on one.
      gradients: What a backward pass finds and gives, see `moe_pallas.GradientConfig`.
      rngs: Each parameter takes one key of ``rngs.params``.

    Raises:
      ValueError: ``partitioning`` names a parameter that the layer does not have.
      TypeError: ``kernel_init`` returns metadata.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from moe_pallas import MoESpec
      >>> from moe_pallas.flax_nnx import MoE
      >>> spec = MoESpec(num_experts=8, top_k=2, hidden_size=16, intermediate_size=32)
      >>> layer = MoE(spec, rngs=nnx.Rngs(0))
      >>> y, aux = layer(jnp.ones((2, 5, 16)), return_aux=True)
      >>> y.shape, int(aux.expert_loads.sum()), layer.w13.shape
      ((2, 5, 16), 20, (8, 64, 16))
    """

    router: nnx.Param[jax.Array]
    router_bias: nnx.Param[jax.Array] | None
    correction_bias: CorrectionBias | None
    w13: nnx.Param[jax.Array]
    w2: nnx.Param[jax.Array]
    b13: nnx.Param[jax.Array] | None
    b2: nnx.Param[jax.Array] | None
    shared_w13: nnx.Param[jax.Array] | None
    shared_w2: nnx.Param[jax.Array] | None
    shared_gate: nnx.Param[jax.Array] | None

    def __init__(
        self,
        spec: MoESpec,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        backend: str = "auto",
        config: Config | None = None,
        kernel_init: Initializer = layers.MoE.kernel_init,
        partitioning: Partitioning | None = None,
        sharding: Sharding | None = None,
        gradients: GradientConfig = layers.MoE.gradients,
        rngs: nnx.Rngs,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.backend = backend
        self.config = config
        self.sharding = sharding
        self.gradients = gradients

        metadata: dict[str, Any] = {}
        if partitioning is None and sharding is not None:
            partitioning = {name: tuple(axes) for name, axes in sharding.param_specs(spec).items()}
            metadata = {"mesh": sharding.mesh}
        partitioning = {} if partitioning is None else partitioning
        if unknown := sorted(partitioning.keys() - spec.param_shapes.keys()):
            raise ValueError(
                f"partitioning names {unknown}, which this layer does not have; it has "
                f"{sorted(spec.param_shapes)}."
            )

        maker = layers.MoE(spec, param_dtype=param_dtype, kernel_init=_plain(kernel_init))
        for name in spec.param_shapes:
            variable = CorrectionBias if name == "correction_bias" else nnx.Param
            placed = {"out_sharding": partitioning[name]} | metadata if name in partitioning else {}
            setattr(self, name, variable(maker.init_param(name, rngs.params()), **placed))
        for name in _OPTIONAL:
            if name not in spec.param_shapes:
                setattr(self, name, nnx.data(None))

    @property
    def layer(self) -> layers.MoE:
        """The same layer without its parameters, for example for ``layer.select_backend``."""
        return layers.MoE(
            self.spec,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            backend=self.backend,
            config=self.config,
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
          return_aux: Also return `moe_pallas.layers.MoEAux`: the routing, loads and losses to train with.

        Returns:
          (..., D) in ``dtype``; exactly 0 at padding. With ``return_aux`` a pair of it and `MoEAux`.

        Raises:
          ValueError, TypeError, UnsupportedError: As `moe_pallas.fused_moe`.
        """
        params = {name: getattr(self, name)[...] for name in self.spec.param_shapes}
        if return_aux:
            return self.layer.apply(params, x, mask=mask, num_tokens=num_tokens, return_aux=True)
        return self.layer.apply(params, x, mask=mask, num_tokens=num_tokens)


def _plain(kernel_init: Initializer) -> Initializer:
    """Refuse metadata from ``kernel_init``."""

    def init(*args: Any) -> jax.Array:
        array = kernel_init(*args)
        if isinstance(array, nnx.VariableMetadata):
            raise TypeError(
                "kernel_init returns metadata, but it makes one matrix of many. Pass the bare initialiser, "
                "and the axis names of whole parameters as partitioning={name: axes}."
            )
        return array

    return init
