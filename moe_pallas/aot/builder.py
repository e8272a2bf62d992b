"""Building a bundle, in a process of its own."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from moe_pallas.aot import toolchain
from moe_pallas.aot.bundle import Header, read_header, save
from moe_pallas.errors import UnsupportedError
from moe_pallas.oracle import assume_device, describe_device
from moe_pallas.warmup import Args, as_step, warmup

HERE = "here"  # the device that JAX uses on this machine

Progress = Callable[[int, int, int, float], None]


def build(
    target: str,
    path: str | os.PathLike[str],
    *,
    device: str,
    max_tokens: int = 8192,
    progress: Progress | None = None,
) -> Header:
    """Compile a layer or a step of a model for every token bucket, and write a bundle.

    Args:
      target: ``"path/to/file.py:name"``, a function without arguments that returns what
        `moe_pallas.warmup.warmup` is given beside max_tokens: ``(layer, params)`` or ``(function, args)``.
        Shapes do (`jax.eval_shape`): a machine that builds needs no room for a model.
      path: Of the file to write.
      device: ``"h200"`` or ``"h100"`` (SXM), on any machine with the ``aot`` extra; ``"here"``: the one that
        JAX uses on this machine.
      max_tokens: The largest batch, see `moe_pallas.warmup.token_buckets`.
      progress: As in `moe_pallas.warmup.warmup`.

    Returns:
      What the file says of itself.

    Raises:
      ValueError: target or device are not of that form.
      UnsupportedError: Nothing can be compiled for that device on this machine.
      RuntimeError: The process that compiles failed, with its last words.
    """
    file, _, name = target.rpartition(":")
    if not (file.endswith(".py") and os.path.isfile(file) and name.isidentifier()):
        raise ValueError(f"target is like 'path/to/file.py:function', of a file that exists; got {target!r}.")
    if device not in (HERE, *toolchain.DEVICES):
        names = ", ".join(map(repr, (*toolchain.DEVICES, HERE)))
        raise ValueError(f"device is one of {names}; got {device!r}.")
    file, path = os.path.abspath(file), os.path.abspath(path)
    if device == HERE:
        environment = _environment_here()
    elif why := toolchain.why_not():
        raise UnsupportedError("aot.build", f"{device}: {why}.", f"device={HERE!r}, beside such a GPU.")
    else:
        environment = toolchain.environment()
    arguments = [file, name, path, device, str(max_tokens)]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", "from moe_pallas.aot import builder; builder.work()", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
        assert process.stdout is not None
        with process:
            for line in process.stdout:
                done, total, bucket, seconds = line.split()
                if progress is not None:
                    progress(int(done), int(total), int(bucket), float(seconds))
        if process.returncode:
            said.seek(0)
            raise RuntimeError(
                f"{target} did not compile for {device}, status {process.returncode}:\n{said.read()[-4000:]}"
            )
    return read_header(path)


def _environment_here() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "JAX_ENABLE_COMPILATION_CACHE": "0",  # see `save`
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # this process may have the GPU's memory
    }


def work() -> None:
    """Build what the command line asks for, and list programs on stdout: what `build` runs elsewhere."""
    # Compilers print: the pipe is kept out of their reach.
    pipe = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    file, name, path, device, max_tokens = sys.argv[1:]
    sharding = None if device == HERE else toolchain.described_sharding(device)
    described = assume_device(describe_device(*sharding.device_set)) if sharding else contextlib.nullcontext()
    with described:
        function, args = as_step(*_call(file, name))
        programs = warmup(
            function,
            int(max_tokens),
            _placed(args, sharding) if sharding else args,
            progress=lambda *news: print(*news, file=pipe),
        )
    save(programs, path)


def _placed(args: Args, sharding: jax.sharding.Sharding) -> Args:
    def placed(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) if hasattr(x, "shape") else x

    return lambda bucket: jax.tree.map(placed, args(bucket))


def _call(file: str, name: str) -> tuple[Any, Any]:
    """What a file's function returns; imported as ``import`` would, so that its classes have their names."""
    sys.path.insert(0, os.path.dirname(file))
    try:
        module = importlib.import_module(Path(file).stem)
        if not os.path.samefile(str(module.__file__), file):
            raise ValueError(f"{file} can't be imported: {module.__file__} has its name. Rename it.")
        return getattr(module, name)()
    finally:
        sys.path.remove(os.path.dirname(file))
