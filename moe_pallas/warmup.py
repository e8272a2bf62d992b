"""Serving without compilation: token buckets, their programs compiled ahead of time, a guard that proves it.

JAX compiles a program for every shape. A server pads each batch to one of a few sizes (`token_buckets`,
`pad_tokens`) and says at run time how many tokens are real, which every function of this package takes as
``num_tokens``: padded tokens visit no expert, and no expert's weights are read for them.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, overload

import jax
import numpy as np
from jax import monitoring

from moe_pallas.errors import RecompileError
from moe_pallas.layers import MoE, Params

Programs = dict[int, jax.stages.Compiled]
Args = Callable[[int], tuple[Any, ...]]

_log = logging.getLogger("moe_pallas")


def token_buckets(max_tokens: int = 8192) -> tuple[int, ...]:
    """Choose the sizes that batches of 1 … max_tokens tokens are padded to: powers of two.

    A batch grows to less than twice its size; ratios that are all alike make that the least that so few sizes
    can promise. The oracle's limit in tokens an expert is a power of two, so where E / top_k is one too a
    batch is served by the backend that it would get unpadded.

    Args:
      max_tokens: The largest batch, at least 1.

    Returns:
      1, 2, 4, … and last max_tokens itself: 14 sizes up to 8192.

    Raises:
      ValueError: max_tokens is below 1.

    Example:
      >>> from moe_pallas.warmup import token_buckets
      >>> token_buckets(48)
      (1, 2, 4, 8, 16, 32, 48)
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is at least 1; got {max_tokens}.")
    return (*(1 << i for i in range((max_tokens - 1).bit_length())), max_tokens)


def pad_tokens(x: Any, buckets: Iterable[int]) -> tuple[np.ndarray, np.int32]:
    """Pad a batch to the smallest bucket that holds it, on the host: on a device every T is a program.

    Args:
      x: (T, …) array of the host. One of a device is copied from there.
      buckets: Sizes, for example of `token_buckets`, or the programs of `warmup`.

    Returns:
      (bucket, …) x, and zeros past its T rows; () int32 T, the ``num_tokens`` of a call.

    Raises:
      ValueError: No bucket holds T tokens.

    Example:
      >>> import numpy as np
      >>> from moe_pallas.warmup import pad_tokens, token_buckets
      >>> padded, num_tokens = pad_tokens(np.ones((5, 16)), token_buckets(64))
      >>> padded.shape, int(num_tokens)
      ((8, 16), 5)
    """
    x, sizes = np.asarray(x), list(buckets)
    tokens = len(x)
    bucket = min((size for size in sizes if size >= tokens), default=None)
    if bucket is None:
        raise ValueError(
            f"The batch has {tokens} tokens, the largest bucket {max(sizes, default=0)}. Split the batch, or "
            "warm up with a larger max_tokens."
        )
    if bucket > tokens:
        x = np.concatenate([x, np.zeros((bucket - tokens, *x.shape[1:]), x.dtype)])
    return x, np.int32(tokens)


@overload
def warmup(
    function: MoE,
    max_tokens: int,
    params: Params,
    /,
    *,
    progress: Callable[[int, int, int, float], None] | None = None,
) -> Programs: ...


@overload
def warmup(
    function: Callable[..., Any],
    max_tokens: int,
    args: Args,
    /,
    *,
    progress: Callable[[int, int, int, float], None] | None = None,
) -> Programs: ...


def warmup(
    function: MoE | Callable[..., Any],
    max_tokens: int,
    args: Any,
    /,
    *,
    progress: Callable[[int, int, int, float], None] | None = None,
) -> Programs:
    """Compile a layer or a step of a model for every token bucket. Nothing is run, and no data needed.

    Args:
      function: A layer, or a function, jitted (with its donated arguments) or not.
      max_tokens: The largest batch, see `token_buckets`.
      args: For a function ``args(bucket)``, the arguments of a call with so many tokens: arrays or
        `jax.ShapeDtypeStruct`s, or pytrees of them. For a layer its parameters, likewise; a call is then
        ``(params, x, num_tokens)`` with x (bucket, D) in the layer's dtype, or else the router's.
      progress: Called after each compilation with the number of programs done, that of all of them, the
        bucket, and the seconds it took. They are logged in any case (logger ``moe_pallas``, level INFO).

    Returns:
      Bucket → program. A program is called with what ``args(bucket)`` stood for; given other shapes it
      raises TypeError and compiles nothing.

    Raises:
      ValueError: max_tokens is below 1.

    Example:
      >>> import jax, numpy as np
      >>> from moe_pallas import MoE, MoESpec
      >>> from moe_pallas.warmup import no_recompile, pad_tokens, warmup
      >>> layer = MoE(MoESpec(num_experts=4, top_k=2, hidden_size=8, intermediate_size=16))
      >>> params = layer.init(jax.random.key(0))
      >>> programs = warmup(layer, 4, params)
      >>> with no_recompile():
      ...     x, num_tokens = pad_tokens(np.ones((3, 8), np.float32), programs)
      ...     y = np.asarray(programs[len(x)](params, x, num_tokens))[:num_tokens]
      >>> list(programs), y.shape
      ([1, 2, 4], (3, 8))
    """
    function, args = as_step(function, args)
    jitted: Any = function if hasattr(function, "lower") else jax.jit(function)
    buckets = token_buckets(max_tokens)
    programs: Programs = {}
    for done, bucket in enumerate(buckets, 1):
        began = time.perf_counter()
        programs[bucket] = jitted.lower(*args(bucket)).compile()
        seconds = time.perf_counter() - began
        _log.info("compiled for %d tokens in %.2f s, program %d of %d", bucket, seconds, done, len(buckets))
        if progress is not None:
            progress(done, len(buckets), bucket, seconds)
    return programs


