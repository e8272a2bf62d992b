"""Settings of every test: eight CPU devices, programs compiled fast, strict promotion, no time limit."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

# Sharding is tested on any machine, and most of the time goes into compiling what runs once: so without
# optimisation, and by the older of XLA's two ways to emit a fusion on a CPU, which takes a third of the time
# (jax 0.12 has the newer alone, which goes through MLIR). XLA reads the flags when jax makes its first CPU
# device; what is given from outside comes later in the line and so wins.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    f"--xla_cpu_parallel_codegen_split_count=1 {os.environ.get('XLA_FLAGS', '')}"
)

import aot
import hypothesis
import jax
import jaxlib
import numpy as np
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")

# A new shape costs a compilation, which no time limit on one example can allow for.
hypothesis.settings.register_profile("moe_pallas", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("moe_pallas")


def _why_not_hopper() -> str | None:
    """Why the tests marked gpu can't run here; None if they can."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"needs an NVIDIA Hopper GPU: jax runs on {device.platform}"
    capability = getattr(device, "compute_capability", "unknown")
    if capability != "9.0":
        return f"needs an NVIDIA Hopper GPU (compute capability 9.0): {device.device_kind} has {capability}"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-aot", action="store_true", help="fail, not skip, what needs the compiler for NVIDIA GPUs"
    )


def pytest_report_header() -> str:
    device = jax.devices()[0]
    return (
        f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, numpy {np.__version__} on "
        f"{jax.device_count()} × {device.device_kind}"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if why := _why_not_hopper():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=why))
    if not config.getoption("require_aot") and (why := aot.why_not()):
        for item in items:
            if item.get_closest_marker("aot"):
                item.add_marker(pytest.mark.skip(reason=why))


def pytest_collection_finish() -> None:
    """Look for garbage after each file alone, not among what all tests need: it took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.disable()


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """Free each file's programs: Linux lets a process have 65530 mappings, and every program takes some."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def h200() -> Iterator[aot.Compiler]:
    """Compiles for an H200, in processes that last as long as the tests."""
    with aot.Compiler() as compiler:
        yield compiler
