"""Activations to FP8 inside a kernel, by the rules of `moe_pallas.quant`.

`quantise_tokens` makes codes and scales of x before the first product; `store_codes` and `store_tile` those
of h from the registers that the first product leaves, where tokens are columns of it, or rows; `load_rows`
and `store_operand` those of h from its float32, before the second product. Codes of x are
quant's, bit for bit; h comes from products that were summed up in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from moe_pallas.kernels import _mgpu
from moe_pallas.kernels._schedule import divmod_static
from moe_pallas.kernels._simt import (
    Bool,
    Float,
    Int,
    Memory,
    cta_index,
    for_range,
    if_,
    in_every_thread,
    maximum,
    reciprocal,
    select,
    thread_index,
    to_e4m3,
    warp_float_max,
    warp_max,
)
from moe_pallas.quant import PER_LARGEST, SMALLEST_SCALE, quantize_activations
from moe_pallas.spec import ActivationScales, QuantScheme

_GROUP = QuantScheme.BLOCK
_PER_LARGEST, _SMALLEST_SCALE = float(PER_LARGEST), float(SMALLEST_SCALE)
_PIECE = 256  # columns that a warp reads at once: 8 a lane
_BARRIER = 9  # named barrier (bar.sync) of the warpgroup of tokens, see `moe_pallas.kernels._mgpu`


def num_pieces(x: Any, activations: ActivationScales) -> int:
    """Pieces that `quantise_tokens` cuts x into; CTA c has those numbered c, c + num_ctas, ..."""
    num_tokens, hidden_size = x.shape
    return num_tokens * (1 if activations is ActivationScales.TOKEN else -(-hidden_size // _PIECE))


def quantise_tokens(
    x: Any,
    codes: Any,
    scales: Any,
    input_scale: Any | None,
    maxima: Any,
    activations: ActivationScales,
    num_ctas: int,
) -> None:
    """Quantise all of x; called by one warpgroup of each CTA, which does a part.

    Args:
      x: (T, D) bfloat16 | float16 in global memory, D a multiple of 64.
      codes: (T, D) float8_e4m3fn in global memory, written.
      scales: (T, ceil(D / 128)) float32 in global memory if GROUP, else (T, 1), written.
      input_scale: (E, P) float32 in global memory if STATIC: x is quantised by the largest.
      maxima: (at least 4,) float32 in shared memory, for this warpgroup.
      activations: STATIC, TOKEN or GROUP.
      num_ctas: CTAs of the launch.
    """
    num_tokens, hidden_size = x.shape
    pieces, groups = num_pieces(x, activations), -(-hidden_size // _GROUP)
    is_static, is_token = (activations is kind for kind in (ActivationScales.STATIC, ActivationScales.TOKEN))

    def phase(given: dict[str, Memory]) -> None:
        lane, warp = thread_index() & 31, (thread_index() >> 5) & 3
        static = _at_least_smallest(_largest(given["input_scale"], lane)) if is_static else None

        def read(token: Int, column: Int) -> tuple[list[Float], Bool]:
            """8 numbers a lane, and whether they are there."""
            is_there = column < hidden_size
            values = given["x"].load_vector(token * hidden_size + select(is_there, column, 0), 8)
            return [_flushed(select(is_there, value, 0.0)) for value in values], is_there

        def write(token: Int, column: Int, values: list[Float], is_there: Bool, scale: Float) -> None:
            with if_(is_there):
                for i, word in enumerate(_codes(values, reciprocal(scale))):
                    given["codes"].store(token * hidden_size + column + 4 * i, word)

        def piece(number: Int) -> list[Any]:
            per_token = pieces // num_tokens
            token = number // per_token
            column = (number - token * per_token) * _PIECE + lane * 8
            values, is_there = read(token, column)
            scale = static
            if scale is None:
                scale = _scale_of(warp_float_max(_largest_finite(values), _GROUP // 8))
            write(token, column, values, is_there, scale)
            is_first = is_there & (column & (_GROUP - 1)).equals(0) if static is None else column.equals(0)
            with if_(is_first):
                given["scales"].store(token if is_static else token * groups + column // _GROUP, scale)
            return []

        def row(token: Int) -> list[Any]:
            columns = [
                at + (thread_index() & 127) * 8 for at in map(Int.of, range(0, hidden_size, 4 * _PIECE))
            ]
            found = [read(token, column) for column in columns]  # all of a row is on its way at once
            amax = Float.of(0.0)
            for values, _ in found:
                amax = maximum(amax, _largest_finite(values))
            amax = warp_float_max(amax)
            with if_(lane.equals(0)):
                given["maxima"].store(warp, amax)
            _mgpu.ptx(f"bar.sync {_BARRIER}, 128;")
            for i in range(4):
                amax = maximum(amax, given["maxima"].load(i))
            _mgpu.ptx(f"bar.sync {_BARRIER}, 128;")  # before the next row's are stored
            scale = _scale_of(amax)
            for column, (values, is_there) in zip(columns, found, strict=True):
                write(token, column, values, is_there, scale)
            with if_((thread_index() & 127).equals(0)):
                given["scales"].store(token, scale)
            return []

        if is_token:
            for_range(cta_index(), num_tokens, num_ctas, [], row)
        else:
            for_range(warp * num_ctas + cta_index(), pieces, 4 * num_ctas, [], piece)

    in_every_thread(phase, x=x, codes=codes, scales=scales, input_scale=input_scale, maxima=maxima)


def store_codes(
    codes: Any,
    scales: Any,
    maxima: Any,
    values: Sequence[jax.Array],
    row: jax.Array,
    column: jax.Array,
    size: jax.Array,
    expert: jax.Array,
    *,
    activations: ActivationScales,
    num_rows: int,
    interpret: bool,
) -> None:
    """``codes[row + j, column + s * num_rows + i]`` = code of ``values[s][i, j]``, j < size, i < num_rows.

    Args:
      codes: (rows, F) float8_e4m3fn in global memory.
      scales: GROUP: (rows, F / 128) float32 in global memory, written for the group at ``column``. STATIC:
        (E, 1) float32, of which ``expert``'s is used.
      maxima: (4 * n,) float32 in shared memory, for this warpgroup.
      values: (64, n) float32 accumulators: columns are tokens. GROUP: two, which make up the group.
      row: Where the tokens begin.
      column: Where the values begin; a multiple of 128 if GROUP.
      size: Tokens.
      expert: Theirs.
      activations: STATIC or GROUP.
      num_rows: Rows of each of the values that count, all 64 if GROUP.
      interpret: Whether Pallas' interpreter runs this.
    """
    is_static = activations is ActivationScales.STATIC
    if interpret:
        rows = jnp.concatenate([value[:num_rows] for value in values]).T  # (n, columns)
        input_scale = scales[expert, 0] if is_static else None
        made, scale = quantize_activations(rows, activations, input_scale)

        @pl.loop(0, size)
        def _(j: jax.Array) -> None:
            codes[row + j, pl.ds(column, made.shape[1])] = made[j]
            if not is_static:
                scales[row + j, pl.ds(column // _GROUP, 1)] = scale[j]

        return
    row_length, width = codes.shape[1], values[0].shape[1]
    groups = row_length // _GROUP

    def store(ctx: Any, codes: Any, scales: Any, maxima: Any, *rest: Any) -> None:
        row, column, size, expert = (Int(_mgpu.scalar(x)) for x in rest[-4:])
        lane, warp = thread_index() & 31, (thread_index() >> 5) & 3
        # Lane l of warp w has rows 16w + l/4 (+ 8) and columns 2(l % 4), 2(l % 4) + 1 (+ 8, ...).
        held = [_pairs(value) for value in rest[:-4]]
        columns = [(j, half) for j in range(width // 8) for half in range(2)]
        mine = {at: [[Float(v[at[0]][i][at[1]]) for i in range(2)] for v in held] for at in columns}
        first = (lane & 3) * 2
        own = {}
        if is_static:
            scale = _at_least_smallest(Memory(scales).load(expert))
            own = dict.fromkeys(columns, reciprocal(scale))
        else:
            table = Memory(maxima)
            _mgpu.consumer_barrier()  # what was there before is read
            for j, half in columns:
                amax = _largest_finite([_flushed(x) for slab in mine[j, half] for x in slab])
                amax = warp_float_max(amax, 32, apart=4)
                with if_(lane < 4):
                    table.store(warp * width + first + (8 * j + half), amax)
            _mgpu.consumer_barrier()
            group = column // _GROUP
            for j, half in columns:
                at = first + (8 * j + half)
                amax = table.load(at)
                for w in range(1, 4):
                    amax = maximum(amax, table.load(at + w * width))
                scale = _scale_of(amax)
                own[j, half] = reciprocal(scale)
                with if_((thread_index() & 127) < 4), if_(at < size):
                    Memory(scales).store((row + at) * groups + group, scale)
        words = {}
        for j, half in columns:
            for s, pair in enumerate(mine[j, half]):
                low, high = (_scaled(_flushed(x), own[j, half]) for x in pair)
                words[j, half, s] = to_e4m3(low, high).value
        _store_pairs(codes, row_length, words, row, column, size, num_rows)

    arrays = [plgpu.Layout.WGMMA] * len(values)
    refs = [plgpu.RefType()] * 3
    run = plgpu.inline_mgpu(arg_types=(*refs, *arrays, *[_mgpu.SCALAR] * 4))(store)
    run(codes, scales, maxima, *values, row, column, size, expert)


def load_rows(
    h: Any,
    blocks: tuple[Any, Sequence[jax.Array]] | None,
    first: jax.Array,
    size: jax.Array,
    step: jax.Array,
    end: jax.Array,
    *,
    width: int,
    num_steps: int,
) -> jax.Array:
    """Read what `store_operand` makes operands of, for ``num_steps`` steps at once; by one warpgroup.

    Args:
      h: (rows, F) float32 in global memory, F a multiple of 128.
      blocks: Scales of weights and where those of step 0 stand, if they have some for each step.
      first: Where the rows begin.
      size: How many count, 1 ... width; others become one of them.
      step: The first step, of 128 columns.
      end: Steps from here on are not used.
      width: Rows, a multiple of 8.
      num_steps: Steps.

    Returns:
      Registers: of each step 8 columns of each 8th row, then a scale of the weights.
    """
    row_length, starts = h.shape[1], () if blocks is None else blocks[1]
    per_step = width + bool(starts)
    count = num_steps * per_step

    def load(ctx: Any, h: Any, weights: Any, *scalars: Any) -> Any:
        first, size, step, end, *starts = (Int(_mgpu.scalar(x)) for x in scalars)
        thread, memory = thread_index() & 127, Memory(h)
        made = []
        for i in range(num_steps):
            at = select(step + i < end, step + i, step)
            column = at * _GROUP + (thread & 15) * 8
            for j in range(0, width, 8):
                row = memory.row(first + select((thread >> 4) + j < size, (thread >> 4) + j, 0), row_length)
                made += [*row.load_vector(column, 4), *row.load_vector(column + 4, 4)]
            if starts:
                start = starts[0]
                for s in range(1, len(starts)):
                    start = select(thread.equals(s), starts[s], start)
                made.append(Memory(weights).load(start + at))
        return _mgpu.hold([value.value for value in made], is_signed=None)

    run = plgpu.inline_mgpu(
        arg_types=(*[plgpu.RefType()] * 2, *[_mgpu.SCALAR] * (4 + len(starts))),
        return_type=plgpu.ShapeDtypeStruct((128 * count,), jnp.float32, layout=_mgpu.held_layout(count)),
    )(load)
    return run(h, h if blocks is None else blocks[0], first, size, step, end, *starts)


def store_operand(
    rows: jax.Array,
    index: int,
    operand: Any,
    scales: Any,
    stage: jax.Array,
    *,
    width: int,
    num_blocks: int,
) -> None:
    """Quantise one step of what `load_rows` read: an operand of WGMMA, and the scales that go with it.

    Args:
      rows: From `load_rows`.
      index: Which of its steps.
      operand: (stages, block_m, 128) float8_e4m3fn in shared memory, in the layout of WGMMA operands.
      scales: (stages, n) float32 in shared memory: first those of the rows, last those of weights.
      stage: Which to write.
      width: As for `load_rows`.
      num_blocks: Scales of weights.
    """
    _, block_m, columns = operand.shape
    per_stage, per_step = scales.shape[1], width + bool(num_blocks)

    def store(ctx: Any, rows: Any, operand: Any, scales: Any, stage: Any) -> None:
        stage = Int(_mgpu.scalar(stage))
        held = [Float(word) for word in _mgpu.held(rows)]
        thread, table = thread_index() & 127, Memory(scales)
        row, chunk = thread >> 4, (thread & 15) >> 1
        to = Int(_mgpu.shared_address(operand)) + stage * (block_m * columns) + row * columns
        to = to + (((chunk ^ row) << 4) | ((thread & 1) << 3))
        mine = held[index * per_step : (index + 1) * per_step]
        for j in range(0, width, 8):
            values = [_flushed(x) for x in mine[j : j + 8]]
            scale = _scale_of(warp_float_max(_largest_finite(values), 16))
            low, high = _codes(values, reciprocal(scale))
            _mgpu.ptx(
                f"st.shared.v2.b32 [%[to]+{j * columns}], {{%[low], %[high]}};",
                to=to.value,
                low=low.value,
                high=high.value,
            )
            with if_((thread & 15).equals(0)):
                table.store(stage * per_stage + row + j, scale)
        if num_blocks:
            with if_(thread < num_blocks):
                table.store(stage * per_stage + (per_stage - num_blocks) + thread, mine[-1])
        _mgpu.ptx(f"fence.proxy.async.shared::cta; bar.sync {_BARRIER}, 128;")

    held = _mgpu.held_layout(rows.shape[0] // 128)
    tile = plgpu.RefType(_mgpu.operand_transforms(operand.dtype))
    plgpu.inline_mgpu(arg_types=(held, tile, plgpu.RefType(), _mgpu.SCALAR))(store)(
        rows, operand, scales, stage
    )


def interpret_operand(
    h: Any,
    blocks: tuple[Any, Sequence[jax.Array]] | None,
    first: jax.Array,
    size: jax.Array,
    step: jax.Array,
    operand: Any,
    scales: Any,
    stage: jax.Array,
) -> None:
    """What `load_rows` and `store_operand` do to one step, for Pallas' interpreter."""
    columns, num_scales = operand.shape[2], scales.shape[1]

    @pl.loop(0, size)
    def _(j: jax.Array) -> None:
        row = h[first + j, pl.ds(step * columns, columns)][None]
        codes, scale = quantize_activations(row, ActivationScales.GROUP)
        operand[stage, j, :] = codes[0]
        scales[stage, j] = scale[0, 0]

    if blocks is not None:
        weights, starts = blocks
        for i, start in enumerate(starts):
            row, column = divmod_static(start + step, weights.shape[1])
            scales[stage, num_scales - len(starts) + i] = weights[row, column]


