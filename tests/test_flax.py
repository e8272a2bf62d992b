"""The Flax adapters give MoE's numbers and keep Flax's conventions."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import moe_pallas
from moe_pallas import MoESpec, Scoring, UnsupportedError, flax_linen, flax_nnx, reference, testing

ROOT = Path(__file__).resolve().parent.parent

PLAIN = MoESpec(num_experts=6, top_k=2, hidden_size=12, intermediate_size=20)
FULL = MoESpec(
    num_experts=8,
    top_k=3,
    hidden_size=12,
    intermediate_size=20,
    expert_bias=True,
    scoring=Scoring.SIGMOID,
    router_bias=True,
    correction_bias=True,
    num_expert_groups=4,
    top_k_groups=2,
    routed_scaling_factor=2.5,
    shared_intermediate_size=16,
    shared_expert_gate=True,
)
BIASES = ("router_bias", "correction_bias", "b13", "b2")
SPECS = pytest.mark.parametrize("spec", [PLAIN, FULL], ids=["plain", "full"])
EXPERT_PARALLEL = {"w13": ("expert", None, None), "w2": ("expert", None, None)}
STACKED = {name: ("layers", *axes) for name, axes in EXPERT_PARALLEL.items()}


def random_params(spec: MoESpec, seed: int = 0) -> dict[str, jax.Array]:
    """MoE's dict, the biases random too, so that every parameter shows in the numbers."""
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(0, 0.4, shape), jnp.float32) for name, shape in spec.param_shapes.items()
    }


def tokens(spec: MoESpec, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(7).normal(size=(2, 7, spec.hidden_size)), dtype)


def nnx_layer(spec: MoESpec, params: dict[str, jax.Array], **options: Any) -> flax_nnx.MoE:
    layer = flax_nnx.MoE(spec, rngs=nnx.Rngs(0), **options)
    nnx.update(layer, params)
    return layer


# Everything runs under jit, compiled once for all tests: layers are static arguments, or pytrees.
@functools.partial(jax.jit, static_argnames=("layer", "return_aux"))
def moe(layer: moe_pallas.MoE, params: dict[str, jax.Array], x: jax.Array, **options: Any) -> Any:
    return layer.apply(params, x, **options)


def _call(layer: flax_nnx.MoE, x: jax.Array, **options: Any) -> Any:
    return layer(x, **options)


call_nnx: Any = nnx.jit(_call, static_argnames="return_aux")


@functools.partial(jax.jit, static_argnames=("layer", "return_aux"))
def call_linen(layer: flax_linen.MoE, variables: Any, x: jax.Array, **options: Any) -> Any:
    return layer.apply(variables, x, **options)


class Nnx:
    """MoE's calls on the NNX adapter."""

    def __init__(self, spec: MoESpec, params: dict[str, jax.Array], **options: Any) -> None:
        self.call = functools.partial(call_nnx, nnx_layer(spec, params, **options))

    @staticmethod
    def init(spec: MoESpec, **options: Any) -> dict[str, jax.Array]:
        return nnx.to_pure_dict(nnx.state(flax_nnx.MoE(spec, rngs=nnx.Rngs(0), **options)))


class Linen:
    """MoE's calls on the Linen adapter."""

    def __init__(self, spec: MoESpec, params: dict[str, jax.Array], **options: Any) -> None:
        variables = flax_linen.to_variables(params)
        self.call = functools.partial(call_linen, flax_linen.MoE(spec, **options), variables)

    @staticmethod
    def init(spec: MoESpec, **options: Any) -> dict[str, jax.Array]:
        variables = jax.jit(flax_linen.MoE(spec, **options).init)(jax.random.key(0), tokens(spec))
        return variables["params"] | variables.get("router_state", {})


ADAPTERS = pytest.mark.parametrize("adapter", [Nnx, Linen])


def assert_same(actual: Any, expected: Any) -> None:
    """Equal in structure, dtype and every bit."""

    def same(a: jax.Array, e: jax.Array) -> None:
        assert a.dtype == e.dtype
        np.testing.assert_array_equal(a, e)

    jax.tree.map(same, actual, expected)


# Numbers


