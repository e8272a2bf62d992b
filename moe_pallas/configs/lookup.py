"""Measured configurations: one file of them for each device, and which one serves a call.

    moe_pallas/configs/tables/nvidia_h200.json    those that come with the package
    $MOE_PALLAS_TABLES/nvidia_h200.json           the user's own, asked first

A file is written by ``python -m benchmarks.tune``, an entry a line. One holds for calls of the same layer
with about as many rows an expert: up to a power of two, more than half of it. A call without one takes that
of the same layer with the nearest number of rows an expert, unless the cost model puts it well behind its own
choice. Else that choice is taken.

A leaf beside `moe_pallas.spec`: no JAX.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moe_pallas.configs.heuristics import default_config
from moe_pallas.configs.predict import predicted_us
from moe_pallas.configs.schema import GroupedGemmConfig, SwapABConfig
from moe_pallas.spec import Activation, ActivationScales, MoESpec, Problem

Config = SwapABConfig | GroupedGemmConfig

VARIABLE = "MOE_PALLAS_TABLES"
CONFIGS: Mapping[str, type[Config]] = {"swap_ab": SwapABConfig, "grouped_gemm": GroupedGemmConfig}
# Where a configuration came from, as `moe_pallas.oracle.Selection` has it.
EXPLICIT, ENTRY, NEIGHBOUR, MODEL = "explicit", "table entry", "neighbour in the table", "cost model"

_FORMAT = 1
_MUCH_SLOWER = 1.1  # by the cost model, which is off by as much


class Layer(NamedTuple):
    """What entries of one layer have in common."""

    kernel: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    gated: bool
    quant: str
    activation_scales: str | None


class Key(NamedTuple):
    """What an entry is looked up by."""

    layer: Layer
    bucket: int


def key_of(kernel: str, problem: Problem) -> Key:
    """The layer of a call, and b of its 2**(b - 1) < rows per expert <= 2**b."""
    spec, activations = problem.spec, problem.activation_scales
    layer = Layer(
        kernel,
        spec.hidden_size,
        spec.intermediate_size,
        spec.num_experts,
        spec.top_k,
        spec.gated,
        problem.quant,
        None if activations is None else activations.value,
    )
    return Key(layer, math.ceil(math.log2(max(1, problem.num_tokens) * spec.top_k / spec.num_experts)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One measured configuration.

    Args:
      kernel: ``"swap_ab"`` or ``"grouped_gemm"``.
      problem: What it was measured on.
      config: The fastest found.
      time_us: Of a layer.
      model_us: Of the layer in the configuration that the cost model chooses, in the same run.
      date: When it was measured, ISO 8601.

    Raises:
      ValueError: The kernel has other configurations, or can't run the problem this way.
    """

    kernel: str
    problem: Problem
    config: Config
    time_us: float
    model_us: float
    date: str

    def __post_init__(self) -> None:
        if type(self.config) is not CONFIGS.get(self.kernel):
            raise ValueError(f"{self.config} is no configuration of {self.kernel!r}")
        for name, value in dataclasses.asdict(self.config).items():
            if type(value) is not int:
                raise ValueError(f"config.{name} is an integer; got {value!r}")
        if objection := self.config.validate(self.problem):
            raise ValueError(f"config is not legal: {objection}")
        if not all(0 < value < math.inf for value in (self.time_us, self.model_us)):
            raise ValueError(f"times are positive; got {self.time_us} and {self.model_us}")

    @property
    def key(self) -> Key:
        """What the entry is looked up by."""
        return key_of(self.kernel, self.problem)

    def to_json(self) -> dict[str, Any]:
        """The entry as plain values."""
        values = self.key.layer._asdict() | {"num_tokens": self.problem.num_tokens}
        values["config"] = dataclasses.asdict(self.config)
        return values | {"time_us": self.time_us, "model_us": self.model_us, "date": self.date}

    @classmethod
    def from_json(cls, values: Any) -> Entry:
        """The entry of plain values; raises ValueError or TypeError where they make none."""
        _check_keys(values, (*Layer._fields, "num_tokens", "config", "time_us", "model_us", "date"))
        if (kernel := values["kernel"]) not in CONFIGS:
            raise ValueError(f"there is no kernel {kernel!r}; there are {', '.join(CONFIGS)}")
        kind = CONFIGS[kernel]
        _check_keys(values["config"], [field.name for field in dataclasses.fields(kind)])
        for name, kinds in (("time_us", (int, float)), ("model_us", (int, float)), ("gated", (bool,))):
            if type(values[name]) not in kinds:
                raise TypeError(f"{name} is of type {kinds[-1].__name__}; got {values[name]!r}")
        spec = MoESpec(
            num_experts=values["num_experts"],
            top_k=values["top_k"],
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            activation=Activation.SWIGLU if values["gated"] else Activation.SILU,
        )
        activations = values["activation_scales"]
        problem = Problem(
            spec=spec,
            num_tokens=values["num_tokens"],
            dtype="bfloat16",
            quant=values["quant"],
            activation_scales=None if activations is None else ActivationScales(activations),
        )
        return cls(
            kernel=kernel,
            problem=problem,
            config=kind(**values["config"]),
            time_us=values["time_us"],
            model_us=values["model_us"],
            date=values["date"],
        )


