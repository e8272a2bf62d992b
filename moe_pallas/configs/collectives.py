"""What a sharded layer moves between GPUs and how long that takes, on paper.

A leaf beside `moe_pallas.spec`: no JAX, no device. Everything is per GPU and for one direction of its links.

    gather      x of every shard to every shard, results reduced back. A GPU receives (n - 1) · T · D numbers
                each way; across nodes a number crosses a node's NICs once and is spread by NVLink.
    all_to_all  a token goes once to each *other* shard that holds one of its experts, and one partial sum
                comes back from each. Across nodes every copy crosses the sender's NIC.

T are the tokens of one shard, n the shards of the expert axis. A collective takes
max(bytes by NVLink / its bandwidth, bytes by NIC / its bandwidth) plus a latency.
"""

from __future__ import annotations

import dataclasses
import math

from moe_pallas.spec import MoESpec

STRATEGIES = ("gather", "all_to_all")

# Measured on one H200 (BUILD_NOTES "Measured facts"): read and matrix roofs; a layer's launch and latencies.
_READ_TB_PER_S, _TFLOPS, _LAYER_US = 4.4, 800.0, 8.0
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """What connects the GPUs. The defaults are assumptions, data sheets and round numbers: none is measured.

    Args:
      gpus_per_node: GPUs that NVLink connects.
      nvlink_gb_per_s: Of one GPU, per direction (H200: 900 GB/s both ways).
      nic_gb_per_s: Of one GPU's NIC, per direction (400 Gbit/s).
      nvlink_latency_us: Of one collective inside a node, launch included.
      nic_latency_us: More for each doubling of the nodes.
      ragged_us: More for a ragged all-to-all: sizes have to be exchanged and read before data can move.
    """

    gpus_per_node: int = 8
    nvlink_gb_per_s: float = 450.0
    nic_gb_per_s: float = 50.0
    nvlink_latency_us: float = 10.0
    nic_latency_us: float = 10.0
    ragged_us: float = 15.0

    def time_us(self, collective: Collective) -> float:
        """How long a collective takes."""
        if not collective.shards > 1:
            return 0.0
        nvlink_us = collective.nvlink_bytes / (self.nvlink_gb_per_s * 1e3)
        nic_us = collective.nic_bytes / (self.nic_gb_per_s * 1e3)
        latency_us = self.nvlink_latency_us + self.nic_latency_us * math.ceil(math.log2(collective.nodes))
        return max(nvlink_us, nic_us) + latency_us + self.ragged_us * collective.ragged


H200_CLUSTER = Network()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective, as one GPU sees it.

    Attributes:
      name: As XLA calls it.
      shards: GPUs that take part.
      nodes: Nodes that they are on.
      nvlink_bytes: Received (or sent) by NVLink.
      nic_bytes: Received (or sent) by the GPU's NIC.
      ragged: Sizes are known on the device only.
    """

    name: str
    shards: int
    nodes: int
    nvlink_bytes: float
    nic_bytes: float
    ragged: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a layer lies on a mesh.

    Args:
      expert: Shards of the experts.
      tensor: Shards of F; neighbours, so on one node as far as they fit.
      tokens_over_experts: Each shard of the experts holds tokens of its own; else all hold the same ones.
    """

    expert: int = 1
    tensor: int = 1
    tokens_over_experts: bool = False


