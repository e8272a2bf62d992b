"""A layer on a mesh of CPU devices gives what it gives on one, in value and gradient, with the collectives
that were promised and no others."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_pallas import MoE, MoESpec, Sharding, UnsupportedError, quantize_experts, reference
from moe_pallas import sharding as sharding_module
from moe_pallas.interop import with_gate_up
from moe_pallas.testing import assert_close, random_params, random_tokens

if jax.device_count() < 8:
    pytest.skip("needs 8 devices", allow_module_level=True)

NAMES = ("data", "expert", "tensor")
# Sizes that are split by every number up to 8 but 5 and 7, and by those.
SMALL = MoESpec(num_experts=24, top_k=3, hidden_size=8, intermediate_size=24, gate_up="interleaved")
SMALL_35 = dataclasses.replace(SMALL, num_experts=35, intermediate_size=35)
# Everything that a layer can have; on 4 shards of experts a token's experts may be more than a shard has.
FULL = MoESpec(
    num_experts=8,
    top_k=3,
    hidden_size=8,
    intermediate_size=12,
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
# How tokens and experts get together: axes of the tokens, strategy.
WAYS = {
    "replicated": ("data", "gather"),
    "gather": (("data", "expert"), "gather"),
    "all_to_all": (("data", "expert"), "all_to_all"),
}
SHAPES = [shape for shape in itertools.product(range(1, 9), repeat=3) if math.prod(shape) <= 8]


def make_mesh(shape: tuple[int, ...], axis_type: AxisType = AxisType.Auto) -> Mesh:
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, NAMES, axis_types=(axis_type,) * 3, devices=devices)


def make_layer(
    spec: MoESpec, shape: tuple[int, ...], way: str, axis_type: AxisType = AxisType.Auto, **options: Any
) -> MoE:
    data, strategy = WAYS[way]
    return MoE(spec, sharding=Sharding(make_mesh(shape, axis_type), data=data, strategy=strategy), **options)


def place(layer: MoE, params: dict[str, Any]) -> dict[str, jax.Array]:
    assert layer.sharding is not None
    return jax.device_put(params, layer.sharding.param_shardings(layer.spec))


def pull_back(layer: MoE, params: Any, x: jax.Array, d_y: jax.Array, mask: jax.Array | None = None) -> Any:
    """(y, d_params, d_x)."""
    y, vjp = jax.vjp(lambda params, x: layer.apply(params, x, mask=mask), params, x)
    return y, *vjp(d_y)


def pull_back_aux(layer: MoE, params: Any, x: jax.Array, d_y: jax.Array, mask: jax.Array | None) -> Any:
    """((y, aux), gradients of y · d_y and both losses)."""

    def loss(params: Any, x: jax.Array) -> Any:
        y, aux = layer.apply(params, x, mask=mask, return_aux=True)
        return (y * d_y).sum() + aux.load_balance_loss + aux.router_z_loss, (y, aux)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)


@functools.cache
def compiled(function: Any, layer: MoE, num_tokens: int, with_mask: bool = False) -> Any:
    """``function`` compiled for parameters that lie as the layer's sharding says."""
    spec = layer.spec
    shardings = {} if layer.sharding is None else layer.sharding.param_shardings(spec)
    params = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=shardings.get(name))
        for name, value in random_params(spec).items()
    }
    x = jax.ShapeDtypeStruct((num_tokens, spec.hidden_size), jnp.float32)
    mask = jax.ShapeDtypeStruct((num_tokens,), bool) if with_mask else None
    args = (params, x) if function is MoE.apply else (params, x, x, mask)
    return jax.jit(functools.partial(function, layer)).lower(*args).compile()


def assert_equal(got: Any, want: Any, context: str = "") -> None:
    """Equal but for the order of float32 sums, each array against its largest element."""
    paths = jax.tree_util.tree_leaves_with_path(want)
    for (path, expected), actual in zip(paths, jax.tree.leaves(got), strict=True):
        atol = 1e-5 * float(np.abs(expected).max(initial=0))
        name = context + jax.tree_util.keystr(path)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=atol, err_msg=name)


