"""What the tests of FP8 share: the schemes, and layers quantised by them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from moe_pallas import MoESpec, QTensor, QuantScheme, dequantize, quantize_experts, reference
from moe_pallas.spec import ActivationScales

SCHEMES = {
    "tensor": QuantScheme(weights="tensor", activations="tensor"),
    "tensor-static": QuantScheme(weights="tensor", activations="static"),
    "tensor-token": QuantScheme.named("fp8_tensor"),
    "channel": QuantScheme.named("fp8_channel"),
    "channel-static": QuantScheme(weights="channel", activations="static"),
    "channel-tensor": QuantScheme(weights="channel", activations="tensor"),
    "block": QuantScheme.named("fp8_block"),
}


def calibrated(params: dict[str, NDArray], x: NDArray, spec: MoESpec) -> dict[str, NDArray]:
    """Input scales that saturate nothing: x's, and 1.1 times what each expert would make of all of x."""
    largest = []
    for expert in range(spec.num_experts):
        a = x.astype(np.float64) @ params["w13"][expert].astype(np.float64).T
        b13 = params["b13"][expert].astype(np.float64) if spec.expert_bias else 0.0
        largest.append(np.abs(reference._activate(a + b13, spec)).max(initial=1e-3))
    w13 = np.full((spec.num_experts, 1), np.abs(x.astype(np.float32)).max(initial=1e-3))
    return {
        "w13": (w13 / 448).astype(np.float32),
        "w2": (1.1 * np.array(largest)[:, None] / 448).astype(np.float32),
    }


def quantised_params(
    params: dict[str, NDArray], x: NDArray, spec: MoESpec, scheme: QuantScheme
) -> dict[str, Any]:
    is_static = scheme.activations is ActivationScales.STATIC
    scales = calibrated(params, x, spec) if is_static else None
    return quantize_experts(params, spec, scheme, input_scales=scales)


def dequantised(params: dict[str, Any]) -> dict[str, NDArray]:
    return {
        name: np.asarray(dequantize(value)) if isinstance(value, QTensor) else value
        for name, value in params.items()
    }


def relative_error(actual: Any, expected: NDArray) -> float:
    """RMS of the difference over RMS of the truth."""
    difference = np.asarray(actual).astype(np.float64) - expected
    return float(np.sqrt(np.mean(difference**2) / np.mean(expected**2)))


def bits(array: Any) -> NDArray:
    return np.asarray(array).view(np.uint8)


def numpy_of(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)
