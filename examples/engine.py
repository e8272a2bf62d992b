"""Generation on a device: one compiled step serves prefill and decode, and what it leaves stays there.

A step runs the model on the next tokens of every sequence, picks the token after them, and finds out which
sequences have ended, all on the device. So decode steps can be queued one behind the other; the host looks at
their tokens when it wants to. Prompts of more than `PREFILL_TOKENS` tokens together are run in pieces.

    cache, state = decoder.init_cache(…), init_state(batch)
    for piece in prompt_pieces(prompts, width):
        cache, state, _ = step(config, params, cache, state, sampling, piece)
    for _ in range(steps):
        cache, state, _ = step(config, params, cache, state, sampling)

Sizes as in `decoder`: B sequences, T tokens of each in a call, V vocabulary.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import decoder
import jax
import jax.numpy as jnp
import numpy as np

# Tokens of a prefill step, of all sequences together: enough to fill a GPU, few enough that the scores of
# attention, float32 for every token, head and slot, fit beside the model.
PREFILL_TOKENS = 8192
STEPS_UNSEEN = 16  # decode steps that are queued before the host looks whether all sequences have ended
_SMALLEST_BUCKET = 16  # tokens
_CACHE_MULTIPLE = 64  # slots

Array = jax.Array | np.ndarray
MoERows = tuple[tuple[jax.Array, jax.Array], ...]  # inputs and outputs (B, T, D) of each MoE layer


class State(NamedTuple):
    """Where the sequences stand between two steps.

    Attributes:
      tokens: (B,) int32. The last token of each, which the model has not run on yet.
      positions: (B,) int32. Its position: how many tokens the cache holds.
      active: (B,) bool. False: has ended. Its row is carried along, without work for the experts.
      number: () int32. Decode steps so far.
    """

    tokens: Array
    positions: Array
    active: Array
    number: Array


class Piece(NamedTuple):
    """The next tokens of every prompt: (B, T) int32, and (B,) int32 how many of a row's are real."""

    tokens: Array
    lengths: Array


class Sampling(NamedTuple):
    """How tokens are picked: () float32 temperature, 0 = the likeliest token; the generation's random key."""

    temperature: jax.Array | np.float32
    key: jax.Array


class Output(NamedTuple):
    """What a step tells: logits (B, V) float32 after each row's last token, and the MoE layers' rows."""

    logits: jax.Array
    moe: MoERows


def init_state(batch: int) -> State:
    """The state before any prompt."""
    zeros = np.zeros(batch, np.int32)
    return jax.device_put(State(zeros, zeros, zeros > 0, np.zeros((), np.int32)))  # compiles nothing


@functools.partial(jax.jit, static_argnames=("config", "keep_moe"), donate_argnames="cache")
def step(
    config: decoder.DecoderConfig,
    params: decoder.Params,
    cache: tuple[decoder.KVCache, ...],
    state: State,
    sampling: Sampling,
    piece: Piece | None = None,
    *,
    keep_moe: bool = False,
) -> tuple[tuple[decoder.KVCache, ...], State, Output]:
    """Runs the model on the next tokens of every sequence and picks the token after them.

    Args:
      config: The model.
      params: Its weights.
      cache: From `decoder.init_cache` or the step before; consumed.
      state: From `init_state` or the step before.
      sampling: How to pick.
      piece: Tokens of the prompts. A row whose prompt has ended before keeps its state. None: decode, each
        active sequence's own last token.
      keep_moe: Return what went into and came out of every MoE layer; otherwise that's empty.

    Returns:
      The cache, the state, and `Output`.
    """
    if piece is None:
        piece = Piece(state.tokens[:, None], state.active.astype(jnp.int32))
        state = state._replace(number=state.number + 1)
    tokens, lengths = map(jnp.asarray, piece)
    positions = jnp.asarray(state.positions)
    offsets = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    hidden, new_cache, records = decoder.forward(
        config, params, tokens, positions[:, None] + offsets, cache, offsets < lengths[:, None]
    )
    assert new_cache is not None
    last = jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
    logits = decoder.unembed(config, params, last)
    # As a choice between argmax and sampling this would be a branch, for which a GPU waits for the host.
    noise = jax.random.gumbel(jax.random.fold_in(sampling.key, state.number), logits.shape)
    picked = jnp.argmax(logits + sampling.temperature * noise, axis=-1).astype(jnp.int32)
    is_last = jnp.isin(picked, np.array(config.eos_token_ids, np.int32))
    ran = lengths > 0
    new_state = State(
        tokens=jnp.where(ran, picked, state.tokens),
        positions=positions + lengths,
        active=jnp.where(ran, ~is_last, state.active),
        number=state.number,
    )
    moe = tuple((record.inputs, record.outputs) for record in records) if keep_moe else ()
    return new_cache, new_state, Output(logits, moe)


