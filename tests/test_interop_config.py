"""What config.json says of a layer: every key, its default, and what makes no sense."""

from __future__ import annotations

import time

import numpy as np
import pytest
from checkpoints import (
    FAMILIES,
    GOLDENS,
    SPECS,
    assert_same_bits,
    config_of,
    tensors_of,
    write,
)

from moe_pallas import UnsupportedError
from moe_pallas.interop import from_huggingface, to_huggingface


@pytest.mark.parametrize(
    ("family", "changes", "field", "value"),
    [
        ("qwen2_moe", {"norm_topk_prob": True}, "renormalize", True),
        ("qwen2_moe", {"norm_topk_prob": None}, "renormalize", False),
        ("qwen3_moe", {"norm_topk_prob": False}, "renormalize", False),
        ("qwen3_moe", {"norm_topk_prob": None}, "renormalize", False),
        ("olmoe", {"norm_topk_prob": True}, "renormalize", True),
        ("olmoe", {"norm_topk_prob": None}, "renormalize", False),
        ("mixtral", {"norm_topk_prob": False}, "renormalize", True),
        ("deepseek_v3", {"norm_topk_prob": None}, "renormalize", True),
        ("deepseek_v3", {"norm_topk_prob": False}, "renormalize", False),
        ("deepseek_v3", {"routed_scaling_factor": 1}, "routed_scaling_factor", 1.0),
        ("deepseek_v3", {"routed_scaling_factor": None}, "routed_scaling_factor", 2.5),
        ("deepseek_v3", {"n_group": None}, "num_expert_groups", 8),
        ("deepseek_v3", {"topk_group": None}, "top_k_groups", 4),
        ("gpt_oss", {"swiglu_alpha": None}, "swiglu_alpha", 1.702),
        ("gpt_oss", {"swiglu_limit": None}, "swiglu_limit", 7.0),
        ("gpt_oss", {"swiglu_limit": 3.5}, "swiglu_limit", 3.5),
        ("mixtral", {"hidden_act": None}, "activation", "swiglu"),
        ("mixtral", {"hidden_act": "silu"}, "activation", "swiglu"),
        ("mixtral", {"hidden_act": "swish"}, "activation", "swiglu"),
        ("olmoe", {"hidden_act": "gelu"}, "activation", "geglu"),
        ("qwen3_moe", {"hidden_act": "gelu_pytorch_tanh"}, "activation", "geglu_tanh"),
        ("deepseek_v3", {"hidden_act": "gelu_new"}, "activation", "geglu_tanh"),
    ],
)
def test_config_keys_and_the_defaults_of_transformers(family, changes, field, value, tmp_path):
    """A change to None takes the key out."""
    config = {key: v for key, v in (config_of(family) | changes).items() if v is not None}
    spec, _ = from_huggingface(write(tmp_path, config, tensors_of(family, 0)), 0)
    assert getattr(spec, field) == value


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "deepseek_v3"])
@pytest.mark.parametrize("spelling", ["num_experts", "num_local_experts"])
def test_both_spellings_of_num_experts(family, spelling, tmp_path):
    config = config_of(family)
    count = config.pop("num_experts", None) or config.pop("num_local_experts")
    write(tmp_path, {**config, spelling: count}, tensors_of(family, 0))
    assert from_huggingface(tmp_path, 0)[0] == SPECS[family]


def test_deepseek_shared_experts_are_one_of_their_summed_width(tmp_path):
    raw, at = tensors_of("deepseek_v3", 0), "model.layers.0.mlp.shared_experts."
    wide = {
        name: np.concatenate([t, 2 * t], axis=1 if "down" in name else 0)
        for name, t in raw.items()
        if name.startswith(at)
    }
    config = {**config_of("deepseek_v3"), "n_shared_experts": 2}
    spec, params = from_huggingface(write(tmp_path, config, raw | wide), 0)
    assert spec.shared_intermediate_size == 96
    np.testing.assert_array_equal(params["shared_w13"][:96], wide[f"{at}gate_proj.weight"])
    np.testing.assert_array_equal(params["shared_w13"][96:], wide[f"{at}up_proj.weight"])


