"""Hugging Face checkpoints: what is read from them and what is written."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import (
    BFLOAT16,
    FAMILIES,
    GOLDENS,
    PER_EXPERT,
    SPECS,
    assert_same_bits,
    config_of,
    random_bits,
    tensors_of,
    write,
)
from safetensors.numpy import load_file

from moe_pallas import MoE, MoESpec, UnsupportedError, reference
from moe_pallas.interop import SafetensorsFolder, from_huggingface, to_huggingface


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layer", [0, 1])
def test_golden_spec_and_params(family, layer):
    spec, params = from_huggingface(GOLDENS / family, layer)
    assert spec == SPECS[family]
    assert {name: array.shape for name, array in params.items()} == spec.param_shapes
    assert all(isinstance(array, jax.Array) and array.dtype == jnp.float32 for array in params.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layer", [0, 1])
def test_golden_output_of_the_reference_and_of_the_layer(family, layer):
    golden = load_file(GOLDENS / family / "golden.safetensors")
    x, expected = golden[f"layers.{layer}.moe_in"], golden[f"layers.{layer}.moe_out"]
    spec, params = from_huggingface(GOLDENS / family, layer)

    from_reference = reference.moe({name: np.asarray(array) for name, array in params.items()}, x, spec)
    from_layer = MoE(spec).apply(params, jnp.asarray(x))

    bound = 1e-5 * np.abs(expected).max()
    assert np.abs(from_reference - expected).max() <= bound
    assert np.abs(np.asarray(from_layer) - expected).max() <= bound


def test_weights_stay_contraction_last_with_gate_before_up():
    raw = tensors_of("mixtral", 1)
    _, params = from_huggingface(GOLDENS / "mixtral", 1)
    at = "model.layers.1.block_sparse_moe."
    np.testing.assert_array_equal(params["router"], raw[f"{at}gate.weight"])
    for e in range(8):
        gate, up, down = (raw[f"{at}experts.{e}.{name}.weight"] for name in ("w1", "w3", "w2"))
        np.testing.assert_array_equal(params["w13"][e], np.concatenate([gate, up]))
        np.testing.assert_array_equal(params["w2"][e], down)


def test_shared_experts_and_correction_bias_are_found():
    raw, (_, params) = tensors_of("qwen2_moe", 0), from_huggingface(GOLDENS / "qwen2_moe", 0)
    at = "model.layers.0.mlp.shared_expert"
    gate, up, down = (raw[f"{at}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    np.testing.assert_array_equal(params["shared_w13"], np.concatenate([gate, up]))
    np.testing.assert_array_equal(params["shared_w2"], down)
    np.testing.assert_array_equal(params["shared_gate"], raw[f"{at}_gate.weight"][0])

    raw, (_, params) = tensors_of("deepseek_v3", 0), from_huggingface(GOLDENS / "deepseek_v3", 0)
    at = "model.layers.0.mlp."
    np.testing.assert_array_equal(params["correction_bias"], raw[f"{at}gate.e_score_correction_bias"])
    np.testing.assert_array_equal(params["shared_w2"], raw[f"{at}shared_experts.down_proj.weight"])


def test_gpt_oss_is_transposed_once_and_stays_interleaved():
    raw, (spec, params) = tensors_of("gpt_oss", 0), from_huggingface(GOLDENS / "gpt_oss", 0)
    at = "model.layers.0.mlp."
    assert spec.gate_up == "interleaved"
    np.testing.assert_array_equal(params["w13"], raw[f"{at}experts.gate_up_proj"].transpose(0, 2, 1))
    np.testing.assert_array_equal(params["w2"], raw[f"{at}experts.down_proj"].transpose(0, 2, 1))
    np.testing.assert_array_equal(params["b13"], raw[f"{at}experts.gate_up_proj_bias"])
    np.testing.assert_array_equal(params["b2"], raw[f"{at}experts.down_proj_bias"])
    np.testing.assert_array_equal(params["router_bias"], raw[f"{at}router.bias"])


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16, np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_bit_for_bit(family, dtype, tmp_path):
    raw = random_bits(tensors_of(family, 1), dtype)
    spec, params = from_huggingface(write(tmp_path / "hub", config_of(family), raw), 1)

    assert params["w13"].dtype == params["w2"].dtype == params["router"].dtype == dtype
    if spec.correction_bias:
        assert params["correction_bias"].dtype == jnp.float32
    assert_same_bits(to_huggingface(spec, params, 1, family=family), raw)

    packed = to_huggingface(spec, params, 1, family=family, packed=True)
    spec_packed, params_packed = from_huggingface(write(tmp_path / "packed", config_of(family), packed), 1)
    assert spec_packed == spec
    assert_same_bits(params_packed, params)


@pytest.mark.parametrize("family", PER_EXPERT)
def test_packed_names_and_shapes(family):
    spec, params = from_huggingface(GOLDENS / family, 0)
    packed = to_huggingface(spec, params, 0, family=family, packed=True)

    raw, at = tensors_of(family, 0), "model.layers.0.mlp."
    old = "model.layers.0.block_sparse_moe." if family == "mixtral" else at
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    expected = {name.replace(old, at): t for name, t in raw.items() if ".experts." not in name}
    experts = [f"{old}experts.{e}" for e in range(spec.num_experts)]
    expected[f"{at}experts.gate_up_proj"] = np.stack(
        [np.concatenate([raw[f"{e}.{gate}.weight"], raw[f"{e}.{up}.weight"]]) for e in experts]
    )
    expected[f"{at}experts.down_proj"] = np.stack([raw[f"{e}.{down}.weight"] for e in experts])
    assert_same_bits(packed, expected)


def test_a_packed_mixtral_may_keep_the_old_name_of_its_block(tmp_path):
    spec, params = from_huggingface(GOLDENS / "mixtral", 0)
    packed = to_huggingface(spec, params, 0, family="mixtral", packed=True)
    renamed = {name.replace(".mlp.", ".block_sparse_moe."): tensor for name, tensor in packed.items()}
    _, again = from_huggingface(write(tmp_path, config_of("mixtral"), renamed), 0)
    assert_same_bits(again, params)


def test_to_huggingface_converts_the_gate_up_order_to_the_familys():
    spec, params = from_huggingface(GOLDENS / "gpt_oss", 0)
    order = np.r_[0:128:2, 1:128:2]
    stacked = {**params, "w13": params["w13"][:, order], "b13": params["b13"][:, order]}
    fields = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
    written = to_huggingface(MoESpec(**{**fields, "gate_up": "stacked"}), stacked, 0, family="gpt_oss")
    assert_same_bits(written, tensors_of("gpt_oss", 0))


def test_to_huggingface_takes_numpy_and_saves():
    spec, params = from_huggingface(GOLDENS / "olmoe", 0)
    written = to_huggingface(spec, {n: np.asarray(a) for n, a in params.items()}, 7, family="olmoe")
    assert "model.layers.7.mlp.experts.15.down_proj.weight" in written
    assert all(array.flags.c_contiguous for array in written.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sharded_checkpoint_reads_only_its_own_layer(family, tmp_path, monkeypatch):
    whole = from_huggingface(GOLDENS / family, 1)
    tensors = tensors_of(family)
    own = sorted(tensors_of(family, 1))

    def shard_of(name: str) -> str:
        return f"model-0000{own.index(name) % 2 + 1 if name in own else 3}.safetensors"

    write(tmp_path, config_of(family), tensors, shard_of)
    (tmp_path / "model-00003.safetensors").write_bytes(b"not to be opened")
    read, original = [], SafetensorsFolder.read
    monkeypatch.setattr(SafetensorsFolder, "read", lambda self, n: (read.append(n), original(self, n))[1])

    spec, params = from_huggingface(tmp_path, 1)

    assert spec == whole[0]
    assert_same_bits(params, whole[1])
    assert sorted(read) == own
    with pytest.raises(ValueError, match=r"model-00003\.safetensors is no readable safetensors file"):
        from_huggingface(tmp_path, 0)


def test_layer_1_is_not_taken_for_layer_10(tmp_path):
    raw = tensors_of("olmoe", 1)
    tenth = {n.replace("layers.1.", "layers.10."): t + 1 for n, t in raw.items()}
    write(tmp_path, {**config_of("olmoe"), "num_hidden_layers": 11}, raw | tenth)
    np.testing.assert_array_equal(
        from_huggingface(tmp_path, 10)[1]["router"], from_huggingface(tmp_path, 1)[1]["router"] + 1
    )


@pytest.mark.parametrize("sharded", [False, True])
def test_safetensors_folder_reads_any_tensor(sharded, tmp_path):
    tensors = tensors_of("mixtral")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(BFLOAT16)

    def shard_of(name: str) -> str:
        return "b.safetensors" if "norm" in name else "a.safetensors"

    write(tmp_path, config_of("mixtral"), tensors, shard_of if sharded else None)
    checkpoint = SafetensorsFolder(str(tmp_path))

    assert checkpoint.names() == tuple(sorted(tensors))
    assert checkpoint.config == config_of("mixtral")
    assert {name: checkpoint.shape(name) for name in tensors} == {n: t.shape for n, t in tensors.items()}
    assert checkpoint.dtype("model.norm.weight") == "BF16"
    assert checkpoint.dtype("lm_head.weight") == "F32"
    assert checkpoint.file("model.norm.weight") == ("b.safetensors" if sharded else "model.safetensors")
    assert_same_bits({name: checkpoint.read(name) for name in tensors}, tensors)
    for method in (checkpoint.read, checkpoint.shape, checkpoint.dtype, checkpoint.file):
        with pytest.raises(ValueError, match=r"holds no tensor 'model.nrom.weight'"):
            method("model.nrom.weight")


def test_a_single_file_goes_before_an_index(tmp_path):
    write(tmp_path, config_of("olmoe"), {"a": np.ones(3)})
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"b": "../b.safetensors"}}')
    assert SafetensorsFolder(tmp_path).names() == ("a",)


def small_params(spec: MoESpec) -> dict[str, np.ndarray]:
    return {name: np.zeros(shape, np.float32) for name, shape in spec.param_shapes.items()}


SIZES = {"num_experts": 2, "top_k": 1, "hidden_size": 3, "intermediate_size": 5}


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("mixtral", {"expert_bias": True}, r"no names for \['b13', 'b2'\]"),
        ("mixtral", {"shared_intermediate_size": 4}, r"no names for \['shared_w13', 'shared_w2'\]"),
        ("mixtral", {"activation": "relu2"}, "gated; got activation='relu2'"),
        ("qwen2_moe", {}, r"needs \['shared_gate', 'shared_w13', 'shared_w2'\]"),
        ("deepseek_v3", {}, r"needs \['correction_bias'\]"),
        ("gpt_oss", {"router_bias": True}, r"needs \['b13', 'b2'\]"),
    ],
)
def test_to_huggingface_refuses_what_a_family_cannot_hold(family, fields, message):
    spec = MoESpec(**SIZES, **fields)
    with pytest.raises(ValueError, match=message):
        to_huggingface(spec, small_params(spec), 0, family=family)


def test_to_huggingface_checks_its_arguments():
    spec = MoESpec(**SIZES)
    params = small_params(spec)
    with pytest.raises(UnsupportedError, match=r"'llama'.*gpt_oss"):
        to_huggingface(spec, params, 0, family="llama")
    with pytest.raises(ValueError, match="layer counts from 0; got -1"):
        to_huggingface(spec, params, -1, family="mixtral")
    with pytest.raises(ValueError, match=r"w2 is \(2, 5, 3\), need \(2, 3, 5\)"):
        to_huggingface(spec, params | {"w2": params["w2"].swapaxes(1, 2)}, 0, family="mixtral")
    with pytest.raises(ValueError, match=r"parameters \['router', 'w13', 'w2'\]; got \['router', 'w13'\]"):
        to_huggingface(spec, {n: a for n, a in params.items() if n != "w2"}, 0, family="mixtral")
