"""The arrays that one model's cells are measured on: weights and tokens made on the device, router logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.cases import Cell
from benchmarks.timing import chain_length
from benchmarks.variants import Variant
from moe_pallas import GateUp, QuantScheme, quantize
from moe_pallas.quant import E4M3_MAX
from moe_pallas.spec import ActivationScales

Pair = tuple[Any, Any]

# What static scales are made for, the largest |x| and |h|. x is N(0, 1): one in 5e8 is beyond 6. h is
# silu(gate) · up of two numbers that are N(0, 1): one in 7e9 is beyond 20, and a layer has 2e8 at most.
# The same for all experts, so that the truth of a few of them is that of the layer.
LARGEST = {"w13": 6.0, "w2": 20.0}


class Inputs:
    """Arrays for cells of one ``case``, ``dtype`` and ``quant``.

    Args:
      cells: The cells.
      floors_us: Floor of each.
      num_layers: Layers in a step; 0: by the floors.
      memory_bytes: For all weight sets together.
    """

    def __init__(
        self, cells: Sequence[Cell], floors_us: Sequence[float], num_layers: int, memory_bytes: float
    ) -> None:
        self.cells = list(cells)
        self.spec, self.dtype, self.scheme = cells[0].spec, jnp.dtype(cells[0].dtype), cells[0].scheme
        # The same for all loads of a token count, which share their programs.
        longest: dict[int, float] = {}
        for cell, floor in zip(cells, floors_us, strict=True):
            longest[cell.tokens] = max(floor, longest.get(cell.tokens, 0.0))
        self._num_layers = {t: num_layers or chain_length(floor) for t, floor in longest.items()}
        fits = int(memory_bytes // (cells[0].expert_bytes * self.spec.num_experts))
        # At least 2, however large; no more than the longest step has layers.
        self._num_weight_sets = max(2, min(fits, max(self._num_layers.values())))

    def num_layers(self, cell: Cell) -> int:
        """Layers in a step."""
        return self._num_layers[cell.tokens]

    def num_weight_sets(self, cell: Cell) -> int:
        """Distinct weights in a step."""
        return min(self._num_weight_sets, self.num_layers(cell))

    @functools.cached_property
    def weights(self) -> list[Pair]:
        """(w13, w2), as many as the longest step has, N(0, 1/fan_in): arrays, or `QTensor`s of the same."""
        keys = jax.random.split(jax.random.key(0), (self._num_weight_sets, 2))
        return [(self._make("w13", key[0]), self._make("w2", key[1])) for key in keys]

    def _make(self, name: str, key: jax.Array) -> Any:
        gate_up = self.spec.gate_up if name == "w13" and self.spec.gated else None
        largest = LARGEST[name]
        return scaled_normal(key, self.spec.param_shapes[name], self.dtype, self.scheme, gate_up, largest)

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """(T, D), N(0, 1), T the largest; on the host, where taking the first few needs no program."""
        most = max(cell.tokens for cell in self.cells)
        make = jax.jit(lambda key: jax.random.normal(key, (most, self.spec.hidden_size), self.dtype))
        return np.asarray(make(jax.random.key(1)))

    def logits(self, cell: Cell, layer: int) -> np.ndarray:
        """(T, E) of one layer: the cell's, with the experts renumbered, so that layers visit others."""
        return np.roll(cell.logits, layer * max(1, self.spec.num_experts // 8), axis=1)

    def layer_logits(self, cell: Cell) -> list[jax.Array]:
        """Logits of all layers of a step."""
        return [jnp.asarray(self.logits(cell, layer)) for layer in range(self.num_layers(cell))]

    def shapes(self, cell: Cell, variant: Variant) -> tuple[Any, list[Pair]]:
        """What a variant takes for x and for the weights of a step, as shapes."""
        rows, convert = variant.rows(cell), variant.weights(cell)
        lead = (cell.tokens,) if rows is None else rows.shape
        key = jax.random.key(0)
        pair = [jax.eval_shape(functools.partial(self._make, name), key) for name in ("w13", "w2")]
        w13, w2 = (jax.eval_shape(convert, w) if convert else w for w in pair)
        x = jax.ShapeDtypeStruct((*lead, self.spec.hidden_size), self.dtype)
        return x, [(w13, w2)] * self.num_weight_sets(cell)

    def rows(self, cell: Cell, variant: Variant) -> jax.Array:
        """What a variant takes for x."""
        rows = variant.rows(cell)
        return jnp.asarray(self.tokens[: cell.tokens] if rows is None else self.tokens[rows])

    def step_weights(self, cell: Cell, convert: Callable[[Any], Any] | None = None) -> list[Pair]:
        """The weights of a step, each array converted."""
        sets = self.weights[: self.num_weight_sets(cell)]
        if convert is None:
            return sets
        converted = jax.jit(convert)
        return [(converted(w13), converted(w2)) for w13, w2 in sets]

    def release(self) -> None:
        """Free the weights; they are made again, the same, when next asked for."""
        self.__dict__.pop("weights", None)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5, 6))
def scaled_normal(
    key: jax.Array,
    shape: tuple[int, ...],
    dtype: Any,
    scheme: QuantScheme | None,
    gate_up: GateUp | None,
    largest: float,
    std: float = 1.0,
) -> Any:
    """(E, …, K) N(0, std²/K) in dtype, or quantised.

    ``largest``: What static scales of activations are made for.
    """

    def one(key: jax.Array) -> Any:
        matrix = (jax.random.normal(key, shape[1:], jnp.float32) * (std * shape[-1] ** -0.5)).astype(dtype)
        if scheme is None:
            return matrix
        is_static = scheme.activations is ActivationScales.STATIC
        # Without the barrier XLA may quantise the float32 numbers.
        return quantize(
            lax.optimization_barrier(matrix),
            scheme,
            gate_up=gate_up,
            input_scale=largest / E4M3_MAX if is_static else None,
        )

    # One expert after the other: the float32 numbers of all of them would not fit, and where they are
    # quantised neither all of them nor their unquantised ones are ever there.
    return lax.map(one, jax.random.split(key, shape[0]))