@ADAPTERS
@SPECS
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_numbers_are_those_of_moe(adapter: Any, spec: MoESpec, dtype: Any) -> None:
    params, x = random_params(spec), tokens(spec)
    expected = moe(moe_pallas.MoE(spec, dtype=dtype), params, x, return_aux=True)
    layer = adapter(spec, params, dtype=dtype)
    assert_same(layer.call(x, return_aux=True), expected)
    assert expected[0].dtype == (dtype or jnp.float32)
    assert all(array.dtype == jnp.float32 for array in params.values())


@ADAPTERS
def test_dtype_none_is_that_of_x(adapter: Any) -> None:
    x = tokens(PLAIN, jnp.bfloat16)
    params = random_params(PLAIN)
    y = adapter(PLAIN, params).call(x)
    assert y.dtype == jnp.bfloat16
    assert_same(y, moe(moe_pallas.MoE(PLAIN), params, x))


@ADAPTERS
def test_padding_is_passed_through(adapter: Any) -> None:
    params, x = random_params(FULL), tokens(FULL)
    mask = jnp.arange(14).reshape(2, 7) < 9
    x = jnp.where(mask[..., None], x, jnp.nan)
    expected = moe(moe_pallas.MoE(FULL), params, x, mask=mask, return_aux=True)
    layer = adapter(FULL, params)
    assert not expected[0][~mask].any()
    assert_same(layer.call(x, mask=mask, return_aux=True), expected)
    assert_same(layer.call(x, num_tokens=9, return_aux=True), expected)


@ADAPTERS
def test_backend_is_passed_through(adapter: Any) -> None:
    params, x = random_params(PLAIN), tokens(PLAIN)
    assert_same(adapter(PLAIN, params, backend="xla").call(x), moe(moe_pallas.MoE(PLAIN), params, x))
    with pytest.raises((UnsupportedError, ValueError), match="no_such_backend"):
        adapter(PLAIN, params, backend="no_such_backend").call(x)


