"""What is measured: models, token counts, loads; and what a call must at least read and compute."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable

import ml_dtypes
import numpy as np

from moe_pallas import MoESpec, Problem, QuantScheme
from moe_pallas.spec import FP8, ActivationScales, WeightScales
from moe_pallas.testing import LOADS, random_logits

__all__ = ["LOADS", "MODELS", "QUANTS", "REGIMES", "SCHEMES", "TINY_MODELS", "TINY_TOKENS", "TOKENS", "Cell"]


def _spec(hidden_size: int, intermediate_size: int, num_experts: int, top_k: int) -> MoESpec:
    # Softmax, renormalised, plain SwiGLU: the function that the rivals were measured on.
    return MoESpec(
        num_experts=num_experts, top_k=top_k, hidden_size=hidden_size, intermediate_size=intermediate_size
    )


# One layer as one GPU holds it; deepseek-v3-tp8 is one of eight tensor-parallel shares (F 2048 / 8).
MODELS = {
    "qwen3-30b-a3b": _spec(2048, 768, 128, 8),
    "qwen3-235b-a22b": _spec(4096, 1536, 128, 8),
    "mixtral-8x7b": _spec(4096, 14336, 8, 2),
    "qwen3-next-80b": _spec(2048, 512, 512, 10),
    "deepseek-v3-tp8": _spec(7168, 256, 256, 8),
    "gpt-oss-120b": _spec(2880, 2880, 128, 4),
    "olmoe": _spec(2048, 1024, 64, 8),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192)

# For testing the harness, on a CPU.
TINY_MODELS = {"tiny": _spec(32, 48, 8, 2), "tiny-wide": _spec(64, 32, 16, 3)}
TINY_TOKENS = (1, 8)

# fp8_tensor is what the rivals' rows of that name were measured with: scales of activations that stand in the
# checkpoint (STATIC). Scales made in the call, which the library's own "fp8_tensor" has, are more work.
SCHEMES = {
    "fp8_tensor": QuantScheme(weights=WeightScales.TENSOR, activations=ActivationScales.STATIC),
    "fp8_channel": QuantScheme.named("fp8_channel"),
    "fp8_block": QuantScheme.named("fp8_block"),
}
QUANTS = ("none", *SCHEMES)

REGIMES = {"decode": (1, 64), "middle": (65, 1024), "prefill": (1025, math.inf)}


def product_dtype(dtype: str, quant: str) -> str:
    """Dtype of what the matrix products multiply: the activations' own, or FP8."""
    return dtype if quant == "none" else FP8


def regime_of(tokens: int) -> str:
    """Name the regime of a token count: decode T ≤ 64, middle to 1024, prefill above."""
    return next(name for name, (low, high) in REGIMES.items() if low <= tokens <= high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One measured problem; its rows are what the backends made of it.

    Args:
      case: Name of the model.
      spec: The layer.
      tokens: T.
      dtype: Of activations, for example ``"bfloat16"``, and of weights that are not quantised.
      load: One of `LOADS`.
      quant: How weights and activations are quantised: ``"none"``, or one of `SCHEMES`.
      seed: Of the router logits.
    """

    case: str
    spec: MoESpec
    tokens: int
    dtype: str
    load: str = "uniform"
    quant: str = "none"
    seed: int = 0

    @property
    def rows(self) -> int:
        """R = T · top_k."""
        return self.tokens * self.spec.top_k

    @functools.cached_property
    def experts_hit(self) -> int:
        """How many experts have a row."""
        return experts_hit(self.logits, self.spec.top_k)

    @property
    def logits(self) -> np.ndarray:
        """(T, E) float32. The first T rows of one table, so that a token's truth is the same at every T."""
        table = _logits_table(self.spec.num_experts, self.load, self.seed, max(self.tokens, TOKENS[-1]))
        return table[: self.tokens]

    @property
    def itemsize(self) -> int:
        """Bytes of one element of x or y."""
        return _itemsize(self.dtype)

    @property
    def scheme(self) -> QuantScheme | None:
        """How weights and activations are quantised, if they are."""
        return None if self.quant == "none" else SCHEMES[self.quant]

    @property
    def product_dtype(self) -> str:
        """See `product_dtype`."""
        return product_dtype(self.dtype, self.quant)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights: 3·D·F of them if gated, else 2·D·F.

        Without their scales: of FP8 weights in blocks 0.02 %, in channels 0.5 % at most, where F is 256.
        """
        spec = self.spec
        return spec.hidden_size * (spec.w13_rows + spec.intermediate_size) * _itemsize(self.product_dtype)

    @property
    def min_bytes(self) -> int:
        """Bytes that must move: the weights of the experts hit, x in and y out, each once.

        x and y have the activations' dtype also where weights are FP8.
        """
        return self.experts_hit * self.expert_bytes + 2 * self.tokens * self.spec.hidden_size * self.itemsize

    @property
    def flops(self) -> int:
        """Of both products of every routed row: 6·T·top_k·D·F if gated, else 4·T·top_k·D·F."""
        spec = self.spec
        return 2 * self.rows * spec.hidden_size * (spec.w13_rows + spec.intermediate_size)

    @property
    def problem(self) -> Problem:
        """The same for the oracle."""
        return Problem(
            spec=self.spec,
            num_tokens=self.tokens,
            dtype=self.dtype,
            quant=self.quant,
            activation_scales=self.scheme.activations if self.scheme else None,
        )

    def floor_us(self, read_gb_per_s: float, matmul_tflops: float) -> float:
        """Time below which nothing runs: max(bytes / read bandwidth, FLOPs / matmul rate), in µs."""
        return max(self.min_bytes / (read_gb_per_s * 1e3), self.flops / (matmul_tflops * 1e6))

    def __str__(self) -> str:
        quant = "" if self.quant == "none" else f" {self.quant}"
        return f"{self.case} T={self.tokens} {self.dtype}{quant} {self.load}"


def experts_hit(logits: np.ndarray, top_k: int) -> int:
    """Count the experts that are among the top_k of any row of (T, E) logits."""
    if top_k >= logits.shape[1]:
        return logits.shape[1]
    return len(np.unique(np.argpartition(-logits, top_k - 1, axis=1)[:, :top_k]))


def cells(
    models: dict[str, MoESpec],
    tokens: Iterable[int],
    dtypes: Iterable[str],
    loads: Iterable[str],
    quants: Iterable[str] = ("none",),
) -> list[Cell]:
    """All combinations; cells of one model, dtype and quant, which share weights, follow each other."""
    return [
        Cell(case=case, spec=spec, tokens=t, dtype=dtype, load=load, quant=quant)
        for case, spec in models.items()
        for dtype in dtypes
        for quant in quants
        for load in loads
        for t in tokens
    ]


def _itemsize(dtype: str) -> int:
    return np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize


@functools.lru_cache(maxsize=4)
def _logits_table(num_experts: int, load: str, seed: int, num_tokens: int) -> np.ndarray:
    return random_logits(num_tokens, num_experts, load=load, seed=seed)
