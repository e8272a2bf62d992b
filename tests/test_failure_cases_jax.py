"""Failure cases of JAX transformations, sharding and export (L), and what compiled programs cost (J4, J8)."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from failure_cases import (
    IMPLEMENTATIONS,
    assert_close_by_expert,
    assert_close_by_stripe,
    assert_same_bits,
    experts_of,
    poison_memory,
    run_layer,
    run_moe,
)
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from moe_pallas import MoE, MoESpec, Routing, fused_experts, fused_moe, reference
from moe_pallas.oracle import PORTABLE_BACKENDS
from moe_pallas.testing import assert_close, random_logits, random_params, random_tokens

backends = pytest.mark.parametrize("backend", PORTABLE_BACKENDS)


def make_spec(**options: Any) -> MoESpec:
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 16, "intermediate_size": 8}
    return MoESpec(**(sizes | options))


FULL = make_spec(
    num_experts=8,
    intermediate_size=24,
    expert_bias=True,
    router_bias=True,
    shared_intermediate_size=8,
    shared_expert_gate=True,
)


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr and of the jaxprs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                yield from equations(getattr(value, "jaxpr", value))


def count_primitives(function: Any, *args: Any) -> collections.Counter[str]:
    jaxpr = jax.make_jaxpr(function)(*args)
    return collections.Counter(eqn.primitive.name for eqn in equations(jaxpr.jaxpr))


def scalar(y: jax.Array) -> jax.Array:
    return (y.astype(jnp.float32) * jnp.cos(jnp.arange(float(y.size))).reshape(y.shape)).sum()


def assert_trees_close(got: Any, want: Any, rtol: float = 1e-5) -> None:
    for actual, expected in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close_by_expert(jnp.asarray(actual)[None], jnp.asarray(expected)[None], rtol)


# L1, L2: scan and remat


@backends
def test_l1_layers_in_a_scan_equal_a_loop(backend: str) -> None:
    spec = make_spec()
    layer, x = MoE(spec, backend=backend), random_tokens(spec, 8)
    layers = [random_params(spec, seed=seed) for seed in range(4)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)

    def scanned(stacked: Any, x: jax.Array) -> jax.Array:
        step = lambda x, params: (x + layer.apply(params, x), None)  # noqa: E731
        return scalar(jax.lax.scan(step, x, stacked)[0])

    @jax.jit
    def one_layer(params: Any, x: jax.Array, d_y: jax.Array) -> Any:
        y, pull_back = jax.vjp(lambda params, x: x + layer.apply(params, x), params, x)
        return y, pull_back(d_y)

    value, (d_stacked, dx) = jax.jit(jax.value_and_grad(scanned, argnums=(0, 1)))(stacked, x)
    inputs = [jnp.asarray(x)]
    for params in layers:
        inputs.append(one_layer(params, inputs[-1], inputs[-1])[0])
    expected, d_y = jax.jit(jax.value_and_grad(scalar))(inputs[-1])
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for i in (3, 2, 1, 0):
        d_params, d_y = one_layer(layers[i], inputs[i], d_y)[1]
        assert_trees_close(jax.tree.map(lambda leaf, i=i: leaf[i], d_stacked), d_params)
        assert np.asarray(d_params["w13"]).any()
    assert_trees_close(dx, d_y)


POLICIES = {
    "default": None,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
}
# Loops over tiles: one for each grouped product, of which the forward pass has four (the biases' rows are
# two), the backward twice as many.
FORWARD_LOOPS, BACKWARD_LOOPS = 4, 8


@pytest.mark.parametrize("policy", POLICIES)
def test_l2_remat_runs_the_forward_pass_at_most_twice(policy: str) -> None:
    layer = MoE(FULL, backend="xla")
    params, x = random_params(FULL), random_tokens(FULL, 8)
    remat = jax.checkpoint(layer.apply, policy=POLICIES[policy])

    def gradient(apply: Any) -> Any:
        return jax.grad(lambda params, x: scalar(apply(params, x)), argnums=(0, 1))

    plain = count_primitives(gradient(layer.apply), params, x)["while"]
    assert plain == FORWARD_LOOPS + BACKWARD_LOOPS
    again = 0 if policy == "everything" else FORWARD_LOOPS
    assert count_primitives(gradient(remat), params, x)["while"] <= plain + again
    if policy == "default":
        expected = jax.jit(gradient(layer.apply))(params, x)
        assert_trees_close(jax.jit(gradient(remat))(params, x), expected, 1e-6)


# L3: vmap, symbolic sizes


@functools.cache
def value_and_gradient(backend: str) -> Any:
    def compute(params: Any, x: jax.Array) -> Any:
        y, pull_back = jax.vjp(MoE(FULL, backend=backend).apply, params, x)
        return y, pull_back(jnp.cos(x))

    return jax.jit(compute)


@backends
@pytest.mark.parametrize("mapped", ["x", "experts", "router_bias"])
def test_l3_vmap_equals_a_loop(backend: str, mapped: str) -> None:
    params = [random_params(FULL, seed=seed) for seed in range(3)]
    xs = np.stack([random_tokens(FULL, 6, seed=seed) for seed in range(3)])
    names = {
        "x": (),
        "experts": ("w13", "w2", "b13", "b2"),
        "router_bias": ("router_bias",),
    }[mapped]
    axes = {name: 0 if name in names else None for name in FULL.param_shapes}
    stacked = {
        name: np.stack([p[name] for p in params]) if name in names else params[0][name] for name in axes
    }
    x_axis = 0 if mapped == "x" else None
    x = xs if x_axis == 0 else xs[0]

    one = value_and_gradient(backend)
    got = jax.jit(jax.vmap(one, in_axes=(axes, x_axis)))(stacked, x)
    for i in range(3):
        mine = {name: value[i] if name in names else value for name, value in stacked.items()}
        want = one(mine, xs[i] if x_axis == 0 else x)
        assert_trees_close(jax.tree.map(lambda leaf, i=i: leaf[i], got), want)
        assert_close(want[0], reference.moe(mine, xs[i] if x_axis == 0 else x, FULL))


def shapes_of(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


@backends
@pytest.mark.parametrize("name", ["T", "batch"])
def test_l3_a_symbolic_number_of_tokens_is_refused(backend: str, name: str) -> None:
    """At export, with the reason; twice in one process, with different names."""
    layer = MoE(FULL, backend=backend)
    (size,) = export.symbolic_shape(name)
    x = jax.ShapeDtypeStruct((size, 16), jnp.float32)
    with pytest.raises(TypeError, match=rf"num_tokens is an int >= 0; got {name}"):
        export.export(jax.jit(layer.apply))(shapes_of(random_params(FULL)), x)


# L4: export


@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda", "tpu")], ids="+".join)
def test_l4_exported_programs_give_the_same_bits(platforms: tuple[str, ...]) -> None:
    apply = jax.jit(lambda params, x, n: MoE(FULL, backend="xla").apply(params, x, num_tokens=n))
    params, x = random_params(FULL), random_tokens(FULL, 8)
    exported = export.export(apply, platforms=platforms)(*shapes_of((params, x, np.int32(5))))
    assert exported.platforms == platforms
    for count in (8, 5, 0):
        assert_same_bits(exported.call(params, x, np.int32(count)), apply(params, x, np.int32(count)))


def test_l4_exported_programs_survive_serialising() -> None:
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    apply = jax.jit(MoE(FULL, backend="xla").apply)
    params, x = random_params(FULL), random_tokens(FULL, 8)
    blob = export.export(apply)(*shapes_of((params, x))).serialize()
    assert_same_bits(export.deserialize(blob).call(params, x), apply(params, x))


# L6: sharded operands

SHARDINGS = {
    "experts": {name: P("x") for name in ("router", "router_bias", "w13", "w2", "b13", "b2")},
    "intermediate": {
        "w13": P(None, "x"),
        "b13": P(None, "x"),
        "w2": P(None, None, "x"),
        "shared_w13": P("x"),
        "shared_w2": P(None, "x"),
    },
    "tokens": {},
}


def place(values: dict[str, NDArray], sharding: str, axis_type: AxisType) -> dict[str, jax.Array]:
    """Parameters and x on eight devices."""
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    specs = SHARDINGS[sharding] | {"x": P("x") if sharding == "tokens" else P()}
    return {
        name: jax.device_put(value, NamedSharding(mesh, specs.get(name, P())))
        for name, value in values.items()
    }


@backends
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_l6_sharded_operands_give_the_same_numbers(backend: str, sharding: str) -> None:
    layer = MoE(FULL, backend=backend)
    values = random_params(FULL) | {"x": random_tokens(FULL, 32)}
    d_y = random_tokens(FULL, 32, seed=6)

    @jax.jit
    def both(values: dict[str, jax.Array]) -> Any:
        apply = lambda v: layer.apply({n: a for n, a in v.items() if n != "x"}, v["x"])  # noqa: E731
        y, pull_back = jax.vjp(apply, values)
        return y, pull_back(jnp.asarray(d_y))[0]

    want = both(values)
    got = both(place(values, sharding, AxisType.Auto))
    assert_close(got[0], reference.moe(random_params(FULL), values["x"], FULL))
    assert_close_by_stripe(got[0], want[0], 1e-5)
    for name, expected in want[1].items():
        assert_close_by_expert(got[1][name], expected, 2e-5, name)


@backends
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_l6_explicit_axes_are_refused_or_right(backend: str, sharding: str) -> None:
    """Under a mesh of explicit axes JAX asks each operation for its sharding: an error, or right numbers."""
    layer = MoE(FULL, backend=backend)
    params, x = random_params(FULL), random_tokens(FULL, 32)
    placed = place(params | {"x": x}, sharding, AxisType.Explicit)
    try:
        y = jax.jit(layer.apply)({n: a for n, a in placed.items() if n != "x"}, placed["x"])
    except Exception as error:
        assert type(error).__name__ == "ShardingTypeError", error
    else:
        assert_close(y, reference.moe(params, x, FULL))


# L8: sizes that nothing divides


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_l8_sizes_that_no_block_divides(implementation: str, dtype: str) -> None:
    spec = make_spec(num_experts=7, top_k=3, hidden_size=100, intermediate_size=60, expert_bias=True)
    params, x, logits = (
        random_params(spec, dtype=dtype),
        random_tokens(spec, 5, dtype=dtype),
        random_logits(5, 7),
    )
    poison_memory()
    y = run_moe(implementation, x, logits, **experts_of(params), spec=spec)
    truth = reference.fused_moe(x, logits, **experts_of(params), spec=spec)
    assert_close(y, truth, dtype=dtype)
    assert_close_by_stripe(y, truth, 1e-5 if dtype == "float32" else 1e-2)


# J8: memory


@backends
@pytest.mark.parametrize("num_experts", [8, 128])
def test_j8_memory_has_no_factor_of_experts(backend: str, num_experts: int) -> None:
    """Temporary memory of R = 8192 rows, in units of R · (D + 2F) float32 numbers.

    Forward, 2: a product is live together with its operand and a padded copy of either. Backward, 4: the
    residuals (both products and both operands) and a gradient of each; and one copy of the weights'
    gradients. One array with a factor of E would have E · R · min(D, F) numbers: 20 times the forward bound
    at E = 128.
    """
    tokens, d, f = 4096, 256, 256
    spec = make_spec(num_experts=num_experts, hidden_size=d, intermediate_size=f)
    x = jax.ShapeDtypeStruct((tokens, d), jnp.float32)
    routing = Routing(
        jax.ShapeDtypeStruct((tokens, 2), jnp.int32), jax.ShapeDtypeStruct((tokens, 2), jnp.float32)
    )
    weights = [jax.ShapeDtypeStruct(spec.param_shapes[name], jnp.float32) for name in ("w13", "w2")]

    def forward(x: jax.Array, routing: Routing, w13: jax.Array, w2: jax.Array) -> jax.Array:
        return fused_experts(x, routing, w13, w2, spec=spec, backend=backend)

    def backward(x: jax.Array, weights: list[jax.Array], routing: Routing) -> Any:
        return jax.grad(lambda x, w: scalar(forward(x, routing, *w)), argnums=(0, 1))(x, weights)

    rows, weight_bytes = 2 * tokens, num_experts * 3 * f * d * 4
    bound = 2 * rows * (d + 2 * f) * 4
    temp = jax.jit(forward).lower(x, routing, *weights).compile().memory_analysis().temp_size_in_bytes
    assert temp <= bound
    analysis = jax.jit(backward).lower(x, weights, routing).compile().memory_analysis()
    assert analysis.temp_size_in_bytes <= 2 * bound + weight_bytes
    assert 20 * bound < 128 * rows * min(d, f) * 4


# J4: compilations


@backends
def test_j4_one_program_serves_every_count_mask_and_routing(backend: str) -> None:
    spec = make_spec()
    params, x = random_params(spec), random_tokens(spec, 24)
    traced = []

    @jax.jit
    def apply(params: Any, x: jax.Array, count: Any, mask: Any, routing: Any) -> jax.Array:
        traced.append((count, mask, routing))
        if routing is not None:
            return fused_experts(
                x, routing, **experts_of(params), spec=spec, num_tokens=count, backend=backend
            )
        return MoE(spec, backend=backend).apply(params, x, num_tokens=count, mask=mask)

    poison_memory()
    for count in (24, 0, 1, 23, 12, -3, 99):
        y = apply(params, x, np.int32(count), None, None)
        assert_close(y, reference.moe(params, x, spec, mask=np.arange(24) < count))
        assert not np.asarray(y)[max(count, 0) :].any()
    assert (len(traced), apply._cache_size()) == (1, 1)
    rng = np.random.default_rng(4)
    for _ in range(5):
        mask = rng.random(24) < 0.5
        assert_close(apply(params, x, None, mask, None), reference.moe(params, x, spec, mask=mask))
    assert (len(traced), apply._cache_size()) == (2, 2)
    for _ in range(20):
        ids, weights = rng.integers(-1, 4, (24, 2), np.int32), rng.standard_normal((24, 2), np.float32)
        y = apply(params, x, np.int32(24), None, Routing(ids, weights))
        assert_close(y, reference.fused_experts(x, ids, weights, **experts_of(params), spec=spec))
    assert (len(traced), apply._cache_size()) == (3, 3)


@backends
def test_j4_counts_of_any_integer_dtype(backend: str) -> None:
    params, x, logits = random_params(make_spec()), random_tokens(make_spec(), 6), random_logits(6, 4)

    def moe(count: Any) -> jax.Array:
        return fused_moe(x, logits, **experts_of(params), spec=make_spec(), num_tokens=count, backend=backend)

    for dtype in (jnp.int8, jnp.int16, jnp.int32, jnp.uint8, jnp.uint32):
        assert jax.eval_shape(moe, jax.ShapeDtypeStruct((), dtype)).shape == (6, 16)


@backends
def test_nothing_calls_back_into_python(backend: str) -> None:
    layer = MoE(FULL, backend=backend)
    params, x = random_params(FULL), random_tokens(FULL, 6)

    def everything(params: Any, x: jax.Array, count: jax.Array) -> Any:
        def loss(params: Any, x: jax.Array) -> Any:
            y, aux = layer.apply(params, x, num_tokens=count, return_aux=True)
            return scalar(y) + aux.load_balance_loss + aux.router_z_loss, aux

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    names = count_primitives(everything, params, x, np.int32(4))
    assert names["while"] > 0
    assert [name for name in names if "callback" in name or "outside" in name or "infeed" in name] == []


# Which rows are in a batch


@backends
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_tokens", [8, 96])
def test_a_token_does_not_depend_on_the_others(backend: str, dtype: str, num_tokens: int) -> None:
    """Bitwise, with the number of tokens fixed: other tokens move its row within and between tiles."""
    spec = make_spec(hidden_size=72, intermediate_size=40, expert_bias=True, shared_intermediate_size=24)
    params, x = random_params(spec, dtype=dtype), random_tokens(spec, num_tokens, dtype=dtype)
    y = run_layer(backend, params, x, spec)
    rng = np.random.default_rng(num_tokens)
    for seed in range(1, 9):
        others = random_tokens(spec, num_tokens, dtype=dtype, seed=seed) * np.asarray(seed, x.dtype)
        kept = rng.random(num_tokens) < 0.25
        kept[seed % num_tokens] = True
        mixed = np.where(kept[:, None], x, others)
        assert_same_bits(run_layer(backend, params, mixed, spec)[kept], y[kept])
