"""Trains the small byte-level MoE language model that `decode_loop.py` runs when it is given nothing else.

The text is what every Python has with it: the language reference behind ``help()``, the standard library's
docstrings and the licence. Gradients go through `moe_pallas.MoE`, and its load-balance loss keeps the
experts in use.

    python examples/train_tiny.py --output examples/tiny_lm

That command made the weights in `tiny_lm`, on the documentation of Python 3.12: 1.71 bits per byte of
held-out text after 12 million bytes. It takes 13 minutes of processor time, so less than 10 on two cores.
"""

from __future__ import annotations

import ast
import pathlib
import pydoc_data.topics
import sysconfig
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import decoder
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging

from moe_pallas import MoE, MoESpec

FLAGS = flags.FLAGS

_SEPARATOR = "\n\n\n"
_HELD_OUT_EVERY = 20  # of the documents, one in so many is never trained on
# Parts of the standard library that hold no prose, or not ours to read.
_SKIPPED = {"__pycache__", "encodings", "idlelib", "lib2to3", "site-packages", "test", "tests", "turtledemo"}


def define_flags() -> None:
    flags.DEFINE_string("output", None, "Folder that the trained model is written to.", required=True)
    flags.DEFINE_integer(
        "steps", 6000, "Optimiser steps, rounded up to whole lines of progress.", lower_bound=1
    )
    flags.DEFINE_integer("batch", 8, "Sequences per step.", lower_bound=1)
    flags.DEFINE_integer(
        "context", 256, "Bytes per sequence, and the model's longest context.", lower_bound=8
    )
    flags.DEFINE_integer("hidden", 128, "D, the width of a token.", lower_bound=8)
    flags.DEFINE_integer("intermediate", 96, "F, the width inside one expert.", lower_bound=1)
    flags.DEFINE_integer("layers", 4, "Blocks.", lower_bound=1)
    flags.DEFINE_integer("heads", 4, "Query heads.", lower_bound=1)
    flags.DEFINE_integer("kv_heads", 2, "Key and value heads.", lower_bound=1)
    flags.DEFINE_integer("experts", 8, "E, experts per block.", lower_bound=1)
    flags.DEFINE_integer("top_k", 2, "Experts that a token visits.", lower_bound=1)
    flags.DEFINE_float("learning_rate", 4e-3, "Peak, after the warm-up; it falls to zero at the end.")
    flags.DEFINE_float("weight_decay", 0.1, "AdamW's, on matrices only.")
    flags.DEFINE_float("balance", 0.02, "Factor of the load-balance loss.")
    flags.DEFINE_integer("seed", 0, "Of the initial weights and of the order of the data.")
    flags.DEFINE_string("backend", "auto", "The MoE layers' backend.")
    flags.DEFINE_integer("log_every", 50, "Steps between two lines of progress.", lower_bound=1)


def documents() -> Iterator[str]:
    """Yields Python's own documentation: help() topics, docstrings of the standard library, the licence."""
    yield from pydoc_data.topics.topics.values()
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    if (licence := library / "LICENSE.txt").is_file():
        yield licence.read_text(encoding="utf-8")
    for path in sorted(library.rglob("*.py")):
        if _SKIPPED.intersection(path.relative_to(library).parts):
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= 120:
                    yield text


def corpus() -> tuple[np.ndarray, np.ndarray]:
    """Returns the text to train on and the held-out text, both uint8 (bytes of UTF-8)."""
    texts = list(dict.fromkeys(documents()))
    order = np.random.default_rng(0).permutation(len(texts))
    held_out = [texts[i] for n, i in enumerate(order) if n % _HELD_OUT_EVERY == 0]
    train = [texts[i] for n, i in enumerate(order) if n % _HELD_OUT_EVERY]
    return _joined(train), _joined(held_out)


def _joined(texts: list[str]) -> np.ndarray:
    return np.frombuffer(_SEPARATOR.join(texts).encode(), np.uint8)


def batches(text: np.ndarray, batch: int, context: int, seed: int) -> Iterator[np.ndarray]:
    """Yields (batch, context + 1) int32 for ever, pieces of the text from random places."""
    rng = np.random.default_rng(seed)
    offsets = np.arange(context + 1)
    while True:
        yield text[rng.integers(0, len(text) - context, batch)[:, None] + offsets].astype(np.int32)


