"""The examples: whole models against Hugging Face's outputs, the decode loop, the check, the training."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("safetensors")
pytest.importorskip("optax")
from processes import ROOT, environment
from safetensors.numpy import load_file, save_file

from moe_pallas import reference_fp8
from moe_pallas.interop import SafetensorsFolder

EXAMPLES = ROOT / "examples"
GOLDENS = ROOT / "tests" / "data" / "goldens"
PROMPT = "The import statement"  # the demo's
FAMILIES = ["mixtral", "qwen3_moe", "olmoe"]

sys.path.insert(0, str(EXAMPLES))
import decode_loop  # noqa: E402
import decoder  # noqa: E402
import train_tiny  # noqa: E402


def run_python(*args: str, quick: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs Python as a user does, on one CPU device, and with warnings as errors."""
    command, env = [sys.executable, "-W", "error", *args], environment(EXAMPLES, quick=quick)
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)


def run_example(name: str, *args: str, quick: bool = True) -> subprocess.CompletedProcess[str]:
    return run_python(str(EXAMPLES / name), *args, quick=quick)


def copy_with(tmp_path: pathlib.Path, family: str, **fields: Any) -> pathlib.Path:
    """A golden checkpoint with other fields in its config.json."""
    folder = tmp_path / family
    shutil.copytree(GOLDENS / family, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def golden(request) -> tuple[decoder.DecoderConfig, decoder.Params, dict[str, np.ndarray]]:
    folder = GOLDENS / request.param
    return *decoder.load_checkpoint(folder), load_file(folder / "golden.safetensors")


@pytest.fixture(scope="module")
def qwen() -> tuple[decoder.DecoderConfig, decoder.Params]:
    return decoder.load_checkpoint(GOLDENS / "qwen3_moe")


def assert_close(actual: jax.Array, expected: np.ndarray, tolerance: float = 1e-4) -> None:
    error = np.max(np.abs(np.asarray(actual, np.float64) - expected)) / np.max(np.abs(expected))
    assert error < tolerance


def test_logits_and_moe_layers_are_hugging_faces(golden):
    config, params, expected = golden
    hidden, cache, records = decoder.forward(config, params, jnp.asarray(expected["input_ids"], jnp.int32))
    assert cache is None
    assert_close(decoder.unembed(config, params, hidden), expected["logits"])
    for i, record in enumerate(records):
        assert_close(record.inputs, expected[f"layers.{i}.moe_in"])
        assert_close(record.outputs, expected[f"layers.{i}.moe_out"])


def test_greedy_continuation_is_hugging_faces(golden):
    config, params, expected = golden
    ids = expected["greedy_prompt_and_continuation"][0].tolist()
    check = decode_loop.MoECheck(config, params)
    generation = decode_loop.generate(config, params, [ids[:6]], max_new_tokens=16, check=check)
    assert ids[:6] + generation.tokens[0] == ids
    assert generation.decode_steps == len(ids) - 7
    assert check.passed and max(check.worst) > 0


def test_prefill_in_pieces_and_padding_change_nothing(golden):
    """The cache serves a prompt's second half, and padding at the end of either half is never seen."""
    config, params, expected = golden
    tokens = np.asarray(expected["input_ids"], np.int32)
    cache = decoder.init_cache(config, 2, 24, jnp.float32)
    for start, stop in ((0, 5), (5, 12)):
        padded = np.full((2, 9), 255, np.int32)
        padded[:, : stop - start] = tokens[:, start:stop]
        offsets = np.arange(9, dtype=np.int32)
        positions = np.broadcast_to(start + offsets, padded.shape)
        mask = np.broadcast_to(offsets < stop - start, padded.shape)
        hidden, cache, _ = decoder.forward(config, params, padded, positions, cache, mask)
        logits = decoder.unembed(config, params, hidden)[:, : stop - start]
        assert_close(logits, expected["logits"][:, start:stop])


def test_batch_equals_single_prompts(qwen):
    """Prompts of different lengths, one of which ends early, do not disturb each other."""
    config, params = qwen
    golden = load_file(GOLDENS / "qwen3_moe" / "golden.safetensors")
    rows = golden["input_ids"].tolist()
    prompts = [rows[0][:6], rows[1][:11], rows[1][:1]]
    together = decode_loop.generate(config, params, prompts, max_new_tokens=10).tokens
    assert [len(tokens) for tokens in together] == [1, 10, 10]
    for prompt, tokens in zip(prompts, together, strict=True):
        assert decode_loop.generate(config, params, [prompt], max_new_tokens=10).tokens == [tokens]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_check_passes_in_half_precision(dtype):
    config, params = decoder.load_checkpoint(GOLDENS / "qwen3_moe", dtype=dtype)
    check = decode_loop.MoECheck(config, params)
    decode_loop.generate(config, params, [[5, 6, 7], [8]], max_new_tokens=3, temperature=1.0, check=check)
    assert check.passed and max(check.worst) > 1e-4


@pytest.mark.parametrize("name", ["router", "w13", "w2"])
def test_check_finds_a_perturbed_weight(qwen, name):
    config, params = qwen
    check = decode_loop.MoECheck(config, params)
    wrong = jax.tree.map(lambda x: x, params)
    wrong["layers"][1]["moe"][name] = wrong["layers"][1]["moe"][name] * 1.01
    decode_loop.generate(config, wrong, [[5, 6, 7]], max_new_tokens=2, check=check)
    assert not check.passed
    assert check.worst[0] <= check.tolerance < check.worst[1]
    assert "FAILED" in check.report() and "layer 1" in check.report()


def test_check_finds_nan_and_unclean_padding(qwen):
    config, params = qwen
    inputs = jnp.ones((1, 2, 64))
    mask = np.array([[True, False]])
    right = jax.jit(config.moe.apply)(params["layers"][0]["moe"], inputs, mask=mask)
    for row, value in ((0, jnp.nan), (1, 1e-6)):
        check = decode_loop.MoECheck(config, params)
        check(((inputs, right),), mask)
        assert check.passed
        check(((inputs, right.at[0, row, 3].set(value)),), mask)
        assert not check.passed


def test_sampling_is_seeded(qwen):
    config, params = qwen

    def sample(temperature: float, seed: int) -> list[list[int]]:
        return decode_loop.generate(
            config, params, [[5, 6, 7]], max_new_tokens=12, temperature=temperature, seed=seed
        ).tokens

    assert sample(1.0, 1) == sample(1.0, 1)
    assert sample(1.0, 1) != sample(1.0, 2)
    assert sample(0.0, 1) == sample(0.0, 2) == sample(1e-4, 1)


def test_context_is_respected(qwen):
    config, params = qwen
    config = dataclasses.replace(config, max_positions=20, eos_token_ids=())
    for prompt, new in ((list(range(10, 29)), 1), ([3], 19)):
        assert len(decode_loop.generate(config, params, [prompt], max_new_tokens=50).tokens[0]) == new
    with pytest.raises(ValueError, match=r"Prompt 1 has 20 tokens; .* 20.* Shorten the prompt to 19"):
        decode_loop.generate(config, params, [[3], list(range(20))], max_new_tokens=1)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [([], "no prompt"), ([[1], []], "Prompt 1 is empty"), ([[1, 256, -1]], r"\[256, -1\].* 0 … 255")],
)
def test_prompts_are_checked(qwen, prompts, message):
    with pytest.raises(ValueError, match=message):
        decode_loop.generate(*qwen, prompts, max_new_tokens=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llama"}, "'llama'.*mixtral, qwen3_moe, olmoe"),
        ({"sliding_window": 64, "use_sliding_window": True}, "sliding_window = 64"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type = 'yarn'"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
    ],
)
def test_unknown_architectures_are_refused(tmp_path, fields, message):
    folder = copy_with(tmp_path, "qwen3_moe", **fields)
    with pytest.raises(decoder.UnsupportedError, match=message):
        decoder.load_checkpoint(folder)