def collectives_of(program: Any) -> dict[str, int]:
    """Name → number of the collectives in a compiled program."""
    names = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
    return dict(collections.Counter(re.findall(rf" ({names})(?:-start)?\(", program.as_text())))


# Values and gradients


# Where experts are not split the three ways are one; where tokens are replicated a data axis adds nothing
# that it does not add to the other two.
CASES = [
    (shape, way)
    for shape in SHAPES
    for way in WAYS
    if (shape[1] > 1 and (way != "replicated" or shape[0] == 1 or math.prod(shape) == 8))
    or (shape[1] == 1 and way == "replicated")
]


@pytest.mark.parametrize(("shape", "way"), CASES, ids=str)
def test_every_mesh_gives_the_same(shape: tuple[int, int, int], way: str) -> None:
    spec = SMALL_35 if {5, 7} & set(shape) else SMALL
    params, x, d_y = random_params(spec), random_tokens(spec, 15), random_tokens(spec, 15, seed=1)
    layer = make_layer(spec, shape, way)
    y, d_params, d_x = compiled(pull_back, layer, 15)(place(layer, params), x, d_y, None)
    assert_equal((y, d_params, d_x), compiled(pull_back, MoE(spec), 15)(params, x, d_y, None))
    for name, sharding in layer.sharding.param_shardings(spec).items():  # what is not split is complete
        assert d_params[name].sharding.is_equivalent_to(sharding, d_params[name].ndim), name


def with_bias(params: dict[str, np.ndarray], favourites: list[int]) -> dict[str, np.ndarray]:
    """Parameters that send every token to these experts, as far as groups allow."""
    bias = np.zeros_like(params["router_bias"])
    bias[favourites] = 100.0
    correction = np.zeros_like(params["correction_bias"])
    correction[favourites] = 10.0
    return params | {"router_bias": bias, "correction_bias": correction}


