"""Hugging Face checkpoints that are broken, hostile, or of a kind that isn't supported."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import (
    BFLOAT16,
    GOLDENS,
    SPECS,
    assert_same_bits,
    config_of,
    tensors_of,
    write,
)
from safetensors.numpy import save_file

from moe_pallas import UnsupportedError
from moe_pallas.interop import SafetensorsFolder, from_huggingface, to_huggingface


def test_missing_unexpected_and_misshaped_tensors_are_all_named(tmp_path, monkeypatch):
    raw, at = tensors_of("mixtral", 0), "model.layers.0.block_sparse_moe."
    del raw[f"{at}gate.weight"], raw[f"{at}experts.3.w2.weight"]
    raw[f"{at}experts.8.w1.weight"] = raw[f"{at}experts.7.w1.weight"].copy()
    raw[f"{at}experts.0.w3.weight"] = np.zeros((95, 64), np.float32)
    write(tmp_path, config_of("mixtral"), raw)

    def read(*_):
        raise AssertionError("shapes come first")

    monkeypatch.setattr(SafetensorsFolder, "read", read)
    with pytest.raises(ValueError) as caught:
        from_huggingface(tmp_path, 0)
    message = str(caught.value)
    assert f"missing in model.safetensors: {at}gate.weight, {at}experts.3.w2.weight;" in message
    assert f"not expected: {at}experts.8.w1.weight (model.safetensors);" in message
    wrong = f"{at}experts.0.w3.weight in model.safetensors is (95, 64), need (96, 64)"
    assert f"misshaped: {wrong}." in message
    assert str(tmp_path) in message


@pytest.mark.parametrize(
    ("family", "old", "new"),
    [
        ("gpt_oss", "experts.gate_up_proj", (8, 128, 64)),
        ("gpt_oss", "experts.down_proj_bias", (8, 65)),
        ("qwen2_moe", "shared_expert_gate.weight", (64,)),
        ("deepseek_v3", "gate.e_score_correction_bias", (16, 1)),
        ("olmoe", "gate.weight", (64, 16)),
    ],
)
def test_a_misshaped_tensor_is_not_reshaped(family, old, new, tmp_path):
    raw, name = tensors_of(family, 0), f"model.layers.0.mlp.{old}"
    need = raw[name].shape
    raw[name] = np.zeros(new, np.float32)
    write(tmp_path, config_of(family), raw)
    with pytest.raises(ValueError) as caught:
        from_huggingface(tmp_path, 0)
    assert f"misshaped: {name} in model.safetensors is {new}, need {need}." in str(caught.value)


def test_a_layer_without_any_tensor_gets_a_shortened_list(tmp_path):
    write(tmp_path, config_of("mixtral"), tensors_of("mixtral", 1))
    with pytest.raises(
        ValueError, match=r"missing in .*: model.layers.0.block_sparse_moe.gate.weight, .*in all\)"
    ):
        from_huggingface(tmp_path, 0)


@pytest.mark.parametrize("experts", [7, 9, 10**15])
def test_a_wrong_number_of_experts_allocates_nothing(experts, tmp_path):
    config = {**config_of("mixtral"), "num_local_experts": experts}
    write(tmp_path, config, tensors_of("mixtral", 0))
    with pytest.raises(ValueError, match=r"gate.weight in model.safetensors is \(8, 64\), need"):
        from_huggingface(tmp_path, 0)


def test_both_forms_at_once_raise(tmp_path):
    spec, params = from_huggingface(GOLDENS / "olmoe", 0)
    both = to_huggingface(spec, params, 0, family="olmoe", packed=True) | tensors_of("olmoe", 0)
    write(tmp_path, config_of("olmoe"), both)
    with pytest.raises(ValueError, match=r"not expected: .*experts.0.down_proj.weight.*\(48 in all\)"):
        from_huggingface(tmp_path, 0)


@pytest.mark.parametrize(
    ("family", "name", "scheme"),
    [
        ("deepseek_v3", "experts.0.gate_proj.weight_scale_inv", "FP8 with block scales"),
        ("qwen3_moe", "experts.gate_up_proj_scale_inv", "FP8 with block scales"),
        ("qwen3_moe", "experts.0.gate_proj.weight_scale", "FP8 or INT8 with scales"),
        ("qwen3_moe", "experts.0.gate_proj.input_scale", "FP8 or INT8 with scales"),
        ("qwen3_moe", "experts.0.gate_proj.weight_packed", "compressed-tensors"),
        ("gpt_oss", "experts.gate_up_proj_blocks", "MXFP4"),
        ("gpt_oss", "experts.gate_up_proj_scales", "MXFP4"),
        ("olmoe", "experts.0.gate_proj.qweight", "GPTQ or AWQ"),
        ("olmoe", "experts.0.gate_proj.scales", "GPTQ or AWQ"),
        ("olmoe", "experts.0.gate_proj.weight.absmax", "bitsandbytes"),
    ],
)
def test_quantised_checkpoints_are_unsupported_by_scheme(family, name, scheme, tmp_path):
    full = f"model.layers.0.mlp.{name}"
    config = {**config_of(family), "quantization_config": {"quant_method": "its-method"}}
    write(tmp_path, config, {**tensors_of(family, 0), full: np.ones(2, np.float32)})
    with pytest.raises(UnsupportedError) as caught:
        from_huggingface(tmp_path, 0)
    assert scheme in caught.value.reason
    assert full in caught.value.reason
    assert "its-method" in caught.value.reason


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "U8", "F64"])
def test_other_dtypes_are_unsupported_by_name(dtype, tmp_path):
    raw, name = tensors_of("mixtral", 0), "model.layers.0.block_sparse_moe.gate.weight"
    write(tmp_path, config_of("mixtral"), raw)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8:end]), content[end:]
    start, stop = header[name]["data_offsets"]
    size = 8 if dtype == "F64" else 1
    # The tensor's bytes go to the end, as the dtype's size has it; the rest moves up.
    for entry in header.values():
        if "data_offsets" in entry and entry["data_offsets"][0] >= stop:
            entry["data_offsets"] = [offset - (stop - start) for offset in entry["data_offsets"]]
    data = data[:start] + data[stop:]
    header[name] = {**header[name], "dtype": dtype, "data_offsets": [len(data), len(data) + 8 * 64 * size]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data + bytes(8 * 64 * size))

    with pytest.raises(UnsupportedError, match=rf"gate.weight \({dtype}\).*F32, F16, BF16"):
        from_huggingface(tmp_path, 0)
    if dtype == "F8_E4M3":
        assert not SafetensorsFolder(tmp_path).read(name).astype(np.float32).any()
    if dtype == "F8_E5M2":
        with pytest.raises(UnsupportedError, match=f"stored as {dtype}"):
            SafetensorsFolder(tmp_path).read(name)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mixtral", "block_sparse_moe.experts.5.w2.weight"),
        ("gpt_oss", "mlp.experts.down_proj_bias"),
        ("qwen2_moe", "mlp.shared_expert.up_proj.weight"),
    ],
)
def test_mixed_dtypes_among_the_experts_raise(family, name, tmp_path):
    raw, full = tensors_of(family, 0), f"model.layers.0.{name}"
    raw[full] = raw[full].astype(BFLOAT16)
    write(tmp_path, config_of(family), raw)
    with pytest.raises(ValueError, match=f"have one dtype.*{full} in model.safetensors is BF16"):
        from_huggingface(tmp_path, 0)


def test_router_and_shared_expert_may_have_dtypes_of_their_own(tmp_path):
    raw = tensors_of("qwen2_moe", 0)
    raw = {name: t.astype(BFLOAT16) if ".experts." in name else t for name, t in raw.items()}
    _, params = from_huggingface(write(tmp_path, config_of("qwen2_moe"), raw), 0)
    assert params["w13"].dtype == params["w2"].dtype == jnp.bfloat16
    assert params["router"].dtype == params["shared_w13"].dtype == jnp.float32


def test_missing_folder_and_files_say_what_is_needed(tmp_path):
    needed = "config.json with model.safetensors, or with model.safetensors.index.json"
    with pytest.raises(FileNotFoundError, match=f"no folder 'mistralai/Mixtral-8x7B'.*{needed}"):
        from_huggingface("mistralai/Mixtral-8x7B", 0)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=f"but pytorch_model.bin. Need {needed}"):
        from_huggingface(tmp_path, 0)
    save_file(tensors_of("olmoe", 0), tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=f"holds no config.json. Need {needed}"):
        from_huggingface(tmp_path, 0)


def test_a_missing_shard_is_named(tmp_path):
    write(tmp_path, config_of("olmoe"), tensors_of("olmoe"), lambda name: "model-1.safetensors")
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no model-1\.safetensors"):
        from_huggingface(tmp_path, 0)


def test_an_index_that_promises_a_tensor_too_many_raises(tmp_path):
    write(tmp_path, config_of("olmoe"), tensors_of("olmoe"), lambda name: "model-1.safetensors")
    left = tensors_of("olmoe")
    gone = "model.layers.0.mlp.experts.4.up_proj.weight"
    del left[gone]
    save_file(left, tmp_path / "model-1.safetensors")
    with pytest.raises(ValueError, match=f"says that model-1.safetensors holds '{gone}', but it doesn't"):
        from_huggingface(tmp_path, 0)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.0001, 0.02, 0.5, 0.99999])
def test_a_truncated_file_raises_with_its_name(share, sharded, tmp_path):
    name = "part.safetensors" if sharded else "model.safetensors"
    write(tmp_path, config_of("gpt_oss"), tensors_of("gpt_oss"), (lambda _: name) if sharded else None)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ValueError, match=f"{name} is no readable safetensors file"):
        from_huggingface(tmp_path, 0)


@pytest.mark.parametrize("header", [b"{", b"[]", b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}'])
def test_a_corrupt_header_raises_with_the_files_name(header, tmp_path):
    write(tmp_path, config_of("olmoe"), {})
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(ValueError, match=r"model\.safetensors is no readable safetensors file"):
        from_huggingface(tmp_path, 0)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"model_type": "olm', "no readable JSON"),
        (b"\xff\xfe\x00", "no readable JSON"),
        (b"[" * 100_000, "no readable JSON"),
        (b"[1, 2]", "no readable JSON: it holds a JSON list; need an object"),
    ],
)
def test_broken_json_raises_with_the_files_name(file, content, message, tmp_path):
    write(tmp_path, config_of("olmoe"), tensors_of("olmoe"), lambda name: "model-1.safetensors")
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"{file} {message}|{file} is {message}"):
        from_huggingface(tmp_path, 0)


HOSTILE = [
    "../model.safetensors",
    "/etc/model.safetensors",
    "sub/model.safetensors",
    "sub\\model.safetensors",
    "C:model.safetensors",
    "..",
    ".",
    "",
    ".hidden.safetensors",
    "config.json",
    "pytorch_model.bin",
    "a\0.safetensors",
    "a\n.safetensors",
    None,
    3,
    ["model.safetensors"],
]


@pytest.mark.parametrize("shard", HOSTILE, ids=repr)
def test_an_index_names_plain_files_only(shard, tmp_path):
    # What the index points to is there and whole: only the name is wrong.
    folder = write(tmp_path / "checkpoint", config_of("olmoe"), {})
    (folder / "model.safetensors").unlink()
    (folder / "sub").mkdir()
    for place in (tmp_path, folder / "sub"):
        save_file(tensors_of("olmoe", 0), place / "model.safetensors")
    weight_map = dict.fromkeys(tensors_of("olmoe", 0), shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match="no plain file names"):
        from_huggingface(folder, 0)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": None}])
def test_an_index_has_a_weight_map(index, tmp_path):
    write(tmp_path, config_of("olmoe"), {}, lambda name: "")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index\.json has no 'weight_map'"):
        from_huggingface(tmp_path, 0)


@pytest.mark.parametrize("linked", ["config.json", "model-1.safetensors", "model.safetensors.index.json"])
def test_links_do_not_lead_out_of_the_folder(linked, tmp_path):
    folder = tmp_path / "checkpoint"
    write(folder, config_of("olmoe"), tensors_of("olmoe"), lambda name: "model-1.safetensors")
    (folder / linked).rename(tmp_path / "outside")
    (folder / linked).symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match=f"{linked} is a link that leads out of its folder"):
        from_huggingface(folder, 0)


def test_links_within_the_hubs_cache_are_followed(tmp_path):
    snapshot, blobs = tmp_path / "models--x--y" / "snapshots" / "0a1b", tmp_path / "models--x--y" / "blobs"
    snapshot.parent.mkdir(parents=True)
    blobs.mkdir()
    write(snapshot, config_of("olmoe"), tensors_of("olmoe"))
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).rename(blobs / name)
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    spec, params = from_huggingface(snapshot, 1)
    assert spec == SPECS["olmoe"]
    assert_same_bits(params, from_huggingface(GOLDENS / "olmoe", 1)[1])


def test_without_safetensors_reading_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'moe_pallas\[checkpoints\]'"):
        from_huggingface(GOLDENS / "mixtral", 0)


def test_importing_and_writing_need_no_safetensors():
    code = (
        "import sys; sys.modules['safetensors'] = None\n"
        "import numpy as np, moe_pallas\n"
        "from moe_pallas.interop import to_huggingface\n"
        "spec = moe_pallas.MoESpec(num_experts=2, top_k=1, hidden_size=3, intermediate_size=5)\n"
        "params = {name: np.zeros(shape) for name, shape in spec.param_shapes.items()}\n"
        "print(len(to_huggingface(spec, params, 0, family='mixtral')))\n"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "7\n"
