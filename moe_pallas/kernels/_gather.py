"""Rows of tokens, gathered from global memory into operands of WGMMA, by `cp.async`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from moe_pallas.kernels._mgpu import (
    SCALAR,
    address,
    held,
    held_layout,
    hold,
    operand_transforms,
    ptx,
    scalar,
    shared_address,
)

_GATHER_BARRIER = 9  # named barrier (bar.sync), see `moe_pallas.kernels._mgpu`


def gather_rows(
    rows_gmem: Any,
    token_of: Any | None,
    rows_smem: Any,
    first: jax.Array,
    size: jax.Array,
    step: jax.Array,
    stage: jax.Array,
    *,
    interpret: bool,
) -> None:
    """Start to copy rows ``token_of[first : first + size]``, 128 columns from ``128 * step`` on.

    Without ``token_of``, rows ``first : first + size``. Into stage ``stage`` of ``rows_smem`` (stages,
    block_m, 128), in the layout of a WGMMA operand. Columns past the end of the rows become 0. Rows past
    ``size`` keep what they held: a column of the product depends on its own row alone.
    """
    _, block_m, block_k = rows_smem.shape
    row_length, itemsize = rows_gmem.shape[1], jnp.dtype(rows_smem.dtype).itemsize
    if interpret:
        # One ordinary load a row: the interpreter has no cp.async.
        for j in range(block_m):

            @pl.when(j < size)
            def _(j: int = j) -> None:
                row = first + j if token_of is None else token_of[first + j]
                rows_smem[stage, j, :] = rows_gmem[row, pl.ds(step * block_k, block_k)]

        return
    row_bytes, stage_bytes = itemsize * row_length, itemsize * block_m * block_k
    # Thread t copies chunk t % chunks (16 bytes) of rows t / chunks, and so many on, ...
    chunks = itemsize * block_k // 16
    at_once, swizzled = 128 // chunks, chunks // 8  # rows; swizzled tiles of 8 rows of 128 bytes side by side
    look_up = "" if token_of is None else "mad.wide.s32 a, t, 4, %[tokens]; @p ld.b32 t, [a];"

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            plgpu.RefType(),
            plgpu.RefType(operand_transforms(rows_smem.dtype)),
            *[SCALAR] * 4,
        )
    )
    def gather(
        ctx: Any, rows: Any, tokens: Any, operand: Any, first: Any, size: Any, step: Any, st: Any
    ) -> None:
        per_row = "".join(
            f"""
            add.s32 t, r, {row}; setp.lt.s32 p, t, %[size]; add.s32 t, t, %[first]; {look_up}
            selp.b32 t, t, 0, p; mad.wide.s32 a, t, {row_bytes}, source;
            add.u32 d, target, {row * 128 * swizzled};
            @p cp.async.cg.shared.global [d], [a], 16, bytes;"""
            for row in range(0, block_m, at_once)
        )
        used = {} if token_of is None else {"tokens": address(tokens)}
        ptx(
            f"""{{ .reg .pred p; .reg .b32 t, r, c, j, d, target, bytes; .reg .b64 a, source;
            mov.u32 t, %tid.x; and.b32 c, t, {chunks - 1}; and.b32 r, t, 127; div.u32 r, r, {chunks};
            mad.lo.s32 j, %[step], {chunks}, c; setp.lt.s32 p, j, {-(-row_bytes // 16)};
            selp.b32 bytes, 16, 0, p; selp.b32 j, j, 0, p; mad.wide.s32 source, j, 16, %[rows];
            mad.lo.s32 target, %[stage], {stage_bytes}, %[operand];
            shr.u32 d, c, 3; mad.lo.u32 target, d, 1024, target;
            shr.u32 d, r, 3; mad.lo.u32 target, d, {1024 * swizzled}, target;
            and.b32 d, r, 7; mad.lo.u32 target, d, 128, target;
            xor.b32 d, c, r; and.b32 d, d, 7; mad.lo.u32 target, d, 16, target;
            {per_row}
            cp.async.commit_group; }}""",
            rows=address(rows),
            operand=shared_address(operand),
            first=scalar(first),
            size=scalar(size),
            step=scalar(step),
            stage=scalar(st),
            **used,
        )

    tokens = rows_gmem if token_of is None else token_of
    gather(rows_gmem, tokens, rows_smem, first, size, step, stage)


class Scales(NamedTuple):
    """Where scales stand that go with rows: ``ref.flat[offset + (step or 0) + row * per_row]``."""

    ref: Any
    per_row: int
    offset: Any = 0
    by_step: bool = False


def gather_scales(
    scales: Scales,
    token_of: Any | None,
    scales_smem: Any,
    first: jax.Array,
    size: jax.Array,
    step: jax.Array,
    stage: jax.Array,
    blocks: tuple[Any, Sequence[jax.Array]] | None,
    *,
    interpret: bool,
) -> None:
    """Start to copy the scales of rows, and of weights, that go with a step; before its `gather_rows`.

    Args:
      scales: Those of the rows, which are named as in `gather_rows`.
      token_of: As there.
      scales_smem: (stages, n) float32. Of the stage, the first ``size`` become those of the rows; the last
        ones, as many as there are indices in ``blocks``, those of the weights.
      first: As there.
      size: As there.
      step: As there.
      stage: As there.
      blocks: Scales of weights and where those of step 0 stand, if they have some for each step.
      interpret: Whether Pallas' interpreter runs this.
    """
    count = scales_smem.shape[1]
    offset = jnp.int32(scales.offset) + (step if scales.by_step else 0)
    weights, starts = blocks or (scales.ref, ())
    first_block = count - len(starts)
    if interpret:

        @pl.loop(0, size)
        def _(j: jax.Array) -> None:
            row = first + j if token_of is None else token_of[first + j]
            at, columns = offset + row * scales.per_row, scales.ref.shape[1]
            scale = scales.ref[lax.div(at, jnp.int32(columns)), lax.rem(at, jnp.int32(columns))]
            scales_smem[stage, j] = scale

        for i, start in enumerate(starts):
            at, columns = start + step, weights.shape[-1]
            row = lax.div(at, jnp.int32(columns))
            scales_smem[stage, first_block + i] = weights[row, lax.rem(at, jnp.int32(columns))]
        return
    look_up = "" if token_of is None else "mad.wide.s32 a, r, 4, %[tokens]; @p ld.b32 r, [a];"

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 4, *[SCALAR] * (5 + len(starts))))
    def gather(
        ctx: Any, source: Any, tokens: Any, weights: Any, target: Any, first: Any, size: Any, offset: Any,
        step: Any, stage: Any, *starts: Any
    ) -> None:  # fmt: skip
        used = {f"start{i}": scalar(start) for i, start in enumerate(starts)}
        used |= {} if token_of is None else {"tokens": address(tokens)}
        used |= {"weights": address(weights), "step": scalar(step)} if starts else {}
        of_weights = "".join(
            f"""
            setp.eq.s32 p, t, {i}; add.s32 r, %[start{i}], %[step]; mad.wide.s32 a, r, 4, %[weights];
            @p cp.async.ca.shared.global [d+{4 * first_block}], [a], 4;"""
            for i in range(len(starts))
        )
        ptx(
            f"""{{ .reg .pred p; .reg .b32 t, r, d; .reg .b64 a;
            mov.u32 t, %tid.x; and.b32 t, t, 127;
            mad.lo.s32 d, %[stage], {4 * count}, %[target]; mad.lo.s32 d, t, 4, d;
            setp.lt.s32 p, t, %[size]; add.s32 r, t, %[first]; {look_up}
            selp.b32 r, r, 0, p; mad.lo.s32 r, r, {scales.per_row}, %[offset];
            mad.wide.s32 a, r, 4, %[source]; @p cp.async.ca.shared.global [d], [a], 4;
            {of_weights} }}""",
            source=address(source),
            target=shared_address(target),
            first=scalar(first),
            size=scalar(size),
            offset=scalar(offset),
            stage=scalar(stage),
            **used,
        )

    tokens = scales.ref if token_of is None else token_of
    gather(scales.ref, tokens, weights, scales_smem, first, size, offset, step, stage, *starts)


def await_gather(pending: int, *, interpret: bool) -> None:
    """Wait until all but the last ``pending`` gathers are in shared memory, for WGMMA to see."""
    if interpret:
        return

    @plgpu.inline_mgpu()
    def wait(ctx: Any) -> None:
        ptx(f"cp.async.wait_group {pending}; fence.proxy.async.shared::cta; bar.sync {_GATHER_BARRIER}, 128;")

    wait()


def gather_tile(
    x_gmem: Any,
    token_of: Any,
    x_smem: Any,
    first: jax.Array,
    size: jax.Array,
    landed_smem: Any,
    *,
    interpret: bool,
) -> Callable[[jax.Array, jax.Array], None]:
    """Find rows ``token_of[first : first + size]`` of x, size <= 128; return a function that copies them.

    Without ``token_of``, rows ``first : first + size``.

    ``copy(step, stage)`` starts to copy 128 bytes of columns, those of number ``step``, into stage ``stage``
    of ``x_smem`` (stages, 128, 64 or of FP8 128), in the layout of a WGMMA operand, and to arrive at the
    stage's barrier in ``landed_smem`` (`init_landed`) when they are there, as `arrive_landed` does;
    interpreted, it waits. Rows past ``size`` keep what they held: a row of the product depends on its own
    row alone.
    """
    _, block_m, block_k = x_smem.shape
    itemsize = jnp.dtype(x_smem.dtype).itemsize
    assert (block_m, itemsize * block_k) == (128, 128), x_smem.shape
    if interpret:
        # One ordinary load a row: the interpreter has no cp.async.
        def copy_rows(step: jax.Array, stage: jax.Array) -> None:
            @pl.loop(0, size)
            def _(j: jax.Array) -> None:
                row = first + j if token_of is None else token_of[first + j]
                x_smem[stage, j, :] = x_gmem[row, pl.ds(step * block_k, block_k)]

        return copy_rows
    # Thread t copies chunk t % 8 (16 bytes) of rows t / 8, t / 8 + 16, …: it keeps the tokens of 8 rows.
    per_thread = block_m // 16

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            plgpu.RefType(operand_transforms(x_smem.dtype)),
            plgpu.RefType(),
            held_layout(per_thread),
            SCALAR,
            SCALAR,
        )
    )
    def gather(ctx: Any, x: Any, operand: Any, landed: Any, tokens: Any, step: Any, stage: Any) -> None:
        rows = _named_rows(tokens)
        # A row is one line of a swizzled tile: 16 rows on, it is two tiles on.
        copies = "".join(
            f"""
            setp.ge.s32 p, %[t{i}], 0; mad.wide.s32 a, %[t{i}], {itemsize * x_gmem.shape[1]}, source;
            @p cp.async.cg.shared.global [target+{2048 * i}], [a], 16;"""
            for i in range(per_thread)
        )
        ptx(
            f"""{{ .reg .pred p; .reg .b32 r, c, d, target; .reg .b64 a, source;
            mov.u32 r, %tid.x; and.b32 c, r, 7; and.b32 r, r, 127; shr.u32 r, r, 3;
            mad.lo.s32 d, %[step], 8, c; mad.wide.s32 source, d, 16, %[x];
            mad.lo.s32 target, %[stage], {128 * block_m}, %[operand];
            mad.lo.u32 target, r, 128, target;
            xor.b32 d, c, r; and.b32 d, d, 7; mad.lo.u32 target, d, 16, target;
            {copies} }}""",
            x=address(x),
            operand=shared_address(operand),
            step=scalar(step),
            stage=scalar(stage),
            **rows,
        )
        _arrive(landed, stage)

    found = _find_rows(x_gmem, token_of, first, size, per_thread)
    return lambda step, stage: gather(x_gmem, x_smem, landed_smem, found, step, stage)


def _find_rows(
    x_gmem: Any, token_of: Any | None, first: jax.Array, size: jax.Array, per_thread: int
) -> jax.Array:
    """Find out which rows a thread copies, t / 8, t / 8 + 16, … of thread t; -1 past ``size``."""
    # Nobody waits here for what is loaded: it is not touched before it is used.
    take = "@p mov.b32 $0, r;"
    if token_of is not None:
        take = "mad.wide.s32 a, r, 4, $1; @p ld.global.b32 $0, [a];"

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((128 * per_thread,), jnp.int32, layout=held_layout(per_thread)),
    )
    def find(ctx: Any, tokens: Any, first: Any, size: Any) -> Any:
        rows = [
            llvm.inline_asm(
                ir.IntegerType.get_signless(32),
                [address(tokens), scalar(first), scalar(size)],
                f"""{{ .reg .pred p; .reg .b32 r; .reg .b64 a;
                mov.u32 r, %tid.x; and.b32 r, r, 127; shr.u32 r, r, 3; add.s32 r, r, {16 * i};
                setp.lt.s32 p, r, $3; add.s32 r, r, $2; mov.b32 $0, -1; {take} }}""",
                "=&r,l,r,r,~{memory}",
                has_side_effects=True,
            )
            for i in range(per_thread)
        ]
        return hold(rows, is_signed=True)

    return find(x_gmem if token_of is None else token_of, first, size)


def _named_rows(found: Any) -> dict[str, ir.Value]:
    """What `_find_rows` found, as registers t0, t1, …."""
    return {f"t{i}": row for i, row in enumerate(held(found))}


def gather_panel(
    x_gmem: Any,
    token_of: Any | None,
    x_smem: Any,
    first: jax.Array,
    size: jax.Array,
    *,
    interpret: bool,
) -> Callable[[jax.Array, jax.Array], None]:
    """Find rows ``token_of[first : first + size]`` of x; return a function that copies columns of them.

    Without ``token_of``, rows ``first : first + size``.

    ``copy(column, stage)`` starts to copy the columns from ``column`` on into stage ``stage`` of ``x_smem``
    (stages, rows, columns), in the layout of a WGMMA operand; interpreted, it waits. Rows of ``x_smem`` past
    ``size`` become 0: the product is a sum over rows.
    """
    _, num_rows, num_columns = x_smem.shape
    if interpret:

        def copy_rows(column: jax.Array, stage: jax.Array) -> None:
            @pl.loop(0, num_rows)
            def _(j: jax.Array) -> None:
                @pl.when(j < size)
                def _() -> None:
                    row = first + j if token_of is None else token_of[first + j]
                    x_smem[stage, j, :] = x_gmem[row, pl.ds(column, num_columns)]

                @pl.when(j >= size)
                def _() -> None:
                    x_smem[stage, j, :] = jnp.zeros((num_columns,), x_smem.dtype)

        return copy_rows
    itemsize = jnp.dtype(x_smem.dtype).itemsize
    per_thread, row_bytes = num_rows // 16, itemsize * num_columns
    panels = row_bytes // 128  # swizzled tiles of 8 rows of 128 bytes side by side

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            plgpu.RefType(operand_transforms(x_smem.dtype)),
            held_layout(per_thread),
            SCALAR,
            SCALAR,
        )
    )
    def gather(ctx: Any, x: Any, operand: Any, found: Any, column: Any, stage: Any) -> None:
        rows = _named_rows(found)
        # 16 rows on, it is two rows of tiles on.
        copies = "".join(
            f"""
            setp.ge.s32 p, %[t{i}], 0; selp.b32 bytes, 16, 0, p; selp.b32 r, %[t{i}], 0, p;
            mad.wide.s32 a, r, {itemsize * x_gmem.shape[1]}, source;"""
            + "".join(
                f"""
            cp.async.cg.shared.global [target+{1024 * (2 * i * panels + j)}], [a+{128 * j}], 16, bytes;"""
                for j in range(panels)
            )
            for i in range(per_thread)
        )
        ptx(
            f"""{{ .reg .pred p; .reg .b32 r, c, d, target, bytes; .reg .b64 a, source;
            mov.u32 r, %tid.x; and.b32 c, r, 7; and.b32 r, r, 127; shr.u32 r, r, 3;
            mad.wide.s32 source, %[column], {itemsize}, %[x]; mad.wide.s32 source, c, 16, source;
            mad.lo.s32 target, %[stage], {num_rows * row_bytes}, %[operand];
            shr.u32 d, r, 3; mad.lo.u32 target, d, {1024 * panels}, target;
            and.b32 d, r, 7; mad.lo.u32 target, d, 128, target;
            xor.b32 d, c, r; and.b32 d, d, 7; mad.lo.u32 target, d, 16, target;
            {copies} }}""",
            x=address(x),
            operand=shared_address(operand),
            column=scalar(column),
            stage=scalar(stage),
            **rows,
        )

    found = _find_rows(x_gmem, token_of, first, size, per_thread)
    return lambda column, stage: gather(x_gmem, x_smem, found, column, stage)


def _arrive(landed: Any, stage: Any) -> None:
    ptx(
        """{ .reg .b32 d; mad.lo.u32 d, %[stage], 8, %[landed];
        cp.async.mbarrier.arrive.noinc.shared::cta.b64 [d]; }""",
        landed=shared_address(landed),
        stage=scalar(stage),
    )


def arrive_landed(landed_smem: Any, stage: jax.Array) -> None:
    """Arrive at a stage's barrier when all is there that this warpgroup has begun to copy by cp.async."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
    def arrive(ctx: Any, landed: Any, stage: Any) -> None:
        _arrive(landed, stage)

    arrive(landed_smem, stage)


def init_landed(landed_smem: Any) -> None:
    """Make barriers of (stages, 2) words, for a warpgroup's copies to arrive; in all threads of a CTA."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def init(ctx: Any, landed: Any) -> None:
        inits = " ".join(
            f"@p mbarrier.init.shared::cta.b64 [%[landed]+{8 * i}], 128;" for i in range(landed_smem.shape[0])
        )
        ptx(
            f"""{{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;
            {inits} fence.mbarrier_init.release.cluster; bar.sync 0; }}""",
            landed=shared_address(landed),
        )

    init(landed_smem)


def await_landed(landed_smem: Any, step: jax.Array, *, for_wgmma: bool = True) -> None:
    """Wait until what comes by cp.async for a step is in shared memory, for WGMMA to see or for threads."""
    stages = landed_smem.shape[0]
    turn = lax.div(step, jnp.int32(stages))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR))
    def wait(ctx: Any, landed: Any, stage: Any, parity: Any) -> None:
        ptx(
            """{ .reg .pred p; .reg .b32 a; mad.lo.u32 a, %[stage], 8, %[landed];
            AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [a], %[parity]; @!p bra AGAIN; }""",
            landed=shared_address(landed),
            stage=scalar(stage),
            parity=scalar(parity),
        )
        if for_wgmma:
            ptx("fence.proxy.async.shared::cta;")

    wait(landed_smem, step - turn * stages, turn & 1)