@pytest.mark.parametrize("none", [0, None])
def test_deepseek_may_have_no_shared_expert(none, tmp_path):
    raw = {name: t for name, t in tensors_of("deepseek_v3", 0).items() if "shared" not in name}
    write(tmp_path, {**config_of("deepseek_v3"), "n_shared_experts": none}, raw)
    spec, params = from_huggingface(tmp_path, 0)
    assert spec.shared_intermediate_size == 0
    assert_same_bits(to_huggingface(spec, params, 0, family="deepseek_v3"), raw)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": None}, "'num_experts_per_tok' is missing"),
        ("mixtral", {"num_local_experts": None}, "'num_experts' or 'num_local_experts' is missing"),
        ("mixtral", {"num_experts": 9}, "contradict"),
        ("mixtral", {"num_experts_per_tok": 9}, "top_k=9 is more than num_experts=8"),
        ("mixtral", {"num_local_experts": "8"}, "num_experts is an int"),
        ("mixtral", {"num_local_experts": -8}, "num_experts is an int >= 1"),
        ("mixtral", {"hidden_size": 64.0}, "hidden_size is an int"),
        ("mixtral", {"num_hidden_layers": None}, "'num_hidden_layers' is missing"),
        ("mixtral", {"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000 is more than 10000"),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "renormalize is True or False"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "'decoder_sparse_step' is an int >= 1"),
        ("qwen3_moe", {"mlp_only_layers": 0}, "'mlp_only_layers' is a list"),
        ("deepseek_v3", {"n_group": 3}, "num_expert_groups=3 does not divide num_experts=16"),
        ("deepseek_v3", {"routed_scaling_factor": float("inf")}, "finite"),
        ("deepseek_v3", {"n_shared_experts": -1}, "'n_shared_experts' is an int >= 0"),
        ("gpt_oss", {"swiglu_limit": -7.0}, "swiglu_limit is > 0"),
    ],
)
def test_a_config_that_makes_no_sense_raises(family, changes, message, tmp_path):
    config = {key: v for key, v in (config_of(family) | changes).items() if v is not None}
    write(tmp_path, config, tensors_of(family, 0))
    with pytest.raises(ValueError, match=rf"config.json \({family}\): .*{message}"):
        from_huggingface(tmp_path, 0)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "mixtral",
            {"model_type": "llama"},
            "'llama'.*mixtral, qwen2_moe, qwen3_moe, olmoe, deepseek_v3, gpt",
        ),
        ("mixtral", {"model_type": None}, "None.*mixtral"),
        ("mixtral", {"model_type": ["mixtral"]}, "no model family"),
        ("mixtral", {"hidden_act": "relu"}, "hidden_act='relu'.*silu"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act='gelu' of gpt_oss.*silu"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'.*sigmoid"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy'.*noaux_tc"),
    ],
)
def test_what_has_no_counterpart_is_unsupported(family, changes, message, tmp_path):
    config = {key: v for key, v in (config_of(family) | changes).items() if v is not None}
    write(tmp_path, config, tensors_of(family, 0))
    with pytest.raises(UnsupportedError, match=message):
        from_huggingface(tmp_path, 0)


@pytest.mark.parametrize(
    ("family", "changes", "dense", "sparse"),
    [
        ("deepseek_v3", {"first_k_dense_replace": 1}, [0], [1, 2, 3]),
        ("deepseek_v3", {"first_k_dense_replace": None}, [0, 1, 2], [3]),
        ("deepseek_v3", {"moe_layer_freq": 2}, [1, 3], [0, 2]),
        ("qwen2_moe", {"mlp_only_layers": [1, 2]}, [1, 2], [0, 3]),
        ("qwen3_moe", {"decoder_sparse_step": 2}, [0, 2], [1, 3]),
        ("qwen3_moe", {"decoder_sparse_step": 5}, [0, 1, 2, 3], []),
    ],
)
def test_a_dense_layer_is_unsupported_and_the_others_are_named(family, changes, dense, sparse, tmp_path):
    config = config_of(family) | {"num_hidden_layers": 4} | changes
    config = {key: v for key, v in config.items() if v is not None}
    layer_0, tensors = tensors_of(family, 0), {}
    for layer in sparse:
        tensors |= {name.replace("layers.0.", f"layers.{layer}."): t for name, t in layer_0.items()}
    write(tmp_path, config, tensors)
    for layer in dense:
        listed = ", ".join(map(str, sparse)) or "none"
        with pytest.raises(UnsupportedError, match=f"layer {layer} of .* is dense.*experts: {listed}\\."):
            from_huggingface(tmp_path, layer)
    for layer in sparse:
        assert from_huggingface(tmp_path, layer)[0] == SPECS[family]


@pytest.mark.parametrize("layer", [-1, 2, 10**9])
def test_a_layer_out_of_range_raises(layer):
    with pytest.raises(ValueError, match=f"the layers 0 … 1; got layer={layer}"):
        from_huggingface(GOLDENS / "mixtral", layer)


def test_a_layer_is_an_int():
    with pytest.raises(TypeError):
        from_huggingface(GOLDENS / "mixtral", 1.0)


def test_layers_are_counted_in_little_time(tmp_path):
    dense = list(range(20_000, 120_000))
    config = {**config_of("qwen3_moe"), "num_hidden_layers": 10_000, "mlp_only_layers": dense}
    write(tmp_path, config, tensors_of("qwen3_moe", 0))
    start = time.process_time()
    assert from_huggingface(tmp_path, 0)[0].num_experts == 16
    assert time.process_time() - start < 5  # layer by layer through the list: minutes
