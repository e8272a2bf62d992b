"""The grouped GEMM: interpreted on a CPU, run on a Hopper GPU. `test_aot` compiles it.

Interpreted with a race detector, the kernel shows that its items cover the matrices, that its ring and its
stores order every access to shared memory, and that its numbers are right. The asynchronous gather of token
rows is replaced there (`interpret` in `moe_pallas.kernels._mgpu`), and that a wait for WGMMA stands where it
must is not proved: tests marked gpu do that. Left out on a CPU are values of D where the combine's
last piece of a row overlaps the one before: both write the same bits, which the detector rightly reports.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from failure_cases import assert_same_bits, experts_of
from interpreted import interpreted, make_routing, without_races
from numpy.typing import NDArray

from moe_pallas import (
    GradientConfig,
    MoESpec,
    Problem,
    Routing,
    UnsupportedError,
    fused_experts,
    fused_moe,
    reference,
    xla,
)
from moe_pallas import grouped_gemm as public_grouped_gemm
from moe_pallas.configs.schema import GroupedGemmConfig
from moe_pallas.kernels import grouped_gemm
from moe_pallas.oracle import assume_device
from moe_pallas.spec import H200
from moe_pallas.testing import assert_close, random_logits, random_params, random_tokens

CONFIG = GroupedGemmConfig()
CLAMPED = {"swiglu_alpha": 1.702, "swiglu_limit": 0.9, "swiglu_up_offset": 1.0}


def make_spec(**options: Any) -> MoESpec:
    return MoESpec(**({"num_experts": 3, "top_k": 2, "hidden_size": 128, "intermediate_size": 128} | options))


def with_sizes(*sizes: int) -> Routing:
    """One expert a token, so many tokens to each, in a random order."""
    rng = np.random.default_rng(0)
    ids = rng.permutation(np.repeat(np.arange(len(sizes), dtype=np.int32), sizes))[:, None]
    return Routing(ids, rng.uniform(0.1, 1, ids.shape).astype(np.float32))


def interpret(
    spec: MoESpec,
    x: NDArray,
    routing: Routing,
    params: dict[str, NDArray],
    config: GroupedGemmConfig = CONFIG,
    num_ctas: int = 2,
) -> NDArray:
    arrays = [params.get(name) for name in ("w13", "w2", "b13", "b2")]
    program = interpreted(grouped_gemm.fused_experts, spec=spec, config=config, num_ctas=num_ctas)
    return without_races(program, x, routing, *arrays)


_ONE = {"top_k": 1}
# Each: the layer, its routing (or how many tokens, and the ids' range), the configuration, CTAs.
INTERPRETED: dict[str, tuple[MoESpec, Routing, GroupedGemmConfig, int]] = {
    "sizes at the edges of a block": (
        make_spec(num_experts=4, **_ONE),
        with_sizes(64, 0, 65, 9),
        CONFIG,
        2,
    ),
    "blocks of one expert, weights on the input": (
        make_spec(num_experts=2, weight_on="input", expert_bias=True, **_ONE),
        with_sizes(128, 137),
        GroupedGemmConfig(band=2),
        3,
    ),
    "dropped ids, biases and a clamp": (
        make_spec(hidden_size=256, expert_bias=True, **CLAMPED),
        make_routing(make_spec(), 40, low=-2, high=4),
        GroupedGemmConfig(num_stages=3),
        2,
    ),
    "interleaved, a run past the end": (
        make_spec(gate_up="interleaved", expert_bias=True, hidden_size=256, intermediate_size=192),
        make_routing(make_spec(), 20),
        CONFIG,
        2,
    ),
    "relu2, a run past the end": (
        make_spec(activation="relu2", weight_on="input", expert_bias=True, intermediate_size=192, top_k=1),
        with_sizes(3, 70, 0),
        CONFIG,
        1,
    ),
    "silu, float16": (make_spec(activation="silu"), make_routing(make_spec(), 9), CONFIG, 4),
    "one hot expert, gelu_tanh": (
        make_spec(activation="gelu_tanh"),
        make_routing(make_spec(), 70, low=1, high=2),
        CONFIG,
        2,
    ),
    "many choices, geglu": (
        make_spec(num_experts=10, top_k=9, activation="geglu"),
        make_routing(make_spec(num_experts=10, top_k=9), 2),
        CONFIG,
        2,
    ),
    "narrow tiles": (
        make_spec(expert_bias=True, hidden_size=256, intermediate_size=192),
        make_routing(make_spec(), 12),
        GroupedGemmConfig(up_block_n=128, down_block_n=128),
        3,
    ),
    "narrow tiles, not gated": (
        make_spec(activation="relu2", hidden_size=256, intermediate_size=192),
        make_routing(make_spec(), 9),
        GroupedGemmConfig(up_block_n=128, down_block_n=128),
        2,
    ),
    "one token, one expert": (
        make_spec(num_experts=1, **_ONE),
        make_routing(make_spec(num_experts=1, **_ONE), 1),
        CONFIG,
        2,
    ),
    "all dropped": (make_spec(), make_routing(make_spec(), 3, low=-3, high=0), CONFIG, 2),
}


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name: str) -> None:
    spec, routing, config, num_ctas = INTERPRETED[name]
    num_tokens = len(routing.topk_ids)
    dtype = "float16" if "float16" in name else "bfloat16"
    assert config.validate(Problem(spec=spec, num_tokens=num_tokens, dtype=dtype)) is None
    params, x = random_params(spec, dtype=dtype), random_tokens(spec, num_tokens, dtype=dtype)
    y = interpret(spec, x, routing, params, config, num_ctas)
    assert_close(y, reference.fused_experts(x, *routing, **experts_of(params), spec=spec))


def test_interpreted_nan_of_others_stays_out() -> None:
    """Of an expert without tokens, of a token without experts, and of rows between blocks."""
    spec = make_spec(expert_bias=True)
    params, x = random_params(spec, dtype="bfloat16"), random_tokens(spec, 6, dtype="bfloat16")
    ids, weights = make_routing(spec, 6, high=2)
    ids = 2 * ids  # experts 0 and 2
    ids[3] = -1
    clean = interpret(spec, x, Routing(ids, weights), params)
    assert_close(clean, reference.fused_experts(x, ids, weights, **experts_of(params), spec=spec))
    for name in ("w13", "w2", "b13", "b2"):
        params[name][1] = np.nan
    x[3], weights[3] = np.nan, np.nan
    assert_same_bits(interpret(spec, x, Routing(ids, weights), params), clean)


def grouped_inputs(
    sizes: tuple[int, ...],
    num_rows: int,
    num_matrices: int,
    contracted: int,
    columns: int,
    contract_last: bool,
    dtype: Any = jnp.bfloat16,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(lhs, rhs, group_sizes); lhs is NaN where it belongs to no group."""
    rng = np.random.default_rng(0)
    lhs = rng.standard_normal((num_rows, contracted))
    lhs[sum(sizes) :] = np.nan
    shape = (columns, contracted) if contract_last else (contracted, columns)
    rhs = contracted**-0.5 * rng.standard_normal((num_matrices, *shape))
    return jnp.asarray(lhs, dtype), jnp.asarray(rhs, dtype), jnp.asarray(sizes, jnp.int32)