def test_older_configs_are_read(tmp_path):
    """Before transformers 5 rope_theta stood at the top; a window that is switched off may have a size."""
    folder = copy_with(
        tmp_path, "qwen3_moe", rope_parameters=None, rope_theta=5e5, sliding_window=64, eos_token_id=[7, 9]
    )
    (folder / "generation_config.json").unlink()
    config, _ = decoder.load_checkpoint(folder)
    assert config.rope_theta == 5e5
    assert config.eos_token_ids == (7, 9)


def test_missing_config_field_is_named(tmp_path):
    folder = copy_with(tmp_path, "mixtral", rope_parameters=None)
    with pytest.raises(ValueError, match=r"mixtral.* needs the field 'rope_theta'"):
        decoder.load_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": "256"}, "vocab_size is an int >= 1; got '256'"),
        ({"vocab_size": 0}, "vocab_size is an int >= 1; got 0"),
        ({"num_attention_heads": 0}, "num_heads is an int >= 1; got 0"),
        ({"num_attention_heads": [4]}, "num_heads is an int"),
        ({"num_key_value_heads": True}, "num_kv_heads is an int"),
        ({"head_dim": float("nan")}, "head_dim is an int"),
        ({"max_position_embeddings": -1}, "max_positions is an int"),
        ({"rope_theta": "big", "rope_parameters": None}, "rope_theta is a finite number > 0; got 'big'"),
        ({"rope_theta": float("nan"), "rope_parameters": None}, "rope_theta is a finite number > 0; got nan"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is a finite number > 0; got inf"),
        ({"tie_word_embeddings": "no"}, "tie_embeddings is True or False; got 'no'"),
        ({"eos_token_id": 1.5}, "eos_token_id"),
        ({"eos_token_id": ["</s>"]}, "eos_token_ids are ints"),
        ({"vocab_size": 2**40}, r"embed_tokens.weight .* is \(256, 64\), need \(1099511627776, 64\)"),
        ({"num_attention_heads": 2**40, "head_dim": 16}, r"self_attn.q_proj.weight .*need"),
    ],
)
def test_a_checkpoint_that_makes_no_sense_is_refused(changes, message, tmp_path):
    folder = copy_with(tmp_path, "mixtral", **changes)
    (folder / "generation_config.json").unlink()
    with pytest.raises(ValueError, match=message):
        decoder.load_checkpoint(folder)


