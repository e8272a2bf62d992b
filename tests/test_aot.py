"""Programs compiled for an H200: their registers, spills, launches, memory and host copies."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import aot
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from quantised import SCHEMES

from benchmarks.cases import MODELS
from moe_pallas import MoE, MoESpec, Problem, Routing, fused_moe, grouped, quantize, select_backend
from moe_pallas.aot import toolchain
from moe_pallas.configs.heuristics import default_grouped_gemm, default_swap_ab
from moe_pallas.configs.schema import GroupedGemmConfig, SwapABConfig
from moe_pallas.kernels import gradients, grouped_gemm, swap_ab
from moe_pallas.oracle import assume_device
from moe_pallas.spec import H200

pytestmark = pytest.mark.aot


def double(x: jax.Array) -> jax.Array:
    """One block with the whole array in its registers: a big one spills."""

    def body(x_gmem, y_gmem) -> None:
        y_gmem[...] = jnp.exp(x_gmem[...]) + x_gmem[...]

    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), kernel_name="double")(x)


def copy(x: jax.Array) -> jax.Array:
    """One block with the whole array in its shared memory."""

    def body(x_gmem, y_gmem, smem, barrier) -> None:
        plgpu.copy_gmem_to_smem(x_gmem, smem, barrier)
        plgpu.barrier_wait(barrier)  # the TMA copy has landed
        plgpu.copy_smem_to_gmem(smem, y_gmem)
        plgpu.wait_smem_to_gmem(0)  # the block outlives its store

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()],
        kernel_name="copy",
    )(x)


def matmul_tile(a: jax.Array, b: jax.Array) -> jax.Array:
    """One WGMMA tile: a (64, K) times b (K, N)."""
    (m, _), (_, n) = a.shape, b.shape

    def body(a_gmem, b_gmem, y_gmem, a_smem, b_smem, y_smem, barrier) -> None:
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, barrier)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, barrier)
        plgpu.barrier_wait(barrier)  # both operands have landed

        def product(acc) -> jax.Array:
            plgpu.wgmma(acc, a_smem, b_smem)
            return acc[...]

        y_smem[...] = pl.run_scoped(product, plgpu.ACC((m, n), jnp.float32)).astype(y_smem.dtype)
        plgpu.commit_smem()  # the store reads through another proxy
        plgpu.copy_smem_to_gmem(y_smem, y_gmem)
        plgpu.wait_smem_to_gmem(0)  # the block outlives its store

    smem = functools.partial(
        plgpu.SMEM, dtype=a.dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    )
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), a.dtype),
        scratch_types=[smem(a.shape), smem(b.shape), smem((m, n)), plgpu.Barrier(num_arrivals=2)],
        kernel_name="matmul_tile",
    )(a, b)


def double_four_times(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 3, lambda _, y: double(y.T), double(x))


def double_until_big(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda y: jnp.max(y) < 100, double, x)


def double_or_copy(x: jax.Array) -> jax.Array:
    return lax.cond(jnp.max(x) < 100, double, lambda y: copy(copy(y).T), x)


def double_to_host(x: jax.Array) -> jax.Array:
    return jax.device_put(double(x), jax.memory.Space.Host)


def end_process(x: jax.Array) -> jax.Array:
    """Do, while it is traced, what a fault in a compiler does."""
    os.write(2, b"a fault in a compiler\n")
    os._exit(134)


def shapes(*sizes: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(size, dtype) for size in sizes)


def layer_case(name: str, spec: MoESpec, num_tokens: int, **limits: int) -> aot.Case:
    """A layer from router logits to output, in bfloat16."""
    params = spec.param_shapes
    x, w13, w2 = shapes((num_tokens, spec.hidden_size), params["w13"], params["w2"], dtype=jnp.bfloat16)
    (logits,) = shapes((num_tokens, spec.num_experts))
    return aot.Case(
        name=name, function=functools.partial(fused_moe, spec=spec), args=(x, logits, w13, w2), **limits
    )


def on_h200(function: Callable[..., jax.Array], *args: Any) -> jax.Array:
    """Trace as if the H200 were there."""
    with assume_device(H200):
        return function(*args)


def apply_layer(params: dict[str, jax.Array], x: jax.Array, *, spec: MoESpec) -> jax.Array:
    return MoE(spec, backend="swap_ab").apply(params, x)


def swap_ab_temp_bytes(spec: MoESpec, num_tokens: int) -> int:
    """Upper bound: h, the slots' results and parts, as the configuration says; 1 KiB of alignment each."""
    problem = Problem(spec=spec, num_tokens=num_tokens, dtype="bfloat16")
    return default_swap_ab(problem).workspace_bytes(problem) + 3 * 1024