def check_groups(
    y: NDArray, lhs: jax.Array, rhs: jax.Array, sizes: tuple[int, ...], offset: int, contract_last: bool
) -> None:
    """Each row against the truth; rows of no group are exactly 0."""
    want = np.zeros(y.shape)
    starts = np.cumsum((0, *sizes))
    for group, matrix in enumerate(np.asarray(rhs, np.float64), start=offset):
        rows = slice(starts[group], starts[group + 1])
        want[rows] = np.asarray(lhs, np.float64)[rows] @ (matrix.T if contract_last else matrix)
    assert_close(y, want)
    end = starts[offset + len(rhs)]
    assert not y[: starts[offset]].any()
    assert not y[end:].any()


# Each: group sizes, rows, columns, the first group, matrices, where the contraction stands, CTAs.
GROUPS: dict[str, tuple[tuple[int, ...], int, int, int, int, bool, int]] = {
    "any row, a run past the end": ((3, 70, 0, 9), 83, 192, 0, 4, True, 2),
    "contraction first, rows of no group": ((5, 66), 150, 128, 0, 2, False, 3),
    "others' groups": ((67, 4, 11, 3), 90, 128, 1, 2, True, 2),
    "no rows in any group": ((0, 0), 9, 128, 0, 2, True, 2),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_interpreted(name: str) -> None:
    sizes, num_rows, columns, offset, num_matrices, contract_last, num_ctas = GROUPS[name]
    lhs, rhs, group_sizes = grouped_inputs(sizes, num_rows, num_matrices, 128, columns, contract_last)
    program = interpreted(
        grouped_gemm.multiply_groups, group_offset=offset, contract_last=contract_last, num_ctas=num_ctas
    )
    y = without_races(program, lhs, rhs, group_sizes)
    check_groups(y, lhs, rhs, sizes, offset, contract_last)


def test_rows_that_are_not_there_have_no_group() -> None:
    """Sizes that add up to more than the rows: nothing is read or written past the end."""
    lhs, rhs, _ = grouped_inputs((50, 40, 0), 90, 3, 128, 128, True)
    program = interpreted(grouped_gemm.multiply_groups, num_ctas=2)
    for sizes in ((50, 60, 5), (50, 40, 2**30)):
        y = without_races(program, lhs, rhs, np.array(sizes, np.int32))
        check_groups(y, lhs, rhs, (50, 40, 0), 0, True)


def test_items_of_one_step_interpreted() -> None:
    """The producer is four items ahead: their numbers must not be written over."""
    sizes = (3, 70, 9, 1, 5, 8)
    lhs, rhs, group_sizes = grouped_inputs(sizes, sum(sizes), len(sizes), 64, 320, True)
    y = without_races(interpreted(grouped_gemm.multiply_groups, num_ctas=1), lhs, rhs, group_sizes)
    check_groups(y, lhs, rhs, sizes, 0, True)


@pytest.mark.parametrize("name", GROUPS)
def test_groups_anywhere(name: str) -> None:
    """The public operation, by XLA."""
    sizes, num_rows, columns, offset, num_matrices, contract_last, _ = GROUPS[name]
    lhs, rhs, group_sizes = grouped_inputs(sizes, num_rows, num_matrices, 128, columns, contract_last)
    given = {"group_offset": offset} if num_matrices < len(sizes) else {}
    y = public_grouped_gemm(lhs, rhs, group_sizes, transpose_rhs=contract_last, **given)
    check_groups(np.asarray(y), lhs, rhs, sizes, offset, contract_last)


def groups_loss(backend: str, transpose_rhs: bool, lhs: jax.Array, rhs: jax.Array, *rest: Any) -> jax.Array:
    sizes, first = rest
    y = public_grouped_gemm(lhs, rhs, sizes, transpose_rhs=transpose_rhs, group_offset=first, backend=backend)
    return jnp.sum(jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape) * y.astype(jnp.float32))


