"""Checkpoints made to do harm are refused with a clear error, before what they claim to have is allocated."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from checkpoints import config_of, tensors_of, write

from moe_pallas import UnsupportedError
from moe_pallas.interop import SafetensorsFolder, from_huggingface, read_dequantised

BIG = 2**62
MEMORY = 32 << 20  # what refusing may take; the files claim from a gigabyte to exabytes


@pytest.fixture(autouse=True)
def little_memory():
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MEMORY


def entry(dtype="F32", shape=(1,), offsets=(0, 4)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def file_of(header: object, data: bytes = bytes(4), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


ONE = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
# What the file holds, and what the message says of it.
HEADERS = {
    "empty file": (b"", "0 bytes"),
    "half a length": (b"\x08\0\0", "3 bytes"),
    "length past the end": (file_of(b"{}", length=1000), "claims 1000 bytes"),
    "length of exabytes": (file_of(b"{}", length=2**64 - 1), "claims 18446744073709551615 bytes"),
    "no JSON": (file_of(b"\xff\xfe{}"), "JSON"),
    "a list": (file_of([]), "list"),
    "nested": (file_of(b'{"a":' + b"[" * 900 + b"]" * 900 + b"}"), "deep"),
    "nested past Python's stack": (file_of(b'{"a":' + b"[" * 10**5), "deep"),
    "a name twice": (file_of(b"{" + ONE + b"," + ONE + b"}"), "'a' twice"),
    "a field twice": (file_of(b'{"a":{"shape":[9],' + ONE[5:] + b"}"), "'shape' twice"),
    "an entry that is none": (file_of({"a": 3}), "'a'.*got 3"),
    "no shape": (file_of({"a": {"dtype": "F32", "data_offsets": [0, 4]}}), "'a'.*shape"),
    "no dtype": (file_of({"a": {"shape": [1], "data_offsets": [0, 4]}}), "'a'.*dtype"),
    "no offsets": (file_of({"a": {"shape": [1], "dtype": "F32"}}), "'a'.*data_offsets"),
    "an unknown dtype": (file_of({"a": entry("F33")}), "'a'.*'F33'"),
    "a dtype that is none": (file_of({"a": entry(["F32"])}), "'a'.*F32"),
    "a negative axis": (file_of({"a": entry(shape=(-1,))}), r"'a'.*\[-1\]"),
    "two negative axes": (file_of({"a": entry(shape=(-1, -1))}), r"'a'.*\[-1, -1\]"),
    "a float axis": (file_of({"a": entry(shape=(1.0,))}), r"'a'.*\[1.0\]"),
    "a bool axis": (file_of({"a": entry(shape=(True,))}), r"'a'.*\[True\]"),
    "a text axis": (file_of({"a": entry(shape=("1",))}), r"'a'.*\['1'\]"),
    "a NaN axis": (file_of({"a": entry(shape=(float("nan"),))}), r"'a'.*\[nan\]"),
    "an axis of 4000 digits": (file_of({"a": entry(shape=(10**4000,))}), "'a'.*shape"),
    "a huge shape": (file_of({"a": entry(shape=(BIG, BIG))}), "'a'.*4 bytes"),
    "a huge shape that wraps to none": (file_of({"a": entry(shape=(2**32, 2**32))}), "'a'.*4 bytes"),
    "a huge shape of no entries": (file_of({"a": entry(shape=(0, BIG, BIG), offsets=(0, 0))}, b""), "'a'"),
    "a shape of 1000 axes": (file_of({"a": entry(shape=(1,) * 1000)}), "'a'.*axes"),
    "a shape of 10**4 axes": (file_of({"a": entry(shape=(1,) * 10**4)}), "'a'.*axes"),
    "a shape too large": (file_of({"a": entry(shape=(2,))}), "'a'.*8 bytes"),
    "a shape too small": (file_of({"a": entry("U8")}), "'a'.*1 byte"),
    "halves of bytes": (file_of({"a": entry("F4", (1,), (0, 1))}, b"0"), "'a'.*4 bits"),
    "offsets past the end": (file_of({"a": entry(shape=(2,), offsets=(0, 8))}), "'a'.*4 bytes of data"),
    "offsets of exabytes": (file_of({"a": entry("U8", (BIG,), (0, BIG))}), "'a'.*4 bytes of data"),
    "offsets the wrong way": (file_of({"a": entry(offsets=(4, 0))}), "'a'.*4.*0"),
    "negative offsets": (file_of({"a": entry(offsets=(-4, 0))}), "'a'.*-4"),
    "float offsets": (file_of({"a": entry(offsets=(0.0, 4.0))}), "'a'.*0.0"),
    "three offsets": (file_of({"a": entry(offsets=(0, 4, 4))}), "'a'.*0, 4, 4"),
    "offsets that overlap": (file_of({"a": entry(), "b": entry()}), "'a' and 'b'|'b' and 'a'"),
    "offsets that overlap in part": (
        file_of({"a": entry(), "b": entry(offsets=(2, 6))}, bytes(6)),
        "'a' and 'b'",
    ),
    "bytes before the first": (file_of({"a": entry(offsets=(4, 8))}, bytes(8)), "0 … 4"),
    "bytes between": (file_of({"a": entry(), "b": entry(offsets=(8, 12))}, bytes(12)), "4 … 8"),
    "bytes after the last": (file_of({"a": entry()}, bytes(8)), "4 … 8"),
    "metadata that are none": (file_of({"__metadata__": [], "a": entry()}), "__metadata__"),
    "metadata that are no texts": (file_of({"__metadata__": {"x": {}}, "a": entry()}), "__metadata__"),
    "a name that a terminal obeys": (file_of({"\x1b[2J": entry()}), r"'\\x1b\[2J'"),
    "a name that is no text": (file_of(b'{"\\ud800"' + ONE[3:] + b"}"), r"'\\ud800'"),
    "a name of a megabyte": (file_of({"a" * 2**20: entry()}), "1048578 characters"),
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_lies_is_refused(case, sharded, tmp_path):
    content, message = HEADERS[case]
    name = "model-1.safetensors" if sharded else "model.safetensors"
    (tmp_path / "config.json").write_text(json.dumps(config_of("olmoe")))
    (tmp_path / name).write_bytes(content)
    if sharded:
        index = {"weight_map": dict.fromkeys([*tensors_of("olmoe", 0), "a"], name)}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for read in (
        lambda: SafetensorsFolder(tmp_path).shape("a"),
        lambda: SafetensorsFolder(tmp_path).dtype("a"),
        lambda: SafetensorsFolder(tmp_path).read("a"),
        lambda: from_huggingface(tmp_path, 0),
    ):
        with pytest.raises(
            ValueError, match=rf"{name} is no readable safetensors file: .*({message})"
        ) as caught:
            read()
        assert "ownload it again" in str(caught.value)
        assert len(str(caught.value)) < 1500


def test_a_header_larger_than_any_is_refused_unread(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:  # a file of holes: the length it claims is there
        file.write(struct.pack("<Q", 2**33))
        file.truncate(2**33 + 8)
    with pytest.raises(ValueError, match=r"claims 8589934592 bytes.*at most 100000000"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_a_json_file_larger_than_any_is_refused_unread(file, tmp_path):
    write(tmp_path, config_of("olmoe"), tensors_of("olmoe"), lambda name: "model-1.safetensors")
    with (tmp_path / file).open("wb") as hole:
        hole.truncate(2**33)
    with pytest.raises(
        ValueError, match=rf"{file} .*more than the {'16777216' if file[0] == 'c' else '100000000'}"
    ):
        from_huggingface(tmp_path, 0)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"x": ' + "[" * 900 + "]" * 900, "deep"),
        ('"x": ' + '{"x":' * 900 + "1" + "}" * 900, "deep"),
        ('"x": 1, "x": 1', "'x' twice"),
        ('"x": {"y": 1, "y": 2}', "'y' twice"),
    ],
)
def test_json_that_is_nested_or_says_a_thing_twice_is_refused(file, text, message, tmp_path):
    write(tmp_path, config_of("olmoe"), tensors_of("olmoe"), lambda name: "model-1.safetensors")
    content = (tmp_path / file).read_text()
    (tmp_path / file).write_text(f"{{{text}, {content[1:]}")
    with pytest.raises(ValueError, match=f"{file} is no readable JSON: .*{message}"):
        from_huggingface(tmp_path, 0)


@pytest.mark.parametrize("name", ["\x1b[2J", "\ud800", "a" * 5000, "a\n"], ids=ascii)
def test_an_index_has_names_that_can_be_shown(name, tmp_path):
    write(tmp_path, config_of("olmoe"), tensors_of("olmoe"), lambda name: "model-1.safetensors")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][f"model.layers.0.mlp.{name}"] = "model-1.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index\.json.*names of tensors") as caught:
        from_huggingface(tmp_path, 0)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1500


LONG = "9" * 4200
# Written into the config's text as it stands: JSON that Python's writer would not make.
ABSURD = [
    ("mixtral", "num_local_experts", LONG),
    ("mixtral", "num_local_experts", "9" * 10**5),
    ("mixtral", "num_local_experts", "NaN"),
    ("mixtral", "num_local_experts", "Infinity"),
    ("mixtral", "num_local_experts", "1e999"),
    ("mixtral", "num_local_experts", "true"),
    ("mixtral", "num_local_experts", "null"),
    ("mixtral", "num_local_experts", "{}"),
    ("mixtral", "num_local_experts", "[" + "8," * 10**4 + "8]"),
    ("mixtral", "hidden_size", LONG),
    ("mixtral", "hidden_size", str(BIG)),
    ("mixtral", "hidden_size", "-1"),
    ("mixtral", "hidden_size", "[[[64]]]"),
    ("mixtral", "intermediate_size", LONG),
    ("mixtral", "intermediate_size", str(BIG)),
    ("mixtral", "num_experts_per_tok", LONG),
    ("mixtral", "num_hidden_layers", LONG),
    ("mixtral", "num_hidden_layers", "-" + LONG),
    ("mixtral", "num_hidden_layers", '"' + "2" * 10**5 + '"'),
    ("qwen2_moe", "shared_expert_intermediate_size", LONG),
    ("qwen3_moe", "norm_topk_prob", "NaN"),
    ("qwen3_moe", "mlp_only_layers", '["1"]'),
    ("qwen3_moe", "mlp_only_layers", "[1.0]"),
    ("qwen3_moe", "mlp_only_layers", "[[1]]"),
    ("qwen3_moe", "mlp_only_layers", "[true]"),
    ("qwen3_moe", "decoder_sparse_step", LONG),
    ("deepseek_v3", "n_group", LONG),
    ("deepseek_v3", "topk_group", LONG),
    ("deepseek_v3", "n_shared_experts", LONG),
    ("deepseek_v3", "n_shared_experts", str(BIG)),
    ("deepseek_v3", "routed_scaling_factor", "NaN"),
    ("deepseek_v3", "routed_scaling_factor", LONG),
    ("deepseek_v3", "routed_scaling_factor", '"2.5"'),
    ("gpt_oss", "swiglu_limit", "NaN"),
    ("gpt_oss", "swiglu_limit", "[7.0]"),
    ("gpt_oss", "swiglu_alpha", "-Infinity"),
    ("qwen3_moe", "quantization_config", "[]"),
    ("qwen3_moe", "quantization_config", "0"),
    ("qwen3_moe", "quantization_config", '"fp8"'),
    ("qwen3_moe", "compression_config", "[1]"),
]


@pytest.mark.parametrize(("family", "key", "value"), ABSURD, ids=lambda value: value[:24])
def test_an_absurd_value_in_the_config_is_refused(family, key, value, tmp_path):
    write(tmp_path, config_of(family), tensors_of(family, 0))
    config = {name: v for name, v in config_of(family).items() if name != key}
    (tmp_path / "config.json").write_text(f'{json.dumps(config)[:-1]}, "{key}": {value}}}')
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        from_huggingface(tmp_path, 0)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("key", ["model_type", "hidden_act"])
def test_an_endless_text_does_not_make_an_endless_message(key, tmp_path):
    write(tmp_path, {**config_of("mixtral"), key: "x" * 10**6}, tensors_of("mixtral", 0))
    with pytest.raises(UnsupportedError) as caught:
        from_huggingface(tmp_path, 0)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    "groups",
    [
        {"g": None},
        {"g": []},
        {"g": {"weights": 1, "input_activations": 2}},
        {"g": {}},
        {"g": "x" * 10**6},
        {"g": {"weights": {"num_bits": 8, "type": "float", "strategy": []}, "input_activations": {}}},
    ],
    ids=lambda groups: repr(groups)[:40],
)
def test_config_groups_of_wrong_types_are_refused(groups, tmp_path):
    stated = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    write(tmp_path, {**config_of("olmoe"), "quantization_config": stated}, tensors_of("olmoe", 0))
    with pytest.raises(UnsupportedError, match="config_groups") as caught:
        from_huggingface(tmp_path, 0)
    assert len(str(caught.value)) < 1500


FP8_WEIGHT = "model.layers.0.self_attn.q_proj.weight"


def fp8_folder(folder: Path, shape: tuple[int, ...], scale: dict, data: bytes) -> SafetensorsFolder:
    """One FP8 matrix of ones outside of the experts, and its scale."""
    size = int(np.prod(shape))
    header = {
        FP8_WEIGHT: entry("F8_E4M3", shape, (0, size)),
        f"{FP8_WEIGHT}_scale": {**scale, "data_offsets": [size, size + len(data)]},
    }
    stated = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps({**config_of("mixtral"), "quantization_config": stated}))
    (folder / "model.safetensors").write_bytes(file_of(header, b"\x38" * size + data))
    return SafetensorsFolder(folder)


def test_a_dense_fp8_matrix_is_read_with_its_scale(tmp_path):
    data = struct.pack("<f", 2.0)
    checkpoint = fp8_folder(tmp_path, (4, 4), {"dtype": "F32", "shape": [1]}, data)
    np.testing.assert_array_equal(read_dequantised(checkpoint, FP8_WEIGHT), np.full((4, 4), 2, np.float32))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_dense_fp8_matrix_has_finite_scales(value, tmp_path):
    checkpoint = fp8_folder(tmp_path, (4, 4), {"dtype": "F32", "shape": [1]}, struct.pack("<f", value))
    with pytest.raises(ValueError, match=r"weight_scale in model\.safetensors .*need finite ones"):
        read_dequantised(checkpoint, FP8_WEIGHT)


@pytest.mark.parametrize(
    ("shape", "scale", "message"),
    [
        ((16,), {"dtype": "F32", "shape": [1]}, r"is \(16,\); need a matrix"),
        ((), {"dtype": "F32", "shape": [1]}, r"is \(\); need a matrix"),
        ((4, 4), {"dtype": "F32", "shape": [2]}, r"is \(2,\), need \(1, 1\)"),
        ((4, 4), {"dtype": "U8", "shape": [1]}, "U8.*F32"),
    ],
)
def test_a_dense_fp8_matrix_that_does_not_fit_its_scales_is_refused_unread(
    shape, scale, message, tmp_path, monkeypatch
):
    size = {"F32": 4, "U8": 1}[scale["dtype"]] * int(np.prod(scale["shape"]))
    checkpoint = fp8_folder(tmp_path, shape, scale, bytes(size))
    monkeypatch.setattr(SafetensorsFolder, "read", lambda *_: pytest.fail("shapes come first"))
    with pytest.raises(ValueError, match=message):
        read_dequantised(checkpoint, FP8_WEIGHT)