def swap_ab_case(model: str, num_tokens: int) -> aot.Case:
    """One launch: routing, both products and the combine."""
    case = layer_case("", MODELS[model], num_tokens, max_launches=1)
    return replace(
        case,
        name=f"swap_ab-{model}-{num_tokens}",
        function=functools.partial(on_h200, functools.partial(case.function, backend="swap_ab")),
        kernels=("swap_ab",),
        max_registers=168,  # 65536 for 384 threads
        max_temp_bytes=swap_ab_temp_bytes(MODELS[model], num_tokens),
    )


def swap_ab_layer_case(num_tokens: int) -> aot.Case:
    """The router's product around it, and what XLA makes of it."""
    spec = MODELS["qwen3-30b-a3b"]
    params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in spec.param_shapes.items()}
    case = swap_ab_case("qwen3-30b-a3b", num_tokens)
    return replace(
        case,
        name=f"swap_ab-layer-{num_tokens}",
        function=functools.partial(on_h200, functools.partial(apply_layer, spec=spec)),
        args=(params, case.args[0]),
        max_launches=4,
        max_temp_bytes=case.max_temp_bytes + 4 * num_tokens * spec.num_experts + 5_000_000,
    )


def moe_with_biases(*args: jax.Array, spec: MoESpec) -> jax.Array:
    x, logits, w13, w2, b13, b2 = args
    return fused_moe(x, logits, w13, w2, b13=b13, b2=b2, spec=spec, backend="swap_ab")


def swap_ab_option_case(name: str, num_tokens: int, **options: Any) -> aot.Case:
    """Other instructions in the kernel; what is around it is not looked at."""
    sizes = {"num_experts": 32, "top_k": 4, "hidden_size": 1024, "intermediate_size": 704}
    spec = MoESpec(**sizes, expert_bias=True, **options)
    case = layer_case("", spec, num_tokens, max_launches=200)
    biases = shapes(spec.param_shapes["b13"], spec.param_shapes["b2"])
    plan = ("plan_count", "plan_place") if "weight_on" in options else ()
    return replace(
        case,
        name=f"swap_ab-{name}-{num_tokens}",
        function=functools.partial(on_h200, functools.partial(moe_with_biases, spec=spec)),
        args=(*case.args, *biases),
        kernels=(*plan, "swap_ab"),
        max_registers=168,
        max_temp_bytes=100_000_000,
    )


def experts_cut(*args: jax.Array, spec: MoESpec, config: SwapABConfig) -> jax.Array:
    x, ids, weights, w13, w2 = args
    return swap_ab.fused_experts(x, Routing(ids, weights), w13, w2, None, None, spec, config=config)


def swap_ab_config_case(num_tokens: int, **config: int) -> aot.Case:
    spec = MODELS["olmoe"]
    case = layer_case("", spec, num_tokens, max_launches=1)
    ids, weights = (
        jax.ShapeDtypeStruct((num_tokens, spec.top_k), dtype) for dtype in (jnp.int32, jnp.float32)
    )
    cut = functools.partial(experts_cut, spec=spec, config=SwapABConfig(**config))
    return replace(
        case,
        name=f"swap_ab-config-{'-'.join(map(str, config.values()))}",
        function=functools.partial(on_h200, cut),
        args=(case.args[0], ids, weights, *case.args[2:]),
        kernels=("swap_ab",),
        max_registers=168,
        max_temp_bytes=500_000_000,
    )


def experts_grouped(*args: jax.Array, spec: MoESpec) -> jax.Array:
    x, ids, weights, w13, w2, *biases = args
    config = default_grouped_gemm(Problem(spec=spec, num_tokens=len(x), dtype=x.dtype.name))
    return grouped_gemm.fused_experts(
        x, Routing(ids, weights), w13, w2, *(biases or (None, None)), spec, config=config
    )