def count_launches(function: Any, *args: Any) -> int:
    """How often a kernel stands in a program for an H200."""
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    with assume_device(H200):
        program = jax.jit(lambda *args: function(*args)).trace(*structs)
        return program.lower(lowering_platforms=("cuda",)).as_text().count("custom_call @mosaic_gpu")


@pytest.mark.parametrize("transpose_rhs", [True, False])
def test_groups_are_lowered(transpose_rhs: bool) -> None:
    args = (*grouped_inputs((5, 6, 0), 40, 2, 128, 192, transpose_rhs), jnp.int32(1))
    loss = functools.partial(groups_loss, "grouped_gemm", transpose_rhs)
    assert count_launches(loss, *args) == 1
    assert count_launches(jax.value_and_grad(loss, argnums=(0, 1)), *args) == 3
    assert count_launches(jax.vmap(loss), *jax.tree.map(lambda x: jnp.stack([x] * 2), args)) == 1
    odd = (*grouped_inputs((5, 6, 0), 40, 2, 128, 96, transpose_rhs), jnp.int32(1))
    assert count_launches(functools.partial(groups_loss, "auto", transpose_rhs), *odd) == 0


def test_groups_refused() -> None:
    lhs, rhs, sizes = grouped_inputs((5, 6), 11, 2, 128, 64, True)
    with pytest.raises(UnsupportedError, match="Hopper"):
        public_grouped_gemm(lhs, rhs, sizes, transpose_rhs=True, backend="grouped_gemm")
    with assume_device(H200), pytest.raises(UnsupportedError, match="multiples of 64"):
        public_grouped_gemm(lhs[:, :96], rhs[:, :, :96], sizes, transpose_rhs=True, backend="grouped_gemm")
    with pytest.raises(ValueError, match="one matrix at least"):
        public_grouped_gemm(lhs, rhs[:0], sizes[:0], transpose_rhs=True)
    with pytest.raises(ValueError, match="no backend 'fast'"):
        public_grouped_gemm(lhs, rhs, sizes, transpose_rhs=True, backend="fast")
    with pytest.raises(ValueError, match=r"need \(R, K\) and \(G, K, N\)"):
        public_grouped_gemm(lhs, rhs, sizes)
    with pytest.raises(ValueError, match="need one size a matrix"):
        public_grouped_gemm(lhs, rhs[:1], sizes, transpose_rhs=True)
    with pytest.raises(TypeError, match="need one dtype"):
        public_grouped_gemm(lhs, rhs.astype(jnp.float16), sizes, transpose_rhs=True)
    with pytest.raises(TypeError, match="group_sizes are integers"):
        public_grouped_gemm(lhs, rhs, sizes.astype(jnp.float32), transpose_rhs=True)


