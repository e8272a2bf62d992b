"""The oracle: which backend serves a call. Pure Python on static facts; needs no device.

Asked once for each call that is traced. What it can't know is where a traced program will run: it goes by
JAX's default device, unless it is told (`assume_device`).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import logging
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from moe_pallas.configs.collectives import STRATEGIES, Layout, collectives, moved_bytes, time_us
from moe_pallas.configs.heuristics import active_experts
from moe_pallas.configs.lookup import CONFIGS, EXPLICIT, Config, configure
from moe_pallas.configs.predict import CONSTANTS, predicted_us
from moe_pallas.configs.schema import GroupedGemmConfig
from moe_pallas.errors import UnsupportedError
from moe_pallas.spec import FP8, DeviceInfo, MoESpec, Problem

BACKENDS = ("swap_ab", "grouped_gemm", "xla")
PORTABLE_BACKENDS = ("xla",)  # run wherever JAX does, on every problem

_assumed: contextvars.ContextVar[DeviceInfo | None] = contextvars.ContextVar("assumed_device", default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """The oracle's answer.

    Attributes:
      backend: Name of the backend that runs the call.
      reason: Why this one.
      config: How its kernel cuts the problem up; None for a backend without configurations.
      source: Where ``config`` came from: ``"explicit"``, ``"table entry"``, ``"neighbour in the table"`` or
        ``"cost model"``.
      device: The device that it was chosen for.
      backward: What computes gradients with ``GradientConfig(kernels=True)``: ``"grouped_gemm"``, or
        ``"xla"``, the portable backend.
      backward_reason: Why that.
      backward_config: How the kernels of a backward pass cut the problem up; None if there are none.
    """

    backend: str
    reason: str
    config: Config | None = None
    source: str | None = None
    device: DeviceInfo
    backward: str = "xla"
    backward_reason: str = "the forward pass is portable"
    backward_config: GroupedGemmConfig | None = None


def select_backend(
    problem: Problem,
    backend: str = "auto",
    *,
    config: Config | None = None,
    device: DeviceInfo | None = None,
    tables: str | os.PathLike[str] | None = None,
) -> Selection:
    """Choose the backend for a call.

    Args:
      problem: The call.
      backend: ``"auto"``, or the name of a backend, which is then used or refused.
      config: A configuration of that backend's kernel, a `SwapABConfig` or `GroupedGemmConfig`,
        which is then used or refused; with ``"auto"`` it asks for its backend.
      device: Where the call runs; JAX's default device if None.
      tables: Directory of tables that are asked before the package's own, see `moe_pallas.configs.lookup`; if
        None the one that the environment variable MOE_PALLAS_TABLES names, if any.

    Returns:
      `Selection`.

    Raises:
      ValueError: No backend has that name, the configuration is another backend's, or a table is malformed.
      TypeError: ``config`` is no configuration, or has a field that is no integer.
      UnsupportedError: The backend or configuration that was asked for can't do this problem, or not on this
        device.

    Example:
      >>> from moe_pallas import MoESpec, Problem, select_backend
      >>> from moe_pallas.spec import H200
      >>> spec = MoESpec(num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768)
      >>> select_backend(Problem(spec=spec, num_tokens=1, dtype="bfloat16"), device=H200).backend
      'swap_ab'
    """
    backend = resolve_backend(backend, config)
    device = device or current_device()
    if backend == "xla":
        return Selection(backend=backend, reason=_ASKED_FOR, device=device)
    kernels = _kernels(problem, backend, config, device, tables)
    if backend in kernels:
        kernel = kernels[backend]
        if kernel.objection:
            hint = "backend='xla', or 'auto'." if config is None else "another config, or none."
            raise UnsupportedError(backend, kernel.objection, hint)
        return kernel.selection(backend, _ASKED_FOR, device, _backward(problem, kernels))
    objections = []
    for name, reason in _REASONS.items():
        if kernels[name].objection is None:
            return kernels[name].selection(name, reason, device, _backward(problem, kernels))
        objections.append(f"{name}: {kernels[name].objection}")
    return Selection(backend="xla", reason=" ".join(objections), device=device)


_ASKED_FOR = "asked for explicitly"

# Why "auto" takes a kernel, in the order in which they are asked.
_REASONS = {
    "swap_ab": "few tokens an expert on a Hopper GPU",
    "grouped_gemm": "many tokens an expert on a Hopper GPU",
}


class _Kernel(NamedTuple):
    """A kernel's configuration for a call, and why it can't (or by "auto" should not) do it here."""

    config: Config
    source: str
    objection: str | None

    def selection(
        self, backend: str, reason: str, device: DeviceInfo, backward: tuple[str, str, Any]
    ) -> Selection:
        name, why, config = backward
        return Selection(
            backend=backend,
            reason=reason,
            config=self.config,
            source=self.source,
            device=device,
            backward=name,
            backward_reason=why,
            backward_config=config,
        )


def _backward(problem: Problem, kernels: dict[str, _Kernel]) -> tuple[str, str, GroupedGemmConfig | None]:
    """What computes gradients behind a kernel, why, and its configuration."""
    if problem.quant != "none":
        return "xla", "quantised weights are frozen", None
    kernel = kernels["grouped_gemm"]
    assert isinstance(kernel.config, GroupedGemmConfig)
    if kernel.objection is not None:
        return "xla", f"grouped_gemm {kernel.objection}", None
    return "grouped_gemm", "the same tiles, whatever the forward pass is", kernel.config


def _kernels(
    problem: Problem,
    backend: str,
    config: Config | None,
    device: DeviceInfo,
    tables: str | os.PathLike[str] | None,
) -> dict[str, _Kernel]:
    kernels = {}
    for name in CONFIGS:
        if config is not None and name == backend:
            chosen, source = config, EXPLICIT
        else:
            chosen, source = configure(name, problem, device.name, tables)
        objection = _objection(problem, chosen, device)
        if backend == "auto" and name == "swap_ab":
            objection = objection or _too_many_tokens(problem)
        kernels[name] = _Kernel(chosen, source, objection)
    return kernels


def _objection(problem: Problem, config: Config, device: DeviceInfo) -> str | None:
    """Why the kernel of this configuration can't do this here."""
    if not device.is_hopper:
        return (
            "needs an NVIDIA GPU of compute capability 9.0 (Hopper); got "
            f"{device.name or device.platform} {device.compute_capability}".rstrip()
            + "."
        )
    return config.validate(problem)