@pytest.mark.parametrize("model_type", [["mixtral"], {}, "x" * 10**6])
def test_a_model_type_that_is_none_is_refused(model_type, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    shutil.copy(GOLDENS / "mixtral/model.safetensors", tmp_path)
    with pytest.raises(decoder.UnsupportedError, match="has model_type") as caught:
        decoder.load_checkpoint(tmp_path)
    assert len(str(caught.value)) < 1000


def test_a_generation_config_is_read_with_the_same_care(tmp_path):
    folder = copy_with(tmp_path, "mixtral")
    (folder / "generation_config.json").write_text("[" * 10**5)
    with pytest.raises(ValueError, match=r"generation_config.json is no readable JSON"):
        decoder.load_checkpoint(folder)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_saved_checkpoint_is_read_back(tmp_path, family, tied):
    config, params = decoder.load_checkpoint(GOLDENS / family)
    config = dataclasses.replace(config, tie_embeddings=tied)
    if tied:
        del params["lm_head"]
    decoder.save_checkpoint(tmp_path / "saved", config, params, jnp.float32)
    again, read = decoder.load_checkpoint(tmp_path / "saved")
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, read, params)


@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_channel", "fp8_block"])
def test_quantised_checkpoint_is_read_back(tmp_path, scheme):
    config, params = decoder.load_checkpoint(GOLDENS / "qwen3_moe")
    assert decoder.quant_of(params) == "none"
    quantised = decoder.quantize(config, params, scheme)
    decoder.save_checkpoint(tmp_path, config, quantised, jnp.float32)
    again, read = decoder.load_checkpoint(tmp_path)
    assert again == config and decoder.quant_of(read) == scheme
    jax.tree.map(np.testing.assert_array_equal, read, quantised)


