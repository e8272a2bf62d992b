"""A layer on several devices: which mesh axis splits what, and how tokens and experts get together.

    mesh axis   splits                                      so that
    data        tokens                                      every shard has its own
    expert      experts: w13, w2 and their biases           a shard holds E / n whole experts
    tensor      F: rows of w13, columns of w2               a shard computes a part of every sum over F

Tokens may be split over the expert axis too (``data=("data", "expert")``), as where attention is
data-parallel. The router runs where a token is, once for each; its weights are on every device. Then:

    tokens        strategy     forward pass                                         backward pass
    not split     gather       every shard: its experts, all tokens → all-reduce    all-reduce of d_x
    over expert   gather       all-gather x, routing → experts → reduce-scatter     the reverse
    over expert   all_to_all   rows to the shards that hold their experts → experts → partial sums back
                               and the same way for gradients

and a tensor axis adds an all-reduce of the tokens' partial sums (it is one with the first line's). Sums
over devices are in the dtype of the computation. A backend sees local experts only: ids less the shard's
first expert; what is outside is dropped. Nothing has a capacity: no token is ever dropped, whatever the
routing.

all_to_all: a token goes once to each shard that holds one of its experts, and one partial sum comes back.
Sizes are known on the devices alone. Where XLA has a ragged all-to-all (GPU, TPU) only live rows move; on a
CPU it has none, and an all-to-all of T rows from each shard to each, the most there can be, stands in.

`jax.shard_map` with its default check does the rest: the gradient of an array comes out whole and placed as
the array is, summed over the axes that it is not split over.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_pallas import xla
from moe_pallas.configs.collectives import STRATEGIES, Layout
from moe_pallas.configs.lookup import Config
from moe_pallas.configs.schema import GradientConfig
from moe_pallas.errors import UnsupportedError
from moe_pallas.experts import fused_experts
from moe_pallas.oracle import StrategySelection, current_device, select_strategy
from moe_pallas.plan import make_plan
from moe_pallas.quant import QTensor
from moe_pallas.routing import Routing
from moe_pallas.spec import GateUp, MoESpec

_DEFAULTS = ("data", "expert", "tensor")
Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How a layer lies on a mesh. Hashable.

    Args:
      mesh: The devices. Axes that are named below are used; over all others the layer is replicated.
      data: Axes that tokens (the first axis of x) are split over; the expert axis may be among them.
      expert: Axis that experts are split over.
      tensor: Axis that F is split over.
      strategy: ``"gather"``, ``"all_to_all"`` (only where tokens are split over the expert axis), or
        ``"auto"``: what `moe_pallas.oracle.select_strategy` says.

    The default names "data", "expert" and "tensor" may be missing from the mesh: nothing is split so. An
    empty name or tuple says so of an axis that is there.

    Raises:
      ValueError: An axis that the mesh does not have, one used for two things, an unknown strategy.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from moe_pallas import MoE, MoESpec, Sharding
      >>> mesh = jax.make_mesh((1, 1), ("expert", "tensor"))  # (4, 2) on eight devices
      >>> spec = MoESpec(
      ...     num_experts=8, top_k=2, hidden_size=16, intermediate_size=32, gate_up="interleaved"
      ... )
      >>> layer = MoE(spec, sharding=Sharding(mesh))
      >>> params = layer.init(jax.random.key(0))  # each device holds its part
      >>> params["w13"].sharding.spec
      P('expert', 'tensor', None)
      >>> jax.jit(layer.apply)(params, jnp.ones((2, 5, 16))).shape
      (2, 5, 16)
    """

    mesh: Mesh | AbstractMesh
    _: dataclasses.KW_ONLY
    data: str | Axes = "data"
    expert: str = "expert"
    tensor: str = "tensor"
    strategy: str = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh | AbstractMesh):
            raise TypeError(f"Sharding.mesh is a jax.sharding.Mesh; got {type(self.mesh).__name__}.")
        data = (self.data,) if isinstance(self.data, str) else tuple(self.data)
        names = {name for name in (*data, self.expert, self.tensor) if name}
        has = self.mesh.axis_names
        if unknown := sorted(names - set(has) - set(_DEFAULTS)):
            raise ValueError(f"Sharding names the axes {unknown}; the mesh has {list(has)}.")
        if has and not names & set(has):
            raise ValueError(
                f"The mesh has the axes {list(has)}; none of them is named. Say what they split: "
                "Sharding(mesh, data=..., expert=..., tensor=...)."
            )
        object.__setattr__(self, "data", tuple(name for name in data if name in has))
        for field in ("expert", "tensor"):
            name = getattr(self, field)
            object.__setattr__(self, field, name if name in has else "")
        if self.tensor and self.tensor in (*self.data, self.expert):
            raise ValueError(
                f"The axis {self.tensor!r} splits F, and so can't split tokens or experts; got data="
                f"{self.data}, expert={self.expert!r}. Give the mesh one more axis."
            )
        if self.strategy not in ("auto", *STRATEGIES):
            raise ValueError(
                f"Sharding.strategy is 'auto', {', '.join(map(repr, STRATEGIES))}; got {self.strategy!r}."
            )
        if self.strategy == "all_to_all" and not self.tokens_over_experts:
            raise ValueError(
                "strategy='all_to_all' sends tokens from the shard that they are on; got data="
                f"{self.data}, expert={self.expert!r}: every shard of the experts has all tokens. Split "
                f"tokens over the expert axis, data={(*self.data, self.expert or 'expert')}, or use 'gather'."
            )

    # Sizes

    def size(self, *axes: str) -> int:
        """Shards of these axes together."""
        return math.prod(self.mesh.shape[axis] for axis in axes if axis)

    @property
    def tokens_over_experts(self) -> bool:
        """Whether each shard of the experts has tokens of its own."""
        return bool(self.expert) and self.expert in self.data

    @property
    def is_plain(self) -> bool:
        """Whether a layer can run as if it had no sharding: one shard, and no axis asks to be named."""
        one = self.size(*{*self.data, self.expert, self.tensor}) == 1
        return one and AxisType.Explicit not in self.mesh.axis_types

    @property
    def experts_are_whole(self) -> bool:
        """Whether every shard has all experts, with all of F."""
        return self.size(self.expert, self.tensor) == 1

    @property
    def token_axes(self) -> Axes:
        """Axes of more than one shard that tokens are split over."""
        return self._real(*self.data)

    @property
    def sum_axes(self) -> Axes:
        """Axes of more than one shard that hold partial sums of the same tokens."""
        return self._real(*(axis for axis in (self.expert, self.tensor) if axis not in self.data))

    def _real(self, *axes: str) -> Axes:
        return tuple(axis for axis in axes if axis and self.mesh.shape[axis] > 1)

    @property
    def layout(self) -> Layout:
        """The same for the cost model."""
        return Layout(
            expert=self.size(self.expert),
            tensor=self.size(self.tensor),
            tokens_over_experts=self.tokens_over_experts,
        )

    # Parameters

    def check(self, spec: MoESpec) -> None:
        """Raise ValueError unless ``spec`` can be split so."""
        experts, tensor = self.size(self.expert), self.size(self.tensor)
        if spec.num_experts % experts:
            fits = [n for n in range(1, spec.num_experts + 1) if spec.num_experts % n == 0]
            raise ValueError(
                f"{spec.num_experts} experts can't be split evenly over {experts} shards of the axis "
                f"{self.expert!r}; need a divisor of num_experts ({', '.join(map(str, fits))}). Let another "
                "axis take the other devices: data or tensor."
            )
        if spec.intermediate_size % tensor:
            raise ValueError(
                f"intermediate_size={spec.intermediate_size} can't be split evenly over {tensor} shards of "
                f"the axis {self.tensor!r}; need a divisor of it. Let another axis take the other devices."
            )
        if tensor > 1 and spec.gated and spec.gate_up is GateUp.STACKED:
            raise ValueError(
                "A tensor axis splits the rows of w13 into runs, and in the order 'stacked' a run is all "
                "gate or all up; need gate_up='interleaved', whose runs hold both. Convert once, at load: "
                "spec, params = moe_pallas.interop.with_gate_up(spec, params, 'interleaved')."
            )

    def param_specs(self, spec: MoESpec) -> dict[str, P]:
        """Name → `PartitionSpec` of every parameter; also what ``partitioning`` of the Flax modules takes."""
        self.check(spec)
        expert, tensor = self.expert or None, self.tensor or None
        split = {
            "w13": P(expert, tensor, None),
            "w2": P(expert, None, tensor),
            "b13": P(expert, tensor),
            "b2": P(expert, None),
        }
        if axes := self.shared_axes(spec):
            split |= {"shared_w13": P(axes, None), "shared_w2": P(None, axes)}
        shapes = spec.param_shapes
        return {name: split.get(name, P(*[None] * len(shape))) for name, shape in shapes.items()}

    def param_shardings(self, spec: MoESpec) -> dict[str, NamedSharding]:
        """Name → `NamedSharding` of every parameter, for ``jax.device_put`` or ``out_shardings``."""
        return {name: NamedSharding(self.mesh, p) for name, p in self.param_specs(spec).items()}

    def shared_axes(self, spec: MoESpec) -> Axes:
        """Axes that the shared expert's width is split over: all partial sums' or, if uneven, none."""
        width = spec.shared_intermediate_size
        axes = self.sum_axes
        uneven = width % self.size(*axes) or (spec.gated and spec.gate_up is GateUp.STACKED)
        return axes if width and axes and not uneven else ()

    # Calls

    def select_strategy(self, spec: MoESpec, num_tokens: int, dtype: str = "bfloat16") -> StrategySelection:
        """Say how ``num_tokens`` tokens (of all shards) and the experts get together, and why."""
        tokens = -(-num_tokens // self.size(*self.data))
        return select_strategy(
            spec, tokens, self.layout, dtype=dtype, strategy=self.strategy, platform=self._platform()
        )

    def seen_by_experts(self, spec: MoESpec, num_tokens: int) -> tuple[MoESpec, int]:
        """The layer and the tokens that one shard of the experts works on: its part of F, its group."""
        groups = self.size(*(axis for axis in self.data if axis != self.expert))
        width = spec.intermediate_size // self.size(self.tensor)
        return dataclasses.replace(spec, intermediate_size=width), -(-num_tokens // groups)

    def _platform(self) -> str:
        devices = getattr(self.mesh, "devices", None)  # an AbstractMesh has none
        return current_device().platform if devices is None else devices.flat[0].platform

    def run(
        self,
        shard: Callable[..., Any],
        spec: MoESpec,
        params: Mapping[str, Any],
        x: jax.Array,
        mask: jax.Array | None,
        out_specs: Any,
    ) -> Any:
        """Call ``shard(params, x, mask)`` on every device with its part of each.

        x and mask are split over their first axis; ``None`` in ``out_specs`` stands for an array (of tokens)
        that comes back like that. Where the first axis can't be split evenly all leading axes become one,
        padded to a multiple of the shards; padding is masked.
        """
        lead = x.shape[:-1]
        tokens, shards = math.prod(lead), self.size(*self.token_axes)
        padded = -(-tokens // shards) * shards
        fits = shards == 1 or (len(lead) > 0 and lead[0] % shards == 0)
        if not fits:
            x, mask = self.place(jnp.asarray(x), P()), None if mask is None else self.place(mask, P())
            mask = jnp.ones(lead, bool) if mask is None else mask
            x = jnp.pad(x.reshape(tokens, -1), ((0, padded - tokens), (0, 0)))
            mask = jnp.pad(mask.reshape(tokens), (0, padded - tokens))
        if self.size(self.tensor) > 1 and any(isinstance(value, QTensor) for value in params.values()):
            raise UnsupportedError(
                "sharding",
                f"quantised weights can't be split over the axis {self.tensor!r}: blocks share scales.",
                "an expert axis in its place, or weights that are not quantised.",
            )
        token_spec = P(self.token_axes or None) if x.ndim > 1 else P()
        specs = {name: self._without_single(p) for name, p in self.param_specs(spec).items()}
        params = {name: self.place(params[name], specs[name]) for name in specs}
        x = self.place(jnp.asarray(x), token_spec)
        mask = None if mask is None else self.place(jnp.asarray(mask), token_spec)
        is_tokens = jax.tree.map(lambda out: out is None, out_specs, is_leaf=lambda out: out is None)
        outs = jax.shard_map(
            shard,
            mesh=self.mesh,
            in_specs=(specs, token_spec, token_spec),
            out_specs=jax.tree.map(lambda is_token: token_spec if is_token else P(), is_tokens),
        )(params, x, mask)
        if fits:
            return outs
        unpad = lambda out: self.place(out, P())[:tokens].reshape(*lead, *out.shape[1:])  # noqa: E731
        return jax.tree.map(lambda is_token, out: unpad(out) if is_token else out, is_tokens, outs)

    def _without_single(self, spec: P) -> P:
        """Leave out axes of one shard, over which nothing needs to be summed."""
        parts = [self._real(*_names(part)) or None for part in spec]
        while parts and parts[-1] is None:
            parts.pop()  # a prefix fits the scales of quantised weights too
        return P(*parts)

    def place(self, tree: Any, spec: P) -> Any:
        """Split arrays over the axes of type Explicit, which JAX does only when told to."""
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        if AxisType.Explicit not in types.values():
            return tree
        keep = lambda part: tuple(axis for axis in _names(part) if types[axis] is AxisType.Explicit)  # noqa: E731
        sharding = NamedSharding(self.mesh, P(*(keep(part) or None for part in spec)))
        return jax.tree.map(lambda array: jax.sharding.reshard(array, sharding), tree)


def _names(part: Any) -> Axes:
    """The axes in one entry of a `PartitionSpec`."""
    return part if isinstance(part, tuple) else (part,) if part else ()


# What follows runs inside shard_map, on one shard's part of everything.


def routed_experts(
    sharding: Sharding,
    strategy: str,
    x: jax.Array,
    routing: Routing,
    experts: Mapping[str, Any],
    spec: MoESpec,
    backend: str,
    config: Config | None,
    gradients: GradientConfig,
) -> jax.Array:
    """Compute the routed experts of this shard's tokens, up to a sum over ``sharding.sum_axes``.

    Args:
      sharding: How the layer lies on the mesh.
      strategy: ``"gather"`` or ``"all_to_all"``.
      x: (T, D), varying over ``sharding.sum_axes``.
      routing: ids (T, top_k) of the whole layer's experts and weights (T, top_k), varying likewise.
      experts: This shard's part of w13, w2 and, if there are any, b13 and b2.
      spec: The whole layer.
      backend: Of the local experts.
      config: Of its kernel, or None.
      gradients: As in `fused_experts`.

    Returns:
      (T, D) in x's dtype.
    """
    local = functools.partial(
        _local_experts,
        sharding,
        experts=experts,
        spec=spec,
        backend=backend,
        config=config,
        gradients=gradients,
    )
    axis = sharding.expert
    if not sharding.tokens_over_experts or sharding.size(axis) == 1:
        return local(x, routing)
    if strategy == "gather":
        x = lax.all_gather(x, axis, tiled=True)
        routing = _unpack(lax.all_gather(_pack(routing), axis, tiled=True))
        return lax.psum_scatter(local(x, routing), axis, scatter_dimension=0, tiled=True)
    assert strategy == "all_to_all", strategy
    return _all_to_all(x, routing, local, axis, sharding.size(axis), spec)


def _local_experts(
    sharding: Sharding,
    x: jax.Array,
    routing: Routing,
    *,
    experts: Mapping[str, Any],
    spec: MoESpec,
    backend: str,
    config: Config | None,
    gradients: GradientConfig,
) -> jax.Array:
    """The experts that are here, of whatever tokens; ids of the others are dropped."""
    shards, tensor = sharding.size(sharding.expert), sharding.size(sharding.tensor)
    ids, weights = routing
    here = spec.num_experts // shards
    if shards > 1:
        ids = ids - lax.axis_index(sharding.expert).astype(jnp.int32) * here
        ids = jnp.where((ids >= 0) & (ids < here), ids, -1)
    top_k = min(spec.top_k, here)
    if top_k < spec.top_k:
        # A token's ids differ, so no more than so many are here: take those, in their order.
        order = jnp.argsort(ids < 0, axis=-1, stable=True)[..., :top_k]
        ids, weights = (jnp.take_along_axis(part, order, axis=-1) for part in (ids, weights))
    b2 = experts.get("b2")
    if b2 is not None and tensor > 1:  # once, not once for each part of F
        b2 = jnp.where(lax.axis_index(sharding.tensor) == 0, b2, 0)
    return fused_experts(
        x,
        Routing(ids, weights),
        experts["w13"],
        experts["w2"],
        spec=local_spec(sharding, spec),
        b13=experts.get("b13"),
        b2=b2,
        backend=backend,
        config=config,
        gradients=gradients,
    )


def local_spec(sharding: Sharding, spec: MoESpec) -> MoESpec:
    """One shard's experts as a layer of its own, without a router or a shared expert."""
    here = spec.num_experts // sharding.size(sharding.expert)
    return dataclasses.replace(
        spec,
        num_experts=here,
        top_k=min(spec.top_k, here),
        intermediate_size=spec.intermediate_size // sharding.size(sharding.tensor),
        router_bias=False,
        correction_bias=False,
        num_expert_groups=1,
        top_k_groups=1,
        shared_intermediate_size=0,
        shared_expert_gate=False,
    )


def _pack(routing: Routing) -> jax.Array:
    """(T, 2 · top_k) float32: one array is one collective. Ids are far below 2**24, so exact."""
    return jnp.concatenate([routing.topk_weights, routing.topk_ids.astype(jnp.float32)], axis=-1)


def _unpack(packed: jax.Array) -> Routing:
    weights, ids = jnp.split(packed, 2, axis=-1)
    return Routing(lax.stop_gradient(ids).astype(jnp.int32), weights)


class _Sizes(NamedTuple):
    """Rows between this shard and each other one, (n,) int32.

    ``sent`` to it, which stand from ``offsets`` on in what is sent; ``received`` from it, which stand from
    ``their_offsets`` on in what it sent.
    """

    sent: jax.Array
    offsets: jax.Array
    received: jax.Array
    their_offsets: jax.Array


def _all_to_all(
    x: jax.Array,
    routing: Routing,
    local: Callable[[jax.Array, Routing], jax.Array],
    axis: str,
    shards: int,
    spec: MoESpec,
) -> jax.Array:
    num_tokens, top_k = routing.topk_ids.shape
    ids = routing.topk_ids
    is_valid = (ids >= 0) & (ids < spec.num_experts)
    owner = jnp.where(is_valid, ids // (spec.num_experts // shards), -1)
    # Of a token's slots with one owner the first stands for all.
    slot = jnp.arange(top_k, dtype=jnp.int32)
    is_again = ((owner[:, :, None] == owner[:, None, :]) & (slot[None, :] < slot[:, None])).any(-1)
    goes_to = jnp.where(is_again, -1, owner)
    plan = make_plan(goes_to, shards)
    offsets = plan.group_offsets[:-1]
    mine = jnp.stack([plan.group_sizes, offsets], axis=1)
    received, their_offsets = lax.all_to_all(mine, axis, 0, 0, tiled=True).T
    sizes = _Sizes(plan.group_sizes, offsets, received, their_offsets)

    num_rows = num_tokens * min(top_k, shards)  # the others are dropped in any case
    row = jnp.arange(num_tokens * top_k, dtype=jnp.int32)
    is_live = (row < plan.group_offsets[-1])[:, None]
    take = lambda rows: jnp.where(is_live, xla._dispatch(rows, plan, top_k), 0)[:num_rows]  # noqa: E731
    with jax.named_scope("send"):
        got = _send(take(x), sizes, axis, num_tokens)
        got_ids, got_weights = _unpack(_send(take(_pack(routing)), sizes, axis, num_tokens))
    is_row = jnp.arange(num_tokens, dtype=jnp.int32) < received[:, None]
    y = local(got, Routing(jnp.where(is_row.reshape(-1, 1), got_ids, -1), got_weights))
    with jax.named_scope("return"):
        back = _give_back(y, sizes, axis, num_rows)
        back = jnp.pad(back, ((0, num_tokens * top_k - num_rows), (0, 0)))
        slots = xla._collect(jnp.where(is_live, back, 0), plan).reshape(num_tokens, top_k, -1)
    partial = jnp.where((goes_to >= 0)[..., None], slots.astype(jnp.float32), 0.0)
    return partial.sum(1).astype(x.dtype)


# The two directions are each other's transpose: what was sent to shard s comes back from it.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _send(rows: jax.Array, sizes: _Sizes, axis: str, capacity: int) -> jax.Array:
    """Rows (N, K), sorted by the shard they go to → (n · capacity, K): those of shard s from s · capacity on.

    ``capacity``: the most rows that one shard can get from another. Rows past the live ones are 0.
    """
    return lax.platform_dependent(
        rows,
        sizes,
        cpu=functools.partial(_padded_send, axis=axis, capacity=capacity),
        default=functools.partial(_ragged_send, axis=axis, capacity=capacity),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _give_back(rows: jax.Array, sizes: _Sizes, axis: str, num_rows: int) -> jax.Array:
    """The reverse of `_send`: (n · capacity, K) → (num_rows, K), each row where it was sent from."""
    return lax.platform_dependent(
        rows,
        sizes,
        cpu=functools.partial(_padded_give_back, axis=axis, num_rows=num_rows),
        default=functools.partial(_ragged_give_back, axis=axis, num_rows=num_rows),
    )


def _send_fwd(
    rows: jax.Array, sizes: _Sizes, axis: str, capacity: int
) -> tuple[jax.Array, tuple[_Sizes, int]]:
    return _send(rows, sizes, axis, capacity), (sizes, rows.shape[0])


def _send_bwd(
    axis: str, capacity: int, residuals: tuple[_Sizes, int], d_rows: jax.Array
) -> tuple[jax.Array, None]:
    sizes, num_rows = residuals
    return _give_back(d_rows, sizes, axis, num_rows), None


def _give_back_fwd(
    rows: jax.Array, sizes: _Sizes, axis: str, num_rows: int
) -> tuple[jax.Array, tuple[_Sizes, int]]:
    return _give_back(rows, sizes, axis, num_rows), (sizes, rows.shape[0] // sizes.sent.size)


def _give_back_bwd(
    axis: str, num_rows: int, residuals: tuple[_Sizes, int], d_rows: jax.Array
) -> tuple[jax.Array, None]:
    sizes, capacity = residuals
    return _send(d_rows, sizes, axis, capacity), None


_send.defvjp(_send_fwd, _send_bwd)
_give_back.defvjp(_give_back_fwd, _give_back_bwd)


def _ragged_send(rows: jax.Array, sizes: _Sizes, *, axis: str, capacity: int) -> jax.Array:
    shards = sizes.sent.size
    mine = lax.axis_index(axis).astype(jnp.int32) * capacity
    return lax.ragged_all_to_all(
        rows,
        _zeros_like(rows, shards * capacity),
        sizes.offsets,
        sizes.sent,
        jnp.zeros_like(sizes.sent) + mine,
        sizes.received,
        axis_name=axis,
    )


def _ragged_give_back(rows: jax.Array, sizes: _Sizes, *, axis: str, num_rows: int) -> jax.Array:
    shards = sizes.sent.size
    starts = jnp.arange(shards, dtype=jnp.int32) * (rows.shape[0] // shards)
    return lax.ragged_all_to_all(
        rows,
        _zeros_like(rows, num_rows),
        jnp.zeros_like(sizes.sent) + starts,
        sizes.received,
        sizes.their_offsets,
        sizes.sent,
        axis_name=axis,
    )


def _padded_send(rows: jax.Array, sizes: _Sizes, *, axis: str, capacity: int) -> jax.Array:
    place = jnp.arange(capacity, dtype=jnp.int32)
    row = jnp.minimum(sizes.offsets[:, None] + place, rows.shape[0] - 1)  # (n, capacity)
    padded = jnp.where((place < sizes.sent[:, None])[..., None], rows[row], 0)
    return lax.all_to_all(padded, axis, 0, 0, tiled=True).reshape(-1, rows.shape[-1])


def _padded_give_back(rows: jax.Array, sizes: _Sizes, *, axis: str, num_rows: int) -> jax.Array:
    shards = sizes.sent.size
    capacity = rows.shape[0] // shards
    back = lax.all_to_all(rows.reshape(shards, capacity, -1), axis, 0, 0, tiled=True)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    ends = sizes.offsets + sizes.sent
    shard = jnp.minimum((row[:, None] >= ends).sum(-1, dtype=jnp.int32), shards - 1)
    place = jnp.minimum(row - sizes.offsets[shard], capacity - 1)
    is_live = (row < ends[-1])[:, None]
    return jnp.where(is_live, back.reshape(shards * capacity, -1)[shard * capacity + place], 0)


def _zeros_like(rows: jax.Array, num_rows: int) -> jax.Array:
    return xla.vary_like(jnp.zeros((num_rows, rows.shape[-1]), rows.dtype), rows)
