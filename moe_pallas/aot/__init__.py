"""Programs compiled ahead of time, on a machine that need not have the device they run on.

    python -m moe_pallas.aot --device h200 --output step.bundle serve.py:build    # on any machine
    programs = moe_pallas.aot.load("step.bundle")                                 # on one with the GPU

A bundle is trusted input: loading it can run any code, see `load`.
"""

from __future__ import annotations

from moe_pallas.aot.builder import build
from moe_pallas.aot.bundle import Header, load, read_header, save
from moe_pallas.aot.toolchain import DEVICES, why_not

__all__ = ["DEVICES", "Header", "build", "load", "read_header", "save", "why_not"]