def piece_width(batch: int, longest: int, max_positions: int, max_tokens: int = PREFILL_TOKENS) -> int:
    """T of prefill steps: a power of two, so that few programs serve all lengths, or the whole context."""
    most = 1 << max(max_tokens // batch, 1).bit_length() - 1
    return min(max(_SMALLEST_BUCKET, 1 << (longest - 1).bit_length()), most, max_positions)


def prompt_pieces(prompts: Sequence[Sequence[int]], width: int) -> Iterator[Piece]:
    """Cuts prompts into pieces of ``width`` tokens, the last one of each padded."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    for start in range(0, int(lengths.max()), width):
        real = np.clip(lengths - start, 0, width)
        tokens = np.zeros((len(prompts), width), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : real[row]] = prompt[start : start + width]
        yield Piece(tokens, real)


class Generation(NamedTuple):
    """What `generate` returns.

    Attributes:
      tokens: The continuation of each prompt; its last one is the end-of-sequence id if there was one.
      prefill_shape: (B, T) of a prefill step, T with padding.
      compile_s: Seconds that compiling prefill and decode took, a first run of each included.
      prefill_s: Seconds from the prompts to the first token of each, without compilation.
      decode_s: Seconds that all decode steps took together.
      decode_steps: Their number, without those that were queued before it was seen that all had ended.
      decoded: Tokens they gave.
    """

    tokens: list[list[int]]
    prefill_shape: tuple[int, int]
    compile_s: float
    prefill_s: float
    decode_s: float
    decode_steps: int
    decoded: int


def generate(
    config: decoder.DecoderConfig,
    params: decoder.Params,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    check: Callable[[MoERows, np.ndarray], None] | None = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> Generation:
    """Continues a batch of prompts until each has ended, max_new_tokens are there or the context is full.

    The longest prompt's context counts for all.

    Args:
      config: The model.
      params: Its weights.
      prompts: Token ids of each prompt.
      max_new_tokens: At least 1.
      temperature: 0 = the likeliest token each time.
      seed: Of the sampling.
      check: Called with every step's MoE layers and which of its tokens (B, T) are real.
      progress: Called now and then: tokens per sequence so far, their limit, seconds.

    Raises:
      ValueError: An empty prompt, one that leaves no room in the context, ids that the model doesn't have;
        max_new_tokens or temperature out of range.
    """
    check_prompts(config, prompts)
    if max_new_tokens < 1 or not temperature >= 0:
        raise ValueError(
            f"max_new_tokens is at least 1 and temperature at least 0; got {max_new_tokens}, {temperature}."
        )
    batch, longest = len(prompts), max(map(len, prompts))
    width = piece_width(batch, longest, config.max_positions)
    limit = min(max_new_tokens, config.max_positions - longest)
    slots = min(-(-(longest + limit) // _CACHE_MULTIPLE) * _CACHE_MULTIPLE, config.max_positions)
    everywhere = params["embed"].sharding
    sampling = Sampling(np.float32(temperature), jax.random.key(seed))
    beginning: State
    cache, beginning = jax.device_put(
        (decoder.init_cache(config, batch, slots, params["embed"].dtype), init_state(batch)), everywhere
    )

    def run(state: State, piece: Piece | None = None) -> tuple[State, MoERows]:
        nonlocal cache
        cache, state, output = step(config, params, cache, state, sampling, piece, keep_moe=check is not None)
        return state, output.moe

    # Both programs are compiled and run once on nothing but padding, so that the times below are a running
    # server's. What that leaves in the cache is never seen, see `decoder.attention`.
    began = time.perf_counter()
    padding = Piece(np.zeros((batch, width), np.int32), np.zeros(batch, np.int32))
    jax.block_until_ready(run(run(beginning, padding)[0]))
    compile_s = time.perf_counter() - began

    began = time.perf_counter()
    state = beginning
    for piece in prompt_pieces(prompts, width):
        state, moe = run(state, piece)
        if check is not None:
            check(moe, np.arange(width) < piece.lengths[:, None])
    first, active = jax.device_get((state.tokens, state.active))
    prefill_s = time.perf_counter() - began
    results = [[token] for token in first.tolist()]
    decode_s, steps = 0.0, 0
    if progress is not None:
        progress(1, limit, prefill_s)
    while active.any() and steps + 1 < limit:
        began = time.perf_counter()
        states: list[State] = []
        for _ in range(min(STEPS_UNSEEN if check is None else 1, limit - 1 - steps)):
            state, moe = run(state)
            states.append(state)
        if check is not None:
            check(moe, active[:, None])
        for tokens, still_active in jax.device_get([(s.tokens, s.active) for s in states]):
            for row in np.flatnonzero(active).tolist():
                results[row].append(int(tokens[row]))
            steps += bool(active.any())
            active = still_active
        decode_s += time.perf_counter() - began
        if progress is not None:
            progress(steps + 1, limit, prefill_s + decode_s)
    return Generation(
        tokens=results,
        prefill_shape=(batch, width),
        compile_s=compile_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        decode_steps=steps,
        decoded=sum(map(len, results)) - batch,
    )


def check_prompts(config: decoder.DecoderConfig, prompts: Sequence[Sequence[int]]) -> None:
    """Raises ValueError for prompts that the model can't continue."""
    if not prompts:
        raise ValueError("There is no prompt; give at least one.")
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"Prompt {row} is empty; it needs at least one token.")
        if len(prompt) >= config.max_positions:
            raise ValueError(
                f"Prompt {row} has {len(prompt)} tokens; the model's context holds {config.max_positions}, "
                f"at least one of them new. Shorten the prompt to {config.max_positions - 1} tokens."
            )
        if unknown := [token for token in prompt if not 0 <= token < config.vocab_size]:
            raise ValueError(
                f"Prompt {row} has the token ids {unknown[:5]}; the model has 0 … {config.vocab_size - 1}."
            )
