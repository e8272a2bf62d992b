"""A file of compiled programs: a line that says what it is, a line of JSON that says for whom, the programs.

    moe_pallas bundle 1
    {"jax": "0.11.2", "jaxlib": "0.11.2", "device": {"name": "NVIDIA H200", …}, "buckets": [1, 2, …], …}
    a pickle of {bucket: (serialised executable, tree of its arguments, tree of its results)}

The first two lines are read, and held against this machine, before anything is unpickled.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import jax
import jaxlib
from jax.experimental import serialize_executable

from moe_pallas.errors import UnsupportedError
from moe_pallas.oracle import describe_device
from moe_pallas.spec import DeviceInfo
from moe_pallas.untrusted import clipped, parse_json
from moe_pallas.warmup import Programs

_FORMAT = b"moe_pallas bundle "
_VERSION = 1
_MAX_HEADER_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """What a bundle says of itself.

    Attributes:
      jax: Version of jax that compiled it.
      jaxlib: Version of jaxlib.
      device: That it was compiled for.
      buckets: Numbers of tokens that there are programs for.
      payload_bytes: Size of the programs.
      sha256: Their checksum, in hexadecimal. It finds damage; whoever changes programs can change it too.
    """

    jax: str
    jaxlib: str
    device: DeviceInfo
    buckets: tuple[int, ...]
    payload_bytes: int
    sha256: str


def save(programs: Mapping[int, jax.stages.Compiled], path: str | os.PathLike[str]) -> Header:
    """Write programs to a file; a file that is there is replaced at once, or not at all.

    Args:
      programs: Bucket → program, as `moe_pallas.warmup.warmup` makes them, of one device.
      path: Of the file.

    Returns:
      What the file says of itself.

    Raises:
      ValueError: No programs, or programs of several devices; programs for a CPU that may be out of the
        compilation cache.

    Example:
      >>> import tempfile, jax
      >>> from moe_pallas import MoE, MoESpec, aot
      >>> from moe_pallas.warmup import warmup
      >>> layer = MoE(MoESpec(num_experts=4, top_k=2, hidden_size=8, intermediate_size=16))
      >>> params = layer.init(jax.random.key(0))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     header = aot.save(warmup(layer, 4, params), f"{folder}/layer.bundle")
      ...     programs = aot.load(f"{folder}/layer.bundle")
      >>> header.buckets, programs[2](params, jax.numpy.ones((2, 8)), jax.numpy.int32(1)).shape
      ((1, 2, 4), (2, 8))
    """
    devices = {device for program in programs.values() for device in _devices(program)}
    if len(devices) != 1:
        raise ValueError(
            f"A bundle holds programs of one device; got {len(programs)} programs of {len(devices)} devices. "
            "Programs of several are compiled where they run: warmup, and JAX's compilation cache."
        )
    device = describe_device(devices.pop())
    if device.platform == "cpu" and _has_compilation_cache():
        # XLA loses a CPU program's functions when it is serialised twice: seen in jaxlib 0.11.2 and 0.12.0.1.
        raise ValueError(
            "A program for a CPU that came from the compilation cache can't be saved, and these may have. "
            'Compile them with jax.config.update("jax_enable_compilation_cache", False), or use aot.build.'
        )
    payload = pickle.dumps(
        {bucket: serialize_executable.serialize(program) for bucket, program in programs.items()}
    )
    header = Header(
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
        device=device,
        buckets=tuple(programs),
        payload_bytes=len(payload),
        sha256=hashlib.sha256(payload).hexdigest(),
    )
    path = Path(path)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as file:
            file.write(_FORMAT + b"%d\n" % _VERSION)
            file.write(json.dumps(dataclasses.asdict(header)).encode() + b"\n")
            file.write(payload)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return header


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read what a bundle says of itself. Nothing is unpickled: any file is safe to read.

    Raises:
      ValueError: The file is no bundle.
      UnsupportedError: It is one of another version of the format.
    """
    with open(path, "rb") as file:
        return _read_header(file, path)


def load(path: str | os.PathLike[str]) -> Programs:
    """Load a bundle's programs onto the first device of this process. No compiler is run.

    **The file must come from a source that you trust, like a program that you run**: JAX's loader unpickles
    it, and a pickle can do anything. What is checked before, that it fits this machine and is undamaged, is
    no protection against a file made to do harm.

    Classes of the caller's own in the arguments (registered pytree nodes) must be imported before.

    Args:
      path: Of a file that `save` or `build` wrote.

    Returns:
      Bucket → program, as `moe_pallas.warmup.warmup` returns them, bitwise the same ones.

    Raises:
      ValueError: The file is no bundle, or is damaged.
      UnsupportedError: It was compiled by another jax or jaxlib, or for another kind of device.
    """
    device = jax.devices()[0]
    with open(path, "rb") as file:
        header = _read_header(file, path)
        if differences := _differences(header, describe_device(device)):
            raise UnsupportedError(
                "aot.load",
                f"{os.fspath(path)} does not fit this machine: {'; '.join(differences)}.",
                "a bundle built for this device by these versions (python -m moe_pallas.aot).",
            )
        payload = file.read()
    if (len(payload), hashlib.sha256(payload).hexdigest()) != (header.payload_bytes, header.sha256):
        raise ValueError(
            f"{os.fspath(path)} is damaged: {len(payload)} bytes of programs, of {header.payload_bytes} with "
            "another checksum. Copy it again, or build it again."
        )
    programs: Programs = {}
    for bucket, (executable, in_tree, out_tree) in pickle.loads(payload).items():
        programs[bucket] = serialize_executable.deserialize_and_load(
            executable, in_tree, out_tree, backend=device.client, execution_devices=[device]
        )
    return programs


def _has_compilation_cache() -> bool:
    return bool(jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir)


def _devices(program: jax.stages.Compiled) -> set[jax.Device]:
    shardings = jax.tree.leaves((program.input_shardings, program.output_shardings))
    return {device for sharding in shardings for device in sharding.device_set}


def _read_header(file: BinaryIO, path: str | os.PathLike[str]) -> Header:
    first = file.readline(len(_FORMAT) + 20)
    if not first.startswith(_FORMAT):
        raise ValueError(f"{os.fspath(path)} is no bundle: it does not begin with {_FORMAT.decode()!r}.")
    version = first.removeprefix(_FORMAT).strip().decode(errors="replace")
    if version != str(_VERSION):
        raise UnsupportedError(
            "aot.load",
            f"{os.fspath(path)} has format {version}, this moe_pallas reads {_VERSION}.",
            "a bundle built by this version of moe_pallas.",
        )
    try:
        fields = parse_json(file.readline(_MAX_HEADER_BYTES))
        device = DeviceInfo(**fields.pop("device"))
        return Header(**fields | {"buckets": tuple(fields["buckets"])}, device=device)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{os.fspath(path)} is no bundle: its header can't be read ({clipped(str(error))})."
        ) from error


def _differences(header: Header, device: DeviceInfo) -> list[str]:
    """What the bundle was compiled for and this machine is not, one phrase each."""
    pairs = {
        "jax": (header.jax, jax.__version__),
        "jaxlib": (header.jaxlib, jaxlib.__version__),
        "platform": (header.device.platform, device.platform),
        "device": (header.device.name, device.name),
        "compute capability": (header.device.compute_capability, device.compute_capability),
        "number of SMs": (header.device.num_sms, device.num_sms),
    }
    return [
        f"it needs {name} {needed or 'none'}, here is {got or 'none'}"
        for name, (needed, got) in pairs.items()
        if needed != got
    ]