def test_matrices_outside_of_the_experts_are_dequantised(tmp_path):
    config, params = decoder.load_checkpoint(GOLDENS / "qwen3_moe")
    decoder.save_checkpoint(tmp_path, config, decoder.quantize(config, params, "fp8_block"), jnp.bfloat16)
    tensors = load_file_with_fp8(tmp_path)
    for name in list(tensors):
        if re.search(r"self_attn\.[qkvo]_proj\.weight$", name):
            values, scale = reference_fp8.quantize(tensors[name], "fp8_block")
            tensors |= {name: values, f"{name}_scale_inv": scale}
    save_file(tensors, tmp_path / "model.safetensors")
    _, read = decoder.load_checkpoint(tmp_path)
    for ours, theirs in zip(read["layers"], params["layers"], strict=True):
        assert ours["q"].dtype == jnp.bfloat16 and ours["moe"]["w13"].dtype == jnp.float8_e4m3fn
        for name in "qkvo":
            error = np.abs(ours[name].astype(np.float32) - theirs[name])
            assert 0 < error.max() < 0.08 * np.abs(theirs[name]).max()
    name = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    save_file({n: t for n, t in tensors.items() if n != name}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"holds no tensor '{name}'"):
        decoder.load_checkpoint(tmp_path)


def load_file_with_fp8(folder: pathlib.Path) -> dict[str, np.ndarray]:
    checkpoint = SafetensorsFolder(folder)
    return {name: checkpoint.read(name) for name in checkpoint.names()}


def test_report_of_moved_logits():
    shift = decode_loop.LogitShift(0.5, 0.1, 2.0, [None, 4])
    assert shift.report().endswith("greedy text changed: prompt 1 from new token 4 on")
    assert shift._replace(changed_at=[None]).report().endswith("greedy text unchanged")


def test_check_knows_quantised_layers(qwen):
    config, params = qwen
    quantised = decoder.quantize(config, params, "fp8_block")
    inputs, mask = (
        jnp.asarray(np.random.default_rng(0).standard_normal((1, 2, 64), np.float32)),
        np.ones((1, 2), bool),
    )
    outputs = jax.jit(config.moe.apply)(quantised["layers"][0]["moe"], inputs)
    for weights, factor, passed in ((quantised, 1.0, True), (quantised, 1.1, False), (params, 1.0, False)):
        check = decode_loop.MoECheck(config, weights)
        check(((inputs, factor * outputs),), mask)
        assert check.passed == passed


def test_tokenizers(tmp_path, monkeypatch):
    text = "naïve → text"
    byte = decode_loop.load_tokenizer(tmp_path, 256)
    assert byte.decode(byte.encode(text)) == text
    assert byte.decode([65, 255]) == "A\ufffd"
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json.*vocab_size 1000.*--prompt_ids"):
        decode_loop.load_tokenizer(tmp_path, 1000)
    ids = decode_loop.IdTokenizer()
    assert ids.decode(ids.encode("1, 306,4658")) == "1,306,4658"
    with pytest.raises(ValueError, match="'1,x'"):
        ids.encode("1,x")
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install tokenizers, or give --prompt_ids"):
        decode_loop.load_tokenizer(tmp_path, 256)


def test_demo_prints_text_and_speeds():
    """What `make demo` runs: the trained model continues its prompt."""
    run = run_example("decode_loop.py", "--max_new_tokens=12", "--check", quick=False)
    assert run.returncode == 0, run.stderr
    text, rest = run.stdout.split("\n\nmodel: ")
    assert text.startswith(PROMPT) and len(text) == len(PROMPT) + 12 and text.isascii()
    assert "4 layers, 8 experts, top-2" in rest
    assert re.search(r"time to first token: [\d.]+ ms", run.stdout)
    assert re.search(r"decode speed: [\d.]+ tokens/s", run.stdout)
    assert re.search(r"prefill: +32 tokens per step on xla", run.stdout)
    assert re.search(r"decode: +1 tokens per step on xla", run.stdout)
    assert re.search(r"check .*passed", run.stdout)
    assert run.stderr == ""


def test_demo_quantises():
    args = [f"--checkpoint={GOLDENS / 'qwen3_moe'}", "--prompt_ids=4,5", "--max_new_tokens=2"]
    run = run_example("decode_loop.py", *args, "--quantize=fp8_block")
    assert run.returncode == 0, run.stderr
    assert "experts in fp8_block" in run.stdout and run.stderr == ""
    number = r"([\d.e-]+)"
    line = rf"logits move by {number} on average, {number} at most \(their standard deviation: {number}\)"
    mean, largest, spread = map(float, re.search(line, run.stdout).groups())
    assert 0 < mean < 0.1 * spread and mean < largest < spread


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--checkpoint=nowhere"], "nowhere"),
        (["--prompt", "x" * 5000], "Prompt 0 has 5000 tokens"),
        (["--backend=abacus"], "abacus"),
    ],
)
def test_demo_fails_clearly(args, message):
    run = run_example("decode_loop.py", *args)
    assert run.returncode == 1
    assert run.stderr.startswith("error: ") and message in run.stderr and "Traceback" not in run.stderr