def test_the_plain_layer_is_at_hand() -> None:
    expected = moe_pallas.MoE(PLAIN, dtype=jnp.bfloat16).select_backend(64)
    assert flax_linen.MoE(PLAIN, dtype=jnp.bfloat16).layer.select_backend(64) == expected
    nnx_moe = flax_nnx.MoE(PLAIN, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert nnx_moe.layer.select_backend(64) == expected


def test_without_jit() -> None:
    params, x = random_params(PLAIN), tokens(PLAIN)
    expected = moe_pallas.MoE(PLAIN).apply(params, x)
    assert_same(nnx_layer(PLAIN, params)(x), expected)
    assert_same(flax_linen.MoE(PLAIN).apply({"params": params}, x), expected)
    # NNX modules are pytrees too.
    jitted = jax.jit(lambda layer, x: layer(x))(nnx_layer(PLAIN, params), x)
    assert_same(jitted, moe(moe_pallas.MoE(PLAIN), params, x))


def test_gradients() -> None:
    spec = FULL
    params, x = random_params(spec), tokens(spec)

    def loss_of(y: jax.Array, aux: moe_pallas.layers.MoEAux) -> jax.Array:
        return jnp.sum(jnp.sin(y)) + 0.1 * aux.load_balance_loss + 0.01 * aux.router_z_loss

    def moe_loss(params: dict[str, jax.Array]) -> jax.Array:
        return loss_of(*moe_pallas.MoE(spec).apply(params, x, return_aux=True))

    loss, expected = jax.jit(jax.value_and_grad(moe_loss))(params)
    assert not expected.pop("correction_bias").any()
    assert all(grad.any() for grad in expected.values())

    layer = nnx_layer(spec, params)
    nnx_loss, grads = nnx.jit(nnx.value_and_grad(lambda m: loss_of(*m(x, return_aux=True))))(layer)
    assert_same(nnx_loss, loss)
    assert_same(nnx.to_pure_dict(grads), expected)

    variables = flax_linen.to_variables(params)
    trained = variables.pop("params")

    def linen_loss(trained: dict[str, jax.Array]) -> jax.Array:
        layer = flax_linen.MoE(spec)
        return loss_of(*layer.apply({"params": trained, **variables}, x, return_aux=True))

    linen_loss_value, linen_grads = jax.jit(jax.value_and_grad(linen_loss))(trained)
    assert_same(linen_loss_value, loss)
    assert_same(linen_grads, expected)


# Parameters


@ADAPTERS
@pytest.mark.parametrize(("spec", "param_dtype"), [(PLAIN, jnp.float32), (FULL, jnp.bfloat16)])
def test_init_makes_moes_parameters(adapter: Any, spec: MoESpec, param_dtype: Any) -> None:
    params = adapter.init(spec, param_dtype=param_dtype)
    moe_init = moe_pallas.MoE(spec, param_dtype=param_dtype).init
    expected = jax.eval_shape(moe_init, jax.random.key(0))
    assert params.keys() == expected.keys()
    for name, array in params.items():
        assert (array.shape, array.dtype) == (expected[name].shape, expected[name].dtype)
        # LeCun's: a variance of 1 / fan_in, and fan_in is the last axis.
        variance = float(np.float32(array).var()) * array.shape[-1]
        assert variance == 0 if name in BIASES else 0.3 < variance < 2
    # Two matrices, and two experts, never share their key.
    assert not np.array_equal(params["w13"][0], params["w13"][1])


@ADAPTERS
def test_kernel_init_makes_every_matrix_by_itself(adapter: Any) -> None:
    seen = []

    def kernel_init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        seen.append(shape)
        return jnp.broadcast_to(jnp.arange(shape[0], dtype=dtype)[:, None], shape)

    params = adapter.init(FULL, kernel_init=kernel_init)
    assert {(12, 8), (12, 40), (20, 12), (12, 32), (16, 12), (12, 1)} == set(seen)
    for name, array in params.items():
        fan_in = array.shape[-1]
        expected = jnp.broadcast_to(jnp.arange(fan_in, dtype=array.dtype), array.shape)
        np.testing.assert_array_equal(array, jnp.zeros(array.shape) if name in BIASES else expected)


def test_names_not_in_the_spec_are_none_in_nnx() -> None:
    layer = flax_nnx.MoE(PLAIN, rngs=nnx.Rngs(0))
    absent = FULL.param_shapes.keys() - PLAIN.param_shapes.keys()
    assert len(absent) == 7
    assert all(getattr(layer, name) is None for name in absent)


def test_correction_bias_is_not_trained_in_nnx() -> None:
    params, x = random_params(FULL), tokens(FULL)
    layer = nnx_layer(FULL, params)
    assert set(nnx.state(layer, nnx.Param)) == params.keys() - {"correction_bias"}
    assert set(nnx.state(layer, flax_nnx.CorrectionBias)) == {"correction_bias"}

    # Weight decay would move it, gradient or not.
    optimizer = nnx.Optimizer(
        layer, optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1)), wrt=nnx.Param
    )
    optimizer.update(layer, nnx.jit(nnx.grad(lambda m: m(x).sum()))(layer))
    after = nnx.to_pure_dict(nnx.state(layer))
    assert_same(after.pop("correction_bias"), params["correction_bias"])
    assert all(not np.array_equal(array, params[name]) for name, array in after.items())


def test_correction_bias_is_not_trained_in_linen() -> None:
    x = tokens(FULL)
    variables = jax.jit(flax_linen.MoE(FULL).init)(jax.random.key(0), x)
    assert variables.keys() == {"params", "router_state"}
    assert variables["params"].keys() == FULL.param_shapes.keys() - {"correction_bias"}
    assert_same(variables["router_state"], {"correction_bias": jnp.zeros(8)})
    assert jax.eval_shape(flax_linen.MoE(PLAIN).init, jax.random.key(0), x).keys() == {"params"}


def test_to_variables_leaves_the_dict_as_it_is() -> None:
    params = random_params(FULL)
    names = list(params)
    variables = flax_linen.to_variables(params)
    assert list(params) == names
    assert_same(variables["params"] | variables["router_state"], params)
    assert flax_linen.to_variables(random_params(PLAIN)).keys() == {"params"}


