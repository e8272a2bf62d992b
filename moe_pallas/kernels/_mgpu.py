"""What the kernels need of Mosaic GPU beyond stable Pallas.

Most of it are a few instructions of PTX that Pallas has no word for: flags in global memory by which CTAs
of one launch wait for each other, and a transposed store. `_gather` has the copies of token rows.

Flags are 64-bit words that hold the number of the launch that set them last, so that they are never reset: a
flag is up if it holds the number of the running launch. The number comes from a ticket counter at the head of
the same buffer, which every CTA draws from once and which each launch raises by `_TICKETS_PER_LAUNCH`; a
second counter is raised by CTAs that leave, and a third, of items, is 0 again at the end. The buffer is a
constant of the program that the kernel writes to, which XLA does not know: what the buffer held between any
two launches is a valid start for the next, so a copy of it does as well, and launches may share one. They
must not do so at the same time. On one stream they can't; if they do, the counters show it, and the kernel
ends with an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

HEADER_FLAGS = 16  # words before the first flag: the counters of tickets, and a sector on that of items
_ITEM_COUNTER = 8
_SIGNATURE_WORD = 4  # random, in words that are never looked at
_SIGNATURE = np.array([0x5A3C91E7, 0x1D48B60F, 0x72E90A3B, 0x2C65F8D4, 0x0B97E3A1, 0x68D21C5F], np.int32)
_TICKETS_PER_LAUNCH = 256
_NO_LAUNCH = -1
_MAX_POLLS = 1 << 24  # some 10 s: a wait that long is a fault, which must not look like a hang

# Named barriers (bar.sync): 0 is the CTA's, Mosaic takes 1 + warpgroup.
_PUBLISH_BARRIER, _AWAIT_BARRIER = 8, 10  # the last and two more: one a warpgroup. 9 is that of `_gather`
_STORE_BARRIER = 13  # and one more: one a warpgroup
_DRAW_BARRIER = 15

SCALAR = plgpu.Layout.WG_SPLAT(())


def num_sms() -> int:
    """Count the SMs of the device that JAX would use; an H200's if it has no NVIDIA GPU."""
    device = jax.devices()[0]
    return int(device.core_count) if device.platform == "gpu" else 132


def operand_transforms(dtype: Any) -> tuple[Any, ...]:
    """Layout of a WGMMA operand in shared memory: 8 rows of 128 bytes to a swizzled tile."""
    tiling: Any = plgpu.TilingTransform  # abstract to type checkers
    swizzle: Any = plgpu.SwizzleTransform
    return (tiling((8, 128 // jnp.dtype(dtype).itemsize)), swizzle(128))


def new_flags(count: int) -> np.ndarray:
    """Initial flags, as the 32-bit halves of ``HEADER_FLAGS + count`` words."""
    flags = np.zeros(2 * (HEADER_FLAGS + count), np.int32)
    # XLA merges equal constants, and makes one of zeros only anew in every call: no other may look like this.
    flags[2 * _SIGNATURE_WORD :][: len(_SIGNATURE)] = _SIGNATURE
    return flags


def address(ref: ir.Value) -> ir.Value:
    """64-bit generic address of a ref in global or shared memory."""
    pointer = mgpu.utils.memref_ptr(ref)
    generic = ir.Type.parse("!llvm.ptr")
    if pointer.type != generic:
        pointer = llvm.addrspacecast(generic, pointer)
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), pointer)


def shared_address(ref: ir.Value) -> ir.Value:
    """32-bit address of a ref in shared memory."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(ref))


def ptx(code: str, **operands: ir.Value) -> None:
    """Run PTX in every thread; ``%[name]`` stands for an operand."""
    names = list(operands)
    text = re.sub(r"%\[(\w+)\]", lambda m: f"${names.index(m.group(1))}", code)
    kinds = {"i64": "l", "i32": "r", "i16": "h"}
    constraints = ",".join([*(kinds[str(v.type)] for v in operands.values()), "~{memory}"])
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"), list(operands.values()), text, constraints, has_side_effects=True
    )


def scalar(value: Any) -> ir.Value:
    """Give the one register of a scalar."""
    return value.registers.item()


def held_layout(per_thread: int) -> Any:
    """Layout of an array that is no more than what each thread of a warpgroup keeps, so many words."""
    return plgpu.Layout.WG_STRIDED((128 * per_thread,), vec_size=1)


def hold(values: Sequence[ir.Value], *, is_signed: bool | None) -> mgpu.FragmentedArray:
    """Make such an array of a thread's words; ``is_signed`` of integers, None of floats."""
    registers = np.empty((len(values),), dtype=object)
    for i, value in enumerate(values):
        vector = llvm.mlir_undef(ir.VectorType.get((1,), value.type))
        registers[i] = llvm.insertelement(vector, value, _zero())
    layout = mgpu.WGStridedFragLayout((128 * len(values),), vec_size=1)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)


