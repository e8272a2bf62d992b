"""What can be timed: every backend of moe_pallas, the grouped products that JAX users have today, two bounds.

A variant turns a cell into a layer function ``(x, logits, w13, w2) → y``. Baselines get the same routing
and combine in XLA around their grouped product. Bounds are the two products and the activation alone, on
rows laid out beforehand: faster than any layer can be, no MoE layers themselves, and never winners. Only our
backends take FP8 weights, as `QTensor`s.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.cases import Cell
from moe_pallas import Routing, UnsupportedError, fused_experts, fused_moe, route, select_backend
from moe_pallas.activations import activate
from moe_pallas.oracle import BACKENDS
from moe_pallas.plan import make_plan

Function = Callable[..., jax.Array]
GroupedMatmul = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

Supports = Callable[[Cell, str], str | None]

OURS, BASELINE, BOUND = "ours", "baseline", "bound"


def _anything(cell: Cell, platform: str) -> str | None:
    return None


def _unless_quantised(supports: Supports = _anything) -> Supports:
    """Of what multiplies arrays: it knows neither scales nor how activations are to be rounded."""

    def check(cell: Cell, platform: str) -> str | None:
        if cell.scheme is not None:
            return f"unsupported: multiplies arrays, not {cell.quant} codes and scales"
        return supports(cell, platform)

    return check


def _one_config(cell: Cell) -> tuple[str, ...]:
    return ("",)


def _as_it_is(cell: Cell) -> None:
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One thing to time.

    Attributes:
      name: Goes into the ``backend`` column.
      kind: ``"ours"``, ``"baseline"`` or ``"bound"``.
      layer: ``layer(cell, config)`` → ``f(x, logits, w13, w2) → y``.
      experts: ``experts(cell, config)`` → ``f(x, routing, w13, w2) → y``; None: there is no such part.
      supports: ``supports(cell, platform)`` → None, or the reason why not.
      configs: ``configs(cell)`` → names of the configurations to time, each a row of its own.
      rows: ``rows(cell)`` → integers; the layer takes ``x[rows]``, made beforehand. None: x itself.
      weights: ``weights(cell)`` → ``f(w13 or w2)`` → what the layer takes for it, made beforehand as if at
        load. None: the array itself.
      error_allowed: In tolerances of `moe_pallas.testing`.
    """

    name: str
    kind: str
    layer: Callable[[Cell, str], Function]
    experts: Callable[[Cell, str], Function] | None = None
    supports: Supports = _anything
    configs: Callable[[Cell], tuple[str, ...]] = _one_config
    rows: Callable[[Cell], np.ndarray | None] = _as_it_is
    weights: Callable[[Cell], Function | None] = _as_it_is
    error_allowed: float = 1.0


def _backend(name: str) -> Variant:
    def supports(cell: Cell, platform: str) -> str | None:
        try:
            select_backend(cell.problem, name)
        except UnsupportedError as error:
            return str(error)
        return None

    return Variant(
        name=name,
        kind=OURS,
        layer=lambda cell, config: functools.partial(fused_moe, spec=cell.spec, backend=name),
        experts=lambda cell, config: functools.partial(fused_experts, spec=cell.spec, backend=name),
        supports=supports,
    )


