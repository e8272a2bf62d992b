"""Projects layer times on many GPUs from the cost model, on paper: no GPU is needed, nothing is measured.

python -m benchmarks.projection        prints the table that stands in BUILD_NOTES.md
"""

from __future__ import annotations

import dataclasses

from benchmarks.cases import MODELS
from moe_pallas import MoESpec
from moe_pallas.configs.collectives import (
    H200_CLUSTER,
    STRATEGIES,
    Layout,
    collectives,
    experts_us,
    moved_bytes,
    time_us,
)
from moe_pallas.oracle import select_strategy

# Whole layers: deepseek-v3 with its shared expert.
LAYERS = {
    "deepseek-v3": dataclasses.replace(
        MODELS["deepseek-v3-tp8"], intermediate_size=2048, shared_intermediate_size=2048
    ),
    "qwen3-235b-a22b": MODELS["qwen3-235b-a22b"],
}
GPUS = (8, 64, 512)
TOKENS_PER_GPU = (8, 64, 1024, 4096)


def layout_of(spec: MoESpec, gpus: int) -> Layout:
    """As many shards of experts as there are GPUs or experts; the other GPUs split F."""
    expert = min(gpus, spec.num_experts)
    return Layout(expert=expert, tensor=gpus // expert, tokens_over_experts=True)


def table() -> str:
    """Markdown: bytes that a GPU receives, microseconds of one forward pass, what is chosen."""
    lines = [
        "| layer | GPUs (expert × tensor) | tokens a GPU | experts us | gather MB, us | all_to_all MB, us "
        "| chosen | layer us |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    for name, spec in LAYERS.items():
        for gpus in GPUS:
            layout = layout_of(spec, gpus)
            for tokens in TOKENS_PER_GPU:
                shard_tokens = tokens * layout.tensor
                steps = {way: collectives(way, spec, shard_tokens, layout) for way in STRATEGIES}
                chosen = select_strategy(spec, shard_tokens, layout).strategy
                local = experts_us(spec, shard_tokens, layout)
                cells = [
                    name,
                    f"{gpus} ({layout.expert} × {layout.tensor})",
                    f"{tokens}",
                    f"{local:.0f}",
                    *(f"{moved_bytes(step) / 1e6:.2f}, {time_us(step):.0f}" for step in steps.values()),
                    chosen,
                    f"{local + time_us(steps[chosen]):.0f}",
                ]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def assumptions() -> str:
    """One line of what the model takes for granted."""
    net = H200_CLUSTER
    return (
        f"{net.gpus_per_node} GPUs a node, NVLink {net.nvlink_gb_per_s:.0f} GB/s and NIC "
        f"{net.nic_gb_per_s:.0f} GB/s a GPU and direction, {net.nvlink_latency_us:.0f} us a collective, "
        f"{net.nic_latency_us:.0f} us more for each doubling of the nodes, {net.ragged_us:.0f} more if ragged"
    )


if __name__ == "__main__":
    print(assumptions(), table(), sep="\n\n")
