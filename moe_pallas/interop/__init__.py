"""Weights from and to other formats: Hugging Face checkpoints, gate/up orders."""

from __future__ import annotations

from moe_pallas.interop.checkpoints import from_huggingface, to_huggingface
from moe_pallas.interop.fp8 import quantization_config, read_dequantised
from moe_pallas.interop.layouts import convert_gate_up, join_gate_up, split_gate_up, with_gate_up
from moe_pallas.interop.safetensors_folder import SafetensorsFolder

__all__ = [
    "SafetensorsFolder",
    "convert_gate_up",
    "from_huggingface",
    "join_gate_up",
    "quantization_config",
    "read_dequantised",
    "split_gate_up",
    "to_huggingface",
    "with_gate_up",
]