# A layer through the public operations.

KERNELS = GradientConfig(kernels=True)
SPEC = MoESpec(num_experts=16, top_k=4, hidden_size=512, intermediate_size=256)


def layer_loss(
    backend: str, x: jax.Array, logits: jax.Array, w13: jax.Array, w2: jax.Array, **rest: Any
) -> jax.Array:
    y = fused_moe(x, logits, w13, w2, spec=SPEC, backend=backend, **({"gradients": KERNELS} | rest))
    return jnp.sum(jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape) * y.astype(jnp.float32))


def layer_inputs(num_tokens: int) -> tuple[jax.Array, ...]:
    params = random_params(SPEC, dtype="bfloat16")
    x = random_tokens(SPEC, num_tokens, dtype="bfloat16")
    return tuple(map(jnp.asarray, (x, random_logits(num_tokens, 16), params["w13"], params["w2"])))


def test_layers_are_lowered() -> None:
    """Five launches, and eight of a backward pass, which needs nothing of the forward pass but its inputs."""
    args = layer_inputs(300)
    loss = functools.partial(layer_loss, "grouped_gemm")
    assert count_launches(loss, *args) == 5
    argnums = (0, 1, 2, 3)
    assert count_launches(jax.value_and_grad(loss, argnums), *args) == 5 + 8
    assert count_launches(jax.grad(loss, argnums), *args) == 8
    assert count_launches(jax.value_and_grad(jax.checkpoint(loss), argnums), *args) == 5 + 8
    # Products that are saved are not made again, if the policy saves them too.
    saves = functools.partial(loss, gradients=GradientConfig(kernels=True, save="products"))
    by_name = jax.checkpoint_policies.save_only_these_names(GradientConfig.PRODUCTS)
    assert count_launches(jax.value_and_grad(saves, argnums), *args) == 5 + 7
    assert count_launches(jax.value_and_grad(jax.checkpoint(saves, policy=by_name), argnums), *args) == 5 + 7
    assert count_launches(jax.vmap(loss), *jax.tree.map(lambda x: jnp.stack([x] * 2), args)) == 5
    mask = jnp.arange(300) % 3 == 0
    assert count_launches(lambda mask, *args: loss(*args, mask=mask), mask, *args) == 5
    assert count_launches(lambda count, *args: loss(*args, num_tokens=count), jnp.int32(7), *args) == 5
    own = functools.partial(fused_experts, spec=SPEC, backend="grouped_gemm")
    assert count_launches(own, args[0], make_routing(SPEC, 300), *args[2:]) == 5