# 9 tokens over 4 shards of tokens: three each, and none. Or 5 and 4, where they are not split over experts.
LOADS = {
    "balanced": ([], [True] * 9),
    "one shard": ([0, 1], [True] * 9),
    "last shard": ([6, 7], [True] * 9),
    "few": ([2, 5, 7], [True] * 9),
    "holes": ([], [True, False] * 4 + [True]),
    "first tokens": ([], [True] * 3 + [False] * 6),
    "last tokens": ([0], [False] * 7 + [True] * 2),
    "one token": ([], [False] * 5 + [True] + [False] * 3),
    "none": ([], [False] * 9),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_load_gives_the_same(way: str) -> None:
    """Skewed routing, shards without rows, shards without tokens, padding that holds NaN; and the losses."""
    layer = make_layer(FULL, (2, 2, 2), way)
    program, plain = (compiled(pull_back_aux, each, 9, with_mask=True) for each in (layer, MoE(FULL)))
    x, d_y = random_tokens(FULL, 9), random_tokens(FULL, 9, seed=1)
    for load, (favourites, mask) in LOADS.items():
        params = random_params(FULL)
        params = with_bias(params, favourites) if favourites else params
        is_real = np.array(mask)
        poisoned = np.where(is_real[:, None], x, np.nan)
        got = program(place(layer, params), poisoned, d_y, is_real)
        assert_equal(got, plain(params, poisoned, d_y, is_real), load)
        if load == "one shard":
            assert set(np.asarray(got[0][1][1].routing.topk_ids)[:, :2].ravel()) == {0, 1}


@pytest.mark.parametrize("way", WAYS)
def test_explicit_axes_give_the_same(way: str) -> None:
    layer = make_layer(FULL, (2, 2, 2), way, AxisType.Explicit)
    params, x, d_y = random_params(FULL), random_tokens(FULL, 9), random_tokens(FULL, 9, seed=1)
    mask = np.ones(9, bool)
    got = jax.jit(pull_back_aux, static_argnums=0)(layer, place(layer, params), x, d_y, mask)
    assert_equal(got, compiled(pull_back_aux, MoE(FULL), 9, with_mask=True)(params, x, d_y, mask))
    assert_close(got[0][1][0], reference.moe(params, x, FULL))


@pytest.mark.parametrize("lead", [(), (3,), (4, 2), (3, 5), (0,), (2, 0)], ids=str)
def test_any_leading_axes(lead: tuple[int, ...]) -> None:
    layer = make_layer(SMALL, (2, 2, 1), "gather")
    params = random_params(SMALL)
    x = random_tokens(SMALL, math.prod(lead)).reshape(*lead, SMALL.hidden_size)
    count = np.int32(math.prod(lead) - 1)
    apply = jax.jit(functools.partial(MoE.apply, return_aux=True), static_argnums=0)
    got = apply(layer, place(layer, params), x, num_tokens=count)
    assert_equal(got, apply(MoE(SMALL), params, x, num_tokens=count))


@pytest.mark.parametrize("way", ["replicated", "all_to_all"])
def test_scan_over_layers_and_checkpoint(way: str) -> None:
    layer = make_layer(SMALL, (2, 2, 2), way)
    stacked = jax.tree.map(lambda *rows: np.stack(rows), *(random_params(SMALL, seed=i) for i in range(3)))
    x = random_tokens(SMALL, 8)

    def loss(layer: MoE, params: Any, x: jax.Array) -> jax.Array:
        block = jax.checkpoint(lambda x, p: (x + layer.apply(p, x), None))
        return jnp.square(lax.scan(block, x, params)[0]).mean()

    value_and_grad = jax.jit(jax.value_and_grad(loss, argnums=(1, 2)), static_argnums=0)
    specs = layer.sharding.param_specs(SMALL)
    mesh = layer.sharding.mesh
    placed = {n: jax.device_put(v, NamedSharding(mesh, P(None, *specs[n]))) for n, v in stacked.items()}
    assert_equal(value_and_grad(layer, placed, x), value_and_grad(MoE(SMALL), stacked, x))


@pytest.mark.parametrize("way", WAYS)
def test_bfloat16(way: str) -> None:
    """Partial sums are rounded, and so is their sum: within twice the bounds of one rounding."""
    spec = dataclasses.replace(SMALL, hidden_size=64, intermediate_size=64)
    layer = make_layer(spec, (1, 4, 2), way)
    params, x = random_params(spec, dtype="bfloat16"), random_tokens(spec, 16, dtype="bfloat16")
    y = jax.jit(layer.apply)(place(layer, params), x)
    assert y.dtype == jnp.bfloat16
    truth = reference.moe(params, x, spec)
    error = np.asarray(y, np.float64) - truth
    scale = np.sqrt(np.square(truth).mean(-1, keepdims=True))
    assert np.sqrt(np.square(error / scale).mean()) < 8e-3
    assert np.abs(error / scale).max() < 6e-2


@pytest.mark.parametrize("way", WAYS)
def test_quantised_experts(way: str) -> None:
    params = quantize_experts(random_params(SMALL), SMALL, "fp8_channel")
    x = random_tokens(SMALL, 16)
    layer = make_layer(SMALL, (2, 4, 1), way)
    assert_equal(jax.jit(layer.apply)(params, x), MoE(SMALL).apply(params, x))
    with pytest.raises(UnsupportedError, match="quantised weights can't be split over the axis 'tensor'"):
        make_layer(SMALL, (2, 2, 2), way).apply(params, x)


# The ragged all-to-all, which XLA does not have on a CPU


def emulated_ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: str,
) -> jax.Array:
    """What the documentation of `lax.ragged_all_to_all` says, by all-gathers."""
    me = lax.axis_index(axis_name)
    operands, starts, sizes, places = (
        lax.all_gather(part, axis_name) for part in (operand, input_offsets, send_sizes, output_offsets)
    )
    row = jnp.arange(output.shape[0])
    for source in range(recv_sizes.size):
        place, size = places[source, me], recv_sizes[source]
        size = jnp.where(size == sizes[source, me], size, -1)  # both sides must agree
        taken = operands[source][jnp.clip(starts[source, me] + row - place, 0, operand.shape[0] - 1)]
        output = jnp.where(((row >= place) & (row < place + size))[:, None], taken, output)
    return output