@SPECS
def test_split_merge_and_state_dict_round_trip(spec: MoESpec) -> None:
    params, x = random_params(spec), tokens(spec)
    layer = nnx_layer(spec, params)
    expected = moe(moe_pallas.MoE(spec), params, x)
    assert_same(nnx.to_pure_dict(nnx.state(layer)), params)

    graphdef, *states = nnx.split(layer, nnx.Param, ...)
    assert len(states) == 2
    assert_same(call_nnx(nnx.merge(graphdef, *states), x), expected)
    # Equal definitions: a layer that is made anew does not compile anew, nor is one bound to its process.
    again = nnx.graphdef(flax_nnx.MoE(spec, rngs=nnx.Rngs(1)))
    assert again == graphdef and hash(again) == hash(graphdef)
    assert pickle.loads(pickle.dumps(graphdef)) == graphdef

    fresh = flax_nnx.MoE(spec, rngs=nnx.Rngs(2))
    nnx.update(fresh, nnx.state(layer))
    assert_same(call_nnx(fresh, x), expected)
    abstract: Any = nnx.eval_shape(lambda: flax_nnx.MoE(spec, rngs=nnx.Rngs(0)))
    state = nnx.state(abstract)
    nnx.replace_by_pure_dict(state, params)
    assert_same(call_nnx(nnx.merge(nnx.graphdef(abstract), state), x), expected)


def test_linen_module_is_a_value() -> None:
    layer = flax_linen.MoE(FULL, partitioning=EXPERT_PARALLEL)
    assert layer == flax_linen.MoE(FULL, partitioning=EXPERT_PARALLEL)
    assert hash(layer) == hash(flax_linen.MoE(FULL, partitioning=EXPERT_PARALLEL))
    assert layer != flax_linen.MoE(PLAIN)


def test_wrong_parameters_are_refused() -> None:
    params, x = random_params(PLAIN), tokens(PLAIN)
    wrong = params | {"w2": params["w2"][:, :, :-1]}
    with pytest.raises(ValueError, match="w2"):
        nnx_layer(PLAIN, wrong)(x)
    with pytest.raises(Exception, match="w2"):
        flax_linen.MoE(PLAIN).apply({"params": wrong}, x)


# Auxiliary outputs


@SPECS
def test_linen_sows_aux_where_asked(spec: MoESpec) -> None:
    params, x = random_params(spec), tokens(spec)
    layer, variables = flax_linen.MoE(spec), flax_linen.to_variables(params)
    y, expected = moe(moe_pallas.MoE(spec), params, x, return_aux=True)

    apply = jax.jit(functools.partial(layer.apply, mutable=["intermediates"]), static_argnames="return_aux")
    sown_y, state = apply(variables, x)
    assert_same(sown_y, y)
    assert_same(state, {"intermediates": {"aux": (expected,)}})

    both, state = apply(variables, x, return_aux=True)
    assert_same(both, (y, expected))
    assert_same(state, {"intermediates": {"aux": (expected,)}})

    assert "intermediates" not in jax.eval_shape(layer.init, jax.random.key(0), x)


def test_linen_in_a_model_sows_under_its_name() -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = x + flax_linen.MoE(PLAIN)(x)
            return nn.Dense(3)(flax_linen.MoE(PLAIN, name="last")(x))

    x = tokens(PLAIN)
    model = Model()
    variables = jax.jit(model.init)(jax.random.key(0), x)
    assert variables["params"].keys() == {"MoE_0", "last", "Dense_0"}
    _, state = jax.jit(functools.partial(model.apply, mutable=["intermediates"]))(variables, x)
    losses = [sown["aux"][0].load_balance_loss for sown in state["intermediates"].values()]
    assert len(losses) == 2 and all(float(loss) > 0 for loss in losses)


# Sharding metadata


def expert_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


def test_no_partitioning_means_no_metadata() -> None:
    layer = flax_nnx.MoE(FULL, rngs=nnx.Rngs(0))
    assert not any(getattr(layer, name).has_metadata("out_sharding") for name in FULL.param_shapes)

    boxes = jax.eval_shape(flax_linen.MoE(FULL).init, jax.random.key(0), tokens(FULL))
    leaves = jax.tree.leaves(boxes, is_leaf=lambda leaf: isinstance(leaf, nn.meta.AxisMetadata))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


def test_nnx_partition_spec() -> None:
    mesh = expert_mesh()
    names = EXPERT_PARALLEL | {"correction_bias": ("expert",)}
    with jax.set_mesh(mesh):
        layer = flax_nnx.MoE(FULL, partitioning=names, rngs=nnx.Rngs(0))
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer)))
    expected = {name: P(*names[name]) if name in names else P() for name in FULL.param_shapes}
    assert specs == expected
    # Flax places it at once.
    assert layer.w13.sharding.spec == P("expert", None, None)
    assert layer.w13.sharding.shard_shape(layer.w13.shape) == (4, 40, 12)

    params, x = random_params(FULL), tokens(FULL)
    shardings = nnx.to_pure_dict(nnx.get_named_sharding(nnx.state(layer), mesh))
    nnx.update(layer, jax.device_put(params, shardings))
    y = call_nnx(layer, x)
    np.testing.assert_allclose(y, moe(moe_pallas.MoE(FULL), params, x), rtol=1e-5, atol=1e-5)