def held(array: mgpu.FragmentedArray) -> list[ir.Value]:
    """A thread's words of such an array."""
    return [llvm.extractelement(register, _zero()) for register in array.registers.flat]


def _zero() -> ir.Value:
    return mgpu.utils.c(0, ir.IntegerType.get_signless(32))


def draw_ticket(flags_gmem: Any, epoch_smem: Any, num_ctas: int) -> None:
    """Note the number of this launch in ``epoch_smem`` (2 words), for this warpgroup to see.

    If another launch is found to use the flags, it is `_NO_LAUNCH`, and the first wait, or `check_alone`,
    ends this one: a trap here would make ptxas wait for each WGMMA that follows.
    """
    bits = _TICKETS_PER_LAUNCH.bit_length() - 1

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def draw(ctx: Any, flags: Any, epoch: Any) -> None:
        ptx(
            f"""{{ .reg .pred p, q; .reg .b32 t; .reg .b64 n, m, l;
            {_first_thread_and_share(num_ctas)}
            mov.u64 m, 0;
            @p atom.relaxed.gpu.global.add.u64 n, [%[flags]], n;
            @p ld.relaxed.gpu.global.u64 m, [%[flags]+8];
            shr.u64 n, n, {bits}; shl.b64 l, n, {bits}; setp.lt.u64 q, m, l;
            add.u64 n, n, 1; selp.b64 n, {_NO_LAUNCH}, n, q;  // q: a launch before this one has not left
            @p st.u64 [%[epoch]], n;
            bar.sync {_PUBLISH_BARRIER}, 128; }}""",
            flags=address(flags),
            epoch=address(epoch),
        )

    draw(flags_gmem, epoch_smem)


def leave(flags_gmem: Any, num_ctas: int) -> None:
    """Say that this CTA will not look at the flags any more."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def count(ctx: Any, flags: Any) -> None:
        ptx(
            f"""{{ .reg .pred p, q; .reg .b32 t; .reg .b64 n;
            {_first_thread_and_share(num_ctas)}
            @p red.relaxed.gpu.global.add.u64 [%[flags]+8], n; }}""",
            flags=address(flags),
        )

    count(flags_gmem)


def check_alone(epoch_smem: Any) -> None:
    """End the kernel with an error if it was found to share the flags with another launch.

    By a store to nowhere: with a trap here, ptxas would wait for each WGMMA of the other warpgroups.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def check(ctx: Any, epoch: Any) -> None:
        ptx(
            f"""{{ .reg .pred p; .reg .b64 n, a;
            ld.u64 n, [%[epoch]]; setp.eq.s64 p, n, {_NO_LAUNCH};
            mov.u64 a, 0; @p st.global.u64 [a], n; }}""",
            epoch=address(epoch),
        )

    check(epoch_smem)


