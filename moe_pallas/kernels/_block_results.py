"""What consumers of the grouped GEMM make of their products, and how it leaves a CTA.

Products of a consumer are (64, columns) float32, in the registers of its threads. They are taken 64 columns
at a time, a run: a run of the results is made of that of gate and that of up. Results are put into shared
memory, up to two runs at once, and leave by TMA. What a launch makes is said by which of its `Outputs` there
are:

    out                        act(w r p + b), the whole of a forward product; p are the products
    products                   p itself, which a backward pass starts from; the first half is gate
    d_products, hidden, dots   with p given, and d_bias: see `Results._make_gradients`

Of FP8 see `moe_pallas.kernels._block_gemm`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_pallas.kernels import _mgpu, _quantise
from moe_pallas.kernels._block_launch import RUN, Item, Launch
from moe_pallas.spec import WeightScales


class Results:
    """The results of one consumer."""

    def __init__(self, launch: Launch, consumer: jax.Array):
        self.launch, self.consumer = launch, consumer
        self.operands, self.outputs, self.tiles = launch.operands, launch.outputs, launch.scratch.results

    def make(self, item: Item, products: tuple[jax.Array, ...]) -> None:
        """Make what the launch makes of a consumer's rows of a block times the weights of a tile."""
        launch, outputs = self.launch, self.outputs
        columns = products[0].shape[1]

        def of_branches(first: int) -> list[jax.Array]:
            """A run of the products: of gate and up, or of the only branch."""
            starts = range(first, columns * len(products), launch.width)
            return [products[at // columns][:, at % columns : at % columns + RUN] for at in starts]

        runs = range(0, launch.width, RUN)
        if self.operands.products is not None:
            self._make_gradients(item, runs, products[0])
            return
        if outputs.products is not None:
            for first in runs:
                self._await_tiles()
                parts = self._on_their_sides(item, of_branches(first), first)
                self._send(item, [(part, outputs.products, i, first) for i, part in enumerate(parts)])
        if outputs.out is None:
            return
        together = 2 if launch.makes_codes else self.tiles.shape[1]
        for some in (runs[j : j + together] for j in range(0, len(runs), together)):
            self._await_tiles()
            results = [self._finish(item, of_branches(first), first) for first in some]
            if launch.makes_codes:
                self._send_codes(item, results, some[0])
            else:
                sent = zip(results, some, strict=True)
                self._send(item, [(result, outputs.out, 0, first) for result, first in sent])

    def end(self) -> None:
        """Set rows of no group to 0, where there are such, and wait for all stores."""
        launch, out = self.launch, self.outputs.out
        if launch.is_compact:
            self.tiles.at[self.consumer, 0][...] = jnp.zeros((RUN, RUN), out.dtype)
            self._clear(jnp.int32(0), self.operands.grouped_rows[0])
            self._clear(self.operands.grouped_rows[1], jnp.int32(out.shape[0]))
        plgpu.wait_smem_to_gmem(0)  # the block outlives its stores

    # Values

    def _finish(self, item: Item, branches: list[jax.Array], first: int) -> jax.Array:
        """A result (64, 64), columns of the tile from ``first`` on: from gate and up, or the only branch."""
        launch, columns = self.launch, self._columns(item, first)
        if launch.scheme is not None and launch.scheme.weights is not WeightScales.BLOCK:
            branches = [value * self._weight_scale(item, i, columns) for i, value in enumerate(branches)]
        branches = self._pre_activations(item, branches, columns)
        return branches[0] if launch.activate is None else launch.activate(*branches)

    def _columns(self, item: Item, first: int) -> Any:
        return pl.ds(pl.multiple_of(self.launch.first_column(item.tile) + first, RUN), RUN)

    def _rows(self, item: Item) -> Any:
        return pl.ds(pl.multiple_of(item.row + self.consumer * RUN, 8), RUN)

    def _pre_activations(self, item: Item, branches: list[jax.Array], columns: Any) -> list[jax.Array]:
        """Apply to products what comes before the activation."""
        operands = self.operands
        if operands.weight_of_row is not None:
            weights = self._of_rows(operands.weight_of_row, item)
            branches = [value * weights for value in branches]
        if operands.bias is not None:
            branches = [
                value + self._of_columns(operands.bias, item, i, columns) for i, value in enumerate(branches)
            ]
        return branches

    def _on_their_sides(self, item: Item, parts: list[jax.Array], first: int) -> list[jax.Array]:
        """Move products that rounding would take across a limit of the activation, where slopes jump."""
        limit = self.launch.limit
        if limit is None:
            return parts
        dtype, columns = self.outputs.products.dtype, self._columns(item, first)
        rounded = [part.astype(dtype).astype(jnp.float32) for part in parts]

        def is_free(parts: list[jax.Array]) -> list[jax.Array]:
            gate, up = self._pre_activations(item, parts, columns)
            return [gate <= limit, jnp.abs(up) <= limit]

        sides = zip(is_free(parts), is_free(rounded), strict=True)
        crosses = [jnp.logical_xor(*both) for both in sides]
        step = 2.0 * float(jnp.finfo(dtype).eps)  # of any number, one or two steps of its dtype
        moves = [
            step * jnp.where(a > b, jnp.abs(b), -jnp.abs(b)) for a, b in zip(parts, rounded, strict=True)
        ]
        return [
            jnp.where(cross, near + move, near)
            for cross, near, move in zip(crosses, rounded, moves, strict=True)
        ]

    def _of_rows(self, ref: Any, item: Item) -> jax.Array:
        """What (rows,) has for the consumer's rows, beside a result (64, 64)."""
        values = plgpu.load(ref.at[self._rows(item)], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        return lax.broadcast_in_dim(values, (RUN, RUN), (0,))

    def _of_columns(self, ref: Any, item: Item, branch: int, columns: Any) -> jax.Array:
        """What (E, N) or (E, 2, N) has for 64 weight rows, beside a result (64, 64)."""
        values = plgpu.load(
            ref.at[(item.expert, branch, columns) if len(ref.shape) == 3 else (item.expert, columns)],
            layout=plgpu.Layout.WGMMA.reduce(0),
            optimized=False,
        )
        return lax.broadcast_in_dim(values.astype(jnp.float32), (RUN, RUN), (1,))

    def _weight_scale(self, item: Item, branch: int, columns: Any) -> jax.Array:
        scheme = self.launch.scheme
        if scheme is not None and scheme.weights is WeightScales.CHANNEL:
            return self._of_columns(self.operands.weight_scale, item, branch, columns)
        return self.operands.weight_scale[item.expert, branch]

    def _make_gradients(self, item: Item, runs: range, product: jax.Array) -> None:
        """Make the gradients of the activation's operands: g = dy @ w2[e], the product, goes backward.

        With weights r on the output, h = act(p + b):

            r h                     hidden: what w2's gradient multiplies dy with
            g · h                   dots: the gradient of r, in a part for each tile
            dp = (dh / dp)ᵀ r g     d_products, in gate's columns and in up's

        With weights on the input, h = act(r p + b):

            h                       hidden
            p · db                  dots
            r db                    d_products
            db = (dh / db)ᵀ g       d_bias

        What comes first is sent before the rest is computed, from operands that are read again: all at once
        would not fit into registers. d_products may take the place of p: nobody else reads p there, but for
        rows and columns whose results are not stored.
        """
        launch, outputs = self.launch, self.outputs
        dots = functools.reduce(jnp.add, [self._run_gradients(item, first, product) for first in runs])
        _mgpu.store_of_rows(
            outputs.dots,
            dots,
            item.tile,
            item.row + self.consumer * RUN,
            item.size - self.consumer * RUN,
            interpret=launch.interpret,
        )

    def _run_gradients(self, item: Item, first: int, product: jax.Array) -> jax.Array:
        """Make those of a run; returns its dots."""
        launch, operands, outputs = self.launch, self.operands, self.outputs
        columns, d_hidden = self._columns(item, first), product[:, first : first + RUN]
        on_input = operands.weight_of_row is not None
        weights = self._of_rows(operands.weight_of_row if on_input else operands.weight_of_result, item)

        def sum_columns(values: jax.Array) -> jax.Array:
            dots = _mgpu.sum_of_rows(values, interpret=launch.interpret)
            # Columns of a tile that was moved back are those of the tile before.
            is_new = launch.first_column(item.tile) + first >= item.tile * launch.width
            return jnp.where(lax.broadcast(is_new, dots.shape), dots, 0.0)

        def load() -> tuple[list[jax.Array], jax.Array, list[jax.Array]]:
            parts = [self._load(operands.products, item, i, columns) for i in range(launch.branches)]
            assert launch.activate is not None
            return parts, *launch.activate(*self._pre_activations(item, parts, columns))

        _, hidden, _ = load()
        dots = None if on_input else sum_columns(d_hidden * hidden)
        self._await_tiles()
        self._send(item, [(hidden if on_input else hidden * weights, outputs.hidden, 0, first)])
        parts, _, slopes = load()
        if dots is None:
            d_parts = [slope * d_hidden for slope in slopes]
            products = [d * part for d, part in zip(d_parts, parts, strict=True)]
            dots = sum_columns(functools.reduce(jnp.add, products))
            if outputs.d_bias is not None:
                self._await_tiles()
                self._send(item, [(d, outputs.d_bias, i, first) for i, d in enumerate(d_parts)])
            d_parts = [d * weights for d in d_parts]
        else:
            d_hidden = d_hidden * weights
            d_parts = [slope * d_hidden for slope in slopes]
        self._await_tiles()
        target = operands.products if outputs.d_products is None else outputs.d_products
        self._send(item, [(d, target, i, first) for i, d in enumerate(d_parts)])
        return dots

    def _load(self, ref: Any, item: Item, branch: int, columns: Any) -> jax.Array:
        """What (rows, branches * N) has for the consumer's rows and 64 columns of a branch."""
        column = pl.multiple_of(columns.start + branch * self.launch.columns, RUN)
        values = plgpu.load(
            ref.at[self._rows(item), pl.ds(column, RUN)], layout=plgpu.Layout.WGMMA, optimized=False
        )
        return values.astype(jnp.float32)

    # Stores

    def _await_tiles(self) -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was here before has left

    def _send(self, item: Item, results: list[tuple[jax.Array, Any, int, int]]) -> None:
        """Send runs on their way: each a value, where to, its branch there, its first column of the tile."""
        for tile, (value, out, _, _) in enumerate(results):
            self.tiles.at[self.consumer, tile][...] = value.astype(out.dtype)
        plgpu.commit_smem()  # TMA sees it
        for tile, (_, out, branch, first) in enumerate(results):
            self._store_if_new(item, tile, out, branch, first)

    def _send_codes(self, item: Item, results: list[jax.Array], first: int) -> None:
        """Quantise 128 columns of the result, and send them on their way."""
        launch, operands = self.launch, self.operands
        row, column = item.row + self.consumer * RUN, launch.first_column(item.tile) + first
        scales = operands.out_scale if self.outputs.scale is None else self.outputs.scale
        where = (row, column, item.size - self.consumer * RUN, item.expert)
        assert launch.scheme is not None
        _quantise.store_tile(
            self.tiles,
            self.consumer,
            scales,
            results,
            *where,
            activations=launch.scheme.hidden,
            interpret=launch.interpret,
        )
        plgpu.commit_smem()  # TMA sees it
        self._store_if_new(item, 0, self.outputs.out, 0, first)

    def _store_if_new(self, item: Item, tile: int, out: Any, branch: int, first: int) -> None:
        """Store a run unless the tile before does: the last tile was moved back."""
        column = self.launch.first_column(item.tile) + first
        pl.when(column >= item.tile * self.launch.width)(
            functools.partial(self._store, item, tile, out, branch * self.launch.columns + column)
        )

    def _store(self, item: Item, tile: int, out: Any, column: jax.Array) -> None:
        """Send a run on its way, as many rows of it as there are in the block."""
        row, size = item.row + self.consumer * RUN, item.size - self.consumer * RUN
        if self.launch.is_compact:
            self._store_rows(tile, row, column, size)
            return
        columns = pl.ds(pl.multiple_of(column, RUN), self.tiles.shape[-1])

        def copy(start: Any, rows: int) -> None:
            plgpu.copy_smem_to_gmem(
                self.tiles.at[self.consumer, tile, pl.ds(start, rows)],
                out.at[pl.ds(pl.multiple_of(row + start, 8), rows), columns],
            )

        @pl.when(size >= RUN)
        def _all() -> None:
            copy(0, RUN)

        @pl.when(size < RUN)
        def _some() -> None:
            # Eight at a time: the next block starts at the next multiple of 8.
            @pl.loop(0, lax.div(size + 7, jnp.int32(8)))
            def _(i: jax.Array) -> None:
                copy(pl.multiple_of(8 * i, 8), 8)

    def _store_rows(self, tile: int, row: jax.Array, column: jax.Array, size: jax.Array) -> None:
        _mgpu.store_tile(
            self.tiles,
            (self.consumer, tile),
            self.outputs.out,
            row,
            column,
            size,
            interpret=self.launch.interpret,
        )

    def _clear(self, first: Any, end: Any) -> None:
        """Set rows to 0, 64 by 64 of them at a time."""
        launch = self.launch
        runs = jnp.int32(launch.columns // RUN)
        pieces = lax.div(end - first + RUN - 1, jnp.int32(RUN)) * runs
        me, all_ = 2 * launch.cta + self.consumer, 2 * launch.num_ctas

        @pl.loop(0, lax.div(jnp.maximum(pieces - me + all_ - 1, 0), jnp.int32(all_)))
        def _(i: jax.Array) -> None:
            piece = me + i * all_
            row = first + lax.div(piece, runs) * RUN
            self._store_rows(0, row, lax.rem(piece, runs) * RUN, end - row)