def test_what_it_refuses() -> None:
    def objection(config: GroupedGemmConfig = CONFIG, dtype: str = "bfloat16", **options: Any) -> str:
        return config.validate(Problem(spec=make_spec(**options), num_tokens=9, dtype=dtype)) or ""

    assert objection() == ""
    assert "float32" in objection(dtype="float32")
    mixed = Problem(spec=make_spec(), num_tokens=9, dtype="bfloat16", weight_dtype="float16")
    assert "float16" in (CONFIG.validate(mixed) or "")
    assert "hidden_size" in objection(hidden_size=160)
    assert "intermediate_size" in objection(intermediate_size=64)
    assert "num_stages" in objection(GroupedGemmConfig(num_stages=2))
    assert "shared memory" in objection(GroupedGemmConfig(num_stages=5))
    assert "band" in objection(GroupedGemmConfig(band=0))
    assert "up_block_n" in objection(GroupedGemmConfig(up_block_n=64))
    assert "down_block_n" in objection(GroupedGemmConfig(down_block_n=192))


# On a GPU


@functools.cache
def program(spec: MoESpec, config: GroupedGemmConfig = CONFIG) -> Any:
    """fused_experts of (x, routing, w13, w2, b13, b2). One for each layer: a shape is compiled once."""
    return jax.jit(functools.partial(grouped_gemm.fused_experts, spec=spec, config=config))


def operands(spec: MoESpec, num_tokens: int, dtype: str = "bfloat16", seed: int = 0) -> tuple[Any, list[Any]]:
    params = random_params(spec, dtype=dtype, seed=seed)
    x = random_tokens(spec, num_tokens, dtype=dtype, seed=seed)
    return jnp.asarray(x), [
        None if (array := params.get(name)) is None else jnp.asarray(array)
        for name in ("w13", "w2", "b13", "b2")
    ]


def check(
    spec: MoESpec,
    num_tokens: int,
    routing: Routing | None = None,
    config: GroupedGemmConfig = CONFIG,
    dtype: str = "bfloat16",
) -> None:
    """Against the truth, if it takes no time, else against the portable backend."""
    x, arrays = operands(spec, num_tokens, dtype)
    routing = make_routing(spec, num_tokens, low=-1) if routing is None else routing
    y = np.asarray(program(spec, config)(x, routing, *arrays))
    if num_tokens * spec.top_k <= 4096:
        names = ("w13", "w2", "b13", "b2")
        own = {n: np.asarray(a) for n, a in zip(names, arrays, strict=True) if a is not None}
        want = reference.fused_experts(np.asarray(x), *routing, **own, spec=spec)
    else:
        want = np.asarray(
            jax.jit(functools.partial(xla.fused_experts, spec=spec))(x, routing, *arrays), np.float64
        )
    assert_close(y, want)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 17, 64, 129, 257, 1000, 8191])