def grouped_gemm_case(name: str, spec: MoESpec, num_tokens: int) -> aot.Case:
    """Two launches for the plan, both products and the combine; asks for h, the slots and some integers."""
    params = spec.param_shapes
    x, w13, w2 = shapes((num_tokens, spec.hidden_size), params["w13"], params["w2"], dtype=jnp.bfloat16)
    ids, weights = (
        jax.ShapeDtypeStruct((num_tokens, spec.top_k), dtype) for dtype in (jnp.int32, jnp.float32)
    )
    biases = shapes(params["b13"], params["b2"]) if spec.expert_bias else ()
    rows = GroupedGemmConfig().max_rows(Problem(spec=spec, num_tokens=num_tokens, dtype="bfloat16"))
    columns = spec.hidden_size + spec.intermediate_size
    return aot.Case(
        name=f"grouped_gemm-{name}-{num_tokens}",
        function=functools.partial(on_h200, functools.partial(experts_grouped, spec=spec)),
        args=(x, ids, weights, w13, w2, *biases),
        kernels=("plan_count", "plan_place", "grouped_gemm_up", "grouped_gemm_down", "combine_slots"),
        max_launches=6 if biases else 5,  # interleaved biases are taken apart
        max_registers=168,
        max_temp_bytes=2 * rows * columns + 64 * rows + sum(4 * b.size for b in biases) + 100_000,
    )


def grouped_gemm_layer_case(model: str, num_tokens: int) -> aot.Case:
    """From logits: routing is in the same launches."""
    spec = MODELS[model]
    experts = grouped_gemm_case(model, spec, num_tokens)
    case = layer_case("", spec, num_tokens, max_launches=5)
    return replace(
        experts,
        name=f"grouped_gemm-layer-{model}-{num_tokens}",
        function=functools.partial(on_h200, functools.partial(case.function, backend="grouped_gemm")),
        args=case.args,
        max_launches=case.max_launches,
        max_temp_bytes=experts.max_temp_bytes + 8 * num_tokens * spec.top_k,
    )


def groups_case(transpose_rhs: bool) -> aot.Case:
    """The public operation, with a hidden size of which the last tile is not whole."""
    lhs, rhs = shapes(
        (4096, 1024), (32, 1088, 1024) if transpose_rhs else (32, 1024, 1088), dtype=jnp.bfloat16
    )
    return aot.Case(
        name=f"grouped_gemm-{'transposed' if transpose_rhs else 'plain'}",
        function=functools.partial(on_h200, functools.partial(grouped_rows, transpose_rhs=transpose_rhs)),
        args=(lhs, rhs, jax.ShapeDtypeStruct((32,), jnp.int32)),
        kernels=("grouped_gemm",),
        max_launches=8,
        max_registers=168,
        max_temp_bytes=50_000,
    )


def grouped_rows(*args: jax.Array, transpose_rhs: bool) -> jax.Array:
    return grouped.grouped_gemm(*args, transpose_rhs=transpose_rhs, backend="grouped_gemm")


def fp8_case(model: str, num_tokens: int, name: str, backend: str) -> aot.Case:
    """The same launches as in bf16; the grouped GEMM has one more, which quantises x."""
    spec, scheme = MODELS[model], SCHEMES[name]
    case = layer_case("", spec, num_tokens, max_launches=1 if backend == "swap_ab" else 6)
    weights = [
        jax.eval_shape(
            functools.partial(quantize, scheme=scheme, gate_up=gate_up),
            struct,
            input_scale=jax.ShapeDtypeStruct((), jnp.float32) if scheme.activations == "static" else None,
        )
        for struct, gate_up in zip(case.args[2:], (spec.gate_up, None), strict=True)
    ]
    problem = Problem(
        spec=spec,
        num_tokens=num_tokens,
        dtype="bfloat16",
        quant=scheme.name,
        activation_scales=scheme.activations,
    )
    config = select_backend(problem, backend, device=H200).config
    assert config is not None
    grouped_kernels = ("quantise", "grouped_gemm_up", "grouped_gemm_down", "combine_slots")
    slots, rows = num_tokens * spec.top_k, config.max_rows(problem)
    return replace(
        case,
        name=f"{backend}-{name}-{model}-{num_tokens}",
        function=functools.partial(on_h200, functools.partial(case.function, backend=backend)),
        args=(*case.args[:2], *weights),
        kernels=("swap_ab",) if backend == "swap_ab" else ("plan_count", "plan_place", *grouped_kernels),
        max_registers=168,
        max_temp_bytes=config.workspace_bytes(problem) + 64 * rows + 8 * slots + 100_000,
        # The grouped GEMM holds 192 numbers a thread: a few words besides have no room.
        max_spill_bytes=0 if backend == "swap_ab" else 100,
    )


