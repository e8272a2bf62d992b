"""MoE layers from and to checkpoints in the Hugging Face format.

Weights are brought into this library's layout once, at load: one ``w13`` and one ``w2`` for all
experts, contraction axis last. Of the supported families only gpt-oss holds them the other way round;
it is transposed here and keeps its interleaved gate/up order, which the spec states.
"""

from __future__ import annotations

import itertools
import operator
import os
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from moe_pallas.errors import UnsupportedError
from moe_pallas.interop import fp8
from moe_pallas.interop.families import Family, Tensor, find_family, moe_layers
from moe_pallas.interop.layouts import convert_gate_up
from moe_pallas.interop.safetensors_folder import SafetensorsFolder
from moe_pallas.quant import QTensor, check_qtensor
from moe_pallas.spec import ActivationScales, GateUp, MoESpec, QuantScheme
from moe_pallas.untrusted import clipped, shortened

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}
# What a tensor's name ends in if the checkpoint is quantised. First match wins.
_QUANTISED = (
    (("scale_inv",), "FP8 with block scales"),
    (("_blocks", "_scales"), "MXFP4"),
    (("weight_packed", "weight_shape", "global_scale"), "compressed-tensors"),
    (("_scale", "_scale_2"), "FP8 or INT8 with scales"),
    (("qweight", "qzeros", "g_idx", ".scales"), "GPTQ or AWQ"),
    ((".absmax", ".quant_map", ".SCB", ".weight_format"), "bitsandbytes"),
)
_FP8 = "F8_E4M3"
_GATE_AND_UP = ("w13", "shared_w13")
_ROUTED = frozenset({"w13", "w2", "b13", "b2"})
_SHARED = frozenset({"shared_w13", "shared_w2"})
_AGAIN = "Download config.json and the weights again, from one revision."


def from_huggingface(folder: str | os.PathLike[str], layer: int) -> tuple[MoESpec, dict[str, Any]]:
    """Read one MoE layer of a checkpoint in the Hugging Face format.

    Families: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V3 and gpt-oss; one tensor per expert or
    packed ones; FP8 as `moe_pallas.interop.fp8` lists it. Only the shards that hold tensors of this layer
    are opened, and only those are read.

    Args:
      folder: Local folder with ``config.json`` and ``model.safetensors``, or with
        ``model.safetensors.index.json`` and the shards it names.
      layer: Which decoder layer, from 0.

    Returns:
      spec: What ``config.json`` says of the layer.
      params: Name → array on JAX's default device, as in ``spec.param_shapes``, in the checkpoint's dtype
        (DeepSeek-V3's correction bias is float32 there too, whatever the weights are). gpt-oss is
        transposed to contraction-last and stays ``GateUp.INTERLEAVED``. Experts in FP8 are `QTensor`s, code
        by code and scale by scale the checkpoint's.

    Raises:
      FileNotFoundError: The folder or a file that has to be in it isn't there.
      ValueError: No such layer; a config that contradicts itself; tensors missing, unexpected, misshaped
        or of mixed dtypes; a broken file; an index that leads out of the folder.
      UnsupportedError: Another family, a dense layer, another quantisation, an unknown activation.
      ImportError: The ``safetensors`` package is missing.

    Example:
      >>> from moe_pallas.interop import from_huggingface
      >>> spec, params = from_huggingface("tests/data/goldens/mixtral", layer=0)
      >>> spec.num_experts, params["w13"].shape
      (8, (8, 192, 64))
    """
    checkpoint = SafetensorsFolder(folder)
    layer = operator.index(layer)
    family = find_family(checkpoint.config.get("model_type"), "from_huggingface")
    spec = _read_spec(checkpoint, family, layer)
    try:
        layout = fp8.read_layout(checkpoint.config)
    except ValueError as error:
        raise _senseless(checkpoint, family, error) from error
    tensors = _find_tensors(checkpoint, family, spec, layer, layout)
    parts = defaultdict(list)
    for tensor in tensors:
        parts[tensor.param].append(tensor)
    quantised = {tensor.param.partition(".")[0] for tensor in tensors if tensor.param.endswith(".scale")}
    _check_dtypes(checkpoint, tensors, quantised)

    def read(name: str, shape: tuple[int, ...]) -> Any:
        # jnp.asarray here: at most one parameter is held twice, on the host and on the device.
        values = jnp.asarray(_read_param(checkpoint, shape, parts[name]))
        if name not in quantised:
            return values
        assert layout is not None
        gate_up = spec.gate_up if name in _GATE_AND_UP else None
        scales = {
            part: jnp.asarray(_read_scales(checkpoint, shape_of_part, parts[f"{name}.{part}"]))
            for part, shape_of_part in _scale_shapes(shape, layout.scheme, gate_up).items()
        }
        return QTensor(values=values, **scales, scheme=layout.scheme, gate_up=gate_up)

    return spec, {name: read(name, shape) for name, shape in spec.param_shapes.items()}


