"""FP8 checkpoints: read code by code, written back bit for bit, refused where they contradict themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoints import BFLOAT16, assert_same_bits, config_of, tensors_of, write
from quantised import SCHEMES, numpy_of

from moe_pallas import MoE, MoESpec, QTensor, QuantScheme, UnsupportedError, reference, reference_fp8
from moe_pallas.interop import SafetensorsFolder, from_huggingface, quantization_config, to_huggingface
from moe_pallas.interop.fp8 import read_layout
from moe_pallas.testing import assert_close, random_params

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
CHANNEL = SCHEMES["channel"]
Tensors = dict[str, np.ndarray]


def is_expert_matrix(name: str) -> bool:
    return "expert" in name and name.endswith(".weight") and "expert_gate" not in name


def quantised(tensors: Tensors, scheme: QuantScheme, scale_dtype: Any = np.float32, one: Any = ()) -> Tensors:
    """A checkpoint's tensors with expert matrices in FP8, each by itself, as quantising tools write them.

    ``one``: the shape of a single scale.
    """
    rng, result = np.random.default_rng(5), {}
    for name, tensor in tensors.items():
        if not is_expert_matrix(name):
            result[name] = tensor
            continue
        values, scale = reference_fp8.quantize(tensor, scheme)
        suffix = "_scale_inv" if scheme.weights == "block" else "_scale"
        scale = scale.astype(scale_dtype)
        result |= {name: values, name + suffix: scale.reshape(one) if scheme.weights == "tensor" else scale}
        if scheme.activations == "static":
            result[name.replace("weight", "input_scale")] = rng.uniform(0.01, 0.1, one).astype(np.float32)
    return result


def checkpoint(folder: Path, family: str, scheme: QuantScheme, **options: Any) -> tuple[Path, Tensors]:
    tensors = quantised(tensors_of(family, 1), scheme, **options)
    config = config_of(family) | {"quantization_config": quantization_config(scheme)}
    return write(folder, config, tensors), tensors


CASES = {
    "mixtral, static": ("mixtral", SCHEMES["tensor-static"], {}),
    "mixtral, static, scales (1,)": ("mixtral", SCHEMES["tensor-static"], {"one": (1,)}),
    "mixtral, dynamic": ("mixtral", SCHEMES["tensor"], {}),
    "qwen3, blocks": ("qwen3_moe", SCHEMES["block"], {}),
    "qwen3, blocks, bfloat16 scales": ("qwen3_moe", SCHEMES["block"], {"scale_dtype": BFLOAT16}),
    "qwen3, channels": ("qwen3_moe", CHANNEL, {"scale_dtype": BFLOAT16}),
    "qwen2, a token's scale": ("qwen2_moe", SCHEMES["tensor-token"], {"one": (1,)}),
    "deepseek, blocks": ("deepseek_v3", SCHEMES["block"], {}),
}


@pytest.mark.parametrize(("family", "scheme", "options"), CASES.values(), ids=CASES)
def test_reading_and_writing_back(
    family: str, scheme: QuantScheme, options: dict[str, Any], tmp_path: Path
) -> None:
    folder, tensors = checkpoint(tmp_path, family, scheme, **options)
    spec, params = from_huggingface(folder, 1)
    assert spec == from_huggingface(write(tmp_path / "plain", config_of(family), tensors_of(family, 1)), 1)[0]
    matrices = [name for name in ("w13", "w2", "shared_w13", "shared_w2") if name in spec.param_shapes]
    assert all(isinstance(params[name], QTensor) and params[name].scheme == scheme for name in matrices)
    assert params["router"].dtype == jnp.float32
    for name in matrices:
        assert params[name].shape == spec.param_shapes[name]
        assert params[name].values.dtype == E4M3 and params[name].scale.dtype == jnp.float32

    again = to_huggingface(spec, params, 1, family=family)
    widened = {
        name: tensor.astype(np.float32) if "scale" in name else tensor for name, tensor in tensors.items()
    }
    shaped = {name: tensor.reshape(again[name].shape) for name, tensor in widened.items()}
    assert_same_bits(again, shaped)
    if "one" not in options:
        assert {name: t.shape for name, t in again.items()} == {n: t.shape for n, t in tensors.items()}
    config = config_of(family) | {"quantization_config": quantization_config(scheme)}
    _, reread = from_huggingface(write(tmp_path / "again", config, again), 1)
    for name in matrices:
        for part in ("values", "scale", "input_scale"):
            if (array := getattr(params[name], part)) is not None:
                np.testing.assert_array_equal(
                    np.asarray(getattr(reread[name], part)).view(np.uint8), np.asarray(array).view(np.uint8)
                )


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("mixtral", SCHEMES["tensor-static"]),
        ("deepseek_v3", SCHEMES["block"]),
        ("qwen2_moe", CHANNEL),
    ],
)
def test_a_layer_computes_what_the_tensors_say(family: str, scheme: QuantScheme, tmp_path: Path) -> None:
    folder, tensors = checkpoint(tmp_path, family, scheme)
    spec, params = from_huggingface(folder, 1)
    x = np.random.default_rng(0).standard_normal((9, 64)).astype(np.float32)
    expected = reference.moe(numpy_of(params), x, spec)
    assert_close(jax.jit(MoE(spec).apply)(params, x), expected, quantised=True)
    # Each matrix dequantised by hand, from the checkpoint's own tensors.
    plain: Tensors = {}
    for name, tensor in tensors.items():
        if is_expert_matrix(name):
            scale = next(tensors[name + s] for s in ("_scale", "_scale_inv") if name + s in tensors)
            scale = scale.reshape(scheme.scale_shape(tensor.shape))
            plain[name] = reference_fp8.dequantize(tensor, scale, scheme).astype(np.float32)
        elif not name.endswith("_scale"):
            plain[name] = tensor
    plain = {name: tensor for name, tensor in plain.items() if "scale" not in name}
    _, by_hand = from_huggingface(write(tmp_path / "plain", config_of(family), plain), 1)
    for name in ("w13", "w2"):
        q = numpy_of(params[name])
        exact = reference_fp8.dequantize(q.values, q.scale, scheme, q.gate_up)
        np.testing.assert_allclose(exact, by_hand[name], rtol=2**-23)


def test_scales_land_at_their_expert_and_projection(tmp_path: Path) -> None:
    folder, tensors = checkpoint(tmp_path, "mixtral", SCHEMES["tensor-static"])
    _, params = from_huggingface(folder, 1)
    at = "model.layers.1.block_sparse_moe.experts"
    for e in range(8):
        for part, scales in (("weight_scale", "scale"), ("input_scale", "input_scale")):
            of_w13, of_w2 = (np.asarray(getattr(params[name], scales))[e].ravel() for name in ("w13", "w2"))
            assert of_w13.tolist() == [tensors[f"{at}.{e}.{name}.{part}"] for name in ("w1", "w3")]
            assert of_w2.tolist() == [tensors[f"{at}.{e}.w2.{part}"]]


def test_blocks_of_a_width_that_is_no_multiple_of_128(tmp_path: Path) -> None:
    """F = 192: two blocks for gate, two for up; packed, a block would hold rows of both."""
    spec = MoESpec(num_experts=2, top_k=1, hidden_size=256, intermediate_size=192)
    plain = to_huggingface(spec, random_params(spec), 1, family="qwen3_moe")
    config = config_of("qwen3_moe") | {
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "hidden_size": 256,
        "moe_intermediate_size": 192,
        "quantization_config": quantization_config("fp8_block"),
    }
    _, params = from_huggingface(write(tmp_path, config, quantised(plain, SCHEMES["block"])), 1)
    assert params["w13"].scale.shape == (2, 4, 2) and params["w2"].scale.shape == (2, 2, 2)
    with pytest.raises(UnsupportedError, match="gate and up of 192 rows each, no multiple of 128"):
        to_huggingface(spec, params, 1, family="qwen3_moe", packed=True)
    packed = to_huggingface(spec, random_params(spec), 1, family="qwen3_moe", packed=True)
    packed["model.layers.1.mlp.experts.gate_up_proj"] = np.zeros((2, 384, 256), E4M3)
    packed["model.layers.1.mlp.experts.gate_up_proj_scale_inv"] = np.ones((2, 3, 2), np.float32)
    with pytest.raises(UnsupportedError, match="gate and up of 192 rows each, no multiple of 128"):
        from_huggingface(write(tmp_path / "packed", config, packed), 1)


def test_packed_blocks(tmp_path: Path) -> None:
    spec = MoESpec(num_experts=2, top_k=1, hidden_size=128, intermediate_size=256)
    plain = to_huggingface(spec, random_params(spec), 1, family="qwen3_moe")
    config = config_of("qwen3_moe") | {
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "hidden_size": 128,
        "moe_intermediate_size": 256,
        "quantization_config": quantization_config("fp8_block"),
    }
    tensors = quantised(plain, SCHEMES["block"])
    _, params = from_huggingface(write(tmp_path, config, tensors), 1)
    packed = to_huggingface(spec, params, 1, family="qwen3_moe", packed=True)
    assert packed["model.layers.1.mlp.experts.gate_up_proj_scale_inv"].shape == (2, 4, 1)
    _, again = from_huggingface(write(tmp_path / "packed", config, packed), 1)
    assert_same_bits(to_huggingface(spec, again, 1, family="qwen3_moe"), tensors)


def test_shards_and_headers(tmp_path: Path) -> None:
    tensors = quantised(tensors_of("mixtral", 1), SCHEMES["tensor"])
    config = config_of("mixtral") | {"quantization_config": quantization_config("fp8_tensor")}
    folder = write(tmp_path, config, tensors, lambda name: f"part-{len(name) % 2}.safetensors")
    reader = SafetensorsFolder(folder)
    assert_same_bits({name: reader.read(name) for name in tensors}, tensors)
    name = next(name for name in tensors if is_expert_matrix(name))
    assert reader.read(name).flags.writeable
    path = folder / reader.file(name)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="no readable safetensors file"):
        SafetensorsFolder(folder).read(name)


def test_layers_that_were_left_out_stay_plain(tmp_path: Path) -> None:
    config = config_of("olmoe") | {"quantization_config": quantization_config("fp8_block")}
    _, params = from_huggingface(write(tmp_path, config, tensors_of("olmoe", 0)), 0)
    assert params["w13"].dtype == jnp.float32
    # DeepSeek: routed experts in FP8, the shared one not.
    tensors, plain = quantised(tensors_of("deepseek_v3", 1), SCHEMES["block"]), tensors_of("deepseek_v3", 1)
    tensors = {name: tensor for name, tensor in tensors.items() if "shared" not in name}
    tensors |= {name: tensor for name, tensor in plain.items() if "shared" in name}
    config = config_of("deepseek_v3") | {"quantization_config": quantization_config("fp8_block")}
    spec, params = from_huggingface(write(tmp_path / "shared", config, tensors), 1)
    assert isinstance(params["w13"], QTensor) and params["shared_w13"].dtype == jnp.float32
    x = np.ones((2, 64), np.float32)
    expected = reference.moe(numpy_of(params), x, spec)
    assert_close(jax.jit(MoE(spec).apply)(params, x), expected, quantised=True)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_the_config_of_a_scheme_is_read_back(scheme: QuantScheme) -> None:
    layout = read_layout({"quantization_config": quantization_config(scheme)})
    assert layout is not None and layout.scheme == scheme


COMPRESSED = quantization_config(CHANNEL)
WEIGHTS, INPUTS = (COMPRESSED["config_groups"]["group_0"][side] for side in ("weights", "input_activations"))


def compressed(weights: Any = WEIGHTS, inputs: Any = INPUTS, **fields: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return COMPRESSED | {"config_groups": {"group_0": group}} | fields


def test_compressed_tensors_in_blocks() -> None:
    inputs = INPUTS | {"strategy": "group", "group_size": 128}
    stated = compressed(WEIGHTS | {"strategy": "block", "block_structure": [128, 128]}, inputs)
    layout = read_layout({"quantization_config": stated})
    assert layout is not None and (layout.scheme, layout.scale_name) == (SCHEMES["block"], "weight_scale")


@pytest.mark.parametrize(
    "stated",
    [
        {"quant_method": "fp8", "fmt": "e5m2"},
        {"quant_method": "fp8", "activation_scheme": "per_token"},
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        {"quant_method": "fp8", "weight_block_size": [1, 128]},
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
        compressed(format="pack-quantized"),
        compressed(WEIGHTS | {"num_bits": 4}),
        compressed(WEIGHTS | {"type": "int"}),
        compressed(WEIGHTS | {"symmetric": False}),
        compressed(WEIGHTS | {"strategy": "group"}),
        compressed(WEIGHTS | {"strategy": "block", "block_structure": [64, 128]}),
        compressed(inputs=None),
        compressed(inputs=INPUTS | {"dynamic": "local"}),
        compressed(inputs=INPUTS | {"strategy": "token", "dynamic": False}),
        compressed(config_groups={}),
    ],
    ids=str,
)
def test_other_forms_of_fp8_are_unsupported(stated: dict[str, Any], tmp_path: Path) -> None:
    config = config_of("olmoe") | {"quantization_config": stated}
    with pytest.raises(
        UnsupportedError, match=r"quantization_config states .*What works: quant_method 'fp8'"
    ):
        from_huggingface(write(tmp_path, config, tensors_of("olmoe", 0)), 0)


def test_contradictions_are_named(tmp_path: Path) -> None:
    at = "model.layers.1.block_sparse_moe.experts.2.w3"
    config = config_of("mixtral") | {"quantization_config": quantization_config(SCHEMES["tensor-static"])}
    good = quantised(tensors_of("mixtral", 1), SCHEMES["tensor-static"])

    def without(*names: str) -> Tensors:
        return {name: tensor for name, tensor in good.items() if name not in names}

    def fails(match: str, tensors: Tensors, error: Any = ValueError, **fields: Any) -> None:
        with pytest.raises(error, match=match):
            from_huggingface(write(tmp_path, config | fields, tensors), 1)

    fails(rf"missing in model.safetensors: {at}\.weight_scale;?", without(f"{at}.weight_scale"))
    fails(rf"missing in model.safetensors: {at}\.input_scale;?", without(f"{at}.input_scale"))
    fails(rf"{at}\.weight_scale in .* is \(2,\), need \(\)", good | {f"{at}.weight_scale": np.ones(2, "f4")})
    fails(
        rf"{at}\.weight_scale .*\(I32\)", good | {f"{at}.weight_scale": np.ones((), "i4")}, UnsupportedError
    )
    for bad in (np.nan, np.inf, -1.0):
        scale = np.full((), bad, np.float32)
        fails(rf"{at}\.weight_scale in .* holds scales from", good | {f"{at}.weight_scale": scale})
    fails("need finite ones, above 0", good | {f"{at}.input_scale": np.zeros((), "f4")})
    fails("have one dtype", good | {f"{at}.weight": tensors_of("mixtral", 1)[f"{at}.weight"]})
    # The config says blocks, or dynamic scales, or nothing.
    blocks = {"quantization_config": quantization_config("fp8_block")}
    fails(r"missing .*weight_scale_inv.*not expected: .*input_scale", good, **blocks)
    dynamic = {"quantization_config": quantization_config("fp8_tensor")}
    fails("not expected: .*input_scale", good, **dynamic)
    fails("FP8 or INT8 with scales.*quantization_config", good, UnsupportedError, quantization_config=None)
    fails("'quantization_config' is an object", good, quantization_config="fp8")
    bare = {name: tensor for name, tensor in good.items() if "scale" not in name}
    fails(r"\(F8_E4M3\)", bare, UnsupportedError, quantization_config=None)
    fails("missing", bare)


def test_a_router_in_fp8_is_refused(tmp_path: Path) -> None:
    tensors = quantised(tensors_of("olmoe", 1), SCHEMES["block"])
    name = "model.layers.1.mlp.gate.weight"
    tensors[name] = tensors[name].astype(E4M3)
    config = config_of("olmoe") | {"quantization_config": quantization_config("fp8_block")}
    with pytest.raises(UnsupportedError, match=rf"{name} \(F8_E4M3\)"):
        from_huggingface(write(tmp_path, config, tensors), 1)


def test_gpt_oss_in_fp8_is_refused(tmp_path: Path) -> None:
    tensors = tensors_of("gpt_oss", 1)
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[name] = tensors[name].astype(E4M3)
    config = config_of("gpt_oss") | {"quantization_config": quantization_config("fp8_block")}
    with pytest.raises(UnsupportedError, match="holds all experts"):
        from_huggingface(write(tmp_path, config, tensors), 1)
