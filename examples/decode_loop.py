"""Continues prompts with a mixture-of-experts language model: prefill, then one decode step per token.

    python examples/decode_loop.py
    python examples/decode_loop.py --checkpoint ~/OLMoE-1B-7B --prompt "The moon" --prompt "Bread is"

Without arguments it runs the small byte-level model in `tiny_lm` (see `train_tiny.py`). Any Mixtral,
Qwen3-MoE or OLMoE folder from the Hugging Face hub works. ``--mesh expert=4,tensor=2`` splits the experts
over eight devices. ``--check`` compares every MoE layer of every step with the NumPy reference and fails if
one is off. ``--quantize fp8_block`` rounds the experts to FP8 and says how far that moves the logits.

The model is in `decoder`, its steps are in `engine`.
"""

from __future__ import annotations

import functools
import itertools
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import decoder
import jax
import numpy as np
from absl import app, flags, logging
from engine import Generation, MoERows, check_prompts, generate

from moe_pallas import UnsupportedError, reference
from moe_pallas.spec import QUANTS

FLAGS = flags.FLAGS

TINY_LM = pathlib.Path(__file__).parent / "tiny_lm"
# What a layer's output may be off, relative to the reference (see `MoECheck`): some hundred roundings of
# float32; the halves round between the two products and at the end.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
# In FP8 a number at a tie may be rounded the other way, a step of 1/8 in one of F (see moe_pallas.testing).
FP8_TOLERANCE = 5e-2


def define_flags() -> None:
    flags.DEFINE_string("checkpoint", str(TINY_LM), "Folder with config.json and *.safetensors.")
    flags.DEFINE_multi_string("prompt", ["The import statement"], "Text to continue; several are one batch.")
    flags.DEFINE_multi_string("prompt_ids", [], "Instead of --prompt: token ids, '1,306,4658'; prints ids.")
    flags.DEFINE_integer("max_new_tokens", 200, "Stop after so many tokens.", lower_bound=1)
    flags.DEFINE_float("temperature", 0.5, "0 takes the likeliest token, else samples.", lower_bound=0.0)
    flags.DEFINE_integer("seed", 0, "Of the sampling.")
    flags.DEFINE_enum(
        "dtype", "auto", ["auto", *TOLERANCE], "To compute in; auto: float32 on a CPU, else the checkpoint's."
    )
    flags.DEFINE_string("backend", "auto", "The MoE layers' backend.")
    flags.DEFINE_enum("quantize", "none", QUANTS, "Round the experts to FP8, and say what that changes.")
    flags.DEFINE_string(
        "mesh", "", "Devices, 'expert=4,tensor=2': axes data, expert, tensor; virtual ones on a CPU."
    )
    flags.DEFINE_bool("check", False, "Compare every MoE layer with the NumPy reference (slow).")


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """Token ids are the bytes of the text's UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


class FileTokenizer:
    """The checkpoint's ``tokenizer.json``, read by the ``tokenizers`` package."""

    def __init__(self, path: pathlib.Path):
        try:
            import tokenizers
        except ImportError:
            raise ImportError(
                f"{path} needs the package tokenizers: pip install tokenizers, or give --prompt_ids."
            ) from None
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids))


class IdTokenizer:
    """Ids are their own text: ``"1,306,4658"``."""

    def encode(self, text: str) -> list[int]:
        try:
            return [int(word) for word in text.split(",")]
        except ValueError:
            raise ValueError(f"--prompt_ids is a list like '1,306,4658'; got {text!r}.") from None

    def decode(self, ids: Sequence[int]) -> str:
        return ",".join(map(str, ids))


def load_tokenizer(folder: pathlib.Path, vocab_size: int) -> Tokenizer:
    """The folder's own tokenizer, or bytes if it has none and the model's vocabulary is the 256 bytes."""
    path = folder / "tokenizer.json"
    if path.is_file():
        return FileTokenizer(path)
    if vocab_size == 256:
        return ByteTokenizer()
    raise FileNotFoundError(
        f"{folder} has no tokenizer.json, and with vocab_size {vocab_size} tokens aren't bytes; add that "
        "file, or give --prompt_ids."
    )