def pull_back(*args: jax.Array, spec: MoESpec, weight_dtype: Any) -> gradients.Gradients:
    d_y, x, ids, weights, w13, w2, *rest = args
    b13, b2 = rest[:2] if spec.expert_bias else (None, None)
    given = {"products": rest[-1] if len(rest) % 2 else None, "weight_dtype": weight_dtype}
    config = GroupedGemmConfig()
    return gradients.gradients(d_y, x, Routing(ids, weights), w13, w2, b13, b2, spec, config=config, **given)


def gradients_case(
    name: str, spec: MoESpec, num_tokens: int, *, saved: bool = False, weight_dtype: Any = None
) -> aot.Case:
    """A backward pass: eight launches and some integers; four more for biases.

    Temporary memory: products, in whose place their gradients come (a copy, if saved: the test owns them),
    h and the slots.
    """
    forward = grouped_gemm_case("", spec, num_tokens)
    problem = Problem(spec=spec, num_tokens=num_tokens, dtype="bfloat16")
    rows, wide = GroupedGemmConfig().max_rows(problem), spec.param_shapes["w13"][1]
    products = shapes((rows, wide), dtype=jnp.bfloat16) if saved else ()
    held = wide + spec.intermediate_size + spec.hidden_size
    kernels = ["plan_count", "plan_place", *([] if saved else ["grouped_gemm_up"]), "grouped_gemm_back"]
    kernels += ["grouped_gemm_back_x", "combine_slots", "weight_gradient_13", "weight_gradient_2"]
    kernels += ["sum_groups"] * 4 if spec.expert_bias else []
    return replace(
        forward,
        name=f"gradients-{name}-{num_tokens}",
        function=functools.partial(
            on_h200, functools.partial(pull_back, spec=spec, weight_dtype=weight_dtype)
        ),
        args=(forward.args[0], *forward.args, *products),
        kernels=tuple(kernels),
        in_any_order=True,
        max_launches=len(kernels) + (14 if spec.expert_bias else 6) + saved,
        max_temp_bytes=2 * rows * held + 128 * rows + 50_000_000 * spec.expert_bias,
    )


QWEN3_30B = MoESpec(num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768)