def test_tokens(num_tokens: int) -> None:
    check(SPEC, num_tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("num_stages", [3, 4])
@pytest.mark.parametrize("band", [1, 3, 8, 16])
def test_configurations(num_stages: int, band: int) -> None:
    check(SPEC, 900, config=GroupedGemmConfig(num_stages=num_stages, band=band))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_narrow_tiles(activation: str) -> None:
    spec = dataclasses.replace(SPEC, hidden_size=704, intermediate_size=320, activation=activation)
    for up, down in ((128, 128), (128, 256), (256, 128)):
        check(spec, 900, config=GroupedGemmConfig(up_block_n=up, down_block_n=down))


OPTIONS: list[dict[str, Any]] = [
    {"expert_bias": True, **CLAMPED},
    {"expert_bias": True, "gate_up": "interleaved", "weight_on": "input"},
    {"activation": "geglu_tanh"},
    {"activation": "geglu"},
    {"activation": "gelu"},
    {"activation": "relu2", "expert_bias": True, "weight_on": "input"},
    {"activation": "silu"},
    {"activation": "gelu_tanh"},
    {"hidden_size": 192, "intermediate_size": 192},
    {"hidden_size": 704, "intermediate_size": 320, "expert_bias": True},
    {"hidden_size": 704, "intermediate_size": 320, "activation": "relu2"},
    {"hidden_size": 128, "intermediate_size": 128},
    {"num_experts": 1, "top_k": 1},
    {"num_experts": 7, "top_k": 7},
    {"num_experts": 1536, "top_k": 8, "hidden_size": 128, "intermediate_size": 128},
    {"num_experts": 64, "top_k": 32, "hidden_size": 128, "intermediate_size": 128},
    {"hidden_size": 2880, "intermediate_size": 2880, "num_experts": 4},
    {"hidden_size": 128, "intermediate_size": 14336, "num_experts": 2, "top_k": 1},
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options: dict[str, Any], dtype: str) -> None:
    check(dataclasses.replace(SPEC, **options), 300, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes", [(0, 500), (500, 0), (1, 127, 128, 129), (63, 64, 65, 0), (8, 7, 9, 1), (5000, 1, 0, 3)]
)
def test_sizes(sizes: tuple[int, ...]) -> None:
    spec = dataclasses.replace(SPEC, num_experts=len(sizes), top_k=1)
    check(spec, sum(sizes), with_sizes(*sizes))


@pytest.mark.gpu
@pytest.mark.parametrize("contract_last", [True, False])
@pytest.mark.parametrize("columns", [64, 128, 192, 704, 2048])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_groups(contract_last: bool, columns: int, dtype: Any) -> None:
    multiply = jax.jit(functools.partial(grouped_gemm.multiply_groups, contract_last=contract_last))
    for sizes, num_rows, offset, num_matrices in (
        ((3, 700, 0, 129, 65), 897, 0, 5),
        ((127, 1, 0, 300), 1000, 1, 2),
        ((0, 0, 0), 77, 0, 3),
        ((5, 6, 0), 11, 2, 1),
    ):
        lhs, rhs, group_sizes = grouped_inputs(
            sizes, num_rows, num_matrices, 320, columns, contract_last, dtype
        )
        y = multiply(lhs, rhs, group_sizes, group_offset=offset)
        check_groups(np.asarray(y), lhs, rhs, sizes, offset, contract_last)


@pytest.mark.gpu
def test_independent_products_of_one_program() -> None:
    """They share their counters: graphs must run one after the other."""
    lhs, rhs, group_sizes = grouped_inputs((300, 500, 1), 801, 3, 320, 704, True)

    @jax.jit
    def both(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(grouped_gemm.multiply_groups(lhs, factor * rhs, sizes) for factor in (1, 2))

    for _ in range(6):
        once, twice = (np.asarray(y) for y in both(lhs, rhs, group_sizes))
        assert_same_bits(twice, 2 * once)
        check_groups(once, lhs, rhs, (300, 500, 1), 0, True)


@pytest.mark.gpu
def test_items_of_one_step() -> None:
    sizes = tuple(range(1, 400))  # many for each CTA
    lhs, rhs, group_sizes = grouped_inputs(sizes, sum(sizes), len(sizes), 64, 320, True)
    y = jax.jit(grouped_gemm.multiply_groups)(lhs, rhs, group_sizes)
    check_groups(np.asarray(y), lhs, rhs, sizes, 0, True)


@pytest.mark.gpu
@pytest.mark.parametrize("transpose_rhs", [True, False])
def test_gradients_of_groups(transpose_rhs: bool) -> None:
    lhs, *rest = grouped_inputs((300, 77, 0, 129), 600, 2, 256, 192, transpose_rhs)
    args = (jnp.nan_to_num(lhs), *rest, jnp.int32(1))
    got, want = (
        jax.jit(jax.grad(functools.partial(groups_loss, backend, transpose_rhs), argnums=(0, 1)))(*args)
        for backend in ("grouped_gemm", "xla")
    )
    for one, other in zip(got, want, strict=True):
        difference = np.asarray(one, np.float64) - np.asarray(other, np.float64)
        assert np.linalg.norm(difference) <= 1e-2 * np.linalg.norm(np.asarray(other, np.float64))


@pytest.mark.gpu
def test_layers() -> None:
    """Values and gradients are the portable backend's; padding may hold anything."""
    args = layer_inputs(700)
    for rest in ({}, {"mask": jnp.arange(700) % 3 == 0}, {"num_tokens": jnp.int32(333)}):
        (value, got), (expected, want) = (
            jax.jit(jax.value_and_grad(functools.partial(layer_loss, backend), argnums=(0, 1, 2, 3)))(
                *args, **rest
            )
            for backend in ("grouped_gemm", "xla")
        )
        np.testing.assert_allclose(value, expected, atol=2.0)  # a sum of 358,400 terms, each a rounding off
        for one, other in zip(got, want, strict=True):
            difference = np.asarray(one, np.float64) - np.asarray(other, np.float64)
            assert np.linalg.norm(difference) <= 1e-2 * np.linalg.norm(np.asarray(other, np.float64))
    x, *others = args
    layer = jax.jit(functools.partial(fused_moe, spec=SPEC, backend="grouped_gemm"))
    clean = layer(x, *others, num_tokens=jnp.int32(333))
    assert_same_bits(layer(x.at[333:].set(jnp.nan), *others, num_tokens=jnp.int32(333)), clean)
    assert not np.asarray(clean)[333:].any()


@pytest.mark.gpu
def test_nan_of_others_stays_out() -> None:
    """Of experts without tokens, of tokens without experts, of what memory held before."""
    x, arrays = operands(SPEC, 700)
    routing = make_routing(SPEC, 700, low=2, high=14)
    routing.topk_ids[300:310] = -1
    clean = program(SPEC)(x, routing, *arrays)
    assert not np.asarray(clean)[300:310].any()
    bad = [None if a is None else a.at[jnp.array([0, 1, 14, 15])].set(jnp.nan) for a in arrays]
    x = x.at[300:310].set(jnp.nan)
    held = [jnp.full((1 << 26,), jnp.nan) for _ in range(4)]
    jax.block_until_ready(held)
    del held
    assert_same_bits(program(SPEC)(x, routing, *bad), clean)


@pytest.mark.gpu
def test_a_token_does_not_depend_on_the_others() -> None:
    x, arrays = operands(SPEC, 600)
    routing = make_routing(SPEC, 600)
    whole = np.asarray(program(SPEC)(x, routing, *arrays))
    for kept in (np.arange(600) == 5, np.arange(600) % 3 == 0, np.arange(600) >= 590):
        ids = np.where(kept[:, None], routing.topk_ids, -1).astype(np.int32)
        y = np.asarray(program(SPEC)(x, Routing(ids, routing.topk_weights), *arrays))
        assert_same_bits(y[kept], whole[kept])
        assert not y[~kept].any()


@pytest.mark.gpu
def test_fifty_calls_repeat_bitwise() -> None:
    """Loads change from call to call; all are queued before the first is looked at."""
    spec = dataclasses.replace(SPEC, hidden_size=1024, intermediate_size=768)
    x, arrays = operands(spec, 3000)
    routings = [
        make_routing(spec, 3000, **ids) for ids in ({}, {"high": 2}, {"low": -9}, {"high": 1}, {"seed": 1})
    ]
    outputs = [[program(spec)(x, routing, *arrays) for routing in routings] for _ in range(50)]
    for again in outputs[1:]:
        for y, first in zip(again, outputs[0], strict=True):
            assert_same_bits(y, first)
    portable = jax.jit(functools.partial(xla.fused_experts, spec=spec))
    for y, routing in zip(outputs[0], routings, strict=True):
        assert_close(y, np.asarray(portable(x, routing, *arrays), np.float64))