Table = Mapping[Key, Entry]


def parse(text: str, name: str) -> dict[Key, Entry]:
    """Read a table; raises ValueError that says which entry of which file is wrong, and how."""
    try:
        content = json.loads(text)
        _check_keys(content, ("format", "device", "date", "entries"))
        if content["format"] != _FORMAT:
            raise ValueError(f"format is {_FORMAT}; got {content['format']!r}")
        if not isinstance(content["entries"], list):
            raise TypeError("entries is a list")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} is no table of configurations: {error}.") from error
    table: dict[Key, Entry] = {}
    for number, values in enumerate(content["entries"]):
        try:
            entry = Entry.from_json(values)
            if entry.key in table:
                raise ValueError("an entry before it has the same layer and rows per expert")
        except (ValueError, TypeError) as error:
            raise ValueError(f"{name}: entry {number} is wrong: {error}. It reads {values}.") from error
        table[entry.key] = entry
    return table


def dump(entries: Iterable[Entry], device: str, date: str) -> str:
    """Write a table, an entry a line, in the order of their keys."""
    head = json.dumps({"format": _FORMAT, "device": device, "date": date})[:-1]
    ordered = sorted(entries, key=lambda entry: (*map(str, entry.key.layer), entry.problem.num_tokens))
    lines = ",\n".join(" " + json.dumps(entry.to_json(), allow_nan=False) for entry in ordered)
    return f'{head}, "entries": [\n{lines}\n]}}\n' if lines else f'{head}, "entries": []}}\n'


def _check_keys(values: Any, need: Iterable[str]) -> None:
    if not isinstance(values, dict):
        raise TypeError(f"an object was expected; got {values!r}")
    missing, unknown = sorted(set(need) - values.keys()), sorted(values.keys() - set(need))
    if missing or unknown:
        raise ValueError(f"missing {missing}, unknown {unknown}")


def file_name(device: str) -> str:
    """Of a device's table: ``"NVIDIA H200"`` → ``"nvidia_h200.json"``."""
    return re.sub(r"\W+", "_", device.strip().lower()) + ".json"


def load(directory: str | os.PathLike[str], device: str) -> Table:
    """A directory's table for a device; empty without a file, read again once the file has changed."""
    path = Path(directory) / file_name(device)
    try:
        changed = path.stat().st_mtime_ns
    except FileNotFoundError:
        return {}
    return _load(path, changed)


@functools.lru_cache(maxsize=64)
def _load(path: Path, changed: int) -> Table:
    return parse(path.read_text(encoding="utf-8"), str(path))


@functools.lru_cache(maxsize=64)
def shipped(device: str) -> Table:
    """The package's table for a device; empty without one."""
    file = importlib.resources.files("moe_pallas.configs") / "tables" / file_name(device)
    return parse(file.read_text(encoding="utf-8"), str(file)) if file.is_file() else {}


def configure(
    kernel: str, problem: Problem, device: str, directory: str | os.PathLike[str] | None = None
) -> tuple[Config, str]:
    """Choose how a kernel cuts a problem up.

    Args:
      kernel: ``"swap_ab"`` or ``"grouped_gemm"``.
      problem: The call.
      device: Name of the device.
      directory: Of the user's own tables; None: what ``MOE_PALLAS_TABLES`` says, if anything.

    Returns:
      The configuration, not necessarily a legal one if there is none; and where it came from.

    Raises:
      ValueError: A table is malformed.
    """
    if directory is None:
        directory = os.environ.get(VARIABLE) or None
    tables = [shipped(device)] if directory is None else [load(directory, device), shipped(device)]
    chosen, key = default_config(kernel, problem), key_of(kernel, problem)
    for table in tables:
        entry = table.get(key)
        if entry is not None and entry.config.validate(problem) is None:
            return entry.config, ENTRY
    for table in tables:
        entry = min(
            (entry for other, entry in table.items() if other.layer == key.layer),
            key=lambda entry: (abs(entry.key.bucket - key.bucket), entry.key.bucket),
            default=None,
        )
        if entry is None or entry.config.validate(problem) is not None:
            continue
        if predicted_us(problem, entry.config) <= _MUCH_SLOWER * predicted_us(problem, chosen):
            return entry.config, NEIGHBOUR
    return chosen, MODEL