def to_huggingface(
    spec: MoESpec, params: Mapping[str, Any], layer: int, *, family: str, packed: bool = False
) -> dict[str, np.ndarray]:
    """Give one layer's parameters the names and shapes that a family's checkpoints have.

    The inverse of `from_huggingface`, bit for bit. What the spec says beyond shapes (scoring,
    normalisation, …) stands in a checkpoint's ``config.json``, which is not written here; for its
    ``quantization_config`` there is `quantization_config`.

    Args:
      spec: The layer. Its gate/up order is converted if the family has the other one.
      params: Arrays as in ``spec.param_shapes``, NumPy or JAX; or `QTensor`s, whose scales are written as
        float32.
      layer: Which decoder layer to name them after, from 0.
      family: ``model_type`` of the checkpoint: mixtral, qwen2_moe, qwen3_moe, olmoe, deepseek_v3, gpt_oss.
      packed: Two tensors for all experts, as newer transformers hold them, rather than some per expert, as
        the hub does. gpt-oss has only the packed form.

    Returns:
      Name → array, to be saved with ``safetensors.numpy.save_file``. May be read-only views of ``params``.

    Raises:
      ValueError: params don't fit the spec, or the spec has parameters that the family has no names for.
      UnsupportedError: An unknown family; packed `QTensor`s that have no packed form.
    """
    form = find_family(family, "to_huggingface")
    layer = operator.index(layer)
    if layer < 0:
        raise ValueError(f"layer counts from 0; got {layer}.")
    _check_params(spec, params, form)
    arrays: dict[str, np.ndarray] = {}
    schemes = {}
    for name, param in params.items():
        if isinstance(param, QTensor):
            schemes[name] = param.scheme
            check_qtensor(name, param, spec.gate_up if name in _GATE_AND_UP else None)
            arrays |= {name: np.asarray(param.values), f"{name}.scale": np.asarray(param.scale)}
            if param.input_scale is not None:
                arrays[f"{name}.input_scale"] = np.asarray(param.input_scale)
        else:
            arrays[name] = np.asarray(param)
    gated = [f"{name}{part}" for name in _GATE_AND_UP for part in ("", ".scale")]
    for name, axis in (*((name, -2) for name in gated), ("b13", -1)):
        if name in arrays:
            arrays[name] = convert_gate_up(arrays[name], spec.gate_up, form.gate_up, axis)
    prefix = form.prefixes(layer)[-1 if packed else 0]
    tensors = list(form.tensors(spec, prefix, packed=packed))
    for name, scheme in schemes.items():
        own = [tensor for tensor in tensors if tensor.param == name]
        tensors += fp8.scale_tensors(own, fp8.Layout.written(scheme))
    return {
        tensor.name: np.ascontiguousarray(tensor.view(arrays[tensor.param])).reshape(tensor.shape)
        for tensor in tensors
    }