def draw_item(
    flags_gmem: Any, items_smem: Any, slot: jax.Array, num_ctas: int, total: jax.Array, *, interpret: bool
) -> None:
    """Note in ``items_smem[slot]`` the number of the next item that no CTA has, for this warpgroup to see.

    The first ``num_ctas`` are not drawn. Each CTA that had one of them draws until it is given a number that
    is not below ``total``; the last of all these draws makes the counter 0 again. Interpreted, a CTA has
    every ``num_ctas``-th item: the number is ``num_ctas`` more than in the slot before.
    """
    if interpret:
        slots = items_smem.shape[0]
        items_smem[slot] = items_smem[lax.rem(slot + slots - 1, jnp.int32(slots))] + num_ctas
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR))
    def draw(ctx: Any, flags: Any, items: Any, slot: Any, total: Any) -> None:
        ptx(
            f"""{{ .reg .pred p, q; .reg .b32 t, n; .reg .b64 a;
            mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 p, t, 0;
            @p atom.relaxed.gpu.global.add.u32 n, [%[flags]+{8 * _ITEM_COUNTER}], 1;
            sub.s32 t, %[total], 1; setp.eq.and.s32 q, n, t, p; mov.u32 t, 0;
            @q st.relaxed.gpu.global.u32 [%[flags]+{8 * _ITEM_COUNTER}], t;
            add.s32 n, n, {num_ctas}; mad.wide.s32 a, %[slot], 4, %[items];
            @p st.u32 [a], n;
            bar.sync {_DRAW_BARRIER}, 128; }}""",
            flags=address(flags),
            items=address(items),
            slot=scalar(slot),
            total=scalar(total),
        )

    draw(flags_gmem, items_smem, slot, total)


def _first_thread_and_share(num_ctas: int) -> str:
    """PTX: p = first thread of the warpgroup, n = this CTA's share of a launch's tickets."""
    return f"""mov.u32 t, %ctaid.x; setp.eq.u32 q, t, 0;
            selp.b64 n, {_TICKETS_PER_LAUNCH - num_ctas + 1}, 1, q;
            mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 p, t, 0;"""


def proxy_fence() -> None:
    """Order ordinary accesses against those of the copy engine."""

    @plgpu.inline_mgpu()
    def fence(ctx: Any) -> None:
        ptx("fence.proxy.async;")

    fence()


def raise_flag(flags_gmem: Any, index: jax.Array, epoch_smem: Any) -> None:
    """Raise a flag; who sees it up sees all that this warpgroup has stored before."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, plgpu.RefType()))
    def publish(ctx: Any, flags: Any, index: Any, epoch: Any) -> None:
        ptx(
            f"""{{ .reg .pred p; .reg .b32 t; .reg .b64 a, n;
            bar.sync {_PUBLISH_BARRIER}, 128;
            mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 p, t, 0;
            ld.u64 n, [%[epoch]]; mad.wide.s32 a, %[index], 8, %[flags];
            @p st.release.gpu.global.u64 [a+{8 * HEADER_FLAGS}], n; }}""",
            flags=address(flags),
            index=scalar(index),
            epoch=address(epoch),
        )

    publish(flags_gmem, index, epoch_smem)


def await_flags(
    flags_gmem: Any, first: jax.Array, count: jax.Array, epoch_smem: Any, *, warpgroup: int
) -> None:
    """Wait until flags first … first + count - 1 are up; each thread watches every 128th."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, plgpu.RefType()))
    def wait(ctx: Any, flags: Any, first: Any, count: Any, epoch: Any) -> None:
        ptx(
            f"""{{ .reg .pred p; .reg .b32 t, polls; .reg .b64 a, n, m;
            ld.u64 n, [%[epoch]]; setp.eq.s64 p, n, {_NO_LAUNCH}; @p trap;
            mov.u32 t, %tid.x; and.b32 t, t, 127;
            FLAG: setp.ge.s32 p, t, %[count]; @p bra DONE;
            add.s32 polls, t, %[first]; mad.wide.s32 a, polls, 8, %[flags]; mov.u32 polls, 0;
            POLL: ld.acquire.gpu.global.u64 m, [a+{8 * HEADER_FLAGS}];
            add.u32 polls, polls, 1; setp.gt.u32 p, polls, {_MAX_POLLS}; @p trap;
            setp.ne.u64 p, m, n; @p bra POLL;
            add.u32 t, t, 128; bra FLAG;
            DONE: bar.sync {_AWAIT_BARRIER + warpgroup}, 128; }}""",
            flags=address(flags),
            first=scalar(first),
            count=scalar(count),
            epoch=address(epoch),
        )

    wait(flags_gmem, first, count, epoch_smem)


