"""What the roles of a CTA of the grouped GEMM share: references, this CTA's items, addresses, the ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_pallas.configs.schema import GroupedGemmConfig
from moe_pallas.kernels import _gather
from moe_pallas.kernels._persistent import NUMBERS, Persistent
from moe_pallas.kernels._weights import block_start
from moe_pallas.spec import ActivationScales, GateUp, QuantScheme, WeightScales

BLOCK_M = GroupedGemmConfig.BLOCK_M
RUN = 64  # rows and columns of a result that are stored together
HALF = 128  # weight rows of a tile that are multiplied together in FP8


class Operands(NamedTuple):
    """What a launch reads."""

    rows: Any  # (T, K), to be gathered, or (rows of the plan, K)
    weights: Any  # (E, N, K) or (E, K, N), or with gate and up apart (E, 2, N, K) or (E, N, 2, K)
    bias: Any  # (E, N) or (E, 2, N); or None
    num_blocks: Any
    block_expert: Any
    block_row: Any
    block_size: Any
    block_first: Any = None  # where a block's tokens start in token_of; given if rows are gathered
    token_of: Any = None
    weight_of_row: Any = None  # (rows of the plan,) float32: factors of the product, before the bias
    row_scale: Any = None  # FP8: (T, n) or (rows of the plan, n), n a scale a step or one; or (E, 1)
    weight_scale: Any = (
        None  # FP8: TENSOR (E, 1 or 2), CHANNEL like a bias, BLOCK (E * blocks of rows, steps)
    )
    out_scale: Any = None  # (E, 1): STATIC scales that the result is quantised by
    flags: Any = None  # of which only the counters are used; None if interpreted
    grouped_rows: Any = None  # (2,): the first row of any group, and the first after; the others become 0
    products: Any = None  # (rows of the plan, branches * N): given to make gradients; may be a `jax.Ref`
    weight_of_result: Any = None  # then: (rows of the plan,) float32, factors of what the experts make


class Outputs(NamedTuple):
    """What a launch makes; ``branches`` is 2 where there are gate and up, gate's columns first."""

    out: Any = None  # (rows of the plan, N), or (T, N) without a plan
    scale: Any = None  # (rows of the plan, N / 128) of FP8 in groups
    products: Any = None  # (rows of the plan, branches * N)
    d_products: Any = None  # (rows of the plan, branches * N); None: in the place of the products given
    hidden: Any = None  # (rows of the plan, N)
    d_bias: Any = None  # like d_products
    dots: Any = None  # (tiles, rows of the plan) float32


class Scratch(NamedTuple):
    """Shared memory."""

    rows: Any
    weights: Any
    results: Any
    words: Any  # numbers of items, then the launch's: each array takes a kilobyte
    landed: Any
    scales: Any  # FP8: (stages, 128 + halves), of a stage's rows and weights
    full: Any
    empty: Any
    drawn: Any


class Item(NamedTuple):
    """A block of rows times a tile of weight rows."""

    block: jax.Array
    tile: jax.Array
    expert: jax.Array
    row: jax.Array
    size: jax.Array