def test_ragged_all_to_all_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lax, "ragged_all_to_all", emulated_ragged_all_to_all)
    monkeypatch.setattr(sharding_module, "_padded_send", sharding_module._ragged_send)
    monkeypatch.setattr(sharding_module, "_padded_give_back", sharding_module._ragged_give_back)
    layer = make_layer(FULL, (1, 4, 2), "all_to_all")
    params, x, d_y = random_params(FULL), random_tokens(FULL, 13), random_tokens(FULL, 13, seed=1)
    program = jax.jit(pull_back, static_argnums=0)
    for favourites in ([], [0, 1], [6, 7]):
        biased = with_bias(params, favourites) if favourites else params
        got = program(layer, place(layer, biased), x, d_y)
        assert_equal(got, compiled(pull_back, MoE(FULL), 13)(biased, x, d_y, None), str(favourites))


def test_a_gpu_gets_ragged_all_to_alls() -> None:
    """Rows, their routing and results forward; each one's reverse backward."""
    layer = make_layer(SMALL, (2, 4, 1), "all_to_all")
    args = place(layer, random_params(SMALL)), random_tokens(SMALL, 16)
    for function, more, number in ((MoE.apply, (), 3), (pull_back, args[1:], 6)):
        lowered = jax.jit(functools.partial(function, layer)).trace(*args, *more)
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
        assert len(re.findall(r"custom_call @ragged_all_to_all\(", text)) == number
        assert len(re.findall(r"stablehlo.all_to_all", text)) == 1  # the sizes


# What is in the compiled program

FORWARD = {
    "replicated": {"all-reduce": 1},
    "gather": {"all-gather": 2, "reduce-scatter": 1, "all-reduce": 1},
    "all_to_all": {"all-to-all": 4, "all-reduce": 1},  # sizes, rows, routing, results
}


@pytest.mark.parametrize("way", WAYS)
def test_collectives_are_those_promised(way: str) -> None:
    layer = make_layer(SMALL, (2, 2, 2), way)
    assert collectives_of(compiled(MoE.apply, layer, 16)) == FORWARD[way]


@pytest.mark.parametrize("way", WAYS)
def test_nothing_but_tokens_moves(way: str) -> None:
    """No collective in the forward or the backward pass has an operand of a weight's size, but for the sums
    of weight gradients over data."""
    spec = dataclasses.replace(SMALL, intermediate_size=480)  # a shard's weights outweigh all tokens
    text = compiled(pull_back, make_layer(spec, (1, 4, 2), way), 16).as_text()
    shapes = re.findall(r"= (\(?[^=]*?\)?) (?:all-[\w-]+|reduce-scatter|collective-\w+)\(", text)
    assert shapes
    for shape in shapes:
        for dims in re.findall(r"\w+\[([\d,]*)\]", shape):
            assert math.prod(map(int, filter(None, dims.split(",")))) <= 24 * 8 * 8, shape


def instructions(program: Any) -> str:
    """The program's text without source locations."""
    text = re.sub(r", metadata=\{[^}]*\}", "", program.as_text())
    return text[text.index("\n") : text.index("FileNames") if "FileNames" in text else None]


def test_one_device_adds_nothing() -> None:
    plain = compiled(MoE.apply, MoE(SMALL), 16)
    for way in WAYS:
        layer = make_layer(SMALL, (1, 1, 1), way)
        x = jax.ShapeDtypeStruct((16, 8), jnp.float32)
        params = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in SMALL.param_shapes.items()}
        assert instructions(jax.jit(layer.apply).lower(params, x).compile()) == instructions(plain)