def consumer_barrier() -> None:
    """Let every thread of a consumer come here; inside a function of `plgpu.inline_mgpu`, one warpgroup's."""
    ptx(f"bar.sync {_STORE_BARRIER}, 128;")


def store(ref: Any, value: jax.Array, *, interpret: bool) -> None:
    """Store to global memory, also in pieces shorter than a cache line, of which jax 0.12 must be told."""
    if interpret or not hasattr(plgpu, "store"):
        ref[...] = value
    else:
        plgpu.store(ref, value, optimized=False)


def load_column(
    ref: Any,
    row: jax.Array,
    column: jax.Array,
    *,
    stride: int,
    num_rows: int,
    width: int,
    interpret: bool,
) -> jax.Array:
    """``value[i, j] = ref[row, column + stride * i]`` as float32, beside a (64, width) accumulator.

    0 from i = num_rows on.
    """
    if interpret:
        values = ref[row, pl.ds(column, stride * (num_rows - 1) + 1)][::stride].astype(jnp.float32)
        return jnp.broadcast_to(jnp.pad(values, (0, 64 - num_rows))[:, None], (64, width))
    row_length, itemsize = ref.shape[1], jnp.dtype(ref.dtype).itemsize
    dtype = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[jnp.dtype(ref.dtype).name]
    convert = {
        "f32": "mov.b32 $0, h;",
        "f16": "cvt.f32.f16 $0, h;",
        "bf16": "mov.b16 z, 0; mov.b32 $0, {z, h};",  # the upper half of a float32
    }[dtype]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((64, width), jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def load(ctx: Any, ref: Any, row: Any, column: Any) -> Any:
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), f32)
        pairs = []
        for upper in (0, 8):
            value = llvm.inline_asm(
                f32,
                [address(ref), scalar(row), scalar(column)],
                f"""{{ .reg .pred p; .reg .b32 t, l; .reg .b{8 * itemsize} h; .reg .b16 z; .reg .b64 a;
                mov.u32 t, %tid.x; and.b32 l, t, 31; shr.u32 l, l, 2; shr.u32 t, t, 5; and.b32 t, t, 3;
                mad.lo.s32 t, t, 16, l; add.s32 t, t, {upper}; setp.lt.s32 p, t, {num_rows};
                mad.lo.s32 t, t, {stride}, $3; mul.wide.s32 a, $2, {row_length * itemsize};
                add.s64 a, a, $1; mad.wide.s32 a, t, {itemsize}, a;
                mov.b{8 * itemsize} h, 0; @p ld.global.b{8 * itemsize} h, [a]; {convert} }}""",
                "=f,l,r,r,~{memory}",
                has_side_effects=True,
            )
            both = llvm.mlir_undef(pair)
            for half in range(2):
                both = llvm.insertelement(both, value, mgpu.utils.c(half, i32))
            pairs.append(both)
        layout = mgpu.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((64, width)), dtype=object)
        registers.flat = pairs * (width // 8)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(ref, row, column)


def store_columns(
    ref: Any,
    value: jax.Array,
    row: jax.Array,
    column: jax.Array,
    size: jax.Array,
    *,
    num_rows: int,
    interpret: bool,
) -> None:
    """``ref[row + j, column + i] = value[i, j]`` of a (64, n) accumulator, for j < size and i < num_rows."""
    if interpret:

        @pl.loop(0, size)
        def _(j: jax.Array) -> None:
            values = lax.dynamic_index_in_dim(value[:num_rows], j, 1, keepdims=False)
            ref[row + j, pl.ds(column, num_rows)] = values

        return
    row_length = ref.shape[1]
    itemsize = jnp.dtype(value.dtype).itemsize

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, SCALAR, SCALAR, SCALAR))
    def store(ctx: Any, ref: Any, value: Any, row: Any, column: Any, size: Any) -> None:
        # Lane l of warp w has rows 16w + l/4 (+ 8) and columns 2(l % 4), 2(l % 4) + 1 (+ 8, ...): for each
        # column, 8 lanes write 8 neighbours.
        registers: dict[str, ir.Value] = {}
        stores = []
        for index, register in enumerate(value.registers.flat):
            registers |= {f"v{index}_{half}": bits for half, bits in enumerate(_halves(register, itemsize))}
        for j in range(value.shape[1] // 8):
            for half in range(2):
                stores.append(f"setp.gt.s32 p, s, {8 * j + half}; and.pred r0, q0, p; and.pred r1, q1, p;")
                for i in range(2):
                    offset = itemsize * ((8 * j + half) * row_length + 8 * i)
                    bits = f"%[v{2 * j + i}_{half}]"
                    stores.append(f"@r{i} st.global.b{8 * itemsize} [a+{offset}], {bits};")
        ptx(
            f"""{{ .reg .pred p, q0, q1, r0, r1; .reg .b32 t, l, c, s; .reg .b64 a;
            mov.u32 t, %tid.x; and.b32 l, t, 31; and.b32 c, l, 3; shl.b32 c, c, 1; sub.s32 s, %[size], c;
            shr.u32 l, l, 2; shr.u32 t, t, 5; and.b32 t, t, 3; shl.b32 t, t, 4; add.s32 t, t, l;
            setp.lt.s32 q0, t, {num_rows}; setp.lt.s32 q1, t, {num_rows - 8};
            add.s32 c, c, %[row]; mul.wide.s32 a, c, {itemsize * row_length}; add.s64 a, a, %[ref];
            add.s32 t, t, %[column]; mad.wide.s32 a, t, {itemsize}, a;
            {" ".join(stores)} }}""",
            ref=address(ref),
            row=scalar(row),
            column=scalar(column),
            size=scalar(size),
            **registers,
        )

    store(ref, value, row, column, size)


def sum_of_rows(value: jax.Array, *, interpret: bool) -> jax.Array:
    """Sum each row of a (64, n) accumulator, float32: Pallas would set shared memory aside for it."""
    if interpret:
        return jnp.sum(value, axis=1)
    layout = plgpu.Layout.WGMMA.reduce(1)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct((64,), jnp.float32, layout=layout),
    )
    def add_up(ctx: Any, value: Any) -> Any:
        return value.reduce("add", 1)

    return add_up(value)