def test_nnx_logical_axes() -> None:
    with jax.set_mesh(expert_mesh()), nnx.logical_axis_rules([("experts_axis", "expert")]):
        layer = flax_nnx.MoE(PLAIN, partitioning={"w2": ("experts_axis", None, None)}, rngs=nnx.Rngs(0))
        specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer)))
        assert specs["w2"] == P("expert", None, None)
    assert layer.w2.sharding.spec == P("expert", None, None)


def test_linen_partition_spec() -> None:
    mesh = expert_mesh()
    names = EXPERT_PARALLEL | {"correction_bias": ("expert",)}
    layer, x = flax_linen.MoE(FULL, partitioning=names), tokens(FULL)
    abstract = jax.eval_shape(layer.init, jax.random.key(0), x)
    specs = nn.get_partition_spec(abstract)
    expected = {name: P(*names[name]) if name in names else P() for name in FULL.param_shapes}
    assert specs["params"] | specs["router_state"] == expected

    init = jax.jit(layer.init, out_shardings=nn.get_sharding(abstract, mesh))
    with jax.set_mesh(mesh):
        variables = init(jax.random.key(0), x)
        y = jax.jit(layer.apply)(variables, x)
    w13 = variables["params"]["w13"]
    assert isinstance(w13, nn.Partitioned)
    assert w13.value.sharding.shard_shape(w13.value.shape) == (4, 40, 12)

    plain = nn.meta.unbox(variables)
    plain = jax.device_get(plain["params"] | plain["router_state"])
    expected_y = moe(moe_pallas.MoE(FULL), plain, x)
    np.testing.assert_allclose(y, expected_y, rtol=1e-5, atol=1e-5)


def test_linen_logical_axes() -> None:
    layer = flax_linen.MoE(
        PLAIN,
        partitioning={"w2": ("experts_axis", None, None)},
        with_partitioning=nn.with_logical_partitioning,
    )
    x = tokens(PLAIN)
    rules = [("experts_axis", "expert")]
    abstract = jax.eval_shape(layer.init, jax.random.key(0), x)
    specs = nn.logical_to_mesh(nn.get_partition_spec(abstract), rules)
    assert specs["params"]["w2"] == P("expert", None, None)
    # As a name of the mesh, experts_axis would be unknown here.
    with jax.set_mesh(expert_mesh()), nn.logical_axis_rules(rules):
        variables = jax.jit(layer.init)(jax.random.key(0), x)
        assert isinstance(variables["params"]["w2"], nn.LogicallyPartitioned)
        assert jax.jit(layer.apply)(variables, x).shape == x.shape


def test_partitioning_of_an_unknown_name_is_refused() -> None:
    names = {"w31": (None, None, None)}
    with pytest.raises(ValueError, match=r"\['w31'\].*\['router', 'w13', 'w2'\]"):
        flax_nnx.MoE(PLAIN, partitioning=names, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"\['w31'\].*\['router', 'w13', 'w2'\]"):
        flax_linen.MoE(PLAIN, partitioning=names)


def test_metadata_from_kernel_init_is_refused() -> None:
    init: Any = jax.nn.initializers.lecun_normal()
    with pytest.raises(TypeError, match="partitioning"):
        flax_nnx.MoE(PLAIN, kernel_init=nnx.with_partitioning(init, (None, "expert")), rngs=nnx.Rngs(0))
    wrapped: Any = nn.with_partitioning(init, (None, "expert"))
    layer = flax_linen.MoE(PLAIN, kernel_init=wrapped)
    with pytest.raises(TypeError, match="partitioning"):
        layer.init(jax.random.key(0), tokens(PLAIN))


# Stacks of layers