def losses(
    config: decoder.DecoderConfig, params: decoder.Params, tokens: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cross entropy of each next byte (nats), load-balance loss (mean over blocks), loads (blocks, E)."""
    hidden, _, records = decoder.forward(config, params, tokens[:, :-1])
    logits = decoder.unembed(config, params, hidden)
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    balance = jnp.stack([record.aux.load_balance_loss for record in records]).mean()
    return entropy, balance, jnp.stack([record.aux.expert_loads for record in records])


class Progress(NamedTuple):
    """What `make_train_steps`' function reports of its N steps.

    Attributes:
      entropy: (N,) float32. Cross entropy in nats, before each step.
      loads: (N, blocks, E) int32. Tokens that each expert got.
    """

    entropy: jax.Array
    loads: jax.Array


TrainSteps = Callable[[decoder.Params, Any, jax.Array], tuple[decoder.Params, Any, Progress]]


def make_train_steps(
    config: decoder.DecoderConfig, optimizer: optax.GradientTransformation, balance: float
) -> TrainSteps:
    """Returns the function (params, state, tokens (N, B, T + 1)) → (params, state, Progress): N steps.

    Several steps are one program because XLA's CPU client allocates a program's memory anew in each call,
    and the page faults of that cost as much as the step itself. To be jitted.
    """

    def objective(params: decoder.Params, tokens: jax.Array) -> tuple[jax.Array, Progress]:
        entropy, balance_loss, loads = losses(config, params, tokens)
        return entropy + balance * balance_loss, Progress(entropy, loads)

    def train_step(carry: tuple[decoder.Params, Any], tokens: jax.Array) -> Any:
        params, state = carry
        grads, progress = jax.grad(objective, has_aux=True)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), progress

    def train_steps(
        params: decoder.Params, state: Any, tokens: jax.Array
    ) -> tuple[decoder.Params, Any, Progress]:
        (params, state), progress = jax.lax.scan(train_step, (params, state), tokens)
        return params, state, progress

    return train_steps


def evaluate(config: decoder.DecoderConfig, params: decoder.Params, text: np.ndarray, batch: int) -> float:
    """Mean cross entropy (nats per byte) over the whole text, cut into pieces of the context's length."""
    length = config.max_positions
    pieces = np.stack([text[i : i + length + 1] for i in range(0, len(text) - length, length)])
    step = jax.jit(lambda params, tokens: losses(config, params, tokens)[0])
    batch = min(batch, len(pieces))
    means = [
        step(params, pieces[i : i + batch].astype(np.int32)) for i in range(0, len(pieces) - batch + 1, batch)
    ]
    return float(np.mean(means))


def main(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)  # else absl prints what jax looks for and does not find
    spec = MoESpec(
        num_experts=FLAGS.experts,
        top_k=FLAGS.top_k,
        hidden_size=FLAGS.hidden,
        intermediate_size=FLAGS.intermediate,
    )
    config = decoder.DecoderConfig(
        family="qwen3_moe",
        vocab_size=256,
        num_layers=FLAGS.layers,
        num_heads=FLAGS.heads,
        num_kv_heads=FLAGS.kv_heads,
        head_dim=FLAGS.hidden // FLAGS.heads,
        max_positions=FLAGS.context,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
        tie_embeddings=False,
        eos_token_ids=(),
        moe=MoE(spec, backend=FLAGS.backend),
    )
    text, held_out = corpus()
    if len(held_out) <= FLAGS.context:
        raise app.UsageError(f"--context is less than the held-out text's {len(held_out)} bytes.")
    pathlib.Path(FLAGS.output).mkdir(parents=True, exist_ok=True)  # fails now, if at all
    params = decoder.init_params(config, jax.random.key(FLAGS.seed))
    size = sum(x.size for x in jax.tree.leaves(params))
    print(f"{size:,} parameters; {len(text):,} bytes to train on, {len(held_out):,} held out", flush=True)

    steps = -(-FLAGS.steps // FLAGS.log_every) * FLAGS.log_every
    warmup = min(100, steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, FLAGS.learning_rate, warmup, steps)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            schedule,
            b2=0.98,
            weight_decay=FLAGS.weight_decay,
            mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
        ),
    )
    state = optimizer.init(params)
    data = batches(text, FLAGS.batch, FLAGS.context, FLAGS.seed)
    next_chunk = lambda: np.stack([next(data) for _ in range(FLAGS.log_every)])  # noqa: E731
    start = time.perf_counter()
    train_steps = make_train_steps(config, optimizer, FLAGS.balance)
    compiled = jax.jit(train_steps, donate_argnums=(0, 1)).lower(params, state, next_chunk()).compile()
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)

    start = time.perf_counter()
    for done in range(FLAGS.log_every, steps + 1, FLAGS.log_every):
        params, state, progress = compiled(params, state, next_chunk())
        progress = jax.device_get(progress)
        if done == FLAGS.log_every:
            print(f"step 1/{steps}  loss {progress.entropy[0]:.3f}", flush=True)
        report(done, steps, progress, time.perf_counter() - start)

    decoder.save_checkpoint(FLAGS.output, config, params, jnp.bfloat16)
    print(f"written to {FLAGS.output}", flush=True)
    entropy = evaluate(config, params, held_out, FLAGS.batch)
    print(f"held-out loss {entropy:.3f} nats, {entropy / np.log(2):.3f} bits per byte", flush=True)


def report(done: int, steps: int, progress: Progress, seconds: float) -> None:
    """Prints a line: step, mean loss since the last one, speed, each block's load max/mean, time left."""
    loads = progress.loads.sum(axis=0)  # (blocks, E)
    skew = " ".join(f"{x:.2f}" for x in loads.max(axis=1) / loads.mean(axis=1))
    speed, left = done * FLAGS.batch * FLAGS.context / seconds, seconds / done * (steps - done)
    print(
        f"step {done}/{steps}  loss {progress.entropy.mean():.3f}  {speed:,.0f} tokens/s  "
        f"load max/mean {skew}  {left:.0f} s left",
        flush=True,
    )


if __name__ == "__main__":
    define_flags()
    app.run(main)
