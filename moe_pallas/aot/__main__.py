"""Builds a bundle of compiled programs, see `moe_pallas.aot.build`.

python -m moe_pallas.aot --device h200 --output step.bundle path/to/serve.py:build
"""

from __future__ import annotations

import sys
import time

from absl import app, flags, logging

from moe_pallas.aot import DEVICES, build
from moe_pallas.aot.builder import HERE
from moe_pallas.errors import UnsupportedError

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Define the command's flags."""
    flags.DEFINE_enum(
        "device", None, [*DEVICES, HERE], "To compile for; here: the device that JAX uses here."
    )
    flags.DEFINE_string("output", None, "File to write.")
    flags.DEFINE_integer("max_tokens", 8192, "The largest batch.", lower_bound=1)
    flags.mark_flags_as_required(["device", "output"])


def show_progress(done: int, total: int, bucket: int, seconds: float) -> None:
    """Print a line for a compiled program."""
    print(f"{done}/{total} compiled for {bucket} tokens in {seconds:.1f} s", file=sys.stderr, flush=True)


def main(argv: list[str]) -> int | str:
    """Build the bundle that the command line asks for."""
    logging.set_verbosity(logging.WARNING)  # progress is shown as it is
    if len(argv) != 2:
        return f"error: one target is needed, like 'path/to/serve.py:build'; got {argv[1:]}."
    began = time.perf_counter()
    try:
        header = build(
            argv[1],
            FLAGS.output,
            device=FLAGS.device,
            max_tokens=FLAGS.max_tokens,
            progress=show_progress,
        )
    except (UnsupportedError, ValueError, OSError, RuntimeError) as error:
        return f"error: {error}"
    print(
        f"{FLAGS.output}: {len(header.buckets)} programs, {header.payload_bytes / 1e6:.1f} MB, for "
        f"{header.device.name or header.device.platform} and jax {header.jax}, in "
        f"{time.perf_counter() - began:.0f} s"
    )
    return 0


if __name__ == "__main__":
    define_flags()
    app.run(main)
