"""A folder of safetensors files, as the Hugging Face hub lays it out, read tensor by tensor.

What it reads is not trusted: file names from the index stay inside the folder, shapes come from the
files' headers (which safetensors checks against the file's size) before anything is allocated, and a
broken file is a ValueError with its name. Nothing is ever downloaded or executed.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from moe_pallas.errors import UnsupportedError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
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
        self._headers: dict[str, tuple[int, dict[str, Any]]] = {}  # where a shard's data begins, its header
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
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Give a tensor's dtype from the file's header, in safetensors' words (``"BF16"``, ``"F32"``)."""
        return str(self._slice(name).get_dtype())

    def read(self, name: str) -> np.ndarray:
        """Read one tensor.

        Returns:
          An array of the tensor's shape and dtype (BF16 and F8_E4M3 as ml_dtypes' bfloat16 and float8_e4m3fn)
          with memory of its own.

        Raises:
          ValueError: No such tensor, or a broken file.
          UnsupportedError: A dtype that NumPy and ml_dtypes don't have, or none that anything here uses.
        """
        dtype = self.dtype(name)
        if dtype == _FP8:
            return self._read_bytes(name).view(ml_dtypes.float8_e4m3fn).reshape(self.shape(name))
        if dtype not in _READABLE:
            raise UnsupportedError(
                "SafetensorsFolder.read",
                f"{name!r} in {self.file(name)} is stored as {dtype}.",
                f"tensors of {', '.join((*_READABLE, _FP8))}.",
            )
        try:
            return self._shard(self.file(name)).get_tensor(name)
        except (self._error, OSError) as error:
            raise self._broken(self.file(name), error) from error

    def _read_bytes(self, name: str) -> np.ndarray:
        file = self.file(name)
        self._shard(file)  # safetensors has checked the header, its offsets and the file's size
        try:
            with self._path(file).open("rb") as stream:
                if file not in self._headers:
                    length = int.from_bytes(stream.read(8), "little")
                    self._headers[file] = (8 + length, json.loads(stream.read(length)))
                data, header = self._headers[file]
                start, stop = header[name]["data_offsets"]
                stream.seek(data + start)
                return np.fromfile(stream, np.uint8, stop - start)
        except (OSError, ValueError, KeyError) as error:
            raise self._broken(file, error) from error

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The contents of ``config.json``."""
        return self._json("config.json")

    def _read_listing(self) -> tuple[str, dict[str, str]]:
        """Give the file that lists the tensors, and tensor name → file that holds it."""
        if (self.folder / _SINGLE).is_file():
            # A single file goes before an index, as in transformers.
            return _SINGLE, dict.fromkeys(self._shard(_SINGLE).keys(), _SINGLE)
        if not (self.folder / _INDEX).is_file():
            held = sorted(path.name for path in self.folder.iterdir())
            raise FileNotFoundError(
                f"{self.folder} holds neither {_SINGLE} nor {_INDEX}, but {shortened(held) or 'nothing'}. "
                f"Need {_CONTENT}; other formats (pytorch_model.bin) are not read."
            )
        files = self._json(_INDEX).get("weight_map")
        if not isinstance(files, dict):
            raise ValueError(f"{self.folder / _INDEX} has no 'weight_map' from tensor names to file names.")
        hostile = sorted({repr(file) for file in files.values() if not _is_plain(file)})
        if hostile:
            raise ValueError(
                f"{self.folder / _INDEX} names shards that are no plain file names of the form "
                f"'….safetensors': {shortened(hostile)}. A shard lies in the folder itself; don't trust "
                "this checkpoint."
            )
        return _INDEX, files

    def _slice(self, name: str) -> Any:
        file = self.file(name)
        try:
            return self._shard(file).get_slice(name)
        except self._error as error:
            raise ValueError(
                f"{self.folder / _INDEX} says that {file} holds {name!r}, but it doesn't ({error}). Download "
                "the checkpoint again, all files from one revision."
            ) from error

    def _shard(self, file: str) -> Any:
        if file not in self._shards:
            path = self._path(file)
            try:
                self._shards[file] = self._safe_open(path, framework="numpy")
            except (self._error, OSError) as error:
                raise self._broken(file, error) from error
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

    def _json(self, file: str) -> dict[str, Any]:
        path = self._path(file)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is no readable JSON: {error}. Download it again.") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path} holds a JSON {type(content).__name__}; need an object.")
        return content

    def _broken(self, file: str, error: Exception) -> ValueError:
        return ValueError(
            f"{self.folder / file} is no readable safetensors file: {error}. It may be cut short; download "
            "it again."
        )


def shortened(items: list[str], limit: int = 8) -> str:
    """Join a list for a message: all of a short one, the head and the length of a long one."""
    rest = f", … ({len(items)} in all)" if len(items) > limit else ""
    return ", ".join(items[:limit]) + rest


def _is_plain(file: Any) -> bool:
    return (
        isinstance(file, str)
        and file.endswith(".safetensors")
        and file.isprintable()
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
