"""The public operation `grouped_gemm`: each group of rows times its own matrix."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_pallas import xla
from moe_pallas.errors import UnsupportedError
from moe_pallas.oracle import current_device
from moe_pallas.spec import DeviceInfo, check_array, check_dtype

_BACKENDS = ("auto", "grouped_gemm", "xla")


def grouped_gemm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool = False,
    group_offset: jax.Array | int | None = None,
    backend: str = "auto",
) -> jax.Array:
    """Multiply each group of rows with its own matrix: ``out[r] = lhs[r] @ rhs[group of r]``.

    What `jax.lax.ragged_dot` computes, on Hopper GPUs by this package's kernel.

    Args:
      lhs: (R, K) bfloat16 | float16 | float32. The rows of group 0, then those of group 1, ...
      rhs: (G, K, N) in lhs's dtype; (G, N, K) if ``transpose_rhs``, as checkpoints hold weights.
      group_sizes: (G,) integers, with a sum of at most R; more than G of them with a ``group_offset``.
      transpose_rhs: The axis that is summed over is rhs's last.
      group_offset: () int. rhs holds the matrices of groups ``group_offset`` ... ``group_offset + G - 1``.
      backend: ``"auto"``, or ``"grouped_gemm"`` (the kernel) or ``"xla"``, which is then used or refused.

    Returns:
      (R, N) in lhs's dtype. Rows of no group, or of groups that rhs does not hold, are exactly 0, whatever
      lhs holds there.

    Raises:
      ValueError: Shapes that disagree, or a backend that is none.
      TypeError: A dtype of the wrong class.
      UnsupportedError: The explicitly requested backend can't do this.

    Notes:
      Accumulates in float32, rounds once. Bitwise repeatable. Gradients are first-order reverse mode.

    Example:
      >>> import jax.numpy as jnp
      >>> from moe_pallas import grouped_gemm
      >>> grouped_gemm(jnp.ones((4, 2)), jnp.ones((2, 2, 3)), jnp.array([1, 2]))[:, 0].tolist()
      [2.0, 2.0, 2.0, 0.0]
    """
    _check(lhs, rhs, group_sizes, transpose_rhs, group_offset)
    if backend not in _BACKENDS:
        raise ValueError(f"There is no backend {backend!r}; there are {', '.join(map(repr, _BACKENDS))}.")
    objection = "asked for explicitly" if backend == "xla" else _objection(lhs, rhs, transpose_rhs)
    if objection and backend == "grouped_gemm":
        raise UnsupportedError("grouped_gemm", objection, "backend='xla', or 'auto'.")
    sizes = group_sizes.astype(jnp.int32)
    first = jnp.asarray(0 if group_offset is None else group_offset, jnp.int32)
    run = _portable if objection else _with_kernel
    return run(lhs, rhs, sizes, first, transpose_rhs)


def _objection(lhs: jax.Array, rhs: jax.Array, transpose_rhs: bool) -> str | None:
    """Why the kernel can't do this here."""
    device: DeviceInfo = current_device()
    if not device.is_hopper:
        name = f"{device.name or device.platform} {device.compute_capability}".rstrip()
        return f"needs an NVIDIA GPU of compute capability 9.0 (Hopper); got {name}."
    from moe_pallas.kernels import grouped_gemm as kernel  # Pallas is imported when a kernel is used

    columns = rhs.shape[1 if transpose_rhs else 2]
    return kernel.supports(len(lhs), lhs.shape[1], columns, lhs.dtype.name)