def store_tile(
    tiles_smem: Any,
    warpgroup: jax.Array,
    scales: Any,
    values: Sequence[jax.Array],
    row: jax.Array,
    column: jax.Array,
    size: jax.Array,
    expert: jax.Array,
    *,
    activations: ActivationScales,
    interpret: bool,
) -> None:
    """``tiles[warpgroup, 0, i, 64 * s + j]`` = code of ``values[s][i, j]``: rows are tokens here.

    Args:
      tiles_smem: (warpgroups, 1, 64, 128) float8_e4m3fn in shared memory, in the layout of WGMMA operands.
      warpgroup: The running one.
      scales: GROUP: (rows, F / 128) float32 in global memory, written for rows ``row : row + size`` and the
        group at ``column``. STATIC: (E, 1) float32, of which ``expert``'s is used.
      values: Two (64, 64) float32 accumulators.
      row: Where the rows stand in ``scales``.
      column: The first column's number in h.
      size: Rows that count.
      expert: Theirs.
      activations: STATIC or GROUP.
      interpret: Whether Pallas' interpreter runs this.
    """
    is_static = activations is ActivationScales.STATIC
    if interpret:
        made, scale = quantize_activations(
            jnp.concatenate(values, axis=1), activations, scales[expert, 0] if is_static else None
        )
        tiles_smem[warpgroup, 0, :, :] = made
        if not is_static:

            @pl.loop(0, jnp.minimum(size, len(made)))
            def _(i: jax.Array) -> None:
                scales[row + i, pl.ds(column // _GROUP, 1)] = lax.dynamic_index_in_dim(scale, i, 0, False)

        return

    def store(ctx: Any, tiles: Any, scales: Any, *rest: Any) -> None:
        warpgroup, row, column, size, expert = (Int(_mgpu.scalar(x)) for x in rest[-5:])
        lane, warp = thread_index() & 31, (thread_index() >> 5) & 3
        held = [_pairs(value) for value in rest[:-5]]
        words = {}
        for i in range(2):
            # Lane l of warp w has columns 2(l % 4), 2(l % 4) + 1 (+ 8, ...) of rows 16w + l/4 (+ 8).
            mine = [[_flushed(Float(x)) for x in pair[i]] for value in held for pair in value]
            if is_static:
                scale = _at_least_smallest(Memory(scales).load(expert))
            else:
                scale = _scale_of(warp_float_max(_largest_finite([x for pair in mine for x in pair]), 4))
                at = warp * 16 + (lane >> 2) + 8 * i
                groups = Memory(scales).size // num_rows
                with if_((lane & 3).equals(0)), if_(at < size):
                    Memory(scales).store((row + at) * groups + column // _GROUP, scale)
            inverse = reciprocal(scale)
            for j, pair in enumerate(mine):
                words[i, j] = to_e4m3(*(_scaled(x, inverse) for x in pair)).value
        stores = []
        for j in range(16):
            if j % 2 == 0:  # a chunk of 16 bytes, swizzled
                stores.append(f"xor.b32 t, l, {j // 2}; shl.b32 t, t, 4; add.u32 t, t, a;")
            for i in range(2):
                stores.append(f"cvt.u16.u32 h, %[v{i}_{j}]; st.shared.b16 [t+{1024 * i + 8 * (j % 2)}], h;")
        _mgpu.ptx(
            f"""{{ .reg .b16 h; .reg .b32 t, l, a;
            mov.u32 t, %tid.x; and.b32 l, t, 3; shl.b32 a, l, 1; add.u32 a, a, %[tiles];
            mad.lo.u32 a, %[warpgroup], {64 * 128}, a; and.b32 l, t, 31; shr.u32 l, l, 2;
            mad.lo.u32 a, l, 128, a; shr.u32 t, t, 5; and.b32 t, t, 3; mad.lo.u32 a, t, 2048, a;
            {" ".join(stores)} }}""",
            tiles=_mgpu.shared_address(tiles),
            warpgroup=warpgroup.value,
            **{f"v{i}_{j}": word for (i, j), word in words.items()},
        )

    num_rows = scales.shape[0]
    arrays = [plgpu.Layout.WGMMA] * len(values)
    refs = [plgpu.RefType(_mgpu.operand_transforms(tiles_smem.dtype)), plgpu.RefType()]
    run = plgpu.inline_mgpu(arg_types=(*refs, *arrays, *[_mgpu.SCALAR] * 5))(store)
    run(tiles_smem, scales, *values, warpgroup, row, column, size, expert)


def quantise(
    x: jax.Array, input_scale: jax.Array | None, activations: ActivationScales
) -> tuple[jax.Array, jax.Array]:
    """Quantise x in a launch of its own: codes (T, D) and scales, as `quantise_tokens` has them."""
    num_tokens, hidden_size = x.shape
    groups = -(-hidden_size // _GROUP) if activations is ActivationScales.GROUP else 1
    pieces = num_pieces(x, activations)
    num_ctas = pieces if activations is ActivationScales.TOKEN else -(-pieces // 4)

    def body(*refs: Any) -> None:
        *given, codes, scales, maxima = refs
        given_scale = given[1] if input_scale is not None else None
        quantise_tokens(given[0], codes, scales, given_scale, maxima, activations, num_ctas)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(x.shape, jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((num_tokens, groups), jnp.float32),
        ),
        grid=(num_ctas,),
        grid_names=("cta",),
        scratch_types=[plgpu.SMEM((4,), jnp.float32)],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name="quantise",
    )(*([x] if input_scale is None else [x, input_scale]))


def _pairs(value: Any) -> list[list[list[Any]]]:
    """The elements of an accumulator that a thread has: by 8 columns, by 8 rows, two columns."""
    registers = value.registers.flat
    both = [[llvm.extractelement(pair, Int.of(half).value) for half in range(2)] for pair in registers]
    return [both[i : i + 2] for i in range(0, len(both), 2)]


def _store_pairs(
    codes: Any,
    row_length: int,
    words: dict[tuple[int, int, int], ir.Value],
    row: Int,
    column: Int,
    size: Int,
    num_rows: int,
) -> None:
    """Store codes of the elements of accumulators: two rows, 8 apart, to a word."""
    stores = []
    for j, half in dict.fromkeys(at[:2] for at in words):
        stores.append(f"setp.gt.s32 p, s, {8 * j + half}; and.pred r0, q0, p; and.pred r1, q1, p;")
        for s in range(1 + max(at[2] for at in words)):
            offset, word = (8 * j + half) * row_length + s * num_rows, f"%[v{j}_{half}_{s}]"
            stores.append(
                f"@r0 st.global.b8 [a+{offset}], {word}; "
                f"shr.u32 c, {word}, 8; @r1 st.global.b8 [a+{offset + 8}], c;"
            )
    _mgpu.ptx(
        f"""{{ .reg .pred p, q0, q1, r0, r1; .reg .b32 t, l, c, s; .reg .b64 a, b;
        mov.u32 t, %tid.x; and.b32 l, t, 31; and.b32 c, l, 3; shl.b32 c, c, 1; sub.s32 s, %[size], c;
        shr.u32 l, l, 2; shr.u32 t, t, 5; and.b32 t, t, 3; shl.b32 t, t, 4; add.s32 t, t, l;
        setp.lt.s32 q0, t, {num_rows}; setp.lt.s32 q1, t, {num_rows - 8};
        add.s32 c, c, %[row]; mul.wide.s32 a, c, {row_length}; add.s64 a, a, %[codes];
        add.s32 c, t, %[column]; cvt.s64.s32 b, c; add.s64 a, a, b;
        {" ".join(stores)} }}""",
        codes=_mgpu.address(codes),
        row=row.value,
        column=column.value,
        size=size.value,
        **{f"v{j}_{half}_{s}": word for (j, half, s), word in words.items()},
    )


def _largest(scales: Memory, lane: Int) -> Float:
    """Largest of positive numbers; NaN if there is one."""
    # Bits of positive numbers are ordered as the numbers are, and those of NaN come last.
    found = for_range(
        lane, scales.size, 32, [Int.of(0)], lambda i, most: [maximum(most, scales.load(i).bits())]
    )
    return warp_max(found[0]).as_float()


def _at_least_smallest(scale: Float) -> Float:
    return select(scale.bits() < Float.of(_SMALLEST_SCALE).bits(), Float.of(_SMALLEST_SCALE), scale)


def _magnitude(x: Float) -> Int:
    return x.bits() & 0x7FFFFFFF


def _flushed(x: Float) -> Float:
    return select(_magnitude(x) < 0x00800000, Float.of(0.0), x)


def _largest_finite(values: Sequence[Float]) -> Float:
    amax = Float.of(0.0)
    for x in values:
        size = _magnitude(x)
        amax = maximum(amax, select(size < 0x7F800000, size, 0).as_float())
    return amax


def _scale_of(amax: Float) -> Float:
    return select(amax > 0.0, maximum(amax * _PER_LARGEST, _SMALLEST_SCALE), Float.of(1.0))


def _scaled(x: Float, inverse: Float) -> Float:
    """What is rounded to a code: NaN for what is not finite."""
    return select(_magnitude(x) < 0x7F800000, x * inverse, Float.of(float("nan")))


def _codes(values: Sequence[Float], inverse: Float) -> list[Int]:
    """Codes, four to a word."""
    scaled = [_scaled(x, inverse) for x in values]
    pairs = [to_e4m3(scaled[i], scaled[i + 1]) for i in range(0, len(scaled), 2)]
    return [pairs[i] | (pairs[i + 1] << 16) for i in range(0, len(pairs), 2)]
