"""The header of a safetensors file, checked whole before a tensor of it is touched.

    8 bytes: length of the header, little endian | header: JSON | data
    header: {"name": {"dtype": "BF16", "shape": [8, 64], "data_offsets": [0, 1024]}, …, "__metadata__": {…}}

The tensors fill the data without gap or overlap, as the format demands, so that together they claim no more
bytes than the file has.
"""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

from moe_pallas.untrusted import clipped, is_name, parse_json

MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
_MAX_AXES = 64  # NumPy's
_MAX_BYTES = 2**63 - 1
# Bits of an entry.
_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor: its dtype in safetensors' words, its shape, and which bytes of the file it is."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path) -> dict[str, Entry]:
    """Read and check the header of a safetensors file.

    Returns:
      Name → entry.

    Raises:
      ValueError: Whatever is wrong with it, with the tensor's name, what it says and what the file has.
      OSError: The file can't be read.
    """
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size < 8:
            raise ValueError(f"it has {size} bytes; need 8 for the header's length alone")
        length, held = int.from_bytes(stream.read(8), "little"), size - 8
        if length > min(held, MAX_HEADER_BYTES):
            raise ValueError(
                f"its header claims {length} bytes; the file has {held} for it, and a header at most "
                f"{MAX_HEADER_BYTES}"
            )
        text = stream.read(length)
    try:
        content = parse_json(text)
    except ValueError as error:
        raise ValueError(f"its header is no readable JSON: {error}") from error
    metadata = content.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise ValueError("its __metadata__ is an object of texts or left out; got something else")
    begin = 8 + length
    entries = {name: _entry(name, stated, begin, size - begin) for name, stated in content.items()}
    _check_cover(entries, begin, size)
    return entries


def _entry(name: str, stated: Any, begin: int, data_bytes: int) -> Entry:
    shown = clipped(ascii(name))
    if not is_name(name):
        raise ValueError(f"tensor {shown} has a name that can't be shown; need printable characters, ≤ 1024")
    if not isinstance(stated, dict):
        raise ValueError(f"tensor {shown} has an object for its entry; got {clipped(repr(stated))}")
    dtype: Any = stated.get("dtype")
    shape: Any = stated.get("shape")
    offsets: Any = stated.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"tensor {shown} has a dtype of {', '.join(_BITS)}; got {clipped(repr(dtype))}")
    if not _are_counts(shape):
        raise ValueError(f"tensor {shown} has for its shape a list of ints >= 0; got {clipped(repr(shape))}")
    if len(shape) > _MAX_AXES:
        raise ValueError(f"tensor {shown} has at most {_MAX_AXES} axes; got {len(shape)}")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(
            f"tensor {shown} has for data_offsets two ints, from and to; got {clipped(repr(offsets))}"
        )
    start, stop = offsets
    if stop > data_bytes:
        raise ValueError(
            f"tensor {shown} has the bytes {start} … {stop}; the file holds "
            f"{_counted(data_bytes, 'byte')} of data"
        )
    bits = math.prod(shape) * _BITS[dtype]
    if bits != 8 * (stop - start):
        need = _counted(bits // 8, "byte") if bits % 8 == 0 else _counted(bits, "bit")
        raise ValueError(
            f"tensor {shown} is {dtype}{clipped(str(shape))}, which is {need}; its offsets hold "
            f"{_counted(stop - start, 'byte')}"
        )
    # An array of no entries has axes too, and NumPy multiplies the others.
    if math.prod(filter(None, shape)) * _BITS[dtype] // 8 > _MAX_BYTES:
        raise ValueError(f"tensor {shown} has the shape {clipped(str(shape))}, past what an array can have")
    return Entry(dtype, tuple(shape), begin + start, begin + stop)


def _check_cover(entries: dict[str, Entry], begin: int, size: int) -> None:
    """Raise ValueError unless the entries fill the data, each byte once."""
    at, before = begin, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start < at:
            raise ValueError(f"the bytes of tensors {before!r} and {name!r} overlap at byte {entry.start}")
        if entry.start > at:
            raise ValueError(f"no tensor has the bytes {at - begin} … {entry.start - begin} of the data")
        at, before = entry.stop, name
    if at != size:
        raise ValueError(f"no tensor has the bytes {at - begin} … {size - begin} of the data")


def _are_counts(values: Any) -> bool:
    # bool is an int too, but no count.
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _counted(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"