def _portable(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, first: jax.Array, transpose_rhs: bool
) -> jax.Array:
    """By XLA: the groups that rhs holds are turned to the front."""
    matrices = rhs if transpose_rhs else rhs.swapaxes(1, 2)
    sizes = lax.dynamic_slice_in_dim(group_sizes, first, len(rhs))
    if len(rhs) == len(group_sizes):
        return xla.grouped_matmul(lhs, matrices, sizes).astype(lhs.dtype)
    start = jnp.sum(jnp.where(jnp.arange(len(group_sizes)) < first, group_sizes, 0))
    out = xla.grouped_matmul(jnp.roll(lhs, -start, axis=0), matrices, sizes)
    return jnp.roll(out.astype(lhs.dtype), start, axis=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _with_kernel(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, first: jax.Array, transpose_rhs: bool
) -> jax.Array:
    from moe_pallas.kernels import grouped_gemm as kernel

    @jax.custom_batching.sequential_vmap
    def multiply(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, first: jax.Array) -> jax.Array:
        return kernel.multiply_groups(lhs, rhs, group_sizes, group_offset=first, contract_last=transpose_rhs)

    out = multiply(lhs, rhs, group_sizes, first)
    return xla.vary_like(out, lhs, rhs, group_sizes)  # Pallas loses track in shard_map


def _with_kernel_fwd(*args: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _with_kernel(*args), args[:4]


def _with_kernel_bwd(
    transpose_rhs: bool, residuals: tuple[jax.Array, ...], d_out: jax.Array
) -> tuple[jax.Array | None, ...]:
    lhs, rhs, group_sizes, first = residuals
    # For the rows the same product, with the other axis summed over.
    d_lhs = _with_kernel(d_out, rhs, group_sizes, first, not transpose_rhs)
    return d_lhs, _d_matrices(lhs, rhs, group_sizes, first, transpose_rhs, d_out), None, None


def _d_matrices(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    first: jax.Array,
    transpose_rhs: bool,
    d_out: jax.Array,
) -> jax.Array:
    """The gradient of rhs: a product over each group's rows, by a kernel where it can."""
    from moe_pallas.configs.schema import GroupedGemmConfig
    from moe_pallas.kernels import _mgpu, grouped_gemm
    from moe_pallas.kernels.weight_gradient import Groups, Rows, supports, weight_gradient

    if supports(lhs.shape[1], d_out.shape[1]):
        (d_rhs,) = jax.vjp(lambda rhs: _portable(lhs, rhs, group_sizes, first, transpose_rhs), rhs)[1](d_out)
        return d_rhs

    @jax.custom_batching.sequential_vmap
    def multiply(lhs: jax.Array, d_out: jax.Array, sizes: jax.Array, first: jax.Array) -> jax.Array:
        firsts = grouped_gemm.first_rows(sizes, first, len(rhs), len(lhs))
        return weight_gradient(
            *((d_out, lhs) if transpose_rhs else (lhs, d_out)),
            Groups(firsts[:-1], firsts[:-1], jnp.diff(firsts)),
            (Rows.SORTED, Rows.SORTED),
            name="weight_gradient",
            config=GroupedGemmConfig(),
            num_ctas=_mgpu.num_sms(),
        )

    d_rhs = xla.vary_like(multiply(lhs, d_out, group_sizes, first), lhs, rhs, group_sizes, d_out)
    return xla.like_primal(d_rhs, rhs)


_with_kernel.defvjp(_with_kernel_fwd, _with_kernel_bwd)


def _check(lhs: Any, rhs: Any, group_sizes: Any, transpose_rhs: bool, group_offset: Any) -> None:
    for name, array in (("lhs", lhs), ("rhs", rhs), ("group_sizes", group_sizes)):
        check_array(name, array)
    check_dtype("lhs", lhs.dtype.name)
    if rhs.dtype != lhs.dtype:
        raise TypeError(f"rhs is {rhs.dtype}, lhs is {lhs.dtype}; need one dtype.")
    if not np.issubdtype(group_sizes.dtype, np.integer):
        raise TypeError(f"group_sizes are integers; got {group_sizes.dtype}.")
    if lhs.ndim != 2 or rhs.ndim != 3 or rhs.shape[2 if transpose_rhs else 1] != lhs.shape[1]:
        need = "(G, N, K)" if transpose_rhs else "(G, K, N)"
        raise ValueError(
            f"lhs has shape {lhs.shape}, rhs {rhs.shape}; need (R, K) and {need} with "
            f"transpose_rhs={transpose_rhs}."
        )
    if not len(rhs):
        raise ValueError(f"rhs has shape {rhs.shape}; need one matrix at least.")
    groups = group_sizes.shape
    if len(groups) != 1 or groups[0] < len(rhs) or (group_offset is None and groups[0] != len(rhs)):
        raise ValueError(
            f"group_sizes has shape {groups}, rhs has {len(rhs)} matrices; need one size a matrix, or with "
            "a group_offset at least as many."
        )
