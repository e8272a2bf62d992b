"""Golden checkpoints, and how tests write their own in the same format."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from moe_pallas import MoESpec

GOLDENS = Path(__file__).parent / "data" / "goldens"
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss")
PER_EXPERT = tuple(family for family in FAMILIES if family != "gpt_oss")
BFLOAT16 = np.dtype(jnp.bfloat16)

SPECS = {
    "mixtral": MoESpec(num_experts=8, top_k=2, hidden_size=64, intermediate_size=96),
    "qwen2_moe": MoESpec(
        num_experts=12,
        top_k=3,
        hidden_size=64,
        intermediate_size=40,
        renormalize=False,
        shared_intermediate_size=56,
        shared_expert_gate=True,
    ),
    "qwen3_moe": MoESpec(num_experts=16, top_k=4, hidden_size=64, intermediate_size=48),
    "olmoe": MoESpec(num_experts=16, top_k=4, hidden_size=64, intermediate_size=80, renormalize=False),
    "deepseek_v3": MoESpec(
        num_experts=16,
        top_k=4,
        hidden_size=64,
        intermediate_size=48,
        scoring="sigmoid",
        correction_bias=True,
        num_expert_groups=4,
        top_k_groups=2,
        group_score="top2_sum",
        routed_scaling_factor=2.5,
        shared_intermediate_size=48,
    ),
    "gpt_oss": MoESpec(
        num_experts=8,
        top_k=4,
        hidden_size=64,
        intermediate_size=64,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        swiglu_up_offset=1.0,
        gate_up="interleaved",
        expert_bias=True,
        scoring="softmax_after_topk",
        router_bias=True,
    ),
}


def config_of(family: str) -> dict:
    return json.loads((GOLDENS / family / "config.json").read_text())


def tensors_of(family: str, layer: int | None = None) -> dict[str, np.ndarray]:
    """The whole checkpoint, or the tensors of one layer's MoE block."""
    tensors = load_file(GOLDENS / family / "model.safetensors")
    if layer is None:
        return tensors
    blocks = (f"model.layers.{layer}.mlp.", f"model.layers.{layer}.block_sparse_moe.")
    return {name: tensor for name, tensor in tensors.items() if name.startswith(blocks)}


def write(folder: Path, config: object, tensors: dict[str, np.ndarray], shard_of=None) -> Path:
    """A checkpoint folder: one file, or shards with an index where ``shard_of`` names each tensor's."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shard_of is None:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {name: shard_of(name) for name in tensors}
    for shard in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def assert_same_bits(actual: dict, expected: dict) -> None:
    assert set(actual) == set(expected)
    for name, array in expected.items():
        got, need = np.asarray(actual[name]), np.asarray(array)
        assert (got.dtype, got.shape) == (need.dtype, need.shape), name
        assert got.tobytes() == need.tobytes(), name


def random_bits(tensors: dict[str, np.ndarray], dtype: np.dtype) -> dict[str, np.ndarray]:
    """Tensors of the same names and shapes with any bits, NaNs and all; correction biases stay float32."""
    rng = np.random.default_rng(0)
    result = {}
    for name, tensor in sorted(tensors.items()):
        own = np.dtype(np.float32) if name.endswith("e_score_correction_bias") else dtype
        result[name] = np.frombuffer(rng.bytes(tensor.size * own.itemsize), own).reshape(tensor.shape)
    return result
