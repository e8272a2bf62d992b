"""Mixture-of-Experts layers for JAX.

What a layer is made and called with. Types that are only returned are where they are made
(`moe_pallas.layers.MoEAux`, `moe_pallas.oracle.Selection` and `Explanation`); the choices that go by their
value, as ``weight_on="input"`` does, are in `moe_pallas.spec`.
"""

from moe_pallas.configs.schema import GradientConfig, GroupedGemmConfig, SwapABConfig
from moe_pallas.errors import UnsupportedError
from moe_pallas.experts import fused_experts, fused_moe
from moe_pallas.grouped import grouped_gemm
from moe_pallas.layers import MoE
from moe_pallas.oracle import explain, select_backend
from moe_pallas.quant import QTensor, dequantize, quantize, quantize_experts
from moe_pallas.routing import Routing, load_balance_loss, route, router_z_loss
from moe_pallas.sharding import Sharding
from moe_pallas.spec import Activation, GateUp, MoESpec, Problem, QuantScheme, Scoring

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "GateUp",
    "GradientConfig",
    "GroupedGemmConfig",
    "MoE",
    "MoESpec",
    "Problem",
    "QTensor",
    "QuantScheme",
    "Routing",
    "Scoring",
    "Sharding",
    "SwapABConfig",
    "UnsupportedError",
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