def store_of_rows(
    ref: Any, value: jax.Array, line: jax.Array, row: jax.Array, size: jax.Array, *, interpret: bool
) -> None:
    """``ref[line, row + i] = value[i]``, a number for each row of a (64, n) accumulator, for i < size."""
    if interpret:

        @pl.loop(0, jnp.minimum(size, 64))
        def _(i: jax.Array) -> None:
            ref[line, row + i] = lax.dynamic_index_in_dim(value, i, keepdims=False)

        return
    row_bytes = 4 * ref.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA.reduce(1), SCALAR, SCALAR, SCALAR))
    def store(ctx: Any, ref: Any, value: Any, line: Any, row: Any, size: Any) -> None:
        # Lane l of warp w has those of rows 16w + l/4 and 8 more, as the 3 lanes beside it have.
        lower, upper = (_bits(register) for register in value.registers.flat)
        ptx(
            f"""{{ .reg .pred p, q; .reg .b32 t, l; .reg .b64 a;
            mov.u32 t, %tid.x; and.b32 l, t, 31; shr.u32 t, t, 5; and.b32 t, t, 3; shl.b32 t, t, 4;
            and.b32 l, l, 3; setp.eq.u32 q, l, 0; mov.u32 l, %tid.x; and.b32 l, l, 31; shr.u32 l, l, 2;
            add.s32 t, t, l; mul.wide.s32 a, %[line], {row_bytes}; add.s64 a, a, %[ref];
            add.s32 l, t, %[row]; mad.wide.s32 a, l, 4, a;
            setp.lt.and.s32 p, t, %[size], q; @p st.global.b32 [a], %[lower];
            add.s32 t, t, 8; setp.lt.and.s32 p, t, %[size], q; @p st.global.b32 [a+32], %[upper]; }}""",
            ref=address(ref),
            lower=lower,
            upper=upper,
            line=scalar(line),
            row=scalar(row),
            size=scalar(size),
        )

    store(ref, value, line, row, size)


