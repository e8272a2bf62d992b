"""What the kernels are worth in a whole model: ``python -m benchmarks.serving``.

    python -m benchmarks.serving --models qwen3-30b-a3b --quants none --json serving.json
    python -m benchmarks.serving --models mixtral-8x7b --quants fp8_block --concurrency 1,64 --prompts 128
    python -m benchmarks.serving --tiny                  the command itself, on a CPU

Tokens/s and time to first token of models of real shapes with random weights, by the engine of the examples,
for each of ``--variants`` in the place of the MoE layers. First a request is served without warm-up
(``--cold``). Then every program is compiled, in threads, and nothing may be compiled any more. Of each
variant the logits are compared with the portable backend's before it is timed.

The result file is written after every load. Started again with it, the command measures what it lacks.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags, logging

from benchmarks import cases, results, serving_model, serving_table
from benchmarks.choices import ALL, choose, counts
from benchmarks.serving_model import engine
from benchmarks.serving_session import Load, Options, Row, Session
from benchmarks.table import Progress

# Concurrency, prompts, loads that are served cold.
_LOADS = ["1", "4", "16", "64"], ["128", "2048"], ["16x2048"]
_TINY_LOADS = ["1", "4"], ["8", "48"], ["4x8"]

_MODELS = flags.DEFINE_list("models", [ALL], f"Models: {', '.join(serving_model.MODELS)}; or all.")
_QUANTS = flags.DEFINE_list(
    "quants", ["none"], f"How the experts are quantised: {', '.join(cases.QUANTS)}; or all."
)
_VARIANTS = flags.DEFINE_list(
    "variants", [ALL], f"In the MoE layers' place: {', '.join(serving_model.VARIANTS)}; or all."
)
_CONCURRENCY = flags.DEFINE_list("concurrency", None, f"Sequences at a time; default: {','.join(_LOADS[0])}.")
_PROMPTS = flags.DEFINE_list("prompts", None, f"Tokens of each prompt; default: {','.join(_LOADS[1])}.")
_COLD = flags.DEFINE_list(
    "cold", None, f"Loads that are served once before any warm-up, too; default: {','.join(_LOADS[2])}."
)
_JSON = flags.DEFINE_string("json", None, "Result file; one that is there is completed.")
_AGAIN = flags.DEFINE_bool("again", False, "Measure again what the result file has, too.")
_TIME_BUDGET = flags.DEFINE_float("time_budget_s", 0, "Begin no load after so many seconds; 0: never stop.")
_PIECE_TOKENS = flags.DEFINE_integer("piece_tokens", engine.PREFILL_TOKENS, "Tokens of a prefill step.")
_NUM_ROUNDS = flags.DEFINE_integer("num_rounds", 3, "Visits to each program.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 0.25, "Aimed at for a run of decode steps.")
_LONGEST = flags.DEFINE_float(
    "longest_s", 12.0, "A time to first token that will take longer, by its first piece, is left out."
)
_TRITON = flags.DEFINE_bool(
    "triton_gemm", False, "Let XLA try Triton for dense products, too: compiling takes far longer."
)
_COMMIT = flags.DEFINE_string("commit", None, "Commit that is measured, where git can't tell.")
_TINY = flags.DEFINE_bool("tiny", False, "A tiny model, to see the command work on a CPU.")

CONDITIONS = {
    "tokens_per_s": "output tokens of all sequences together while decoding: concurrency / step_ms",
    "step_ms": "of a decode step, sampling on the device included: `steps` of them queued back to back, the "
    "host waiting only for the last, from the end of the prompt on; median of `rounds` runs",
    "ttft_ms": "time to first token: from the prompts on the host to the first token of all of them on the "
    "host; median of `rounds`. Prompts of more than piece_tokens tokens together run in `pieces` steps of "
    "`width` tokens a sequence",
    "dispatch_ms": "for the call of a decode step to return; near step_ms, the host is what limits",
    "step_spread, ttft_spread": "(largest - smallest) / median",
    "no_warmup": "the load served once before any other of its shapes was compiled in this process, without "
    "JAX's compilation cache: ttft_ms and first_steps_ms include compiling",
    "error": "RMS of the difference of logits over their RMS, against the portable backend: after the first "
    "piece of the prompt, and after a decode step from the same token; the larger. More than "
    "error_allowed is red, and nothing is timed",
    "same_as": "variants that have the same program for prefill or decode share what was measured of it",
    "model": "random weights, of the router too, so routing is close to uniform; prompts are random tokens, "
    "sampling is at temperature 1",
    "cache": "bfloat16, prompt + 128 slots; attention is XLA's and reads all slots",
    "dense products": "cuBLAS for all variants, unless triton_gemm",
    "variants": {name: variant.what for name, variant in serving_model.VARIANTS.items()},
    "status": "ok; red: error over the allowed, nothing timed; failed, skipped: see reason; not reached: the "
    "time budget ran out",
}


def measure(
    models: Sequence[str],
    quants: Sequence[str],
    loads: Sequence[Load],
    options: Options,
    *,
    json: str | None = None,
    tiny: bool = False,
    again: bool = False,
    commit: str | None = None,
) -> dict[str, Any]:
    """Measure models and write the result file on the way.

    Args:
      models: Names.
      quants: How experts are quantised.
      loads: What to serve.
      options: How.
      json: Result file or None.
      tiny: Whether models are tiny ones.
      again: Whether rows that the file has are measured again.
      commit: Recorded in the result.

    Returns:
      The result: a header and ``rows``.

    Raises:
      ValueError: The file's rows were measured on another device, jax or commit.
    """
    head = results.header(commit, conditions=CONDITIONS, stages={}, failures=[])
    rows: dict[tuple[Any, ...], Row] = {}
    if json and Path(json).exists() and not again:
        old = results.read(json)
        for name in ("device", "jax", "commit"):
            if old[name] != head[name]:
                raise ValueError(
                    f"{json} was measured with {name} {old[name]}, this is {head[name]}: give --again, or "
                    "another file."
                )
        rows = {_key(row): row for row in old["rows"]}
        head["stages"] = old["stages"]
    progress = Progress(len(models) * len(quants) * len(loads))
    known = serving_model.TINY_MODELS if tiny else serving_model.MODELS
    for case, quant in itertools.product(models, quants):
        title = f"{case} {quant}"
        session = Session(
            case,
            known[case],
            quant,
            loads,
            options,
            {
                (Load(row["concurrency"], row["prompt"]), row["variant"])
                for row in rows.values()
                if (row["case"], row["quant"]) == (case, quant) and row["status"] in ("ok", "skipped")
            },
            lambda what, finished, title=title: progress(f"{title}: {what}", finished=finished),  # type: ignore[misc]
        )
        try:
            for new in session.run():
                rows |= {_key(row): row for row in new}
                for row in new:
                    print(serving_table.line(row), flush=True)
                head["stages"][title] = session.seconds
                if json:
                    results.write(json, head, list(rows.values()))
        except Exception as error:  # a model that does not fit, say; the others are still wanted
            traceback.print_exc()
            head["failures"].append(f"{title}: {error}"[:300])
        session.release()
    result = {**head, "rows": list(rows.values())}
    if json:
        results.write(json, head, result["rows"])
    progress("done", last=True)
    return result


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("case", "quant", "concurrency", "prompt", "variant"))


def main(argv: Sequence[str]) -> None:
    """Do what the flags say."""
    logging.set_verbosity(logging.WARNING)  # else absl prints what jax looks for and does not find
    if len(argv) > 1:
        raise app.UsageError(f"there are no arguments beside flags; got {argv[1:]}")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    triton = f"--xla_gpu_enable_triton_gemm={str(_TRITON.value).lower()}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {triton}".strip()
    known = serving_model.TINY_MODELS if _TINY.value else serving_model.MODELS
    defaults = _TINY_LOADS if _TINY.value else _LOADS
    flagged = _CONCURRENCY.value, _PROMPTS.value, _COLD.value
    concurrency, prompts, cold = (
        default if value is None else value for value, default in zip(flagged, defaults, strict=True)
    )
    loads = itertools.product(counts("concurrency", concurrency), counts("prompts", prompts))
    options = Options(
        variants=choose("variants", _VARIANTS.value, list(serving_model.VARIANTS)),
        cold=[Load(*counts("cold", load.split("x"))) for load in cold],
        rounds=_NUM_ROUNDS.value,
        seconds=0.01 if _TINY.value else _SECONDS.value,
        longest_s=_LONGEST.value,
        piece_tokens=64 if _TINY.value else _PIECE_TOKENS.value,
        deadline=time.monotonic() + _TIME_BUDGET.value if _TIME_BUDGET.value else math.inf,
    )
    try:
        result = measure(
            choose("models", _MODELS.value, list(known)),
            choose("quants", _QUANTS.value, list(cases.QUANTS)),
            [Load(*load) for load in loads],
            options,
            json=_JSON.value,
            tiny=_TINY.value,
            again=_AGAIN.value,
            commit=_COMMIT.value,
        )
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    print(f"\n{serving_table.render([result])}")
    for title, seconds in result["stages"].items():
        print(f"{title}: {', '.join(f'{what} {s:.0f} s' for what, s in seconds.items())}", file=sys.stderr)
    wrong = [row for row in result["rows"] if row["status"] in ("red", "failed")]
    for row in wrong:
        print(serving_table.line(row), file=sys.stderr)
    for failure in result["failures"]:
        print(f"Not measured: {failure}", file=sys.stderr)
    if wrong or result["failures"]:
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
