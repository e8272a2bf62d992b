"""The one command for a kernel author on a Hopper machine: ``python -m benchmarks.gpu_check``.

Correctness, stress, then a short timing table. Each case runs in a process of its own, with a timeout: a
kernel that hangs or poisons the device costs one case. The summary comes last; the exit status is 0 only if
nothing failed. Whoever ends it early ends the case in hand with it.

    tests                    pytest -m gpu
    correctness:MODEL        every backend, several T, loads and quants: sampled rows against the float64
                             truth, and all rows against the portable backend
    stress:MODEL             50 calls with changing routing and T, each bitwise equal to its first result
    timing                   benchmarks.run on the same models

``--tiny`` takes tiny models, to try the command itself on a CPU.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import cases, gate
from benchmarks.inputs import Inputs
from benchmarks.results import FOLDER
from benchmarks.variants import OURS, VARIANTS, Variant
from moe_pallas import fused_moe
from moe_pallas.testing import assert_close

_ROOT = FOLDER.parent.parent
_KINDS = ("tests", "correctness", "stress", "timing")
_MODELS = ("qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-120b", "olmoe")
_TOKENS = (1, 7, 64, 257, 1031)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=__doc__.split("\n")[0]
    )
    split = lambda text: text.split(",")  # noqa: E731
    ours = [name for name, variant in VARIANTS.items() if variant.kind == OURS]
    parser.add_argument("--only", type=split, default=list(_KINDS), help=f"some of {','.join(_KINDS)}")
    parser.add_argument("--models", type=split, help=f"default: {','.join(_MODELS)}")
    parser.add_argument("--backends", type=split, default=ours, help=f"default: {','.join(ours)}")
    parser.add_argument("--tokens", type=split, help=f"default: {','.join(map(str, _TOKENS))}")
    parser.add_argument("--quants", type=split, default=["none"], help=f"some of {','.join(cases.QUANTS)}")
    parser.add_argument("--repeats", type=int, default=50, help="calls of a stress case")
    parser.add_argument("--timeout_s", type=float, default=240, help="of each case")
    parser.add_argument("--tiny", action="store_true", help="tiny models and token counts, for a CPU")
    parser.add_argument("--case", help="run this one case here, in this process")
    options = parser.parse_args(argv)
    if unknown := set(options.only) - set(_KINDS):
        parser.error(f"--only: no {', '.join(sorted(unknown))}; there are {', '.join(_KINDS)}")
    known = cases.TINY_MODELS if options.tiny else cases.MODELS
    options.models = options.models or (list(known) if options.tiny else list(_MODELS))
    options.tokens = [int(t) for t in options.tokens or (cases.TINY_TOKENS if options.tiny else _TOKENS)]
    for flag, names, all_names in (
        ("models", options.models, known),
        ("backends", options.backends, ours),
        ("quants", options.quants, cases.QUANTS),
    ):
        if unknown := set(names) - set(all_names):
            parser.error(f"--{flag}: no {', '.join(sorted(unknown))}; there are {', '.join(all_names)}")
    return options


def main(argv: Sequence[str]) -> int:
    """Run the cases, or with ``--case`` one of them; returns the exit status."""
    options = parse(argv)
    if options.case:
        kind, _, model = options.case.partition(":")
        {"correctness": correctness, "stress": stress}[kind](model, options)
        return 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Under nohup, say, one is ignored and stays so.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _Ending.exit)
    outcomes = []
    for name, command in _commands(options):
        print(f"\n== {name}", flush=True)
        start = time.monotonic()
        outcome = run_case(command, options.timeout_s)
        if name == "tests" and outcome == "exit status 5":
            outcome = "ok (no test is marked gpu)"
        outcomes.append((name, outcome, time.monotonic() - start))
    print("\nsummary")
    for name, outcome, seconds in outcomes:
        print(f"  {name:32} {seconds:6.1f} s  {outcome}")
    failed = sum(not outcome.startswith("ok") for _, outcome, _ in outcomes)
    print(f"{len(outcomes) - failed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


class _Ending:
    """Signals end by an exception, which `run_case` sees; they are held while a case is being started."""

    held: list[int] | None = None

    @classmethod
    def exit(cls, number: int, frame: types.FrameType | None = None) -> None:
        if cls.held is None:
            sys.exit(128 + number)
        cls.held.append(number)

    @classmethod
    def let_go(cls) -> None:
        """Let signals act again, first those that came meanwhile."""
        held, cls.held = cls.held, None
        for number in held or ():
            cls.exit(number)


def run_case(command: Sequence[str], timeout_s: float) -> str:
    """Run a command, its output to ours; returns ``"ok"`` or what went wrong."""
    # In a session of its own, so that a timeout ends its children too.
    _Ending.held = []
    try:
        process = subprocess.Popen(command, cwd=_ROOT, start_new_session=True)
    except BaseException:
        _Ending.held = None
        raise
    try:
        _Ending.let_go()
        status = process.wait(timeout_s)
    except BaseException as error:
        # If this process is to end, so must the case: nothing else would end it, and it holds the GPU.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            return f"timeout after {timeout_s:.0f} s"
        raise
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return "ok" if status == 0 else f"exit status {status}"


def _commands(options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    python = [sys.executable, "-m"]
    tiny = ["--tiny"] if options.tiny else []
    backends, quants = f"--backends={','.join(options.backends)}", f"--quants={','.join(options.quants)}"
    tokens = f"--tokens={','.join(map(str, options.tokens))}"
    if "tests" in options.only:
        yield "tests", [*python, "pytest", "-q", "-m", "gpu", "tests"]
    for kind in ("correctness", "stress"):
        for model in options.models if kind in options.only else ():
            name, repeats = f"{kind}:{model}", f"--repeats={options.repeats}"
            own = [f"--case={name}", tokens, backends, quants, repeats, *tiny]
            yield name, [*python, "benchmarks.gpu_check", *own]
    if "timing" in options.only:
        how = ["--num_layers=2"] if options.tiny else ["--tokens=1,8,64,512,4096"]
        how += [f"--models={','.join(options.models)}", backends, quants, "--num_rounds=5"]
        how += [f"--time_budget_s={0.8 * options.timeout_s:.0f}", *tiny]
        yield "timing", [*python, "benchmarks.run", *how]


def correctness(model: str, options: argparse.Namespace) -> None:
    """Compare every backend with the truth and with the portable backend; raises AssertionError."""
    for quant, load in itertools.product(options.quants, cases.LOADS):
        cells = _cells(model, quant, load, options)
        inputs = Inputs(cells, [0.0] * len(cells), 1, 0)
        largest = max(cells, key=lambda cell: cell.tokens)
        truth = gate.Truth(cells, inputs.logits(largest, 0), inputs.tokens, *inputs.weights[0])
        for cell in cells:
            x, logits = inputs.rows(cell, VARIANTS["xla"]), jnp.asarray(inputs.logits(cell, 0))
            weights = inputs.weights[0]
            outputs = {
                v.name: np.asarray(_layer(cell, v)(x, logits, *weights)) for v in _supported(cell, options)
            }
            for name, y in outputs.items():
                error = truth.check(cell, y)
                print(f"{cell} {name}: error {error:.2e}", flush=True)
            wanted = outputs["xla"].astype(np.float64)
            for name, y in outputs.items():
                # Each of the two may be a tolerance off.
                near = wanted + (y.astype(np.float64) - wanted) / 2
                context = f"{cell} {name}, all rows, against xla"
                in_fp8 = cell.scheme is not None
                assert_close(near, wanted, dtype=cell.dtype, context=context, quantised=in_fp8, wgmma=in_fp8)


def stress(model: str, options: argparse.Namespace) -> None:
    """Call every backend again and again, T and routing changing; raises AssertionError."""
    for quant in options.quants:
        _stress([cell for load in cases.LOADS for cell in _cells(model, quant, load, options)], options)


def _stress(cells: Sequence[cases.Cell], options: argparse.Namespace) -> None:
    inputs = Inputs(cells, [0.0] * len(cells), 1, 0)
    for name in options.backends:
        calls = []
        for cell in cells:
            if name in [variant.name for variant in _supported(cell, options)]:
                x, logits = inputs.rows(cell, VARIANTS[name]), jnp.asarray(inputs.logits(cell, 0))
                layer = _layer(cell, VARIANTS[name])
                calls.append((cell, functools.partial(layer, x, logits, *inputs.weights[0])))
        if not calls:
            continue  # it can do none of them, and was said to
        first = [np.asarray(call()) for _, call in calls]
        order = np.random.default_rng(0).integers(len(calls), size=options.repeats)
        # All queued before the first is looked at, so that calls follow each other without a pause.
        outputs = [calls[i][1]() for i in order]
        for i, y in zip(order, outputs, strict=True):
            if not np.array_equal(np.asarray(y).view(np.uint8), first[i].view(np.uint8)):
                raise AssertionError(f"{name}: {calls[i][0]} is not bitwise what it was before")
        kind = f"{name} {cells[0].quant}"
        print(f"{kind}: {len(order)} calls of {len(calls)} shapes and loads repeat bitwise", flush=True)


def _cells(model: str, quant: str, load: str, options: argparse.Namespace) -> list[cases.Cell]:
    spec = (cases.TINY_MODELS if options.tiny else cases.MODELS)[model]
    return cases.cells({model: spec}, options.tokens, ["bfloat16"], [load], [quant])


def _supported(cell: cases.Cell, options: argparse.Namespace) -> Iterator[Variant]:
    """The portable backend, and of those asked for the ones that can do the cell."""
    for name in dict.fromkeys(["xla", *options.backends]):
        if reason := VARIANTS[name].supports(cell, jax.default_backend()):
            print(f"{cell} {name}: {reason}", flush=True)
        else:
            yield VARIANTS[name]


@functools.cache
def _jitted(spec: cases.MoESpec, backend: str) -> jax.stages.Wrapped:
    return jax.jit(functools.partial(fused_moe, spec=spec, backend=backend))


def _layer(cell: cases.Cell, variant: Variant) -> jax.stages.Wrapped:
    return _jitted(cell.spec, variant.name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
