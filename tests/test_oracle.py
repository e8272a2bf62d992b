"""Which backend is chosen for which problem and device, and what the Swap-AB kernel can be configured to."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.cases import MODELS
from moe_pallas import MoE, MoESpec, Problem, UnsupportedError, explain, fused_moe, select_backend
from moe_pallas.configs.heuristics import default_grouped_gemm, default_swap_ab
from moe_pallas.configs.schema import SMEM_BYTES, GroupedGemmConfig, SwapABConfig
from moe_pallas.oracle import BACKENDS, PORTABLE_BACKENDS, Selection, assume_device, current_device
from moe_pallas.spec import H200, DeviceInfo

CPU = DeviceInfo(platform="cpu", name="cpu")
SPEC = MoESpec(num_experts=8, top_k=2, hidden_size=512, intermediate_size=256)


def make_problem(num_tokens: int = 1, dtype: str = "bfloat16", **options: Any) -> Problem:
    return Problem(spec=dataclasses.replace(SPEC, **options), num_tokens=num_tokens, dtype=dtype)


# Choosing


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 8, 9, 16, 31, 32, 33, 63, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_decode_is_swap_ab_on_an_h200(model: str, num_tokens: int, dtype: str) -> None:
    problem = Problem(spec=MODELS[model], num_tokens=num_tokens, dtype=dtype)
    selection = select_backend(problem, device=H200)
    assert selection.backend == "swap_ab"
    assert selection.reason
    assert selection.device is H200
    assert isinstance(selection.config, SwapABConfig)
    assert selection.config.validate(problem) is None


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_tokens", [0, 1, 64])
def test_a_cpu_runs_xla(model: str, num_tokens: int) -> None:
    problem = Problem(spec=MODELS[model], num_tokens=num_tokens, dtype="bfloat16")
    selection = select_backend(problem, device=CPU)
    assert selection == Selection(backend="xla", reason=selection.reason, config=None, device=CPU)
    assert "Hopper" in selection.reason


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"hidden_size": 520}, "520"),
        ({"hidden_size": 64}, "64"),
        ({"intermediate_size": 96}, "96"),
        ({"intermediate_size": 64}, "64"),
    ],
)
def test_what_kernels_cannot_do_is_xla(options: dict[str, Any], word: str) -> None:
    problem = make_problem(**options)
    selection = select_backend(problem, device=H200)
    assert selection.backend == "xla"
    assert word in selection.reason and selection.reason.startswith("swap_ab: ")
    assert " grouped_gemm: " in selection.reason
    for kernel in ("swap_ab", "grouped_gemm"):
        with pytest.raises(UnsupportedError, match=word):
            select_backend(problem, kernel, device=H200)
    assert select_backend(problem, "xla", device=H200).reason == "asked for explicitly"


def test_explain_agrees_and_gives_reasons() -> None:
    for problem in (make_problem(8), make_problem(4096), make_problem(8, dtype="float32")):
        for backend in ("auto", "xla"):
            why = explain(problem, backend, device=H200)
            assert why.selection == select_backend(problem, backend, device=H200)
            assert {name for name, _ in why.rejected} == set(BACKENDS) - {why.selection.backend}
            assert all(reason for _, reason in why.rejected)
            text = str(why)
            assert text.startswith(f"{why.selection.backend} serves T={problem.num_tokens}, E=8")
            assert all(f"not {name}: {reason}" in text for name, reason in why.rejected)
            if why.selection.backend != "xla":
                assert (
                    f"gradients by kernels: {why.selection.backward}, {why.selection.backward_reason}" in text
                )
    with pytest.raises(UnsupportedError, match="float32"):
        explain(make_problem(dtype="float32"), "swap_ab", device=H200)


def test_explain_counts() -> None:
    """One token visits top_k experts; the H200's roofs are measured, another device's unknown."""
    problem = make_problem(1, num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768)
    why = explain(problem, device=H200)
    assert why.experts_hit == pytest.approx(8)
    assert why.min_bytes == 8 * 3 * 2048 * 768 * 2 + 2 * 2048 * 2
    assert why.flops == 2 * 8 * 3 * 2048 * 768
    assert why.floor_us == pytest.approx(why.min_bytes / 4.5e6)
    assert 0 < why.smem_bytes <= SMEM_BYTES
    assert why.workspace_bytes is not None and why.workspace_bytes > 0
    other = explain(problem, device=CPU)
    assert (other.selection.backend, other.floor_us, other.smem_bytes) == ("xla", None, 0)
    assert other.workspace_bytes is None
    assert MoE(problem.spec).explain(1) == explain(problem)


def test_a_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """At info; a warning if a Hopper GPU has to fall back, not if it was told to."""
    spec = dataclasses.replace(SPEC, num_experts=11)  # no other test's
    tokens = [jnp.zeros((3, width), jnp.float32) for width in (spec.hidden_size, 11)]
    weights = [jnp.zeros(spec.param_shapes[name], jnp.float32) for name in ("w13", "w2")]
    for backend, level in (("xla", logging.INFO), ("auto", logging.WARNING)):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="moe_pallas"), assume_device(H200):
            for _ in range(2):
                fused_moe(*tokens, *weights, spec=spec, backend=backend)
        (record,) = caplog.records
        assert record.levelno == level
        assert record.getMessage().startswith("xla serves T=3, E=11, top_k=2")


def test_load_decides_between_the_kernels() -> None:
    few, many = make_problem(8), make_problem(4096)
    assert select_backend(few, device=H200).backend == "swap_ab"
    assert select_backend(many, device=H200).backend == "grouped_gemm"
    problems = {F: make_problem(12, intermediate_size=F) for F in (256, 320)}  # 3 tokens an expert
    chosen = {F: select_backend(problem, device=H200).backend for F, problem in problems.items()}
    assert chosen == {256: "grouped_gemm", 320: "swap_ab"}
    for backend in ("swap_ab", "grouped_gemm"):
        for problem in (few, many):
            asked = select_backend(problem, backend, device=H200)
            assert (asked.backend, asked.reason) == (backend, "asked for explicitly")
            assert asked.config is not None
            assert asked.config.validate(problem) is None


@pytest.mark.parametrize(
    "activation", ["swiglu", "geglu", "geglu_tanh", "relu2", "silu", "gelu", "gelu_tanh"]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"expert_bias": True},
        {"gate_up": "interleaved"},
        {"weight_on": "input"},
        {"num_expert_groups": 4, "top_k_groups": 2},
        {"scoring": "sigmoid", "correction_bias": True, "routed_scaling_factor": 2.5},
        {"shared_intermediate_size": 96},
    ],
)
def test_every_other_option_is_swap_ab(activation: str, options: dict[str, Any]) -> None:
    problem = make_problem(8, activation=activation, **options)
    assert select_backend(problem, device=H200).backend == "swap_ab"
    assert select_backend(problem, "swap_ab", device=H200).config == default_swap_ab(problem)


def test_only_hopper_is_hopper() -> None:
    for device in (
        dataclasses.replace(H200, compute_capability="9.1"),
        dataclasses.replace(H200, compute_capability="8.9"),
        dataclasses.replace(H200, compute_capability="10.0"),
        dataclasses.replace(H200, compute_capability=""),
        dataclasses.replace(H200, platform="tpu"),
        CPU,
    ):
        assert not device.is_hopper
        assert select_backend(make_problem(), device=device).backend == "xla"
    h100 = DeviceInfo(platform="gpu", name="NVIDIA H100 80GB HBM3", compute_capability="9.0", num_sms=132)
    assert H200.is_hopper and h100.is_hopper
    assert select_backend(make_problem(), device=h100).device == h100


def test_portable_backends_are_backends() -> None:
    assert set(PORTABLE_BACKENDS) < set(BACKENDS)
    for backend in PORTABLE_BACKENDS:
        for problem in (make_problem(0), make_problem(3, "float32", hidden_size=7, activation="gelu")):
            assert select_backend(problem, backend, device=CPU).backend == backend


def test_selection_is_a_value() -> None:
    one, other = (select_backend(make_problem(), device=H200) for _ in range(2))
    assert one == other and hash(one) == hash(other)
    assert isinstance(one.backward_config, GroupedGemmConfig)
    assert eval(repr(one)) == one
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.backend = "xla"


# Devices


@pytest.mark.skipif(jax.devices()[0].platform != "cpu", reason="describes a CPU")
def test_the_default_device_is_described() -> None:
    assert current_device().platform == "cpu"
    assert current_device().name == jax.devices()[0].device_kind
    assert not current_device().is_hopper
    with jax.default_device(jax.devices()[1]):
        assert current_device().platform == "cpu"
    with jax.default_device("cpu"):
        assert current_device().platform == "cpu"


def test_a_device_can_be_assumed() -> None:
    before = current_device()
    with assume_device(H200):
        assert current_device() is H200
        assert select_backend(make_problem()).backend == "swap_ab"
        assert MoE(SPEC).select_backend(1).backend == "swap_ab"
        with assume_device(CPU):
            assert select_backend(make_problem()).backend == "xla"
        assert current_device() is H200
        # Who names a device means it.
        assert select_backend(make_problem(), device=CPU).backend == "xla"
    assert current_device() == before
    with pytest.raises(RuntimeError), assume_device(H200):
        raise RuntimeError
    assert current_device() == before


def test_an_assumed_device_reaches_calls() -> None:
    struct = jax.ShapeDtypeStruct
    x, logits = struct((8, 512), jnp.bfloat16), struct((8, 8), jnp.float32)
    weights = [struct(SPEC.param_shapes[name], jnp.bfloat16) for name in ("w13", "w2")]

    def trace(device: DeviceInfo, backend: str = "auto") -> str:
        with assume_device(device):
            layer = jax.jit(lambda *args: fused_moe(*args, spec=SPEC, backend=backend))
            return str(layer.trace(x, logits, *weights).jaxpr)

    assert "swap_ab" in trace(H200)
    assert "swap_ab" not in trace(H200, "xla")
    assert "swap_ab" not in trace(CPU)
    with pytest.raises(UnsupportedError, match=r"got cpu\."):
        trace(CPU, "swap_ab")


# Configurations


def test_config_is_a_value() -> None:
    config = SwapABConfig(block_m=16, num_stages=5, down_splits=2)
    assert eval(repr(config)) == config
    assert SwapABConfig(**dataclasses.asdict(config)) == config
    assert len({config, dataclasses.replace(config), dataclasses.replace(config, block_m=8)}) == 2
    with pytest.raises(TypeError):
        SwapABConfig(8, 4)


# D 512 and F 256: 4 steps of the first GEMM, 2 of the second.
@pytest.mark.parametrize(
    ("config", "problem", "words"),
    [
        ({}, {}, None),
        ({"block_m": 64, "num_stages": 4}, {"num_tokens": 4096}, None),
        ({}, {"dtype": "float16"}, None),
        ({}, {"hidden_size": 128, "intermediate_size": 128}, None),
        ({}, {"hidden_size": 192, "intermediate_size": 320}, None),
        ({}, {"dtype": "float32"}, "bfloat16 or float16; got float32"),
        ({}, {"hidden_size": 200}, "hidden_size in multiples of 64 from 128 on; got 200"),
        ({}, {"hidden_size": 64}, "hidden_size in multiples of 64 from 128 on; got 64"),
        ({}, {"intermediate_size": 96}, "intermediate_size in multiples of 64 from 128 on; got 96"),
        ({}, {"intermediate_size": 64}, "intermediate_size in multiples of 64 from 128 on; got 64"),
        ({"block_m": 0}, {}, "block_m is 8, 16, 32 or 64; got 0"),
        ({"block_m": 24}, {}, "block_m is 8, 16, 32 or 64; got 24"),
        ({"block_m": 128}, {}, "block_m is 8, 16, 32 or 64; got 128"),
        ({"num_stages": 2}, {}, "num_stages is 3"),
        ({"num_stages": 33}, {}, "num_stages is 3"),
        ({"num_stages": 32}, {}, "bytes of shared memory"),
        ({"block_m": 64, "num_stages": 5}, {}, "use fewer stages"),
        ({"up_rows": 8, "down_rows": 40}, {}, None),
        ({"up_rows": 0}, {}, "up_rows is a multiple of 8 up to 64; got 0"),
        ({"up_rows": 12}, {}, "up_rows is a multiple of 8 up to 64; got 12"),
        ({"down_rows": 72}, {}, "down_rows is a multiple of 8 up to 64; got 72"),
        ({"up_splits": 2}, {}, None),
        ({"up_splits": 4}, {}, None),
        ({"up_splits": 3}, {}, "up_splits cuts 4 steps of 128"),
        ({"up_splits": 0}, {}, "up_splits cuts 4 steps of 128"),
        ({"up_splits": 5}, {}, "up_splits cuts 4 steps of 128"),
        ({"up_splits": 3}, {"hidden_size": 704}, None),  # 6 steps, the last one half empty
        ({"down_splits": 2}, {}, None),
        ({"down_splits": 3}, {}, "down_splits cuts 2 steps of 128"),
    ],
)
def test_configs_are_legal_or_not(config: dict[str, int], problem: dict[str, Any], words: str | None) -> None:
    why_not = SwapABConfig(**({"block_m": 8, "num_stages": 4} | config)).validate(make_problem(**problem))
    assert (why_not is None) if words is None else (words in why_not), why_not


@pytest.mark.parametrize("model", MODELS)
def test_default_configs_are_legal(model: str) -> None:
    """And their splits even, whatever the sizes."""
    for num_tokens in (0, 1, 5, 8, 9, 17, 33, 64, 65, 200, 1024, 8192):
        problem = Problem(spec=MODELS[model], num_tokens=num_tokens, dtype="bfloat16")
        config = default_swap_ab(problem)
        assert config.validate(problem) is None
        assert config.smem_bytes(problem) <= SMEM_BYTES


def test_tiles_are_narrow_where_few_rounds_come_out_uneven() -> None:
    """mixtral-8x7b at T = 512 makes 12 blocks: 192 wide tiles of the second GEMM, for 132 SMs."""

    def tiles(model: str, num_tokens: int) -> tuple[int, int]:
        problem = Problem(spec=MODELS[model], num_tokens=num_tokens, dtype="bfloat16")
        config = default_grouped_gemm(problem)
        assert config.validate(problem) is None
        return config.up_block_n, config.down_block_n

    assert tiles("mixtral-8x7b", 512) == (256, 128)
    assert all(tiles(model, 8192) == (256, 256) for model in MODELS)


def test_a_plan_has_entries_to_the_end_of_the_last_block() -> None:
    problem = make_problem(41, num_experts=3, top_k=1, weight_on="input")
    config = SwapABConfig(block_m=64, num_stages=3)
    last_row = 8  # 8 tokens at one expert, 33 at another: its block is read from there on, 64 wide
    assert config.plan_rows(problem) >= last_row + config.block_m


def test_default_configs_of_any_size_are_legal() -> None:
    for size in range(128, 16384 + 1, 64):
        for options in ({"hidden_size": size}, {"intermediate_size": size}):
            problem = make_problem(num_tokens=1 + size // 128, **options)
            assert default_swap_ab(problem).validate(problem) is None, (options, problem.num_tokens)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("hidden_size", "intermediate_size"), [(128, 128), (192, 320), (704, 192), (2880, 2880)]
)
def test_tiles_cover_the_matrices(hidden_size: int, intermediate_size: int, gated: bool) -> None:
    spec = dataclasses.replace(
        SPEC,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        activation="swiglu" if gated else "relu2",
    )
    config = SwapABConfig(block_m=8, num_stages=4)
    for tiles, width, size in (
        (config.up_tiles(spec), config.up_width(spec), intermediate_size),
        (config.down_tiles(spec), 128, hidden_size),
        (config.up_steps(spec), config.BLOCK_K, hidden_size),
        (config.down_steps(spec), config.BLOCK_K, intermediate_size),
    ):
        assert (tiles - 1) * width < size <= tiles * width
    assert config.up_width(spec) == (64 if gated else 128)