def _too_many_tokens(problem: Problem) -> str | None:
    """Why swap_ab should not do this: its thin products, and weights read again for every 64 tokens."""
    spec = problem.spec
    tokens = problem.num_tokens * spec.top_k / spec.num_experts
    most = _MOST_TOKENS if spec.intermediate_size > _SHORT_INTERMEDIATE_SIZE else _MOST_TOKENS_IF_SHORT
    if tokens > most:
        return f"{tokens:.0f} tokens an expert are too many, it is fastest up to {most}."
    return None


# Tokens an expert where the grouped GEMM overtakes, at T = 64 ... 512: BUILD_NOTES "Measured facts". A short
# contraction of the second GEMM leaves Swap-AB little to do for each result.
_MOST_TOKENS, _MOST_TOKENS_IF_SHORT, _SHORT_INTERMEDIATE_SIZE = 16, 2, 256


# Read bandwidth in TB/s and products in TFLOP/s by dtype, measured: benchmarks/results.
_ROOFS = {"NVIDIA H200": (4.5, {"bfloat16": 790.0, FP8: 1520.0})}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a call is served as it is; ``print`` shows it.

    Attributes:
      problem: The call.
      selection: What serves it.
      rejected: The other backends, each with why not.
      experts_hit: Experts that some token visits, on average over uniform routings.
      min_bytes: That must be moved at least: the weights of these experts, x and y.
      flops: Of the products.
      floor_us: The time of either at the device's measured roofs; None where these are not known.
      predicted_us: By `moe_pallas.configs.predict`; None without a kernel, or for a device it does not know.
      smem_bytes: Shared memory of a CTA of the kernel; 0 without one.
      workspace_bytes: Global memory for intermediate results; None without a kernel: XLA decides.
    """

    problem: Problem
    selection: Selection
    rejected: tuple[tuple[str, str], ...]
    experts_hit: float
    min_bytes: int
    flops: int
    floor_us: float | None
    predicted_us: float | None
    smem_bytes: int
    workspace_bytes: int | None

    def __str__(self) -> str:
        lines = [f"{_headline(self.problem, self.selection)}: {self.selection.reason}"]
        if self.selection.config is not None:
            workspace = _size(self.workspace_bytes or 0)
            lines.append(f"{self.selection.config}, {_FROM[self.selection.source or '']}")
            lines.append(f"{self.smem_bytes} bytes of shared memory a CTA, {workspace} of workspace")
            lines.append(f"gradients by kernels: {self.selection.backward}, {self.selection.backward_reason}")
        predicted, floor = (
            "unknown" if time is None else f"{time:.1f} us" for time in (self.predicted_us, self.floor_us)
        )
        lines.append(
            f"predicted {predicted}, floor {floor}: {_size(self.min_bytes)} for {self.experts_hit:.1f} "
            f"experts hit, {self.flops / 1e9:.2f} GFLOP, uniform routing"
        )
        lines += [f"not {name}: {reason}" for name, reason in self.rejected]
        return "\n  ".join(lines)


_FROM = {
    "explicit": "asked for explicitly",
    "table entry": "by a measurement in the table",
    "neighbour in the table": "by a measurement of fewer or more tokens in the table",
    "cost model": "by the cost model",
}


def explain(
    problem: Problem,
    backend: str = "auto",
    *,
    config: Config | None = None,
    device: DeviceInfo | None = None,
    tables: str | os.PathLike[str] | None = None,
) -> Explanation:
    """Say which backend serves a call, why, and why not the others.

    Args:
      problem: The call.
      backend: As in `select_backend`, which it agrees with, and so the others.

    Returns:
      `Explanation`.

    Raises:
      ValueError, TypeError, UnsupportedError: As `select_backend`.

    Example:
      >>> from moe_pallas import MoESpec, Problem, explain
      >>> from moe_pallas.spec import H200
      >>> spec = MoESpec(num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768)
      >>> why = explain(Problem(spec=spec, num_tokens=4096, dtype="bfloat16"), device=H200)
      >>> print(str(why).splitlines()[-2].strip())
      not swap_ab: 256 tokens an expert are too many, it is fastest up to 16.
    """
    selection = select_backend(problem, backend, config=config, device=device, tables=tables)
    backend = resolve_backend(backend, config)
    kernels = _kernels(problem, backend, config, selection.device, tables)
    spec, config = problem.spec, selection.config
    comes_first = "not asked for" if backend != "auto" else f"{selection.backend} is taken before it"
    rejected = []
    for name, kernel in kernels.items():
        if name != selection.backend:
            rejected.append((name, kernel.objection or comes_first))
    if selection.backend != "xla":
        rejected.append(("xla", comes_first))
    hit = active_experts(problem.num_tokens, spec)
    matrices = 3 if spec.gated else 2
    products = matrices * spec.hidden_size * spec.intermediate_size
    row_bytes = 2 * spec.hidden_size * _ITEMSIZES[problem.dtype]
    min_bytes = round(hit * products * _ITEMSIZES[str(problem.weight_dtype)]) + problem.num_tokens * row_bytes
    flops = 2 * problem.num_tokens * spec.top_k * products
    read, rates = _ROOFS.get(selection.device.name, (0.0, {}))
    rate = rates.get(str(problem.weight_dtype))
    constants = CONSTANTS.get(selection.device.name)
    return Explanation(
        problem=problem,
        selection=selection,
        rejected=tuple(rejected),
        experts_hit=hit,
        min_bytes=min_bytes,
        flops=flops,
        floor_us=max(min_bytes / read, flops / rate) / 1e6 if rate else None,
        predicted_us=predicted_us(problem, config, constants) if config and constants else None,
        smem_bytes=0 if config is None else config.smem_bytes(problem),
        workspace_bytes=None if config is None else config.workspace_bytes(problem),
    )


_ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8: 1}


def _headline(problem: Problem, selection: Selection) -> str:
    spec, device = problem.spec, selection.device
    return (
        f"{selection.backend} serves T={problem.num_tokens}, E={spec.num_experts}, top_k={spec.top_k}, "
        f"D={spec.hidden_size}, F={spec.intermediate_size}, {problem.dtype}"
        f"{'' if problem.quant == 'none' else ', ' + problem.quant} on {device.name or device.platform}"
    )


@functools.lru_cache(maxsize=4096)
def announce(problem: Problem, selection: Selection) -> None:
    """Log what serves a call, once for each kind of call: a warning where a Hopper GPU has to fall back."""
    falls_back = selection.device.is_hopper and selection.backend == "xla" and selection.reason != _ASKED_FOR
    level = logging.WARNING if falls_back else logging.INFO
    _log.log(level, "%s: %s", _headline(problem, selection), selection.reason)


_log = logging.getLogger("moe_pallas")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategySelection:
    """How tokens and experts on different devices get together.

    Attributes:
      strategy: ``"gather"`` or ``"all_to_all"``, see `moe_pallas.sharding`.
      reason: Why this one, with the bytes that a GPU receives in a forward pass and the modelled time.
    """

    strategy: str
    reason: str


def select_strategy(
    spec: MoESpec,
    num_tokens: int,
    layout: Layout,
    *,
    dtype: str = "bfloat16",
    strategy: str = "auto",
    platform: str = "gpu",
) -> StrategySelection:
    """Choose how tokens and experts get together: by modelled time, see `moe_pallas.configs.collectives`.

    Args:
      spec: The whole layer.
      num_tokens: T, tokens of one shard.
      layout: How the layer lies on the mesh.
      dtype: Of the activations.
      strategy: ``"auto"``, or the name of a strategy, which is then used.
      platform: Where it runs: ``"cpu"`` has no ragged all-to-all.

    Example:
      >>> from moe_pallas import MoESpec
      >>> from moe_pallas.configs.collectives import Layout
      >>> from moe_pallas.oracle import select_strategy
      >>> spec = MoESpec(num_experts=128, top_k=8, hidden_size=4096, intermediate_size=1536)
      >>> [select_strategy(spec, t, Layout(expert=64, tokens_over_experts=True)).strategy for t in (1, 4096)]
      ['gather', 'all_to_all']
    """
    if strategy not in ("auto", *STRATEGIES):
        names = ", ".join(repr(name) for name in ("auto", *STRATEGIES))
        raise ValueError(f"There is no strategy {strategy!r}; there are {names}.")
    steps = {name: collectives(name, spec, num_tokens, layout, dtype=dtype) for name in STRATEGIES}
    costs = {
        name: f"{name} moves {_size(moved_bytes(step))} a GPU, {time_us(step):.0f} us"
        for name, step in steps.items()
    }
    if layout.expert == 1 or not layout.tokens_over_experts:
        why = "every shard of the experts has all tokens" if layout.expert > 1 else "experts are not split"
        return StrategySelection(strategy="gather", reason=f"{why}: {costs['gather']}")
    listed = "; ".join(costs.values())
    if strategy != "auto":
        return StrategySelection(strategy=strategy, reason=f"asked for explicitly: {listed}")
    if platform == "cpu":
        why = "no ragged all-to-all on a CPU, a padded one moves as much as gather"
        return StrategySelection(strategy="gather", reason=f"{why}: {costs['gather']}")
    best = min(STRATEGIES, key=lambda name: time_us(steps[name]))
    return StrategySelection(strategy=best, reason=f"least modelled time: {listed}")


def _size(number: float) -> str:
    return f"{number / 1e6:.1f} MB" if number >= 1e6 else f"{number / 1e3:.1f} kB"


def check_backend(backend: str) -> None:
    """Raise ValueError unless ``backend`` is "auto" or the name of one."""
    if backend not in ("auto", *BACKENDS):
        names = ", ".join(repr(name) for name in ("auto", *BACKENDS))
        raise ValueError(f"There is no backend {backend!r}; there are {names}.")


def resolve_backend(backend: str, config: Any = None) -> str:
    """Check what is asked for; a configuration with "auto" means the backend that it belongs to."""
    check_backend(backend)
    if config is None:
        return backend
    kernel = next((name for name, kind in CONFIGS.items() if type(config) is kind), None)
    if kernel is None:
        names = " or ".join(kind.__name__ for kind in CONFIGS.values())
        raise TypeError(f"config is a {names}, or None; got {config!r} ({type(config).__name__}).")
    for name, value in dataclasses.asdict(config).items():
        if type(value) is not int:
            raise TypeError(f"config.{name} is an int; got {value!r} ({type(value).__name__}).")
    if backend not in ("auto", kernel):
        raise ValueError(
            f"A {type(config).__name__} belongs to backend={kernel!r}; got backend={backend!r}. Give "
            "that, or 'auto'."
        )
    return kernel


def current_device() -> DeviceInfo:
    """Describe the device that JAX would run on now, or the one assumed by `assume_device`."""
    if (assumed := _assumed.get()) is not None:
        return assumed
    import jax  # the oracle itself needs no JAX

    default = jax.config.jax_default_device
    return describe_device(default if isinstance(default, jax.Device) else jax.devices(default)[0])


def describe_device(device: Any) -> DeviceInfo:
    """Describe a `jax.Device`."""
    return DeviceInfo(
        platform=device.platform,
        name=device.device_kind,
        compute_capability=str(getattr(device, "compute_capability", "")),
        num_sms=int(getattr(device, "core_count", 0) or 0),
    )


@contextlib.contextmanager
def assume_device(device: DeviceInfo) -> Iterator[None]:
    """Choose backends for ``device`` inside: to compile for a device that this machine does not have.

    Programs that JAX traced before, for the same function and shapes, keep what was chosen then.
    """
    token = _assumed.set(device)
    try:
        yield
    finally:
        _assumed.reset(token)