def collectives(
    strategy: str,
    spec: MoESpec,
    num_tokens: int,
    layout: Layout,
    *,
    dtype: str = "bfloat16",
    network: Network = H200_CLUSTER,
) -> tuple[Collective, ...]:
    """List the collectives of one forward pass.

    Args:
      strategy: ``"gather"`` or ``"all_to_all"``.
      spec: The whole layer.
      num_tokens: T, tokens of one shard.
      layout: How the layer lies on the mesh.
      dtype: Of the activations.
      network: What connects the GPUs.

    Example:
      >>> from moe_pallas import MoESpec
      >>> from moe_pallas.configs.collectives import Layout, collectives
      >>> spec = MoESpec(num_experts=128, top_k=8, hidden_size=4096, intermediate_size=1536)
      >>> layout = Layout(expert=8, tokens_over_experts=True)
      >>> [c.name for c in collectives("gather", spec, 64, layout)]
      ['all-gather', 'all-gather', 'reduce-scatter']
    """
    row = spec.hidden_size * _DTYPE_BYTES[dtype]
    routing = spec.top_k * 8  # an id and a weight
    expert_group = _group(layout.expert, layout.tensor, network)
    found: list[Collective] = []
    if not layout.tokens_over_experts:
        both = _group(layout.expert * layout.tensor, 1, network)
        return _existing(both.spread("all-reduce", 2 * num_tokens * row / (layout.expert * layout.tensor)))
    if strategy == "gather":
        found += [expert_group.spread("all-gather", num_tokens * size) for size in (row, routing)]
        found.append(expert_group.spread("reduce-scatter", num_tokens * row))
    else:
        copies = num_tokens * visit_probability(spec, layout.expert)
        found.append(expert_group.exchange("all-to-all", 8))
        found += [
            expert_group.exchange("ragged-all-to-all", copies * size, ragged=True)
            for size in (row, routing, row)
        ]
    tensor_group = _group(layout.tensor, 1, network)
    found.append(tensor_group.spread("all-reduce", 2 * num_tokens * row / layout.tensor))
    return _existing(*found)


def visit_probability(spec: MoESpec, shards: int) -> float:
    """Probability that one token visits one given shard of the experts, over uniform routings."""
    others = spec.num_experts - spec.num_experts // shards
    if others < spec.top_k:
        return 1.0
    return 1 - math.comb(others, spec.top_k) / math.comb(spec.num_experts, spec.top_k)


def moved_bytes(steps: tuple[Collective, ...]) -> float:
    """What one GPU receives."""
    return sum(step.nvlink_bytes + step.nic_bytes for step in steps)


def time_us(steps: tuple[Collective, ...], network: Network = H200_CLUSTER) -> float:
    """Time of collectives, one after the other."""
    return sum(network.time_us(step) for step in steps)


def experts_us(spec: MoESpec, num_tokens: int, layout: Layout) -> float:
    """Time that one GPU's experts take in bfloat16 if all shards have as many rows: weights read or products.

    The shared expert, if there is one, is read by every shard of the experts.
    """
    branches = 3 if spec.gated else 2
    matrix = branches * spec.hidden_size * spec.intermediate_size / layout.tensor
    shared = branches * spec.hidden_size * spec.shared_intermediate_size / layout.tensor
    all_tokens = num_tokens * (layout.expert if layout.tokens_over_experts else 1)
    missed = (1 - spec.top_k / spec.num_experts) ** all_tokens
    active = spec.num_experts / layout.expert * (1 - missed)
    rows = all_tokens * spec.top_k / layout.expert
    read_us = 2 * (active * matrix + shared) / (_READ_TB_PER_S * 1e6)
    product_us = 2 * (rows * matrix + num_tokens * shared) / (_TFLOPS * 1e6)
    return _LAYER_US + max(read_us, product_us)


@dataclasses.dataclass(frozen=True)
class _Group:
    """GPUs that take part in a collective: ``local`` of them on each of ``nodes`` nodes."""

    shards: int
    local: int
    nodes: int

    def spread(self, name: str, shard_bytes: float) -> Collective:
        """Each shard's part to all (or the reverse): a part crosses the NICs of a node once."""
        others = (self.shards - self.local) * shard_bytes
        return Collective(
            name=name,
            shards=self.shards,
            nodes=self.nodes,
            nvlink_bytes=(self.shards - 1) * shard_bytes if self.local > 1 else 0.0,
            nic_bytes=others / self.local,
        )

    def exchange(self, name: str, pair_bytes: float, *, ragged: bool = False) -> Collective:
        """Something of its own from each shard to each other."""
        return Collective(
            name=name,
            shards=self.shards,
            nodes=self.nodes,
            nvlink_bytes=(self.local - 1) * pair_bytes,
            nic_bytes=(self.shards - self.local) * pair_bytes,
            ragged=ragged,
        )


def _group(shards: int, stride: int, network: Network) -> _Group:
    """Every ``stride``-th GPU, ``shards`` of them."""
    local = max(1, min(shards, network.gpus_per_node // stride))
    return _Group(shards, local, -(-shards // local))


def _existing(*steps: Collective) -> tuple[Collective, ...]:
    return tuple(step for step in steps if step.shards > 1)