def test_one_device_of_explicit_axes_adds_nothing() -> None:
    plain = compiled(MoE.apply, MoE(SMALL), 16).as_text()
    program = compiled(MoE.apply, make_layer(SMALL, (1, 1, 1), "gather", AxisType.Explicit), 16)
    assert not collectives_of(program)
    text = program.as_text()
    for operation in ("copy", "fusion", "dot", "while", "sort"):
        assert len(re.findall(rf" {operation}\(", text)) == len(re.findall(rf" {operation}\(", plain))


# Parameters


def test_init_makes_the_same_numbers_where_they_belong() -> None:
    layer = make_layer(SMALL, (2, 2, 2), "replicated")
    params, want = layer.init(jax.random.key(3)), jax.jit(MoE(SMALL).init)(jax.random.key(3))
    for name, sharding in layer.sharding.param_shardings(SMALL).items():
        np.testing.assert_array_equal(params[name], want[name], err_msg=name)
        assert params[name].sharding.is_equivalent_to(sharding, params[name].ndim)
    assert params["w13"].sharding.shard_shape(params["w13"].shape) == (12, 24, 8)


def test_a_spec_in_another_order_is_the_same_layer() -> None:
    stacked = dataclasses.replace(FULL, gate_up="stacked")
    params, x = random_params(stacked), random_tokens(stacked, 5)
    spec, converted = with_gate_up(stacked, params, "interleaved")
    assert spec == FULL
    assert_equal(reference.moe(converted, x, spec), reference.moe(params, x, stacked))
    assert with_gate_up(spec, converted, "stacked")[0] == stacked
    plain = dataclasses.replace(SMALL, activation="relu2")
    assert with_gate_up(plain, {}, "stacked") == (plain, {})


def test_a_shared_expert_is_split_where_it_can_be() -> None:
    def axes(shape: tuple[int, ...], way: str, **changes: Any) -> tuple[str, ...]:
        layer = make_layer(dataclasses.replace(FULL, **changes), shape, way)
        return layer.sharding.shared_axes(layer.spec)

    assert axes((2, 2, 2), "replicated") == ("expert", "tensor")
    assert axes((2, 2, 2), "gather") == ("tensor",)
    assert axes((2, 4, 1), "replicated") == ("expert",)
    assert axes((2, 4, 1), "replicated", shared_intermediate_size=10) == ()
    assert axes((2, 4, 1), "replicated", gate_up="stacked") == ()
    whole = dataclasses.replace(FULL, gate_up="stacked")
    params, x = random_params(whole), random_tokens(whole, 6)
    y = jax.jit(make_layer(whole, (1, 4, 1), "replicated").apply)(params, x)
    assert_close(y, reference.moe(params, x, whole))


# Refusals


@pytest.mark.parametrize(
    ("changes", "shape", "message"),
    [
        ({"num_experts": 6, "num_expert_groups": 1, "top_k_groups": 1}, (1, 4, 1), "1, 2, 3, 6"),
        ({"num_experts": 3, "num_expert_groups": 1, "top_k_groups": 1}, (1, 4, 1), "can't be split evenly"),
        ({"intermediate_size": 10}, (1, 1, 4), "intermediate_size=10 can't be split evenly over 4"),
        ({"gate_up": "stacked"}, (1, 1, 2), "with_gate_up"),
    ],
    ids=str,
)
def test_what_does_not_divide_is_refused(changes: dict, shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_layer(dataclasses.replace(FULL, **changes), shape, "replicated")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert": "model"}, "names the axes \\['model'\\]"),
        ({"data": (), "expert": "", "tensor": ""}, "none of them is named"),
        ({"tensor": "expert"}, "'expert' splits F"),
        ({"strategy": "broadcast"}, "'auto', 'gather', 'all_to_all'; got 'broadcast'"),
        ({"strategy": "all_to_all"}, "every shard of the experts has all tokens"),
    ],
    ids=str,
)
def test_a_sharding_that_means_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sharding(make_mesh((2, 2, 2)), **options)
    with pytest.raises(TypeError, match="is a jax"):
        Sharding("cpu")
