"""The compiler for NVIDIA GPUs on a machine without one: where it is, and what a process needs to run it.

JAX's CUDA plugin compiles for a device that is only described (``devices/*.txtpb``): Pallas, Mosaic GPU, XLA,
LLVM and ptxas run as they would beside the GPU. It does so in a process of its own, with `environment`, since
the plugin has no place in one that runs on a CPU.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import sysconfig
from pathlib import Path

import jax

_FOLDER = Path(__file__).parent / "devices"
DEVICES = tuple(sorted(path.stem for path in _FOLDER.glob("*.txtpb")))
# Names another folder that holds the plugin and ptxas, for instance the site-packages of another environment.
TOOLCHAIN_VARIABLE = "MOE_PALLAS_AOT"


def toolchain() -> Path:
    """Find the folder that holds JAX's CUDA plugin and ptxas; it may lack them (`why_not`).

    The one that ``MOE_PALLAS_AOT`` names, else ``aot`` in the environment's folder if there is one, else the
    environment itself.
    """
    if named := os.environ.get(TOOLCHAIN_VARIABLE):
        return Path(named).resolve()
    apart = Path(sys.prefix) / "aot"
    return (apart if apart.is_dir() else Path(sysconfig.get_path("purelib"))).resolve()


def why_not() -> str | None:
    """Say why nothing can be compiled for a described GPU here; None if it can."""
    folder = toolchain()
    found = {d.name: d.version for d in importlib.metadata.distributions(path=[str(folder)])}
    version = found.get("jax-cuda13-plugin")
    if version is None:
        return (
            f"needs JAX's CUDA plugin in {folder}: pip install 'moe-pallas[aot]' on Linux (in a checkout "
            f"`make test` puts it there), or name the folder that has it in {TOOLCHAIN_VARIABLE}"
        )
    if version != jax.__version__:
        return f"needs JAX's CUDA plugin {jax.__version__}, the version of jax; {folder} has {version}"
    for tool in ["bin/ptxas", "nvvm/libdevice/libdevice.10.bc"]:
        if not (folder / "nvidia/cu13" / tool).is_file():
            return f"needs {tool}, which {folder}/nvidia/cu13 has not"
    return None


def environment() -> dict[str, str]:
    """Make the variables of a process that compiles."""
    folder = toolchain()
    path = [str(folder), *(entry for entry in sys.path if entry)]
    return {
        **os.environ,
        # A CUDA toolkit of the machine must not take the place of this one: for ptxas, for libdevice.
        "PATH": os.pathsep.join([str(folder / "nvidia/cu13/bin"), os.environ.get("PATH", "")]),
        "CUDA_ROOT": str(folder / "nvidia/cu13"),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "JAX_PLATFORMS": "cpu",
        # Compiling needs no cuDNN.
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "0",
    }


def described_sharding(device: str) -> jax.sharding.NamedSharding:
    """Make the sharding that puts arguments on a described device, in a process that has the plugin.

    Args:
      device: One of ``DEVICES``.
    """
    from jax.experimental import topologies

    text = (_FOLDER / f"{device}.txtpb").read_text(encoding="utf-8")
    topology = topologies.get_topology_desc(platform="cuda", target_config=text, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("device",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
