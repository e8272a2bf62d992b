"""Faults found by trying to break the layer: each test was seen to fail before its fault was mended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moe_pallas import (
    MoE,
    MoESpec,
    Routing,
    fused_experts,
    fused_moe,
    load_balance_loss,
    reference,
    route,
    router_z_loss,
)
from moe_pallas.interop import from_huggingface
from moe_pallas.testing import assert_close, random_logits, random_params, random_tokens

SPEC = MoESpec(num_experts=4, top_k=2, hidden_size=8, intermediate_size=6, expert_bias=True)
# One weight a matrix: silu(1) · 1 = 0.731 for each expert visited.
ONES = MoESpec(num_experts=4, top_k=1, hidden_size=1, intermediate_size=1)
ONES_WEIGHTS = (np.ones((4, 2, 1), np.float32), np.ones((4, 1, 1), np.float32))


def test_shard_map_over_tokens_gives_the_same_values_and_gradients() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params, x = random_params(SPEC), random_tokens(SPEC, 12)
    plain = MoE(SPEC).apply
    sharded = jax.shard_map(plain, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))

    def value_and_gradient(apply: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda p, x: jnp.square(apply(p, x)).sum(), argnums=(0, 1)))(
            params, x
        )

    value, gradients = value_and_gradient(sharded)
    expected_value, expected = value_and_gradient(plain)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    for got, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(
    ("count", "rows"),
    [
        (np.array(2**31), 4),
        (np.array(2**32 + 1), 4),
        (np.array(-(2**32) + 2), 0),
        (np.array(2**32, np.uint64), 4),
        (np.array(3, np.int8), 3),
        (np.array(3, np.uint32), 3),
    ],
    ids=str,
)
def test_a_count_of_any_width_does_not_wrap(count: np.ndarray, rows: int) -> None:
    x, logits = np.ones((4, 1), np.float32), np.zeros((4, 4), np.float32)
    y = fused_moe(x, logits, *ONES_WEIGHTS, spec=ONES, num_tokens=count)
    assert np.count_nonzero(y) == rows


@pytest.mark.parametrize("masked", [False, True])
def test_ids_past_32_bits_are_dropped(masked: bool) -> None:
    routing = Routing(np.array([[2**32], [1], [-(2**32) + 1], [2**31]]), np.ones((4, 1), np.float32))
    mask = np.ones(4, bool) if masked else None
    y = fused_experts(np.ones((4, 1), np.float32), routing, *ONES_WEIGHTS, spec=ONES, mask=mask)
    assert np.flatnonzero(y).tolist() == [1]


def test_signed_zeros_tie_among_groups() -> None:
    spec = MoESpec(
        num_experts=4,
        top_k=1,
        hidden_size=8,
        intermediate_size=6,
        num_expert_groups=2,
        group_score="max",
        scoring="softmax_after_topk",
    )
    logits = np.array([[-0.0, -1, 0.0, -1]], np.float32)
    assert route(logits, spec).topk_ids.tolist() == reference.route(logits, spec)[0].tolist() == [[0]]


def test_padding_is_zero_even_if_a_shared_expert_is_broken() -> None:
    spec = MoESpec(num_experts=4, top_k=2, hidden_size=8, intermediate_size=6, shared_intermediate_size=3)
    params = random_params(spec)
    params["shared_w13"][0, 0] = np.inf
    y = MoE(spec).apply(params, random_tokens(spec, 3), num_tokens=1)
    assert not np.asarray(y)[1:].any()


def test_losses_check_what_they_get() -> None:
    logits = random_logits(6, 4)
    routing = route(logits, SPEC)
    for mask in (np.ones(1, bool), np.ones((6, 1), bool)):
        with pytest.raises(ValueError, match="mask has shape"):
            router_z_loss(logits, mask=mask)
        with pytest.raises(ValueError, match="mask has shape"):
            load_balance_loss(logits, routing, SPEC, mask=mask)
    with pytest.raises(TypeError, match="mask is bool"):
        router_z_loss(logits, mask=np.ones(6, np.int32))
    with pytest.raises(TypeError, match="logits are floats"):
        router_z_loss(np.ones((6, 4), np.int32))
    with pytest.raises(ValueError, match="num_experts"):
        load_balance_loss(logits[:, :3], routing, SPEC)
    with pytest.raises(ValueError, match="leading axes"):
        load_balance_loss(logits, Routing(*(leaf[:1] for leaf in routing)), SPEC)


@pytest.mark.parametrize("field", ["routed_scaling_factor", "swiglu_alpha", "swiglu_limit"])
def test_a_number_past_the_range_of_floats_is_a_value_error(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        MoESpec(num_experts=4, top_k=2, hidden_size=8, intermediate_size=6, **{field: 10**400})


def test_an_index_with_an_endless_file_name(tmp_path: Path) -> None:
    golden = Path(__file__).parent / "data" / "goldens" / "qwen3_moe"
    (tmp_path / "config.json").write_bytes((golden / "config.json").read_bytes())
    name = "a" * 300 + ".safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.layers.0.mlp.gate.weight": name}})
    )
    with pytest.raises((ValueError, FileNotFoundError)):
        from_huggingface(tmp_path, 0)


def test_x64_and_strict_promotion_together() -> None:
    params, x = random_params(SPEC), random_tokens(SPEC, 5)
    with jax.enable_x64(True):
        y = jax.jit(MoE(SPEC).apply)(params, x)
    assert y.dtype == jnp.float32
    assert_close(y, reference.moe(params, x, SPEC))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fused_moe([[1.0]], np.zeros((1, 4), np.float32), *ONES_WEIGHTS, spec=ONES), "x is an array"),
        (lambda: route([[1.0] * 4], ONES), "router_logits is an array"),
        (lambda: MoE(ONES).apply(np.ones((1, 1), np.float32), {}), "params is a dict"),
        (
            lambda: fused_experts(
                np.ones((1, 1), np.float32), np.ones((1, 4), np.float32), *ONES_WEIGHTS, spec=ONES
            ),
            "fused_moe",
        ),
    ],
)
def test_arguments_in_the_wrong_place_are_named(call: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call()


def test_transposed_weights_are_recognised() -> None:
    spec = MoESpec(num_experts=4, top_k=2, hidden_size=8, intermediate_size=6)
    params, x = random_params(spec), random_tokens(spec, 3)
    with pytest.raises(ValueError, match=r"w2\.swapaxes\(1, 2\)"):
        fused_moe(x, random_logits(3, 4), params["w13"], params["w2"].swapaxes(1, 2), spec=spec)


def test_layers_of_one_dtype_are_equal_however_it_is_spelled() -> None:
    layers = [MoE(SPEC, dtype=dtype) for dtype in ("bfloat16", jnp.bfloat16, jnp.dtype("bfloat16"))]
    assert len(set(layers)) == 1
    with pytest.raises(ValueError, match="'nonsense'"):
        MoE(SPEC, backend="nonsense")
