"""FP8 checkpoints: what config.json says of the quantisation, and the tensors that hold scales.

What is read, always e4m3 with float scales:

    quant_method        weights                               activations          scales of ``X.weight``
    fp8                 one scale a matrix                    static or dynamic    X.weight_scale
    fp8                 weight_block_size [128, 128]          dynamic, groups      X.weight_scale_inv
    compressed-tensors  strategy tensor, channel or block     static or dynamic    X.weight_scale

("inv" or not, the stored number is the one that codes are multiplied with.) Dynamic activations of the first
row get scales by TOKEN: they are finer than a call's, and a token's result does not depend on the others.
Static activations have an ``X.input_scale`` too. Mixtral, Qwen3-MoE and DeepSeek-V3 come so. Nothing is
dequantised: codes are read byte for byte, scales as float32, whatever float they are stored as.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from moe_pallas.errors import UnsupportedError
from moe_pallas.interop.families import Tensor
from moe_pallas.interop.safetensors_folder import SafetensorsFolder
from moe_pallas.quant import QTensor, dequantize
from moe_pallas.spec import ActivationScales, QuantScheme, WeightScales
from moe_pallas.untrusted import clipped

_FP8 = "F8_E4M3"
_SCALE_DTYPES = ("F32", "F16", "BF16")
MATRICES = ("w13", "w2", "shared_w13", "shared_w2")
# What scales are called; those of param w13 go to params "w13.scale" and "w13.input_scale".
SUFFIXES = (".weight_scale", ".weight_scale_inv", ".input_scale", "_proj_scale_inv")

_READ = (
    "quant_method 'fp8' (a scale a matrix, or weight_block_size [128, 128]) or 'compressed-tensors' in "
    "format 'float-quantized'; or a checkpoint in float32, float16 or bfloat16."
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a checkpoint is quantised, and what the scales of ``X.weight`` are called: ``X.`` and this."""

    scheme: QuantScheme
    scale_name: str

    @classmethod
    def written(cls, scheme: QuantScheme) -> Layout:
        """What `to_huggingface` writes, as `quantization_config` states it."""
        is_block = scheme.weights is WeightScales.BLOCK
        return cls(scheme, "weight_scale_inv" if is_block else "weight_scale")


def read_layout(config: Mapping[str, Any]) -> Layout | None:
    """Read from config.json how the checkpoint is quantised.

    Returns:
      The layout; None if the config states no quantisation, or a method other than FP8's.

    Raises:
      UnsupportedError: FP8 in a form that is not read.
      ValueError: A ``quantization_config`` that is no such thing.
    """
    stated = config.get("quantization_config")
    if stated is None or stated == {}:
        stated = config.get("compression_config")
    if stated is None:
        return None
    if not isinstance(stated, Mapping):
        raise ValueError(f"'quantization_config' is an object; got {clipped(repr(stated))}.")
    method = stated.get("quant_method")
    if method == "fp8":
        return _fp8(stated)
    return _compressed_tensors(stated) if method == "compressed-tensors" else None


def quantization_config(scheme: QuantScheme | str) -> dict[str, Any]:
    """Give the ``quantization_config`` that belongs to what `to_huggingface` writes.

    Example:
      >>> from moe_pallas.interop import quantization_config
      >>> quantization_config("fp8_block")["weight_block_size"]
      [128, 128]
    """
    scheme = QuantScheme.named(scheme)
    if scheme.weights is WeightScales.CHANNEL or scheme.activations is ActivationScales.TENSOR:
        group = {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": scheme.weights.value},
            "input_activations": _activations_of(scheme),
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": group},
        }
    is_static = scheme.activations is ActivationScales.STATIC
    stated = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "static" if is_static else "dynamic"}
    if scheme.weights is WeightScales.BLOCK:
        return {**stated, "weight_block_size": list(scheme.block_shape)}
    return stated


def read_dequantised(checkpoint: SafetensorsFolder, name: str) -> np.ndarray:
    """Read a matrix ``X.weight`` outside of the experts, whatever it is stored in.

    Returns:
      (N, K) as it is stored; of FP8 each code times its scale, float32.

    Raises:
      ValueError: As `SafetensorsFolder.read`, or no scales of the form that config.json states.
      UnsupportedError: A form of FP8 that is not read.
    """
    if checkpoint.dtype(name) != _FP8:
        return checkpoint.read(name)
    layout, shape = read_layout(checkpoint.config), checkpoint.shape(name)
    if layout is None:
        raise ValueError(f"{name} in {checkpoint.folder} is FP8, but config.json states no FP8 quantisation.")
    if len(shape) != 2:
        raise ValueError(f"{name} in {checkpoint.folder} is {shape}; need a matrix (N, K) where it is FP8.")
    scale_name = name.removesuffix("weight") + layout.scale_name
    got, need, dtype = (
        checkpoint.shape(scale_name),
        layout.scheme.scale_shape(shape),
        checkpoint.dtype(scale_name),
    )
    if math.prod(got) != math.prod(need):
        raise ValueError(f"{scale_name} in {checkpoint.folder} is {got}, need {need}.")
    if dtype not in _SCALE_DTYPES:
        raise ValueError(
            f"{scale_name} in {checkpoint.folder} is {dtype}; scales are one of {', '.join(_SCALE_DTYPES)}."
        )
    values, scale = checkpoint.read(name), read_scales(checkpoint, scale_name).reshape(need)
    matrix = QTensor(values=jnp.asarray(values), scale=jnp.asarray(scale), scheme=layout.scheme)
    return np.asarray(dequantize(matrix))


