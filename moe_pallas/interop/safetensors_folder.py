"""A folder of safetensors files, as the Hugging Face hub lays it out, read tensor by tensor.

What it reads is not trusted: file names from the index stay inside the folder, JSON is bounded in size and
depth, a shard's header is checked whole against the file's size before a tensor is touched, and a broken
file is a ValueError with its name. Nothing is ever downloaded or executed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from moe_pallas.errors import UnsupportedError
from moe_pallas.interop.header import MAX_HEADER_BYTES, Entry, read_header
from moe_pallas.untrusted import clipped, is_name, parse_json, shortened

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# The largest that is read; the index of DeepSeek-V3 in FP8, with some 90,000 names, is far below.
_MAX_CONFIG_BYTES, _MAX_INDEX_BYTES = 16 << 20, MAX_HEADER_BYTES
_CONTENT = f"config.json with {_SINGLE}, or with {_INDEX} and the shards it names"
# NumPy's own dtypes, and bfloat16: it knows that name since jax, and so ml_dtypes, was imported.
_READABLE = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "BF16", "F32", "F64")
_FP8 = "F8_E4M3"  # read here: safetensors has no NumPy dtype for it


class SafetensorsFolder:
    """The tensors of a checkpoint folder: names, shapes and contents, without loading the whole.

    A shard is opened (memory-mapped) when something of it is first asked for, and stays open as long as
    this object lives.

    Args:
      folder: A local folder with ``model.safetensors``, or ``model.safetensors.index.json`` and its
        shards. Symbolic links may lead elsewhere in the folder or, in the hub's own cache
        (``snapshots/<revision>/``), to its ``blobs/``; nowhere else.

    Raises:
      FileNotFoundError: No such folder, or neither file in it.
      ValueError: A broken index, or one that names files outside of the folder.
      ImportError: The ``safetensors`` package is missing.

    Attributes:
      folder: The folder.
      listing: Name of the file in it that says which tensors there are.

    Example:
      >>> from moe_pallas.interop import SafetensorsFolder
      >>> checkpoint = SafetensorsFolder("tests/data/goldens/mixtral")
      >>> checkpoint.shape("model.embed_tokens.weight")
      (256, 64)
      >>> checkpoint.read("model.norm.weight").dtype
      dtype('float32')
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise FileNotFoundError(
                f"There is no folder {os.fspath(folder)!r}. Need a local folder that holds {_CONTENT}; "
                "nothing is downloaded here (huggingface_hub.snapshot_download gives such a folder)."
            )
        self._safe_open, self._error = _import_safetensors()
        self._shards: dict[str, Any] = {}
        self._headers: dict[str, dict[str, Entry]] = {}
        self.listing, self._files = self._read_listing()

    def names(self) -> tuple[str, ...]:
        """Give the names of all tensors, sorted."""
        return tuple(sorted(self._files))

    def file(self, name: str) -> str:
        """Give the name of the file, within the folder, that holds a tensor."""
        if name not in self._files:
            raise ValueError(f"{self.folder} holds no tensor {name!r}; names() lists its {len(self._files)}.")
        return self._files[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Give a tensor's shape from the file's header; the tensor itself is not read."""
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        """Give a tensor's dtype from the file's header, in safetensors' words (``"BF16"``, ``"F32"``)."""
        return self._entry(name).dtype

    def read(self, name: str) -> np.ndarray:
        """Read one tensor.

        Returns:
          An array of the tensor's shape and dtype (BF16 and F8_E4M3 as ml_dtypes' bfloat16 and float8_e4m3fn)
          with memory of its own.

        Raises:
          ValueError: No such tensor, or a broken file.
          UnsupportedError: A dtype that NumPy and ml_dtypes don't have, or none that anything here uses.
        """
        entry, file = self._entry(name), self.file(name)
        if entry.dtype not in (*_READABLE, _FP8):
            raise UnsupportedError(
                "SafetensorsFolder.read",
                f"{name!r} in {file} is stored as {entry.dtype}.",
                f"tensors of {', '.join((*_READABLE, _FP8))}.",
            )
        try:
            if entry.dtype != _FP8:
                return self._shard(file).get_tensor(name)
            values = np.fromfile(self._path(file), np.uint8, entry.stop - entry.start, offset=entry.start)
            return values.view(ml_dtypes.float8_e4m3fn).reshape(entry.shape)
        except (self._error, OSError, ValueError) as error:  # it was whole when it was opened
            raise self._broken(file, error) from error

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The contents of ``config.json``."""
        return self.json("config.json")

    def _read_listing(self) -> tuple[str, dict[str, str]]:
        """Give the file that lists the tensors, and tensor name → file that holds it."""
        if (self.folder / _SINGLE).is_file():
            # A single file goes before an index, as in transformers.
            return _SINGLE, dict.fromkeys(self._header(_SINGLE), _SINGLE)
        if not (self.folder / _INDEX).is_file():
            held = sorted(path.name for path in self.folder.iterdir())
            raise FileNotFoundError(
                f"{self.folder} holds neither {_SINGLE} nor {_INDEX}, but {shortened(held) or 'nothing'}. "
                f"Need {_CONTENT}; other formats (pytorch_model.bin) are not read."
            )
        files = self.json(_INDEX).get("weight_map")
        if not isinstance(files, dict):
            raise ValueError(f"{self.folder / _INDEX} has no 'weight_map' from tensor names to file names.")
        hostile = sorted({clipped(ascii(file)) for file in files.values() if not _is_plain(file)})
        if hostile:
            raise ValueError(
                f"{self.folder / _INDEX} names shards that are no plain file names of the form "
                f"'….safetensors': {shortened(hostile)}. A shard lies in the folder itself; don't trust "
                "this checkpoint."
            )
        unfit = [clipped(ascii(name)) for name in files if not is_name(name)]
        if unfit:
            raise ValueError(
                f"{self.folder / _INDEX} has names of tensors that can't be shown: {shortened(unfit)}. Need "
                "printable characters, at most 1024 in a name; don't trust this checkpoint."
            )
        return _INDEX, files

    def _entry(self, name: str) -> Entry:
        file = self.file(name)
        header = self._header(file)
        if name not in header:
            raise ValueError(
                f"{self.folder / _INDEX} says that {file} holds {name!r}, but it doesn't: it holds "
                f"{shortened(sorted(header)) or 'nothing'}. Download the checkpoint again, all files from "
                "one revision."
            )
        return header[name]

    def _header(self, file: str) -> dict[str, Entry]:
        if file not in self._headers:
            path = self._path(file)
            try:
                self._headers[file] = read_header(path)
            except (ValueError, OSError) as error:
                raise self._broken(file, error) from error
        return self._headers[file]

    def _shard(self, file: str) -> Any:
        if file not in self._shards:
            self._header(file)  # is checked first
            self._shards[file] = self._safe_open(self._path(file), framework="numpy")
        return self._shards[file]

    def _path(self, file: str) -> Path:
        path, home = self.folder / file, self.folder.resolve()
        try:
            is_there = path.is_file()
        except OSError:  # a name longer than the file system has
            is_there = False
        if not is_there:
            raise FileNotFoundError(f"{self.folder} holds no {file}. Need {_CONTENT}.")
        homes = [home]
        if home.parent.name == "snapshots":  # the hub's cache links its snapshots to its blobs
            homes.append((home.parent.parent / "blobs").resolve())
        if not any(path.resolve().is_relative_to(place) for place in homes):
            raise ValueError(
                f"{path} is a link that leads out of its folder, to {path.resolve()}. Replace it by the file "
                "if you trust it."
            )
        return path

    def json(self, file: str) -> dict[str, Any]:
        """Read a JSON file of the folder that holds an object.

        Raises:
          FileNotFoundError: It isn't there.
          ValueError: It is a link out of the folder, too large, no JSON, nested deep, or says a thing twice.
        """
        path = self._path(file)
        size, limit = path.stat().st_size, _MAX_INDEX_BYTES if file == _INDEX else _MAX_CONFIG_BYTES
        if size > limit:
            raise ValueError(
                f"{path} has {size} bytes, more than the {limit} that are read of such a file. Don't trust "
                "this checkpoint."
            )
        try:
            with path.open("rb") as stream:
                return parse_json(stream.read(size))
        except ValueError as error:
            raise ValueError(f"{path} is no readable JSON: {error}. Download it again.") from error

    def _broken(self, file: str, error: Exception) -> ValueError:
        return ValueError(
            f"{self.folder / file} is no readable safetensors file: {clipped(str(error), 1000)}. It may be "
            "cut short; download it again."
        )


def _is_plain(file: Any) -> bool:
    return (
        is_name(file)
        and file.endswith(".safetensors")
        and not file.startswith(".")
        and not set(file) & set("/\\:")
    )


def _import_safetensors() -> tuple[Callable[..., Any], type[Exception]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            "Reading checkpoints needs the safetensors package: pip install 'moe_pallas[checkpoints]'."
        ) from error
    return safe_open, SafetensorError