def _read_spec(checkpoint: SafetensorsFolder, family: Family, layer: int) -> MoESpec:
    try:
        layers, with_experts = moe_layers(family, checkpoint.config)
        spec = family.read_spec(checkpoint.config) if with_experts else None
    except UnsupportedError:
        raise
    except (ValueError, TypeError) as error:
        raise _senseless(checkpoint, family, error) from error
    if not 0 <= layer < layers:
        raise ValueError(f"{checkpoint.folder} has the layers 0 … {layers - 1}; got layer={layer}.")
    if spec is None or layer not in with_experts:
        raise UnsupportedError(
            "from_huggingface",
            f"layer {layer} of {checkpoint.folder} is dense, it has no experts.",
            f"the layers with experts: {shortened([str(i) for i in with_experts]) or 'none'}.",
        )
    return spec


def _senseless(checkpoint: SafetensorsFolder, family: Family, error: Exception) -> ValueError:
    stated = clipped(str(error), 500)
    return ValueError(f"{checkpoint.folder / 'config.json'} ({family.name}): {stated} {_AGAIN}")


def _find_tensors(
    checkpoint: SafetensorsFolder, family: Family, spec: MoESpec, layer: int, layout: fp8.Layout | None
) -> list[Tensor]:
    """Match the layer's tensors in the files' headers with those that the spec and the layout ask for."""
    prefixes = family.prefixes(layer)
    found = [name for name in checkpoint.names() if name.startswith(prefixes)]
    _check_quantisation(checkpoint, layer, found, layout)
    # transformers renames Mixtral's block when it packs it, so that the block's name is open.
    prefix = next((p for p in prefixes if any(name.startswith(p) for name in found)), prefixes[0])
    packed = f"{prefix}experts.gate_up_proj" in found or f"{prefix}experts.down_proj" in found
    # A wrong num_experts may ask for any number of tensors; past this many some are surely missing.
    limit = len(found) + 100
    tensors = list(itertools.islice(family.tensors(spec, prefix, packed=packed), limit))
    present = set(found)
    if layout is not None:
        in_fp8 = [t for t in tensors if t.name in present and checkpoint.dtype(t.name) == _FP8]
        params = {tensor.param for tensor in in_fp8}
        tensors += fp8.scale_tensors([t for t in tensors if t.param in params], layout)
        limit *= 3
    expected = {tensor.name for tensor in tensors}
    missing = [tensor.name for tensor in tensors if tensor.name not in present]
    extra = sorted(present - expected) if len(tensors) < limit else []
    problems = []
    if missing:
        problems.append(f"missing in {checkpoint.listing}: {shortened(missing)}")
    if extra:
        problems.append(f"not expected: {shortened([f'{name} ({checkpoint.file(name)})' for name in extra])}")
    wrong = [
        f"{tensor.name} in {checkpoint.file(tensor.name)} is {checkpoint.shape(tensor.name)}, need "
        f"{tensor.shape}"
        for tensor in tensors
        if tensor.name in present and checkpoint.shape(tensor.name) not in (tensor.shape, tensor.other_shape)
    ]
    if wrong:
        problems.append(f"misshaped: {shortened(wrong)}")
    if problems:
        raise ValueError(
            f"Layer {layer} of {checkpoint.folder} does not hold the tensors that its config.json "
            f"({family.name}) asks for; {'; '.join(problems)}. {_AGAIN}"
        )
    return tensors


def _check_quantisation(
    checkpoint: SafetensorsFolder, layer: int, names: list[str], layout: fp8.Layout | None
) -> None:
    """Refuse tensors that belong to a quantisation other than the layout's."""
    for suffixes, scheme in _QUANTISED:
        hits = [name for name in names if name.endswith(suffixes)]
        if layout is not None:
            hits = [name for name in hits if not name.endswith(fp8.SUFFIXES)]
        if hits:
            stated = checkpoint.config.get("quantization_config")
            method = (
                f", {clipped(repr(stated.get('quant_method')))} by its config"
                if isinstance(stated, dict)
                else ""
            )
            raise UnsupportedError(
                "from_huggingface",
                f"layer {layer} of {checkpoint.folder} is quantised: {scheme} by the names of its tensors"
                f"{method}; it holds {shortened(hits)}.",
                "a checkpoint in float32, float16 or bfloat16, or in FP8 with a quantization_config that "
                "says so; dequantise this one first.",
            )