def layer_by_layer(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    layer = moe_pallas.MoE(FULL)
    for i in range(3):
        x = x + moe(layer, {name: array[i] for name, array in params.items()}, x)
    return x


def test_nnx_vmap_and_scan() -> None:
    @nnx.jit
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def create(rngs: nnx.Rngs) -> flax_nnx.MoE:
        return flax_nnx.MoE(FULL, partitioning=EXPERT_PARALLEL, rngs=rngs)

    @nnx.jit
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def forward(x: jax.Array, layer: flax_nnx.MoE) -> jax.Array:
        return x + layer(x)

    with jax.set_mesh(expert_mesh()):
        stack = create(nnx.Rngs(0))
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(stack)))
    assert {name: specs[name] for name in STACKED} == {name: P(*axes) for name, axes in STACKED.items()}
    params = nnx.to_pure_dict(nnx.state(stack))
    assert {name: array.shape[1:] for name, array in params.items()} == FULL.param_shapes
    assert not np.array_equal(params["w2"][0], params["w2"][1])

    x = tokens(FULL)
    y = forward(x, stack)
    np.testing.assert_allclose(y, layer_by_layer(jax.device_get(params), x), rtol=1e-5, atol=1e-5)


def test_linen_scan() -> None:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return x + flax_linen.MoE(FULL, partitioning=EXPERT_PARALLEL)(x), None

    stack = nn.scan(
        Block,
        variable_axes={"params": 0, "router_state": 0, "intermediates": 0},
        split_rngs={"params": True},
        length=3,
        metadata_params={nn.meta.PARTITION_NAME: "layers"},
    )()
    x = tokens(FULL)
    boxed = jax.jit(stack.init)(jax.random.key(0), x, None)
    specs = nn.get_partition_spec(boxed)["params"]["MoE_0"]
    assert {name: specs[name] for name in STACKED} == {name: P(*axes) for name, axes in STACKED.items()}
    variables = nn.meta.unbox(boxed)
    params = variables["params"]["MoE_0"] | variables["router_state"]["MoE_0"]
    assert {name: array.shape[1:] for name, array in params.items()} == FULL.param_shapes

    (y, _), state = jax.jit(functools.partial(stack.apply, mutable=["intermediates"]))(boxed, x, None)
    np.testing.assert_allclose(y, layer_by_layer(params, x), rtol=1e-5, atol=1e-5)
    assert state["intermediates"]["MoE_0"]["aux"][0].expert_loads.shape == (3, 8)


# Import


IMPORT_WITHOUT_FLAX = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "flax":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
import moe_pallas

for name in ("flax_nnx", "flax_linen"):
    try:
        __import__(f"moe_pallas.{name}")
    except ImportError as error:
        print(type(error).__name__, error)
"""


def test_without_flax_the_import_error_says_what_to_install() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT_FLAX], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for name, line in zip(("flax_nnx", "flax_linen"), lines, strict=True):
        assert line.startswith(f"ImportError moe_pallas.{name} needs Flax: pip install 'moe_pallas[flax]'")


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_sharding_brings_its_partitioning(axis_type: AxisType) -> None:
    """The same numbers, and metadata by which Flax places parameters, in both Flax forms."""
    spec = MoESpec(
        num_experts=4,
        top_k=2,
        hidden_size=8,
        intermediate_size=12,
        gate_up="interleaved",
        correction_bias=True,
    )
    mesh = jax.make_mesh((2, 2), ("expert", "tensor"), axis_types=(axis_type,) * 2, devices=jax.devices()[:4])
    sharding, params, x = moe_pallas.Sharding(mesh), random_params(spec), tokens(spec)
    with jax.set_mesh(mesh):
        layer = flax_nnx.MoE(spec, sharding=sharding, rngs=nnx.Rngs(0))
        specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer)))
        assert specs == sharding.param_specs(spec)
        nnx.update(layer, jax.device_put(params, sharding.param_shardings(spec)))
        testing.assert_close(call_nnx(layer, x), reference.moe(params, x, spec))

        linen = flax_linen.MoE(spec, sharding=sharding)
        variables = jax.jit(linen.init)(jax.random.key(0), x)
        boxed = nn.get_partition_spec(variables)
        assert boxed["params"] | boxed["router_state"] == sharding.param_specs(spec)
        plain = nn.meta.unbox(variables)
        assert plain["params"]["w13"].sharding.shard_shape(spec.param_shapes["w13"])[:2] == (2, 12)
        values = jax.device_get(plain["params"] | plain["router_state"])
        testing.assert_close(jax.jit(linen.apply)(variables, x), reference.moe(values, x, spec))