CASES = [
    aot.Case(
        name="double",
        function=double,
        args=shapes((128, 128)),
        kernels=("double",),
        max_launches=1,
    ),
    aot.Case(
        name="copy",
        function=copy,
        args=shapes((256, 200)),
        kernels=("copy",),
        max_launches=1,
        max_registers=32,
    ),
    aot.Case(
        name="matmul_tile",
        function=matmul_tile,
        args=shapes((64, 64), (64, 128), dtype=jnp.bfloat16),
        kernels=("matmul_tile",),
        max_launches=1,
        max_registers=128,
    ),
    layer_case("xla-qwen3_30b-1", QWEN3_30B, 1, max_launches=40, max_temp_bytes=60_000_000),
    layer_case("xla-qwen3_30b-64", QWEN3_30B, 64, max_launches=80, max_temp_bytes=300_000_000),
    *(swap_ab_case(model, num_tokens) for model in MODELS for num_tokens in (1, 64)),
    swap_ab_case("qwen3-30b-a3b", 8),
    swap_ab_case("qwen3-next-80b", 8),
    swap_ab_case("qwen3-30b-a3b", 128),
    swap_ab_layer_case(1),
    swap_ab_layer_case(64),
    grouped_gemm_case("qwen3-30b-a3b", MODELS["qwen3-30b-a3b"], 8192),  # the layers below have the others
    grouped_gemm_case("qwen3-30b-a3b", MODELS["qwen3-30b-a3b"], 512),
    grouped_gemm_case("mixtral-8x7b", MODELS["mixtral-8x7b"], 512),  # narrow tiles
    *(
        grouped_gemm_case(
            "-".join(map(str, options.values())), replace(QWEN3_30B, expert_bias=True, **options), 300
        )
        for options in (
            {"activation": "swiglu", "swiglu_limit": 7.0, "weight_on": "input", "gate_up": "interleaved"},
            {"activation": "geglu", "intermediate_size": 704, "hidden_size": 1088},
            {"activation": "relu2", "weight_on": "input"},
            {"activation": "silu"},
            {"activation": "gelu"},
        )
    ),
    *(grouped_gemm_layer_case(model, 8192) for model in MODELS),
    grouped_gemm_layer_case("qwen3-30b-a3b", 512),
    grouped_gemm_layer_case("qwen3-30b-a3b", 65536),
    gradients_case("qwen3-30b-a3b", MODELS["qwen3-30b-a3b"], 16384),
    gradients_case("mixtral-8x7b", MODELS["mixtral-8x7b"], 32768, saved=True, weight_dtype=jnp.float32),
    gradients_case("gpt-oss-120b", MODELS["gpt-oss-120b"], 4096),
    gradients_case(
        "relu2-odd",
        replace(
            QWEN3_30B,
            expert_bias=True,
            activation="relu2",
            weight_on="input",
            intermediate_size=704,
            hidden_size=1088,
        ),
        300,
    ),
    groups_case(True),
    groups_case(False),
    fp8_case("qwen3-30b-a3b", 1, "tensor-static", "swap_ab"),
    fp8_case("mixtral-8x7b", 64, "block", "swap_ab"),
    fp8_case("qwen3-next-80b", 8, "channel", "swap_ab"),
    fp8_case("mixtral-8x7b", 8192, "tensor-static", "grouped_gemm"),
    fp8_case("qwen3-30b-a3b", 8192, "block", "grouped_gemm"),
    fp8_case("deepseek-v3-tp8", 512, "channel", "grouped_gemm"),
    swap_ab_option_case(
        "clamped-interleaved", 8, gate_up="interleaved", swiglu_limit=7.0, swiglu_alpha=1.702
    ),
    swap_ab_option_case("relu2-on-input", 64, activation="relu2", weight_on="input"),
    swap_ab_option_case("gelu-groups", 16, activation="gelu", num_expert_groups=4, top_k_groups=2),
    swap_ab_config_case(8, block_m=8, num_stages=5, up_splits=4, down_splits=2),
    swap_ab_config_case(64, block_m=64, num_stages=3, up_splits=2, down_splits=2),
]


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, h200: aot.Compiler) -> dict[str, Future[aot.Report]]:
    """The cases of the selected tests, all begun at once."""
    calls = (getattr(item, "callspec", None) for item in request.session.items)
    cases = [call.params["case"] for call in calls if call and isinstance(call.params.get("case"), aot.Case)]
    return {case.name: h200.submit(case.function, *case.args) for case in cases}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_program_stays_within_its_limits(case: aot.Case, reports: dict[str, Future[aot.Report]]) -> None:
    report = reports[case.name].result()
    assert case.violations(report) == [], report


def test_report_of_a_tile(h200: aot.Compiler) -> None:
    report = h200.compile(matmul_tile, *shapes((64, 64), (64, 128), dtype=jnp.bfloat16))
    (kernel,) = report.kernels
    assert kernel.wgmma_count == 64 // 16
    # Both operands, the result and one barrier.
    assert kernel.smem_bytes == 2 * (64 * 64 + 64 * 128 + 64 * 128) + 8
    # An accumulator alone is 64 × 128 float32 over 128 threads.
    assert 64 < kernel.registers < 128
    assert report.launches == (aot.Launch(name="matmul_tile", kind="mosaic"),)
    assert report.temp_bytes == 0