def _check_dtypes(checkpoint: SafetensorsFolder, tensors: list[Tensor], quantised: set[str]) -> None:
    dtypes = {tensor.name: checkpoint.dtype(tensor.name) for tensor in tensors}
    codes = {tensor.name for tensor in tensors if tensor.param in quantised}
    unfit = [
        f"{name} ({dtype})"
        for name, dtype in dtypes.items()
        if dtype not in _DTYPES and not (name in codes and dtype == _FP8)
    ]
    if unfit:
        raise UnsupportedError(
            "from_huggingface",
            f"{checkpoint.folder} holds tensors in quantised or otherwise unfit dtypes: {shortened(unfit)}.",
            f"{', '.join(_DTYPES)}.",
        )
    for params in (_ROUTED, _SHARED):
        # One example of each dtype says enough.
        mixed = {dtypes[tensor.name]: tensor.name for tensor in tensors if tensor.param in params}
        if len(mixed) > 1:
            examples = [f"{name} in {checkpoint.file(name)} is {dtype}" for dtype, name in mixed.items()]
            raise ValueError(
                f"The experts' tensors of a layer have one dtype; in {checkpoint.folder} "
                f"{'; '.join(examples)}. Convert them to one dtype."
            )


def _read_param(checkpoint: SafetensorsFolder, shape: tuple[int, ...], tensors: list[Tensor]) -> np.ndarray:
    first = tensors[0]
    if first.shape == shape and not first.index and not first.transposed:
        return checkpoint.read(first.name)
    dtype = checkpoint.dtype(first.name)
    param = np.empty(shape, jnp.float8_e4m3fn if dtype == _FP8 else _DTYPES[dtype])
    for tensor in tensors:
        tensor.view(param)[...] = checkpoint.read(tensor.name)
    return param


def _scale_shapes(
    shape: tuple[int, ...], scheme: QuantScheme, gate_up: GateUp | None
) -> dict[str, tuple[int, ...]]:
    parts = 1 if gate_up is None else 2
    shapes = {"scale": scheme.scale_shape(shape, parts)}
    if scheme.activations is ActivationScales.STATIC:
        shapes["input_scale"] = (*shape[:-2], parts)
    return shapes


def _read_scales(checkpoint: SafetensorsFolder, shape: tuple[int, ...], tensors: list[Tensor]) -> np.ndarray:
    scales = np.empty(shape, np.float32)
    for tensor in tensors:
        part = tensor.view(scales)
        part[...] = fp8.read_scales(checkpoint, tensor.name).reshape(part.shape)
    return scales


def _check_params(spec: MoESpec, params: Mapping[str, Any], form: Family) -> None:
    shapes = spec.param_shapes
    if set(params) != set(shapes):
        raise ValueError(f"The spec has the parameters {sorted(shapes)}; got {sorted(params)}.")
    wrong = [
        f"{name} is {tuple(params[name].shape)}, need {shape}"
        for name, shape in shapes.items()
        if tuple(params[name].shape) != shape
    ]
    if wrong:
        raise ValueError(f"Parameters do not have the spec's shapes: {shortened(wrong)}.")
    if not spec.gated:
        raise ValueError(f"{form.name} experts are gated; got activation={spec.activation.value!r}.")
    nameless = sorted(set(shapes) - form.params - form.optional_params)
    lacking = sorted(form.params - set(shapes))
    if nameless or lacking:
        raise ValueError(
            f"The spec does not fit a {form.name} checkpoint, which has no names for {nameless} and needs "
            f"{lacking} besides what the spec has. Use another family."
        )
