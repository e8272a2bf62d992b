"""How far predictions of `moe_pallas.configs.predict` are off, and its constants fitted to measured layers.

python -m benchmarks.fit    constants as they would be fitted now; errors of those in use, and of these
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.cases import MODELS, Cell
from benchmarks.results import FOLDER, device_folder, read
from moe_pallas.configs.heuristics import default_config
from moe_pallas.configs.predict import (
    CONSTANTS,
    Constants,
    GroupedGemmConstants,
    SwapABConstants,
    predicted_us,
)

DEVICE = "NVIDIA H200"
# Runs of the kernels as they are, in their default configurations, by file and quant.
FILES = (
    "swap_ab.json",
    "swap_ab_1_8_64.json",
    "grouped_gemm.json",
    "fp8_tensor.json",
    "fp8_tensor_t1.json",
    "fp8_block.json",
    "fp8_prefill.json",
)
# Swap-AB is fitted where it may be chosen: rows of more tokens an expert are predicted, and worse.
MOST_TOKENS = 16


class Measured(NamedTuple):
    """One layer, the tokens of each of its experts, and its time."""

    cell: Cell
    backend: str
    group_sizes: tuple[int, ...]
    time_us: float

    @property
    def tokens_per_expert(self) -> float:
        return self.cell.rows / self.cell.spec.num_experts

    def error(self, constants: Constants = CONSTANTS[DEVICE]) -> float:
        """Predicted over measured time, less 1, for the routing that was measured."""
        config = default_config(self.backend, self.cell.problem)
        return predicted_us(self.cell.problem, config, constants, self.group_sizes) / self.time_us - 1


def measured(files: Sequence[str] = FILES) -> Iterator[Measured]:
    """What the results hold of our kernels, uniform loads."""
    for name in files:
        for row in read(FOLDER / device_folder(DEVICE) / name)["rows"]:
            if row["backend"] not in ("swap_ab", "grouped_gemm") or row["status"] != "ok":
                continue
            if row["load"] == "uniform":
                case, quant = row["case"], row.get("quant", "none")
                cell = Cell(
                    case=case, spec=MODELS[case], tokens=row["tokens"], dtype=row["dtype"], quant=quant
                )
                yield Measured(cell, row["backend"], _group_sizes(cell), row["time_us"])


def fit(rows: Sequence[Measured], start: Constants = CONSTANTS[DEVICE]) -> Constants:
    """Least squares of the relative errors."""
    decode, prefill = parts(rows)["swap_ab"], parts(rows)["grouped_gemm"]

    def decode_errors(x: np.ndarray) -> np.ndarray:
        constants = start._replace(swap_ab=SwapABConstants(*x.tolist()))
        return np.array([row.error(constants) for row in decode])

    def prefill_errors(x: np.ndarray) -> np.ndarray:
        constants = start._replace(grouped_gemm=GroupedGemmConstants(*x.tolist()))
        return np.array([row.error(constants) for row in prefill])

    return Constants(
        SwapABConstants(*_least_squares(decode_errors, start.swap_ab)),
        GroupedGemmConstants(*_least_squares(prefill_errors, start.grouped_gemm)),
    )


def _least_squares(errors: Callable[[np.ndarray], np.ndarray], start: Sequence[float]) -> list[float]:
    """Levenberg and Marquardt's, with differences for derivatives; constants stay above 0."""
    x, damping = np.array(start, float), 1e-2
    e = errors(x)
    for _ in range(40):
        steps = np.diag(1e-4 * x + 1e-6)
        slopes = np.stack([(errors(x + step) - e) / step.sum() for step in steps], 1)
        normal = slopes.T @ slopes
        change = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-12), -slopes.T @ e)
        new = np.maximum(x + change, 0)
        if (e_new := errors(new)) @ e_new < e @ e:
            x, e, damping = new, e_new, damping / 3
        else:
            damping *= 4
    return [float(f"{value:.3g}") for value in x]


def _group_sizes(cell: Cell) -> tuple[int, ...]:
    top_k, logits = cell.spec.top_k, cell.logits
    chosen = np.argpartition(-logits, top_k - 1, axis=1)[:, :top_k]
    return tuple(np.bincount(chosen.ravel(), minlength=cell.spec.num_experts).tolist())


def parts(rows: Sequence[Measured]) -> dict[str, list[Measured]]:
    """The rows by what predicts them."""
    decode = [row for row in rows if row.backend == "swap_ab"]
    return {
        "swap_ab": [row for row in decode if row.tokens_per_expert <= MOST_TOKENS],
        "swap_ab, more tokens": [row for row in decode if row.tokens_per_expert > MOST_TOKENS],
        "grouped_gemm": [row for row in rows if row.backend == "grouped_gemm"],
    }


def main() -> None:
    """Print what the module promises."""
    rows = list(measured())
    print(fitted := fit(rows))
    for constants in (CONSTANTS[DEVICE], fitted):
        for what, some in parts(rows).items():
            off = [abs(row.error(constants)) for row in some]
            worst = some[int(np.argmax(off))].cell
            print(f"{what}: mean {np.mean(off):.1%}, worst {max(off):.1%} ({worst}), {len(some)} layers")


if __name__ == "__main__":
    main()