class MoECheck:
    """Compares MoE layers' outputs with `moe_pallas.reference` and keeps each layer's worst error.

    The error of a token is ``rms(output - reference) / rms(reference)`` over its row. The reference gets the
    very input that the layer got, in float64, so errors don't pile up from layer to layer. Padding must come
    out as exactly 0.
    """

    def __init__(self, config: decoder.DecoderConfig, params: decoder.Params):
        self._spec = config.moe.spec
        self._params = [jax.tree.map(np.asarray, layer["moe"]) for layer in params["layers"]]
        self.tolerance = TOLERANCE[params["embed"].dtype.name]
        if decoder.quant_of(params) != "none":
            self.tolerance += FP8_TOLERANCE
        self.worst = [0.0] * config.num_layers

    def __call__(self, moe: MoERows, mask: np.ndarray) -> None:
        for layer, (inputs, outputs) in enumerate(moe):
            expected = reference.moe(self._params[layer], np.asarray(inputs), self._spec, mask=mask)
            difference = np.asarray(outputs).astype(np.float64) - expected
            tiny = np.finfo(np.float32).tiny  # 0 / tiny: no error where both are 0
            error = float(np.max(_rms(difference) / np.maximum(_rms(expected), tiny)))
            # A NaN is an error like any other; max() would lose it.
            self.worst[layer] = max(self.worst[layer], math.inf if math.isnan(error) else error)

    @property
    def passed(self) -> bool:
        return max(self.worst) <= self.tolerance

    def report(self) -> str:
        lines = [
            f"  layer {layer}: {worst:.1e}{'' if worst <= self.tolerance else '  <-- above the tolerance'}"
            for layer, worst in enumerate(self.worst)
        ]
        verdict = "passed" if self.passed else "FAILED: these layers do not compute what the reference does"
        head = (
            f"check of each MoE layer's worst token (relative RMS, tolerance {self.tolerance:.0e}): {verdict}"
        )
        return "\n".join([head, *lines])


def _rms(rows: np.ndarray) -> np.ndarray:
    return np.sqrt(np.mean(rows * rows, axis=-1))


class LogitShift(NamedTuple):
    """What quantising does to a model's logits, along the greedy continuations of the original.

    Attributes:
      max_abs: The largest shift of any logit.
      mean_abs: The mean shift.
      spread: The mean of a position's standard deviation of logits, to compare with.
      changed_at: For each prompt, the first new token that the quantised model continues with differently;
        None if its text is the same.
    """

    max_abs: float
    mean_abs: float
    spread: float
    changed_at: list[int | None]

    def report(self) -> str:
        changes = [
            f"prompt {row} from new token {at} on" for row, at in enumerate(self.changed_at) if at is not None
        ]
        text = "unchanged" if not changes else f"changed: {', '.join(changes)}"
        return (
            f"quantising: logits move by {self.mean_abs:.3g} on average, {self.max_abs:.3g} at most (their "
            f"standard deviation: {self.spread:.3g}); greedy text {text}"
        )


@functools.partial(jax.jit, static_argnums=0)
def _logits(
    config: decoder.DecoderConfig, params: decoder.Params, ids: jax.Array, mask: jax.Array
) -> jax.Array:
    hidden, _, _ = decoder.forward(config, params, ids, mask=mask)
    return decoder.unembed(config, params, hidden)


def compare_logits(
    config: decoder.DecoderConfig,
    params: decoder.Params,
    quantised: decoder.Params,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> LogitShift:
    """Continues prompts greedily with both models, and compares logits along what the first one says."""
    before, after = (
        generate(config, p, prompts, max_new_tokens=max_new_tokens).tokens for p in (params, quantised)
    )
    texts = [[*prompt, *tokens[:-1]] for prompt, tokens in zip(prompts, before, strict=True)]
    width = max(map(len, texts))
    ids, mask = np.zeros((len(texts), width), np.int32), np.zeros((len(texts), width), bool)
    is_new = np.zeros_like(mask)  # positions whose logits choose a new token
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        ids[row, : len(text)], mask[row, : len(text)] = text, True
        is_new[row, len(prompt) - 1 : len(text)] = True

    original, moved = (
        np.asarray(_logits(config, p, ids, mask))[is_new].astype(np.float64) for p in (params, quantised)
    )
    shift = np.abs(moved - original)
    changed_at = [
        next((i for i, pair in enumerate(itertools.zip_longest(a, b)) if pair[0] != pair[1]), None)
        for a, b in zip(before, after, strict=True)
    ]
    return LogitShift(float(shift.max()), float(shift.mean()), float(original.std(-1).mean()), changed_at)


def make_mesh(text: str) -> jax.sharding.Mesh:
    """``"expert=4,tensor=2"`` as a mesh; where there is only a CPU, of virtual devices.

    Raises:
      ValueError: Something else, or fewer devices.
    """
    axes = dict(axis.partition("=")[::2] for axis in text.split(","))
    are_sizes = all(size.isdecimal() and int(size) for size in axes.values())
    if not (are_sizes and set(axes) <= {"data", "expert", "tensor"}):
        raise ValueError(f"--mesh is a list like 'expert=4,tensor=2' of data, expert, tensor; got {text!r}.")
    sizes = tuple(map(int, axes.values()))
    jax.config.update("jax_num_cpu_devices", math.prod(sizes))  # before JAX makes its first device
    axis_types = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, tuple(axes), axis_types=axis_types)


