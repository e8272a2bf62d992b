"""Mixture-of-Experts layers for JAX."""

from moe_pallas.errors import UnsupportedError
from moe_pallas.experts import fused_experts, fused_moe
from moe_pallas.grouped import grouped_gemm
from moe_pallas.layers import MoE, MoEAux
from moe_pallas.oracle import Explanation, Selection, explain, select_backend
from moe_pallas.quant import QTensor, dequantize, quantize, quantize_experts
from moe_pallas.routing import Routing, load_balance_loss, route, router_z_loss
from moe_pallas.sharding import Sharding
from moe_pallas.spec import (
    Activation,
    ActivationScales,
    GateUp,
    GroupScore,
    MoESpec,
    Problem,
    QuantScheme,
    Scoring,
    WeightOn,
    WeightScales,
)

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "ActivationScales",
    "Explanation",
    "GateUp",
    "GroupScore",
    "MoE",
    "MoEAux",
    "MoESpec",
    "Problem",
    "QTensor",
    "QuantScheme",
    "Routing",
    "Scoring",
    "Selection",
    "Sharding",
    "UnsupportedError",
    "WeightOn",
    "WeightScales",
    "dequantize",
    "explain",
    "fused_experts",
    "fused_moe",
    "grouped_gemm",
    "load_balance_loss",
    "quantize",
    "quantize_experts",
    "route",
    "router_z_loss",
    "select_backend",
]