def test_demo_fails_if_a_layer_is_wrong():
    """The command line's exit status, with a layer whose every output is a little too large."""
    script = """
from absl import app
import decode_loop, decoder

apply = decoder.MoE.apply

def wrong(*args, **kwargs):
    y, aux = apply(*args, **kwargs)
    return y * 1.001, aux

decoder.MoE.apply = wrong
decode_loop.define_flags()
app.run(decode_loop.main)
"""
    args = [f"--checkpoint={GOLDENS / 'mixtral'}", "--prompt_ids=4,5", "--max_new_tokens=2"]
    run = run_python("-c", script, *args, "--check")
    assert run.returncode == 1
    assert run.stderr == "error: --check failed, see above.\n"
    assert "FAILED" in run.stdout and "layer 1: 1.0e-03  <-- above the tolerance" in run.stdout


def test_trained_model_predicts_english():
    """The weights in the repository are those of a trained model: few bits per byte on a plain sentence."""
    config, params = decoder.load_checkpoint(decode_loop.TINY_LM, dtype="float32")
    text = b"If the object is not a string, the function returns a list of the names in the module."
    tokens = np.frombuffer(text, np.uint8).astype(np.int32)[None]
    assert float(train_tiny.losses(config, params, tokens)[0]) / np.log(2) < 2.5
    size = (decode_loop.TINY_LM / "model.safetensors").stat().st_size
    assert size < 3.2e6


def test_training_learns_and_writes_what_the_decode_loop_reads(tmp_path):
    sizes = (
        "--layers=1 --hidden=32 --intermediate=32 --heads=2 --kv_heads=1 --experts=4 --batch=8 --context=64"
    )
    run = run_example(
        "train_tiny.py", *sizes.split(), "--steps=60", "--log_every=20", f"--output={tmp_path / 'model'}"
    )
    assert run.returncode == 0, run.stderr
    first, *rest = (float(x) for x in re.findall(r"loss (\d+\.\d+)", run.stdout))
    assert len(rest) == 4  # three lines of progress and the held-out loss
    assert first > 5.3 and rest[0] > rest[1] > rest[2] and rest[-1] < 3.4
    assert re.search(r"step 60/60 .* tokens/s  load max/mean \d\.\d\d  0 s left", run.stdout)

    config, params = decoder.load_checkpoint(tmp_path / "model", dtype="float32")
    assert config.max_positions == 64
    generation = decode_loop.generate(config, params, [list(b"The ")], max_new_tokens=5)
    assert len(generation.tokens[0]) == 5


def test_training_is_reproducible():
    config, _ = decoder.load_checkpoint(GOLDENS / "qwen3_moe")
    config = dataclasses.replace(config, num_layers=1)
    text = np.frombuffer((EXAMPLES / "decoder.py").read_bytes(), np.uint8)
    optimizer = train_tiny.optax.adamw(1e-2)
    train_steps = jax.jit(train_tiny.make_train_steps(config, optimizer, 0.01))

    def train() -> train_tiny.Progress:
        params = decoder.init_params(config, jax.random.key(0))
        data = train_tiny.batches(text, 4, 32, seed=0)
        tokens = np.stack([next(data) for _ in range(8)])
        return jax.device_get(train_steps(params, optimizer.init(params), tokens)[2])

    with jax.numpy_dtype_promotion("standard"):  # which optax relies on
        progress, again = train(), train()
    assert progress.entropy[-1] < progress.entropy[0] - 1
    assert progress.loads.shape == (8, 1, 16) and (progress.loads.sum(-1) == 4 * 32 * 4).all()
    jax.tree.map(np.testing.assert_array_equal, progress, again)


def test_corpus_is_python_documentation():
    train, held_out = train_tiny.corpus()
    assert len(train) > 1e6 and 0.02 < len(held_out) / len(train) < 0.2
    assert b"statement" in train.tobytes()