def show_progress(done: int, total: int, seconds: float) -> None:
    """Redraws a bar on stderr if that is a terminal."""
    if sys.stderr.isatty():
        bar = "#" * (30 * done // total)
        end = "\n" if done == total else ""
        print(
            f"\r[{bar:30}] {done}/{total} tokens, {done / seconds:.0f}/s",
            end=end,
            file=sys.stderr,
            flush=True,
        )


def summary(config: decoder.DecoderConfig, params: decoder.Params, generation: Generation) -> str:
    """What ran, on what, and how fast."""
    spec, dtype = config.moe.spec, params["embed"].dtype
    batch, width = generation.prefill_shape
    quant = decoder.quant_of(params)
    size = sum(x.size for x in jax.tree.leaves(params))
    stored = dtype.name if quant == "none" else f"{dtype.name}, experts in {quant}"
    lines = [
        f"model:    {config.family}, {config.num_layers} layers, {spec.num_experts} experts, "
        f"top-{spec.top_k}, {size:,} parameters in {stored}, on {jax.devices()[0].device_kind}",
    ]
    if (sharding := config.moe.sharding) is not None:
        lines.append(f"mesh:     {', '.join(f'{axis} {size}' for axis, size in sharding.mesh.shape.items())}")
    for name, tokens in (("prefill", batch * width), ("decode", batch)):
        chosen = config.moe.select_backend(tokens, dtype, quant)
        lines.append(f"{name + ':':9} {tokens} tokens per step on {chosen.backend} ({chosen.reason})")
    lines += [
        f"compiled in {generation.compile_s:.2f} s",
        f"time to first token: {generation.prefill_s * 1e3:.1f} ms",
    ]
    if generation.decode_steps:
        lines.append(
            f"decode speed: {generation.decoded / generation.decode_s:.1f} tokens/s "
            f"({generation.decode_steps} steps, {batch} at a time)"
        )
    return "\n".join(lines)


def main(argv: list[str]) -> int | str:
    logging.set_verbosity(logging.WARNING)  # else absl prints what jax looks for and does not find
    if len(argv) > 1:
        return f"error: unexpected arguments {argv[1:]}; a prompt is given as --prompt '...'."
    try:
        mesh = make_mesh(FLAGS.mesh) if FLAGS.mesh else None
    except ValueError as error:
        return f"error: {error}"
    folder = pathlib.Path(FLAGS.checkpoint).expanduser()
    dtype = FLAGS.dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else None
    try:
        config, params = decoder.load_checkpoint(folder, dtype=dtype, backend=FLAGS.backend)
        tokenizer = IdTokenizer() if FLAGS.prompt_ids else load_tokenizer(folder, config.vocab_size)
        prompts = [tokenizer.encode(text) for text in FLAGS.prompt_ids or FLAGS.prompt]
        check_prompts(config, prompts)
        if FLAGS.quantize != "none":
            if (stored := decoder.quant_of(params)) != "none":
                raise ValueError(f"The checkpoint's experts are in {stored} already; leave --quantize out.")
            plain, params = params, decoder.quantize(config, params, FLAGS.quantize)
        if mesh is not None:
            config, params = decoder.shard(config, params, mesh)
        config.moe.select_backend(len(prompts), params["embed"].dtype, decoder.quant_of(params))
    except (UnsupportedError, OSError, ImportError, ValueError) as error:
        return f"error: {error}"
    check = MoECheck(config, params) if FLAGS.check else None
    try:
        generation = generate(
            config,
            params,
            prompts,
            max_new_tokens=FLAGS.max_new_tokens,
            temperature=FLAGS.temperature,
            seed=FLAGS.seed,
            check=check,
            progress=show_progress,
        )
    except (UnsupportedError, ValueError) as error:
        return f"error: {error}"
    for prompt, tokens in zip(prompts, generation.tokens, strict=True):
        print(tokenizer.decode([*prompt, *tokens]), end="\n\n")
    longest = max(len(p) + len(t) for p, t in zip(prompts, generation.tokens, strict=True))
    if longest == config.max_positions:
        print(f"(stopped: the model's context of {longest} tokens is full)")
    print(summary(config, params, generation))
    if FLAGS.quantize != "none":
        print(compare_logits(config, plain, params, prompts, FLAGS.max_new_tokens).report())
    if check is not None:
        print(check.report())
        if not check.passed:
            return "error: --check failed, see above."
    return 0


if __name__ == "__main__":
    define_flags()
    app.run(main)
