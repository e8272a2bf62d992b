"""A layer on a mesh of CPU devices gives what it gives on one, in value and gradient, with the collectives
that were promised and no others."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from moe_pallas import MoE, MoESpec, Sharding
from moe_pallas.testing import random_params, random_tokens

if jax.device_count() < 8:
    pytest.skip("needs 8 devices", allow_module_level=True)

NAMES = ("data", "expert", "tensor")
# Everything that a layer can have; 24 is split by every size but 5 and 7, 35 by those.
FULL = MoESpec(
    num_experts=24,
    top_k=3,
    hidden_size=8,
    intermediate_size=24,
    gate_up="interleaved",
    expert_bias=True,
    router_bias=True,
    correction_bias=True,
    scoring="sigmoid",
    num_expert_groups=4,
    top_k_groups=3,
    routed_scaling_factor=1.5,
    shared_intermediate_size=24,
    shared_expert_gate=True,
)
SMALL = MoESpec(num_experts=24, top_k=3, hidden_size=8, intermediate_size=24, gate_up="interleaved")
SMALL_35 = dataclasses.replace(SMALL, num_experts=35, intermediate_size=35)
EIGHT = dataclasses.replace(FULL, num_experts=8, num_expert_groups=1, top_k_groups=1)
# How tokens and experts get together: axes of the tokens, strategy.
WAYS = {
    "replicated": ("data", "gather"),
    "gather": (("data", "expert"), "gather"),
    "all_to_all": (("data", "expert"), "all_to_all"),
}
SHAPES = [s for s in itertools.product(range(1, 9), repeat=3) if np.prod(s) <= 8]


def make_mesh(shape: tuple[int, ...], axis_type: AxisType = AxisType.Auto) -> Mesh:
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, NAMES, axis_types=(axis_type,) * 3, devices=devices)


def make_layer(
    spec: MoESpec, shape: tuple[int, ...], way: str, axis_type: AxisType = AxisType.Auto, **options: Any
) -> MoE:
    data, strategy = WAYS[way]
    return MoE(spec, sharding=Sharding(make_mesh(shape, axis_type), data=data, strategy=strategy), **options)


def place(layer: MoE, params: dict[str, Any]) -> dict[str, jax.Array]:
    assert layer.sharding is not None
    return jax.device_put(params, layer.sharding.param_shardings(layer.spec))


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(layer: MoE, params: Any, x: jax.Array, d_y: jax.Array, mask: jax.Array | None) -> Any:
    """(y, d_params, d_x)."""
    y, pull_back = jax.vjp(lambda params, x: layer.apply(params, x, mask=mask), params, x)
    return y, *pull_back(d_y)


def assert_equal(got: Any, want: Any, context: str = "") -> None:
    """Equal but for the order of float32 sums, each array against its largest element."""
    paths = jax.tree_util.tree_leaves_with_path(want)
    for (path, expected), actual in zip(paths, jax.tree.leaves(got), strict=True):
        atol = 1e-5 * float(np.abs(expected).max(initial=0))
        name = context + jax.tree_util.keystr(path)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=atol, err_msg=name)


def collectives_of(compiled: Any) -> dict[str, int]:
    """Name → number of the collectives in a compiled program."""
    names = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
    return dict(collections.Counter(re.findall(rf" ({names})(?:-start)?\(", compiled.as_text())))


# Values and gradients


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_mesh_gives_the_same(shape: tuple[int, int, int], way: str) -> None:
    if shape[1] == 1 and way != "replicated":
        pytest.skip("experts are not split: the three ways are one")
    spec = SMALL_35 if {5, 7} & set(shape) else SMALL
    params, x, d_y = random_params(spec), random_tokens(spec, 16), random_tokens(spec, 16, seed=1)
    layer = make_layer(spec, shape, way)
    got = value_and_gradients(layer, place(layer, params), x, d_y, None)
    assert_equal(got, value_and_gradients(MoE(spec), params, x, d_y, None))