def test_spills_are_reported(h200: aot.Compiler) -> None:
    case = replace(CASES[0], args=shapes((256, 256)), max_registers=168)
    report = h200.compile(case.function, *case.args)
    (kernel,) = report.kernels
    assert kernel.registers == 255
    assert kernel.spill_bytes >= 1000
    wrong = "\n".join(case.violations(report))
    assert "255 registers in double, at most 168 allowed" in wrong
    assert f"{kernel.spill_bytes} bytes spilled in double, at most 0 allowed" in wrong
    assert "Registers are spilled to local memory" in wrong


def test_too_much_shared_memory_does_not_compile(h200: aot.Compiler) -> None:
    with pytest.raises(aot.CompileError, match=r"smem_bytes=262152 > max_smem_bytes=232448"):
        h200.compile(copy, *shapes((256, 256)))


def test_same_program_is_reported_again(h200: aot.Compiler) -> None:
    """No kernel is missing because it was compiled before."""
    args = shapes((128, 128))
    again = [h200.compile(double, *args) for _ in range(2)]
    assert [[kernel.name for kernel in report.kernels] for report in again] == [["double"]] * 2
    assert len({(report.kernels, report.launches) for report in again}) == 1


def test_launches_in_a_loop_count_each_time(h200: aot.Compiler) -> None:
    report = h200.compile(double_four_times, *shapes((128, 128)))
    launched = [(x.name, x.times) for x in report.launches if x.kind == "mosaic"]
    assert launched == [("double", 1), ("double", 3)]
    assert report.num_launches >= 4
    assert report.host_copies == ()
    assert report.temp_bytes >= 128 * 128 * 4
    launches, temp_bytes, kernels = CASES[0].violations(report)
    assert launches == f"{report.num_launches} launches, at most 1 allowed"
    assert temp_bytes == f"{report.temp_bytes} bytes of temporary memory, at most 0 allowed"
    assert kernels == f"launches the Mosaic kernels {('double',) * 4}, not ('double',)"
    assert len(replace(CASES[0], kernels=("double",) * 4).violations(report)) == 2


def test_host_copies_are_reported(h200: aot.Compiler) -> None:
    """A loop of unknown length, a conditional and a transfer all stop for the host."""
    begun = [h200.submit(f, *shapes((128, 128))) for f in (double_until_big, double_or_copy, double_to_host)]
    loop, conditional, transfer = (future.result() for future in begun)
    assert len(loop.host_copies) == 1
    assert "double" in [x.name for x in loop.launches]
    assert len(conditional.host_copies) == 1
    assert [x.name for x in conditional.launches if x.kind == "mosaic"] == ["copy", "copy"]
    assert len(transfer.host_copies) == 1
    for report in loop, conditional, transfer:
        assert any("copies to or from the host" in wrong for wrong in CASES[0].violations(report))


def test_a_fault_in_a_compiler_is_reported(h200: aot.Compiler) -> None:
    with pytest.raises(aot.CompileError, match=r"ended with status 134:\n(.*\n)*a fault in a compiler"):
        h200.compile(end_process, *shapes((8, 8)))


def test_a_program_that_takes_too_long_is_given_up() -> None:
    late = pytest.raises(aot.CompileError, match=r"not compiled within 0\.01 s")
    with aot.Compiler(timeout_s=0.01) as compiler, late:
        compiler.compile(double, *shapes((128, 128)))


def test_one_program_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    path = tmp_path / "by_hand.py"
    path.write_text(
        "import jax, jax.numpy as jnp\n"
        "def build():\n"
        "    return lambda x: x @ x, [jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)]\n"
    )
    monkeypatch.setattr("sys.argv", ["aot.py", f"{path}:build"])
    with pytest.raises(SystemExit) as end:
        aot.main()
    assert end.value.code == 0
    assert "1 launches, 0.0" in capfd.readouterr().out


def test_says_why_it_cannot_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(toolchain.TOOLCHAIN_VARIABLE, str(tmp_path))
    with pytest.raises(aot.CompileError, match=r"needs JAX's CUDA plugin in .*moe-pallas\[aot\]"):
        aot.Compiler()
    info = tmp_path / "jax_cuda13_plugin-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jax-cuda13-plugin\nVersion: 0.0.1\n")
    assert f"needs JAX's CUDA plugin {jax.__version__}" in aot.why_not()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: jax-cuda13-plugin\nVersion: {jax.__version__}\n"
    )
    assert aot.why_not().startswith("needs bin/ptxas")