def _experts_around(grouped_matmul: GroupedMatmul, cell: Cell) -> Function:
    """Build ``f(x, routing, w13, w2)`` around ``grouped_matmul(rows, weights, group_sizes)``."""
    spec = cell.spec

    def experts(x: jax.Array, routing: Routing, w13: jax.Array, w2: jax.Array) -> jax.Array:
        plan = make_plan(routing.topk_ids, spec.num_experts)
        rows = x[plan.slot_of_row // spec.top_k]
        a = grouped_matmul(rows, w13, plan.group_sizes).astype(jnp.float32)
        h = activate(a, spec).astype(x.dtype)
        y = grouped_matmul(h, w2, plan.group_sizes)
        slots = y[plan.row_of_slot].reshape(x.shape[0], spec.top_k, -1).astype(jnp.float32)
        return (slots * routing.topk_weights[..., None]).sum(1).astype(x.dtype)

    return experts


def _grouped(
    name: str,
    grouped_matmul: Callable[[Cell, str], GroupedMatmul],
    supports: Supports,
    configs: Callable[[Cell], tuple[str, ...]] = _one_config,
    weights: Callable[[Cell], Function | None] = _as_it_is,
) -> Variant:
    def experts(cell: Cell, config: str) -> Function:
        return _experts_around(grouped_matmul(cell, config), cell)

    def layer(cell: Cell, config: str) -> Function:
        compute = experts(cell, config)
        return lambda x, logits, w13, w2: compute(x, route(logits, cell.spec), w13, w2)

    return Variant(
        name=name,
        kind=BASELINE,
        layer=layer,
        experts=experts,
        supports=_unless_quantised(supports),
        configs=configs,
        weights=weights,
        # Its products come rounded to the activations' dtype, which makes five roundings in place of two.
        error_allowed=2.0,
    )


def _transpose(w: jax.Array) -> jax.Array:
    return w.mT


def _transposed(cell: Cell) -> Function:
    """(E, K, N), made once: given K-major weights, who wants this would copy them in every call."""
    return _transpose


# jax.lax.ragged_dot: XLA multiplies every row with every expert and masks.

_MAX_BYTES, _MAX_US = 40e9, 50e3
_PREDICTED_TFLOPS = 774  # bf16 on an H200, rivals.json


def _lax_ragged_dot(cell: Cell, config: str) -> GroupedMatmul:
    return lax.ragged_dot


def _lax_ragged_dot_supports(cell: Cell, platform: str) -> str | None:
    spec = cell.spec
    temp_bytes = spec.num_experts * cell.rows * max(spec.hidden_size, spec.w13_rows) * cell.itemsize
    dense_us = spec.num_experts * cell.flops / (_PREDICTED_TFLOPS * 1e6)
    if temp_bytes > _MAX_BYTES:
        return f"skipped: predicted {temp_bytes / 1e9:.0f} GB of temporary memory (E-fold work)"
    if dense_us > _MAX_US:
        return f"skipped: predicted {dense_us / 1e3:.0f} ms (E-fold work)"
    return None


# The grouped product that ships with jax as an example of Pallas Mosaic GPU.


class _Blocks(NamedTuple):
    block_m: int
    block_n: int
    block_k: int
    max_concurrent_steps: int
    grid_block_n: int


def _mgpu_blocks(cell: Cell) -> dict[str, _Blocks]:
    spec = cell.spec
    block_n = 128 if spec.hidden_size % 128 == spec.w13_rows % 128 == 0 else 64
    block_m = 64 if cell.rows < 64 * spec.num_experts else 128
    blocks = [_Blocks(block_m, block_n, 64, 4, 1)]
    if block_m == 128:
        blocks.append(_Blocks(block_m, block_n, 64, 5, 8))
    return {"m{}n{}k{}s{}g{}".format(*b): b for b in blocks}


def _ragged_dot_mgpu(cell: Cell, config: str) -> GroupedMatmul:
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    blocks = _mgpu_blocks(cell)[config]

    def multiply(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
        # It was written for many rows; fewer than one block of them are filled up to one.
        filled = jnp.pad(rows, ((0, max(0, blocks.block_m - rows.shape[0])), (0, 0)))
        return ragged_dot_mgpu.ragged_dot(
            filled, weights, group_sizes=group_sizes, transpose_rhs=True, **blocks._asdict()
        )[: rows.shape[0]]

    return multiply


def _ragged_dot_mgpu_supports(cell: Cell, platform: str) -> str | None:
    spec = cell.spec
    if platform != "gpu":
        return f"needs an NVIDIA Hopper GPU; jax runs on {platform}"
    if cell.dtype not in ("bfloat16", "float16"):
        return f"multiplies 16-bit floats; got {cell.dtype}"
    if spec.num_experts > 128:
        return f"it unrolls its search over the experts, {spec.num_experts} of them: too long to compile"
    if spec.hidden_size % 64 or spec.intermediate_size % 64:
        return f"needs D and F in multiples of 64; got {spec.hidden_size}, {spec.intermediate_size}"
    return None


# tokamax, if it is installed. Only "mosaic": falling back in silence would time something else.


def _tokamax(cell: Cell, config: str) -> GroupedMatmul:
    import tokamax

    def multiply(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
        return tokamax.ragged_dot(rows, weights, group_sizes, implementation=config)

    return multiply


def _tokamax_supports(cell: Cell, platform: str) -> str | None:
    if importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed (pip install tokamax)"
    if platform != "gpu":
        return f"needs a GPU; jax runs on {platform}"
    return None


# Bounds.


def _dense_pair(cell: Cell, config: str) -> Function:
    """``rows (…, m, D)``, weights of matching leading axes: both products and the activation."""

    def pair(rows: jax.Array, logits: Any, w13: jax.Array, w2: jax.Array) -> jax.Array:
        h = activate(jnp.einsum("...md,...nd->...mn", rows, w13), cell.spec).astype(rows.dtype)
        return jnp.einsum("...mf,...df->...md", h, w2)

    return pair


def _one_group_supports(cell: Cell, platform: str) -> str | None:
    if platform == "gpu" and cell.rows < 1024:
        return f"no bound: {cell.rows} rows wait for the weights of more than one expert"
    return None


def _token_of_row(cell: Cell) -> np.ndarray:
    return np.repeat(np.arange(cell.tokens), cell.spec.top_k)


def _batched_rows(cell: Cell) -> np.ndarray:
    return np.resize(_token_of_row(cell), (cell.experts_hit, -(-cell.rows // cell.experts_hit)))


def _batched_weights(cell: Cell) -> Function | None:
    return None if cell.experts_hit == cell.spec.num_experts else _first_experts(cell.experts_hit)


@functools.cache  # one function object for each count, by which jax.jit finds what it has compiled
def _first_experts(count: int) -> Function:
    return lambda w: w[:count]


def _first_expert(w: jax.Array) -> jax.Array:
    return w[0]


VARIANTS = {
    variant.name: variant
    for variant in (
        *(_backend(name) for name in BACKENDS),
        _grouped("lax_ragged_dot", _lax_ragged_dot, _lax_ragged_dot_supports, weights=_transposed),
        _grouped(
            "ragged_dot_mgpu",
            _ragged_dot_mgpu,
            _ragged_dot_mgpu_supports,
            configs=lambda cell: tuple(_mgpu_blocks(cell)),
        ),
        _grouped(
            "tokamax",
            _tokamax,
            _tokamax_supports,
            configs=lambda cell: ("mosaic",),
            weights=_transposed,
        ),
        Variant(
            name="bound_one_group",
            kind=BOUND,
            layer=_dense_pair,
            supports=_unless_quantised(_one_group_supports),
            rows=_token_of_row,
            weights=lambda cell: _first_expert,
        ),
        Variant(
            name="bound_batched",
            kind=BOUND,
            layer=_dense_pair,
            supports=_unless_quantised(),
            rows=_batched_rows,
            weights=_batched_weights,
        ),
    )
}