def _bits(value: ir.Value) -> ir.Value:
    """A register of one float32, or of one in a vector, as an integer."""
    i32 = ir.IntegerType.get_signless(32)
    if isinstance(value.type, ir.VectorType):
        value = llvm.extractelement(value, mgpu.utils.c(0, i32))
    return llvm.bitcast(i32, value)


def _halves(pair: ir.Value, itemsize: int) -> list[ir.Value]:
    """Both elements of a register of two, as integers."""
    i32 = ir.IntegerType.get_signless(32)
    bits = ir.IntegerType.get_signless(8 * itemsize)
    return [llvm.bitcast(bits, llvm.extractelement(pair, mgpu.utils.c(half, i32))) for half in range(2)]


def store_tile(
    tiles_smem: Any,
    at: tuple[jax.Array, Any],
    out_gmem: Any,
    row: jax.Array,
    column: jax.Array,
    size: jax.Array,
    *,
    interpret: bool,
) -> None:
    """``out[row + j, column + i] = tiles[at][j, i]`` of a 16-bit tile (64, 64), for j < size, at any row.

    ``tiles_smem`` (warpgroups, n, 64, 64) has the layout of WGMMA operands, ``at`` begins with the running
    warpgroup. The tile may be written again when this returns.
    """
    _, count, rows, columns = tiles_smem.shape
    assert (rows, columns) == (64, 64), tiles_smem.shape
    if interpret:

        @pl.loop(0, jnp.minimum(size, rows))
        def _(j: jax.Array) -> None:
            out_gmem[row + j, pl.ds(column, columns)] = tiles_smem[(*at, j)]

        return
    row_bytes = 2 * out_gmem.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(operand_transforms(tiles_smem.dtype)), plgpu.RefType(), *[SCALAR] * 5)
    )
    def store(
        ctx: Any, tiles: Any, out: Any, warpgroup: Any, tile: Any, row: Any, column: Any, size: Any
    ) -> None:
        # Thread t copies chunk t % 8 (16 bytes) of rows t / 8, t / 8 + 16, …: 8 threads write 128 bytes.
        copies = "".join(
            f"""
            setp.gt.s32 p, s, {j}; @p ld.shared.v4.b32 {{v0, v1, v2, v3}}, [source+{128 * j}];
            @p st.global.v4.b32 [a], {{v0, v1, v2, v3}}; add.s64 a, a, {16 * row_bytes};"""
            for j in range(0, rows, 16)
        )
        ptx(
            f"""{{ .reg .pred p; .reg .b32 r, c, d, s, source, v0, v1, v2, v3; .reg .b64 a;
            add.s32 d, %[warpgroup], {_STORE_BARRIER}; bar.sync d, 128;
            mov.u32 r, %tid.x; and.b32 c, r, 7; and.b32 r, r, 127; shr.u32 r, r, 3; sub.s32 s, %[size], r;
            mad.lo.s32 d, %[warpgroup], {count}, %[tile];
            mad.lo.s32 source, d, {2 * rows * columns}, %[tiles]; mad.lo.u32 source, r, 128, source;
            xor.b32 d, c, r; and.b32 d, d, 7; mad.lo.u32 source, d, 16, source;
            add.s32 r, r, %[row]; mul.wide.s32 a, r, {row_bytes}; add.s64 a, a, %[out];
            mad.lo.u32 c, c, 8, %[column]; mad.wide.s32 a, c, 2, a;
            {copies}
            add.s32 d, %[warpgroup], {_STORE_BARRIER}; bar.sync d, 128; }}""",
            tiles=shared_address(tiles),
            out=address(out),
            warpgroup=scalar(warpgroup),
            tile=scalar(tile),
            row=scalar(row),
            column=scalar(column),
            size=scalar(size),
        )

    warpgroup, tile = at
    store(tiles_smem, out_gmem, warpgroup, jnp.int32(tile), row, column, size)