class Launch(Persistent):
    """What the roles of a CTA share: statics, references, and which items are this CTA's."""

    def __init__(
        self,
        operands: Operands,
        outputs: Outputs,
        scratch: Scratch,
        *,
        gate_up: GateUp | None,
        activate: Callable[..., Any] | None,  # to make gradients, `activate_with_slopes`
        limit: float | None,
        scheme: QuantScheme | None,
        contract_last: bool,
        config: GroupedGemmConfig,
        block_n: int,
        num_ctas: int,
        interpret: bool,
    ):
        self.operands, self.outputs = operands, outputs
        self.gate_up, self.activate, self.scheme, self.config = gate_up, activate, scheme, config
        self.contract_last, self.limit = contract_last, limit
        self.gathers = operands.block_first is not None
        self.is_compact = operands.grouped_rows is not None  # no rows between blocks
        self.makes_codes = scratch.results.dtype == jnp.float8_e4m3fn
        self.columns = num_columns(operands.weights.shape, gate_up, contract_last)
        given = operands.products
        self.branches = 1 if given is None else given.shape[1] // self.columns  # of what is given
        self.width = tile_width(self.columns, gate_up, block_n)
        self.tiles = num_tiles(self.columns, self.width)
        self.block_k = scratch.rows.shape[2]
        self.steps = operands.rows.shape[1] // self.block_k
        self.blocks = operands.num_blocks[0]
        super().__init__(
            operands.flags,
            scratch,
            num_stages=config.num_stages,
            items=self.blocks * self.tiles,
            num_ctas=num_ctas,
            interpret=interpret,
        )

    def walk(
        self, body: Callable[[Item, jax.Array], None], next_number: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """``body(item, its first step)`` for each item of this CTA; return the number of all its steps.

        ``next_number(slot)`` gives an item's number, with its place in the ring of numbers.
        """

        def turn(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            turns, number = state
            body(self.item(number), turns * self.steps)
            return turns + 1, next_number(lax.rem(turns + 1, jnp.int32(NUMBERS)))

        turns, _ = lax.while_loop(lambda state: state[1] < self.items, turn, (jnp.int32(0), self.cta))
        return turns * self.steps

    def item(self, number: jax.Array) -> Item:
        """What an item's number stands for."""
        block, tile = plgpu.planar_snake(number, (self.blocks, self.tiles), 0, self.config.band)
        operands = self.operands
        row = operands.block_row[block]
        row = row if self.is_compact else pl.multiple_of(row, 8)
        return Item(block, tile, operands.block_expert[block], row, operands.block_size[block])

    def first_column(self, tile: jax.Array) -> jax.Array:
        """First column of the result that a tile makes; the last tile ends with the matrix."""
        return pl.multiple_of(jnp.minimum(tile * self.width, self.columns - self.width), RUN)

    def weight_tiles(self, item: Item, contracted: Any) -> list[tuple[Any, ...]]:
        """Where the weights of an item stand: gate and up, or the only branch."""
        rows = pl.ds(self.first_column(item.tile), self.width)
        if self.gate_up is None:
            if self.contract_last:
                return [(item.expert, rows, contracted)]
            if len(self.operands.weights.shape) == 3:
                return [(item.expert, contracted, rows)]
            # Of interleaved weights (E, F, 2, N): all of gate is contracted, then all of up.
            size = jnp.int32(self.operands.weights.shape[1])
            branch = lax.div(contracted.start, size)
            first = pl.multiple_of(contracted.start - branch * size, self.block_k)
            return [(item.expert, pl.ds(first, self.block_k), branch, rows)]
        halves = [(half, rows) if self.gate_up is GateUp.STACKED else (rows, half) for half in range(2)]
        return [(item.expert, *half, contracted) for half in halves]

    def halves(self, item: Item) -> list[tuple[int, jax.Array]]:
        """The runs of 128 weight rows of a tile: which branch, and the first row in it."""
        row = self.first_column(item.tile)
        if self.gate_up is not None:
            return [(0, row), (1, row)]
        return [(0, row + first) for first in range(0, self.width, HALF)]

    def row_scales(self, item: Item) -> _gather.Scales:
        """Where the scales of a block's rows stand."""
        assert self.scheme is not None
        scales = self.operands.row_scale
        if self.scheme.hidden is ActivationScales.STATIC and not self.gathers:
            return _gather.Scales(scales, 0, item.expert)
        return _gather.Scales(scales, scales.shape[1], by_step=scales.shape[1] > 1)

    def block_scales(self, item: Item) -> tuple[Any, list[jax.Array]] | None:
        """Scales of blocks of weights, and where those of step 0 stand for each half."""
        if self.scheme is None or self.scheme.weights is not WeightScales.BLOCK:
            return None
        scales, halves = self.operands.weight_scale, self.halves(item)
        at = (self.columns, self.gate_up)
        return scales, [block_start(scales, item.expert, branch, row, *at) for branch, row in halves]


def num_columns(weights: tuple[int, ...], gate_up: GateUp | None, contract_last: bool) -> int:
    """Columns of the product with weights of a shape, of each branch if they are apart."""
    if not contract_last:
        return weights[-1]
    return weights[1 if gate_up is not GateUp.STACKED else 2]


def tile_width(columns: int, gate_up: GateUp | None, block_n: int) -> int:
    """Columns of the result that a tile makes."""
    return min(block_n // (1 if gate_up is None else 2), columns)


def num_tiles(columns: int, width: int) -> int:
    """Tiles of the result, the last moved back where it does not come out even."""
    return -(-columns // width)