def read_scales(checkpoint: SafetensorsFolder, name: str) -> np.ndarray:
    """Read scales as float32, to which every float that they are stored in widens exactly.

    Raises:
      ValueError: As `SafetensorsFolder.read`, or a scale that is negative or not finite.
    """
    scales = checkpoint.read(name).astype(np.float32)
    is_input = name.endswith("input_scale")
    if not (np.isfinite(scales) & ((scales > 0) if is_input else (scales >= 0))).all():
        raise ValueError(
            f"{name} in {checkpoint.file(name)} of {checkpoint.folder} holds scales from {scales.min()} to "
            f"{scales.max()}; need finite ones, {'above' if is_input else 'not below'} 0. Quantise the "
            "checkpoint again."
        )
    return scales


def scale_tensors(tensors: Iterable[Tensor], layout: Layout) -> Iterator[Tensor]:
    """Give the tensors of scales that go with the expert matrices among ``tensors``.

    Raises:
      UnsupportedError: Packed matrices that have no scales of that kind, or whose blocks hold gate and up.
    """
    scheme = layout.scheme
    for tensor in tensors:
        if tensor.param not in MATRICES:
            continue
        if not tensor.name.endswith(".weight"):
            yield _packed_scales(tensor, scheme)
            continue
        base = tensor.name.removesuffix("weight")
        rows, columns = scheme.scale_shape(tensor.shape)
        lead = tuple(at for at in tensor.index if isinstance(at, int))
        part = next((int(at.start is not None) for at in tensor.index if isinstance(at, slice)), 0)
        stored, other = {
            WeightScales.TENSOR: ((), (1,)),
            WeightScales.CHANNEL: ((rows, 1), (rows,)),
            WeightScales.BLOCK: ((rows, columns), None),
        }[scheme.weights]
        yield Tensor(
            base + layout.scale_name,
            stored,
            f"{tensor.param}.scale",
            (*lead, slice(part * rows, (part + 1) * rows)),
            other_shape=other,
        )
        if scheme.activations is ActivationScales.STATIC:
            place = (*lead, slice(part, part + 1))
            yield Tensor(f"{base}input_scale", (), f"{tensor.param}.input_scale", place, other_shape=(1,))


def _packed_scales(tensor: Tensor, scheme: QuantScheme) -> Tensor:
    reason = None
    if scheme.weights is not WeightScales.BLOCK or tensor.transposed:
        reason = f"{tensor.name} holds all experts, and its scales are not in blocks as they are read."
    elif tensor.param == "w13" and (tensor.shape[1] // 2) % QuantScheme.BLOCK:
        reason = (
            f"{tensor.name} holds gate and up of {tensor.shape[1] // 2} rows each, no multiple of "
            f"{QuantScheme.BLOCK}: a block of its scales covers rows of both."
        )
    if reason is not None:
        raise UnsupportedError("FP8 checkpoints", reason, "one tensor for each expert and projection.")
    return Tensor(f"{tensor.name}_scale_inv", scheme.scale_shape(tensor.shape), f"{tensor.param}.scale")


def _fp8(stated: Mapping[str, Any]) -> Layout:
    if stated.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _unread(f"fmt={stated['fmt']!r}")
    activations = stated.get("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        raise _unread(f"activation_scheme={activations!r}")
    block = stated.get("weight_block_size")
    if block is None:
        kind = ActivationScales.STATIC if activations == "static" else ActivationScales.TOKEN
        return Layout(QuantScheme(weights=WeightScales.TENSOR, activations=kind), "weight_scale")
    if block != [QuantScheme.BLOCK, QuantScheme.BLOCK] or activations == "static":
        raise _unread(f"weight_block_size={block!r} with activation_scheme={activations!r}")
    return Layout(QuantScheme.named("fp8_block"), "weight_scale_inv")


def _compressed_tensors(stated: Mapping[str, Any]) -> Layout:
    groups = stated.get("config_groups")
    if stated.get("format") != "float-quantized" or not isinstance(groups, Mapping) or len(groups) != 1:
        raise _unread(f"format={stated.get('format')!r} of compressed-tensors, config_groups={groups!r}")
    (group,) = groups.values()
    if not isinstance(group, Mapping):
        raise _unread(f"config_groups={groups!r}")
    weights: Any = group.get("weights")
    inputs: Any = group.get("input_activations")
    for side in (weights, inputs):
        is_fp8 = isinstance(side, Mapping) and (side.get("num_bits"), side.get("type")) == (8, "float")
        if not is_fp8 or not side.get("symmetric", True):
            raise _unread(f"config_groups={groups!r}: weights and input_activations must be symmetric FP8")
    kind: Any = "static" if not inputs.get("dynamic", False) else inputs.get("strategy")
    block = weights.get("block_structure", [QuantScheme.BLOCK] * 2)
    sizes = (block, inputs.get("group_size") or QuantScheme.BLOCK)
    if (
        (kind == "static" and inputs.get("strategy") != "tensor")
        or sizes != ([QuantScheme.BLOCK] * 2, QuantScheme.BLOCK)
        or inputs.get("dynamic") not in (None, True, False)
    ):
        raise _unread(f"config_groups={groups!r}")
    try:
        scheme = QuantScheme(weights=weights.get("strategy"), activations=kind)
    except ValueError as error:
        raise _unread(f"config_groups={groups!r} ({error})") from error
    return Layout(scheme, "weight_scale")


def _activations_of(scheme: QuantScheme) -> dict[str, Any]:
    is_static = scheme.activations is ActivationScales.STATIC
    strategy = "tensor" if is_static else scheme.activations.value
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": not is_static}


def _unread(what: str) -> UnsupportedError:
    return UnsupportedError("FP8 checkpoints", f"quantization_config states {clipped(what, 500)}.", _READ)
