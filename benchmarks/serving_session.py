"""Serving one model, quantised in one way, under several loads: programs, check, times.

    Session(case, …)    what takes the MoE layers' place in which program
    .run()              weights; the cold loads; all programs, in threads; then load by load the check, and
                        every program against the others in turn

A program is a step of `engine` for a number of sequences, tokens of each (none: decode) and slots of the
cache, with an MoE layer that has made all of its choices. Variants that choose alike share it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import serving_model
from benchmarks.cases import SCHEMES, Cell
from benchmarks.serving_model import DTYPE, PORTABLE, VARIANTS, decoder, engine
from benchmarks.timing import compile_all
from moe_pallas.warmup import no_recompile

Row = dict[str, Any]

NO_WARMUP = "no_warmup"
DECODE_SLOTS = 128  # of the cache, past the prompt
_MOST_STEPS, _FEWEST_STEPS = 96, 8  # of a run of decode steps
_FIRST_STEPS = 4
_SLOW_S = 1.0  # what takes longer is run once before it is timed, not twice

# RMS of the difference of logits over their RMS. Not roundings alone: a token whose eighth and ninth expert
# are nearly alike gets another one. BUILD_NOTES "Logits of a whole model" has what was measured.
ERROR_ALLOWED = {"none": 0.25, "fp8_tensor": 0.5, "fp8_channel": 0.5, "fp8_block": 0.5}


class Load(NamedTuple):
    """So many sequences at a time, and tokens of each one's prompt."""

    concurrency: int
    prompt: int

    def __str__(self) -> str:
        return f"{self.concurrency}x{self.prompt}"

    @property
    def slots(self) -> int:
        return -(-(self.prompt + DECODE_SLOTS) // 64) * 64


class Key(NamedTuple):
    """A program: its MoE layer, sequences, tokens of each (0: decode) and slots."""

    layer: Any
    batch: int
    width: int
    slots: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How to measure.

    Attributes:
      variants: Names.
      cold: Loads to be served before any warm-up.
      rounds: Visits to each program.
      seconds: Aimed at for a run of decode steps.
      longest_s: A time to first token that will take longer is left out; nothing is visited again that would
        take longer than that in all.
      piece_tokens: Tokens of a prefill step at most.
      deadline: Time (`time.monotonic`) at which to begin nothing more.
    """

    variants: Sequence[str] = tuple(VARIANTS)
    cold: Sequence[Load] = ()
    rounds: int = 3
    seconds: float = 0.25
    longest_s: float = 12.0
    piece_tokens: int = engine.PREFILL_TOKENS
    deadline: float = math.inf

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.deadline


class Reference(NamedTuple):
    """The portable backend's logits after the first piece, its state then, and logits a step later."""

    prefill: np.ndarray
    state: engine.State
    decode: np.ndarray


class Session:
    """Measures one model under several loads.

    Args:
      case: The model's name.
      config: The model.
      quant: How its experts are quantised.
      loads: What to serve.
      options: How.
      done: Loads and variants that need no measurement any more.
      progress: Called with what is being done, and how many more loads are done.
    """

    def __init__(
        self,
        case: str,
        config: decoder.DecoderConfig,
        quant: str,
        loads: Sequence[Load],
        options: Options,
        done: Collection[tuple[Load, str]] = (),
        progress: Callable[[str, int], None] = lambda what, finished: None,
    ) -> None:
        self.case, self.config, self.quant, self.options = case, config, quant, options
        self.scheme, self.progress = SCHEMES.get(quant), progress
        self.seconds: dict[str, float] = {}  # of each stage
        self._wanted = {load: [v for v in options.variants if (load, v) not in done] for load in loads}
        self._cold = [load for load in options.cold if (load, NO_WARMUP) not in done]
        self._programs: dict[Key, Any] = {}
        self._params: decoder.Params = {}
        self._cache: Any = None
        self._sampling = engine.Sampling(np.float32(1.0), jax.random.key(0))
        self._references: dict[Load, Reference] = {}
        self._piece_s: dict[Key, float] = {}
        self._steps: dict[Key, int] = {}

    # Programs.

    def width(self, load: Load) -> int:
        """Tokens of a sequence in a prefill step."""
        return engine.piece_width(*load, self.config.max_positions, self.options.piece_tokens)

    def keys(self, load: Load, variant: str) -> tuple[Key, Key]:
        """The programs of prefill and decode; raises NotImplementedError where there are none."""

        def key(width: int) -> Key:
            spec, tokens = self.config.moe.spec, load.concurrency * max(width, 1)
            cell = Cell(case=self.case, spec=spec, tokens=tokens, dtype=DTYPE.name, quant=self.quant)
            return Key(VARIANTS[variant].layer(cell), load.concurrency, width, load.slots)

        return key(self.width(load)), key(0)

    @functools.cached_property
    def _param_shapes(self) -> decoder.Params:
        return jax.eval_shape(lambda: serving_model.make_params(self.config, self.scheme))

    def arguments(self, key: Key) -> tuple[Any, ...]:
        """The shapes that a program is compiled for."""
        params = self._param_shapes
        if isinstance(key.layer, serving_model.BaselineLayer):
            params = jax.eval_shape(serving_model.transpose_experts, params)
        cache = jax.eval_shape(lambda: decoder.init_cache(self.config, key.batch, key.slots, DTYPE))
        state = jax.eval_shape(lambda: engine.init_state(key.batch))
        piece = engine.Piece(np.zeros((key.batch, key.width), np.int32), np.zeros(key.batch, np.int32))
        return params, cache, state, self._sampling, jax.eval_shape(lambda: piece) if key.width else None

    def compile(self, key: Key) -> Any:
        """Compile a program."""
        config = dataclasses.replace(self.config, moe=key.layer)
        return engine.step.lower(config, *self.arguments(key)).compile()

    def _compile_all(self) -> None:
        """Compile what is not there yet, in threads; the references' programs too."""
        jobs: dict[Key, Callable[[], Any]] = {}
        for load, names in self._wanted.items():
            for name in (PORTABLE, *names) if names else ():
                with contextlib.suppress(NotImplementedError):  # its row will say so
                    keys = [key for key in self.keys(load, name) if key not in self._programs]
                    jobs |= {key: functools.partial(self.compile, key) for key in keys}
        self._programs |= compile_all(
            jobs,
            deadline=self.options.deadline,
            progress=lambda done, total: self.progress(f"compile {done}/{total}", 0),
        )

    # The run.

    def run(self) -> Iterator[list[Row]]:
        """Measure load by load; yields the rows of each."""
        if (self._cold or any(self._wanted.values())) and not self.options.is_late:
            with self._timed("weights"):
                self._params = jax.block_until_ready(serving_model.make_params(self.config, self.scheme))
            with self._timed("cold"):
                for load in self._cold:
                    self.progress(f"{load} without warm-up", 0)
                    yield [self._serve_cold(load)]
            with self._timed("compile"):
                self._compile_all()
        with self._timed("measure"):
            for load, names in self._wanted.items():
                self.progress(str(load), 0)
                yield self._measure(load, [name for name in names if not VARIANTS[name].is_transposed])
                self.progress(str(load), 1)
        with self._timed("measure transposed"):
            transposed = {
                load: [name for name in names if VARIANTS[name].is_transposed]
                for load, names in self._wanted.items()
            }
            self._transpose(transposed)
            for load, names in transposed.items():
                yield self._measure(load, names)

    def release(self) -> None:
        """Free the device's memory."""
        self._params, self._cache, self._programs = {}, None, {}

    @contextlib.contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[stage] = round(time.monotonic() - began, 1)

    def _serve_cold(self, load: Load) -> Row:
        """One request, and no program there."""
        row = self._new_row(load, NO_WARMUP)
        with self._told_in(row, load):
            if jax.config.jax_compilation_cache_dir:
                raise NotImplementedError("JAX's compilation cache is on: nothing would be compiled")
            _ = self._param_shapes  # known in a server
            self._new_cache(load)
            prefill, decode = self.keys(load, "auto")
            row.update(_names(prefill, decode), ttft_ms=self._time_to_first_token(prefill, load) * 1e3)
            state, row["first_steps_ms"] = _after_prompts(load), []
            for _ in range(_FIRST_STEPS):
                began = time.perf_counter()
                state, _ = self._step(decode, state)
                np.asarray(state.tokens)
                row["first_steps_ms"].append(round((time.perf_counter() - began) * 1e3, 3))
            row["status"] = "ok"
        return row

    def _measure(self, load: Load, names: Sequence[str]) -> list[Row]:
        """Check some variants, then time them against each other."""
        rows = {name: self._new_row(load, name) for name in names}
        if not names or self.options.is_late:
            return list(rows.values())
        self._new_cache(load)
        keys: dict[str, tuple[Key, Key]] = {}
        with no_recompile():
            for name, row in rows.items():
                with self._told_in(row, load):
                    prefill, decode = self.keys(load, name)
                    row.update(_names(prefill, decode))
                    row["error"] = self._check(load, prefill, decode)
                    keys[name] = prefill, decode
            steps = self._visit(load, (decode for _, decode in keys.values()), self._decode)
            quick = (
                key for key, _ in keys.values() if self._predicted_s(key, load) <= self.options.longest_s
            )
            firsts = self._visit(load, quick, self._time_to_first_token)
        for name, (prefill, decode) in keys.items():
            row = rows[name]
            row["same_as"] = [
                next(other for other, pair in keys.items() if pair[i] == key)
                for i, key in enumerate((prefill, decode))
            ]
            with self._told_in(row, load):
                step_ms, step_spread = _median_ms([step for step, _ in steps[decode]()])
                row.update(
                    step_ms=step_ms,
                    step_spread=step_spread,
                    tokens_per_s=load.concurrency / step_ms * 1e3,
                    dispatch_ms=_median_ms([dispatch for _, dispatch in steps[decode]()])[0],
                    steps=self._steps[decode],
                    rounds=len(steps[decode]()),
                )
                if prefill in firsts:
                    row["ttft_ms"], row["ttft_spread"] = _median_ms(firsts[prefill]())
                else:
                    row["reason"] = f"no ttft_ms: predicted {self._predicted_s(prefill, load):.0f} s"
                row["status"] = "ok"
        return list(rows.values())

    def _visit[V](
        self, load: Load, keys: Iterable[Key], run: Callable[[Key, Load], V]
    ) -> dict[Key, Callable[[], list[V]]]:
        """Run programs in turn; key → what gives the results of its visits, or raises what they raised."""
        results: dict[Key, list[V]] = {key: [] for key in keys}
        errors: dict[Key, Exception] = {}
        spent = dict.fromkeys(results, 0.0)
        for _ in range(self.options.rounds):
            for key, values in results.items():
                count = len(values)
                if key in errors or spent[key] * (count + 1) > self.options.longest_s * max(count, 1):
                    continue
                began = time.perf_counter()
                try:
                    values.append(run(key, load))
                except Exception as error:  # out of memory, say
                    errors[key] = error
                    self._new_cache(load)
                spent[key] += time.perf_counter() - began

        def result(key: Key) -> list[V]:
            if key in errors:
                raise errors[key]
            return results[key]

        return {key: functools.partial(result, key) for key in results}

    # Steps.

    def _new_cache(self, load: Load) -> None:
        self._cache = None  # two may not fit
        self._cache = decoder.init_cache(self.config, load.concurrency, load.slots, DTYPE)

    def _step(
        self, key: Key, state: engine.State, piece: engine.Piece | None = None
    ) -> tuple[engine.State, jax.Array]:
        """The state after a step, and its logits; a program that is not there is compiled."""
        if key not in self._programs:
            self._programs[key] = self.compile(key)
        if isinstance(program := self._programs[key], BaseException):
            raise program
        self._cache, state, output = program(self._params, self._cache, state, self._sampling, piece)
        return state, output.logits

    def _pieces(self, load: Load) -> list[engine.Piece]:
        tokens = np.random.default_rng(0).integers(self.config.vocab_size, size=load)
        return list(engine.prompt_pieces(tokens.tolist(), self.width(load)))

    def _time_to_first_token(self, key: Key, load: Load) -> float:
        """Seconds from the prompts on the host to the first token of each there."""
        pieces, state = self._pieces(load), engine.init_state(load.concurrency)
        jax.block_until_ready((self._cache, state))
        began = time.perf_counter()
        for piece in pieces:
            state, _ = self._step(key, state, piece)
        np.asarray(state.tokens)
        return time.perf_counter() - began

    def _decode(self, key: Key, load: Load) -> tuple[float, float]:
        """Seconds of a step, and of its call, from the prompts' end on, whatever the cache holds."""

        def run(steps: int) -> tuple[float, float]:
            state = _after_prompts(load)
            jax.block_until_ready(self._cache)
            began = time.perf_counter()
            for _ in range(steps):
                state, _ = self._step(key, state)
            called = time.perf_counter()
            jax.block_until_ready(state)
            return (time.perf_counter() - began) / steps, (called - began) / steps

        if key not in self._steps:
            run(3)  # XLA makes a graph in the second
            self._steps[key] = int(np.clip(self.options.seconds / run(3)[0], _FEWEST_STEPS, _MOST_STEPS))
        return run(self._steps[key])

    def _predicted_s(self, prefill: Key, load: Load) -> float:
        return self._piece_s[prefill] * -(-load.prompt // prefill.width)

    # The check.

    def _first_piece(self, key: Key, load: Load) -> tuple[engine.State, np.ndarray]:
        """State and logits after the first piece of the prompts."""
        piece = self._pieces(load)[0]
        for _ in range(2):
            began = time.perf_counter()
            state, logits = self._step(key, engine.init_state(load.concurrency), piece)
            on_host = np.asarray(logits)
            self._piece_s[key] = time.perf_counter() - began
            if self._piece_s[key] > _SLOW_S:
                break
        return jax.device_get(state), on_host

    def _reference(self, load: Load) -> Reference:
        if load not in self._references:
            prefill, decode = self.keys(load, PORTABLE)
            state, logits = self._first_piece(prefill, load)
            self._references[load] = Reference(logits, state, np.asarray(self._step(decode, state)[1]))
        return self._references[load]

    def _check(self, load: Load, prefill: Key, decode: Key) -> float:
        """The larger error of both programs' logits; AssertionError if it is too large."""
        reference = self._reference(load)
        _, after_prefill = self._first_piece(prefill, load)
        _, after_decode = self._step(decode, reference.state)
        error = max(
            relative_error(after_prefill, reference.prefill),
            relative_error(np.asarray(after_decode), reference.decode),
        )
        allowed = ERROR_ALLOWED[self.quant]
        if not error <= allowed:  # a NaN is none
            raise AssertionError(f"logits differ by {error:.3g} of their RMS, allowed is {allowed}")
        return error

    def _transpose(self, wanted: Mapping[Load, Sequence[str]]) -> None:
        """Turn the experts' weights, for those that want them so and can run here."""
        if not any(isinstance(key.layer, serving_model.BaselineLayer) for key in self._programs):
            return
        for load, names in wanted.items():  # the portable backend takes them as they were
            if names and not self.options.is_late:
                self._new_cache(load)
                self._reference(load)
        serving_model.transpose_experts(self._params)

    # Rows.

    def _new_row(self, load: Load, variant: str) -> Row:
        return {
            "case": self.case,
            "quant": self.quant,
            "concurrency": load.concurrency,
            "prompt": load.prompt,
            "variant": variant,
            "status": "not reached",
            "reason": None,
            "tokens_per_s": None,
            "step_ms": None,
            "ttft_ms": None,
            "error": None,
            "error_allowed": ERROR_ALLOWED[self.quant],
            "width": self.width(load),
            "pieces": -(-load.prompt // self.width(load)),
            "slots": load.slots,
        }

    @contextlib.contextmanager
    def _told_in(self, row: Row, load: Load) -> Iterator[None]:
        """Put what goes wrong into the row."""
        try:
            yield
        except AssertionError as error:
            row.update(status="red", reason=str(error))
        except NotImplementedError as error:
            row.update(status="skipped", reason=_first_line(error))
        except TimeoutError as error:
            row.update(reason=_first_line(error))
        except Exception as error:
            row.update(status="failed", reason=f"{type(error).__name__}: {_first_line(error)}")
            self._new_cache(load)  # which may be lost


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """RMS of the difference over RMS."""
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))


def _median_ms(seconds: Sequence[float]) -> tuple[float, float]:
    """Median in ms, and (largest - smallest) / median."""
    middle = float(np.median(seconds))
    return middle * 1e3, (max(seconds) - min(seconds)) / middle


def _names(prefill: Key, decode: Key) -> dict[str, str]:
    return {
        "prefill": serving_model.name_of(prefill.layer),
        "decode": serving_model.name_of(decode.layer),
    }


def _after_prompts(load: Load) -> engine.State:
    """A state as prompts leave it."""
    rows = np.ones(load.concurrency, np.int32)
    return engine.State(rows, load.prompt * rows, rows > 0, np.zeros((), np.int32))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0][:300]
