"""What processes are given that tests start."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(*paths: Path, num_devices: int | None = None, quick: bool = True) -> dict[str, str]:
    """The variables of a process on a CPU that finds the package.

    Args:
      paths: Where else it looks for modules.
      num_devices: Devices of its CPU; None leaves that to the process.
      quick: Compiles as the tests do (`conftest`), not as a user does.
    """
    flags = os.environ["XLA_FLAGS"] if quick else ""
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags)
    if num_devices is not None:
        flags += f" --xla_force_host_platform_device_count={num_devices}"
    path = [str(ROOT), *map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