def as_step(function: MoE | Callable[..., Any], args: Any) -> tuple[Callable[..., Any], Args]:
    """Turn a layer and its parameters into a function and its arguments; leave these as they are."""
    if not isinstance(function, MoE):
        return function, args
    layer, params = function, args
    dtype = params["router"].dtype if layer.dtype is None else layer.dtype

    def moe_layer(params: Params, x: jax.Array, num_tokens: jax.Array) -> jax.Array:
        return layer.apply(params, x, num_tokens=num_tokens)

    def layer_args(bucket: int) -> tuple[Any, ...]:
        x = jax.ShapeDtypeStruct((bucket, layer.spec.hidden_size), dtype)
        return params, x, jax.ShapeDtypeStruct((), np.int32)

    return moe_layer, layer_args


_guards: dict[int, list[str]] = {}  # what each no_recompile() that is entered has refused
_lock = threading.Lock()


@contextlib.contextmanager
def no_recompile() -> Iterator[None]:
    """Refuse to compile: inside, a call that JAX has no program for raises before the compiler runs.

    Programs that come from the persistent compilation cache count too, as do the small ones of operations
    outside of ``jax.jit``: slicing or padding a device's array to a new length is one.

    It holds in every thread of the process, since a step waits for a compilation wherever it runs. The error
    is raised in the thread that would compile. Where it is caught there, or ends that thread alone, leaving
    the context raises it again, unless another exception leaves it. Contexts may be nested.

    Raises:
      RecompileError: With the function's name and its arguments' dtypes and shapes.

    Example:
      >>> import jax, numpy as np
      >>> from moe_pallas.warmup import no_recompile
      >>> double = jax.jit(lambda x: 2 * x)
      >>> _ = double(np.ones(4, np.float32))
      >>> with no_recompile():
      ...     _ = double(np.zeros(4, np.float32))
    """
    refused: list[str] = []
    with _lock:
        if not _guards:
            monitoring.register_scalar_listener(_refuse)
        _guards[id(refused)] = refused
    try:
        yield
    finally:
        with _lock:
            del _guards[id(refused)]
            if not _guards:
                monitoring.unregister_scalar_listener(_refuse)
    if refused:
        raise RecompileError(f"{refused[0]} (Raised before, {len(refused)} times, and caught.)")


# JAX records it as a scalar when it begins to compile, with the function's name.
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_MOST_SHAPES = 12


def _refuse(event: str, value: float | int, **kwargs: str | int) -> None:
    if event != _COMPILE_EVENT:
        return
    message = (
        f"{kwargs.get('fun_name')} would be compiled inside no_recompile(), for {_compiled_shapes()}. "
        "Compile it for these before (warmup), or pad the batch to a bucket that was (pad_tokens)."
    )
    with _lock:
        for refused in _guards.values():
            refused.append(message)
    raise RecompileError(message)


def _compiled_shapes() -> str:
    """The dtypes and shapes that JAX is about to compile for.

    The event lacks them, but a frame above has them. JAX's log does not do: it names them when a function is
    lowered, which may have been long before.
    """
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if (avals := frame.f_locals.get("global_in_avals")) is not None:
            shapes = [f"{aval.dtype.name}{list(aval.shape)}" for aval in avals]
            more = len(shapes) - _MOST_SHAPES
            shown = ", ".join(shapes[-_MOST_SHAPES:])  # a step's tokens come after its parameters
            return f"{f'{more} arrays and ' if more > 0 else ''}{shown or 'no arguments'}"
        frame = frame.f_back
    return "shapes that this version of JAX does not tell"
