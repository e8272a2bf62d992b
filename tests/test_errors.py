"""What a wrong argument is answered: the class of the error, and a message with what, got and need."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_pallas import (
    MoE,
    MoESpec,
    Problem,
    Routing,
    UnsupportedError,
    fused_experts,
    fused_moe,
    route,
    select_backend,
)
from moe_pallas.oracle import BACKENDS, PORTABLE_BACKENDS
from moe_pallas.spec import H200, DeviceInfo
from moe_pallas.testing import random_params

SIZES = {"num_experts": 4, "top_k": 2, "hidden_size": 8, "intermediate_size": 6}
SPEC = MoESpec(**SIZES)
BIASED = dataclasses.replace(SPEC, expert_bias=True, correction_bias=True)
GATELESS = dataclasses.replace(SPEC, activation="relu2")
T = 3


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def call(function: Any, **arguments: Any) -> Any:
    """Trace only: an error has to come before anything is compiled."""
    arrays = {n: v for n, v in arguments.items() if isinstance(v, np.ndarray | Routing | dict)}
    rest = {name: value for name, value in arguments.items() if name not in arrays}
    return jax.eval_shape(lambda arrays: function(**arrays, **rest), arrays)


def check(error: type[Exception], words: tuple[str, ...], function: Any, **arguments: Any) -> None:
    with pytest.raises(error) as caught:
        call(function, **arguments)
    assert caught.type is error, caught.type  # not a subclass: TypeError has many in JAX
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {str(caught.value)!r}"


# One case: what is wrong, the error, words of its message, the arguments that differ from the good ones.
Errors = type[Exception] | tuple[type[Exception], ...]
Case = tuple[Errors, tuple[str, ...], dict[str, Any]]


def by_name(cases: dict[str, Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("error", "words", "wrong"), cases.values(), ids=cases)


GOOD_ROUTE = {"logits": array(T, 4), "spec": SPEC}
ROUTE_CASES: dict[str, Case] = {
    "logits of another E": (ValueError, ("logits", "(3, 5)", "4"), {"logits": array(T, 5)}),
    "logits without axes": (ValueError, ("logits", "()", "4"), {"logits": array()}),
    "logits of integers": (TypeError, ("logits", "int32", "float"), {"logits": array(T, 4, dtype=np.int32)}),
    "logits of booleans": (TypeError, ("logits", "bool", "float"), {"logits": array(T, 4, dtype=bool)}),
    "logits complex": (
        TypeError,
        ("logits", "complex64", "float"),
        {"logits": array(T, 4, dtype=np.complex64)},
    ),
    "no correction bias": (ValueError, ("correction_bias", "True", "none was given"), {"spec": BIASED}),
    "correction bias not expected": (
        ValueError,
        ("correction_bias", "False", "one was given"),
        {"correction_bias": array(4)},
    ),
    "correction bias of another E": (
        ValueError,
        ("correction_bias", "(5,)", "(4,)"),
        {"spec": BIASED, "correction_bias": array(5)},
    ),
    "correction bias of another rank": (
        ValueError,
        ("correction_bias", "(1, 4)", "(4,)"),
        {"spec": BIASED, "correction_bias": array(1, 4)},
    ),
    "correction bias of integers": (
        TypeError,
        ("correction_bias", "int32", "float"),
        {"spec": BIASED, "correction_bias": array(4, dtype=np.int32)},
    ),
}


@by_name(ROUTE_CASES)
def test_route(error: type[Exception], words: tuple[str, ...], wrong: dict[str, Any]) -> None:
    check(error, words, route, **(GOOD_ROUTE | wrong))


def half(*shape: int) -> np.ndarray:
    return array(*shape, dtype=jnp.bfloat16)


# What fused_moe and fused_experts have in common.
GOOD_EXPERTS = {"x": array(T, 8), "w13": array(4, 12, 8), "w2": array(4, 8, 6), "spec": SPEC}
BIASES = {"b13": array(4, 12), "b2": array(4, 8)}
WITH_BIASES = BIASES | {"spec": dataclasses.replace(SPEC, expert_bias=True)}
EXPERTS_CASES: dict[str, Case] = {
    "x of another D": (ValueError, ("x", "(3, 9)", "8"), {"x": array(T, 9)}),
    "x of integers": (TypeError, ("x is", "int32", "float32"), {"x": array(T, 8, dtype=np.int32)}),
    "w13 of another E": (ValueError, ("w13", "(5, 12, 8)", "(4, 12, 8)"), {"w13": array(5, 12, 8)}),
    "w13 transposed": (ValueError, ("w13", "(4, 8, 12)", "(4, 12, 8)"), {"w13": array(4, 8, 12)}),
    "w13 without the up rows": (ValueError, ("w13", "(4, 6, 8)", "(4, 12, 8)"), {"w13": array(4, 6, 8)}),
    "w13 of another rank": (ValueError, ("w13", "(12, 8)", "(4, 12, 8)"), {"w13": array(12, 8)}),
    "w13 gated but the activation is not": (
        ValueError,
        ("w13", "(4, 12, 8)", "(4, 6, 8)", "not gated"),
        {"spec": GATELESS},
    ),
    "w13 of another dtype": (TypeError, ("w13", "bfloat16", "float32"), {"w13": half(4, 12, 8)}),
    "w13 of integers": (TypeError, ("w13", "int8", "float32"), {"w13": array(4, 12, 8, dtype=np.int8)}),
    "w2 transposed": (ValueError, ("w2", "(4, 6, 8)", "(4, 8, 6)"), {"w2": array(4, 6, 8)}),
    "w2 of another F": (ValueError, ("w2", "(4, 8, 7)", "(4, 8, 6)"), {"w2": array(4, 8, 7)}),
    "w2 of another dtype": (
        TypeError,
        ("w2", "float16", "float32"),
        {"w2": array(4, 8, 6, dtype=np.float16)},
    ),
    "no b13": (ValueError, ("b13", "expert_bias=True"), WITH_BIASES | {"b13": None}),
    "no b2": (ValueError, ("b2", "expert_bias=True"), WITH_BIASES | {"b2": None}),
    "b13 not expected": (ValueError, ("b13", "expert_bias=False"), {"b13": array(4, 12)}),
    "b2 not expected": (ValueError, ("b2", "expert_bias=False"), {"b2": array(4, 8)}),
    "b13 of another shape": (ValueError, ("b13", "(4, 6)", "(4, 12)"), WITH_BIASES | {"b13": array(4, 6)}),
    "b2 of another shape": (ValueError, ("b2", "(4, 6)", "(4, 8)"), WITH_BIASES | {"b2": array(4, 6)}),
    "b13 of integers": (
        TypeError,
        ("b13", "int32", "float"),
        WITH_BIASES | {"b13": array(4, 12, dtype=np.int32)},
    ),
    "b2 of booleans": (TypeError, ("b2", "bool", "float"), WITH_BIASES | {"b2": array(4, 8, dtype=bool)}),
    "mask of another shape": (ValueError, ("mask", "(4,)", "(3,)"), {"mask": array(4, dtype=bool)}),
    "mask with D": (ValueError, ("mask", "(3, 8)", "(3,)"), {"mask": array(T, 8, dtype=bool)}),
    "mask of integers": (TypeError, ("mask", "int32", "bool"), {"mask": array(T, dtype=np.int32)}),
    "mask of floats": (TypeError, ("mask", "float32", "bool"), {"mask": array(T)}),
    "mask and num_tokens": (
        ValueError,
        ("mask", "num_tokens"),
        {"mask": array(T, dtype=bool), "num_tokens": 2},
    ),
    "num_tokens below 0": (ValueError, ("num_tokens", "-1", "0 … 3"), {"num_tokens": -1}),
    "num_tokens above T": (ValueError, ("num_tokens", "4", "0 … 3"), {"num_tokens": 4}),
    "num_tokens of NumPy above T": (ValueError, ("num_tokens", "4", "0 … 3"), {"num_tokens": np.int32(4)}),
    "num_tokens of NumPy below 0": (ValueError, ("num_tokens", "-1", "0 … 3"), {"num_tokens": np.int64(-1)}),
    "num_tokens of float": (TypeError, ("num_tokens", "float64", "integer"), {"num_tokens": 2.0}),
    "num_tokens of bool": (TypeError, ("num_tokens", "bool", "integer"), {"num_tokens": True}),
    "num_tokens of an array": (
        TypeError,
        ("num_tokens", "(3,)", "integer"),
        {"num_tokens": array(T, dtype=np.int32)},
    ),
    "a backend that is not there": (
        ValueError,
        ("'cudnn'", "'auto'", *map(repr, BACKENDS)),
        {"backend": "cudnn"},
    ),
    "a backend that is no name": (ValueError, ("None", "'auto'", *map(repr, BACKENDS)), {"backend": None}),
}

GOOD_MOE = GOOD_EXPERTS | {"router_logits": array(T, 4)}
MOE_CASES: dict[str, Case] = EXPERTS_CASES | {
    "router_logits of another E": (ValueError, ("ogits", "(3, 5)", "4"), {"router_logits": array(T, 5)}),
    "router_logits of another T": (
        ValueError,
        ("router_logits", "(4,)", "(3,)"),
        {"router_logits": array(4, 4)},
    ),
    "router_logits with a batch axis": (
        ValueError,
        ("router_logits", "(1, 3)", "(3,)"),
        {"router_logits": array(1, T, 4)},
    ),
    "router_logits of integers": (
        TypeError,
        ("ogits", "int32", "float"),
        {"router_logits": array(T, 4, dtype=np.int32)},
    ),
    "no correction bias": (
        ValueError,
        ("correction_bias", "none was given"),
        {"spec": dataclasses.replace(SPEC, correction_bias=True)},
    ),
    "correction bias not expected": (
        ValueError,
        ("correction_bias", "one was given"),
        {"correction_bias": array(4)},
    ),
    "correction bias of another E": (
        ValueError,
        ("correction_bias", "(3,)", "(4,)"),
        {"spec": dataclasses.replace(SPEC, correction_bias=True), "correction_bias": array(3)},
    ),
}


@by_name(MOE_CASES)
def test_fused_moe(error: type[Exception], words: tuple[str, ...], wrong: dict[str, Any]) -> None:
    check(error, words, fused_moe, **(GOOD_MOE | wrong))


IDS, WEIGHTS = array(T, 2, dtype=np.int32), array(T, 2)
FUSED_EXPERTS_CASES: dict[str, Case] = EXPERTS_CASES | {
    "topk_ids of another top_k": (
        ValueError,
        ("topk_ids", "(3, 3)", "(3, 2)"),
        {"routing": Routing(array(T, 3, dtype=np.int32), WEIGHTS)},
    ),
    "topk_ids of another T": (
        ValueError,
        ("topk_ids", "(4, 2)", "(3, 2)"),
        {"routing": Routing(array(4, 2, dtype=np.int32), WEIGHTS)},
    ),
    "topk_ids of floats": (
        TypeError,
        ("topk_ids", "float32", "integer"),
        {"routing": Routing(array(T, 2), WEIGHTS)},
    ),
    "topk_ids unsigned": (
        TypeError,
        ("topk_ids", "uint32", "signed"),
        {"routing": Routing(array(T, 2, dtype=np.uint32), WEIGHTS)},
    ),
    "topk_weights of another top_k": (
        ValueError,
        ("topk_weights", "(3, 1)", "(3, 2)"),
        {"routing": Routing(IDS, array(T, 1))},
    ),
    "topk_weights of integers": (
        TypeError,
        ("topk_weights", "int32", "float"),
        {"routing": Routing(IDS, IDS)},
    ),
    "ids and weights swapped": (TypeError, ("topk_ids", "float32"), {"routing": Routing(WEIGHTS, IDS)}),
}


@by_name(FUSED_EXPERTS_CASES)
def test_fused_experts(error: type[Exception], words: tuple[str, ...], wrong: dict[str, Any]) -> None:
    check(error, words, fused_experts, **(GOOD_EXPERTS | {"routing": Routing(IDS, WEIGHTS)} | wrong))


def test_float64_is_refused() -> None:
    with jax.enable_x64(True):
        wrong = {"x": array(T, 8, dtype=np.float64)}
        check(TypeError, ("x is", "float64", "float32"), fused_moe, **(GOOD_MOE | wrong))


@pytest.mark.parametrize(("function", "good"), [(route, GOOD_ROUTE), (fused_moe, GOOD_MOE)])
def test_a_spec_that_is_none(function: Any, good: dict[str, Any]) -> None:
    check(TypeError, ("spec", "NoneType", "MoESpec"), function, **(good | {"spec": None}))


PARAMS = random_params(SPEC)
LAYER_CASES: dict[str, Case] = {
    "a parameter missing": (
        ValueError,
        ("params", "missing ['w2']"),
        {"params": {name: value for name, value in PARAMS.items() if name != "w2"}},
    ),
    "a parameter not expected": (
        ValueError,
        ("params", "not expected ['b2']"),
        {"params": PARAMS | {"b2": array(4, 8)}},
    ),
    "a parameter of another shape": (
        ValueError,
        ("'router'", "(8, 4)", "(4, 8)"),
        {"params": PARAMS | {"router": array(8, 4)}},
    ),
    "a parameter of integers": (
        TypeError,
        ("w13", "int8", "float"),
        {"params": PARAMS | {"w13": array(4, 12, 8, dtype=np.int8)}},
    ),
    "a router of integers": (
        TypeError,
        ("router", "int32", "float"),
        {"params": PARAMS | {"router": array(4, 8, dtype=np.int32)}},
    ),
    "x of another D": (ValueError, ("x", "(3, 7)", "8"), {"x": array(T, 7)}),
    "x without axes": (ValueError, ("x", "()", "8"), {"x": array()}),
    "x of integers": (TypeError, ("x is", "int32", "float32"), {"x": array(T, 8, dtype=np.int32)}),
} | {name: case for name, case in EXPERTS_CASES.items() if name.startswith(("mask", "num_tokens"))}


@by_name(LAYER_CASES)
def test_layer_apply(error: type[Exception], words: tuple[str, ...], wrong: dict[str, Any]) -> None:
    check(error, words, MoE(SPEC).apply, **({"params": PARAMS, "x": array(T, 8)} | wrong))


def test_layer_with_a_dtype_still_wants_tokens_of_floats() -> None:
    layer = MoE(SPEC, dtype=jnp.float32)
    x = array(T, 8, dtype=np.int32)
    check(TypeError, ("x is", "int32", "float32"), layer.apply, params=PARAMS, x=x)


LAYERS: dict[str, Case] = {
    "a backend that is not there": (ValueError, ("'cudnn'", "'auto'", "'xla'"), {"backend": "cudnn"}),
    "a dtype of integers": (TypeError, ("int32", "float32"), {"dtype": jnp.int32}),
    "a dtype too wide": (TypeError, ("float64", "float32"), {"dtype": "float64"}),
    "a spec that is none": (TypeError, ("spec", "MoESpec", "dict"), {"spec": SIZES}),
}


@by_name(LAYERS)
def test_layer(error: type[Exception], words: tuple[str, ...], wrong: dict[str, Any]) -> None:
    """At the latest when the layer is applied."""

    def make_and_apply(params: Any, x: Any) -> Any:
        return MoE(**({"spec": SPEC} | wrong)).apply(params, x)

    check(error, words, make_and_apply, params=PARAMS, x=array(T, 8))


def test_layer_select_backend() -> None:
    with pytest.raises(ValueError, match=r"num_tokens .*>= 0.*-1"):
        MoE(SPEC).select_backend(-1)
    with pytest.raises(TypeError, match=r"num_tokens .*'8'"):
        MoE(SPEC).select_backend("8")
    with pytest.raises(ValueError, match=r"'cudnn'.*'auto', 'swap_ab', 'grouped_gemm', 'xla'"):
        MoE(SPEC, backend="cudnn").select_backend(1)


SPEC_CASES: dict[str, Case] = {
    **{
        f"{name} too small": (ValueError, (name, str(low), str(low - 1)), {name: low - 1})
        for name, low in [
            ("num_experts", 1),
            ("top_k", 1),
            ("hidden_size", 1),
            ("intermediate_size", 1),
            ("num_expert_groups", 1),
            ("top_k_groups", 1),
            ("shared_intermediate_size", 0),
        ]
    },
    **{
        f"{name} no int": (TypeError, (name, "int", repr(value)), {name: value})
        for name in ("num_experts", "top_k", "hidden_size", "intermediate_size", "shared_intermediate_size")
        for value in (2.0, "2", None, True)
    },
    **{
        f"{name} no bool": (TypeError, (name, "True or False", "1"), {name: 1})
        for name in ("expert_bias", "renormalize", "router_bias", "correction_bias", "shared_expert_gate")
    },
    **{
        f"{name} not finite": (ValueError, (name, "finite", "nan"), {name: float("nan")})
        for name in ("swiglu_alpha", "swiglu_limit", "swiglu_up_offset", "routed_scaling_factor")
    },
    **{
        f"{name} no number": (TypeError, (name, "float", "'1'"), {name: "1"})
        for name in ("swiglu_alpha", "swiglu_limit", "swiglu_up_offset", "routed_scaling_factor")
    },
    **{
        f"{name} unknown": (ValueError, (name, *words, "'other'"), {name: "other"})
        for name, words in {
            "activation": ("'swiglu'", "'gelu_tanh'"),
            "gate_up": ("'stacked'", "'interleaved'"),
            "scoring": ("'softmax'", "'softmax_after_topk'", "'sigmoid'"),
            "group_score": ("'max'", "'top2_sum'"),
            "weight_on": ("'output'", "'input'"),
        }.items()
    },
    "activation None": (ValueError, ("activation", "'swiglu'", "None"), {"activation": None}),
    "top_k above E": (ValueError, ("top_k=5", "num_experts=4"), {"top_k": 5}),
    "groups that don't divide": (
        ValueError,
        ("num_expert_groups=3", "num_experts=4"),
        {"num_expert_groups": 3},
    ),
    "more groups kept than there are": (
        ValueError,
        ("top_k_groups=2", "num_expert_groups=1"),
        {"top_k_groups": 2},
    ),
    "too few experts in the kept groups": (
        ValueError,
        ("top_k=3", "1 of 2 groups", "2"),
        {"top_k": 3, "num_expert_groups": 2},
    ),
    "limit of zero": (ValueError, ("swiglu_limit", "> 0", "0.0"), {"swiglu_limit": 0.0}),
    "limit below zero": (ValueError, ("swiglu_limit", "> 0", "-7.0"), {"swiglu_limit": -7.0}),
    "limit of another activation": (
        ValueError,
        ("swiglu_limit", "'geglu'", "'swiglu'"),
        {"activation": "geglu", "swiglu_limit": 7.0},
    ),
    "alpha of another activation": (
        ValueError,
        ("swiglu_alpha", "'silu'", "'swiglu'"),
        {"activation": "silu", "swiglu_alpha": 1.702},
    ),
    "a gate for no shared expert": (
        ValueError,
        ("shared_expert_gate", "shared_intermediate_size=0"),
        {"shared_expert_gate": True},
    ),
}


@by_name(SPEC_CASES)
def test_spec(error: type[Exception], words: tuple[str, ...], wrong: dict[str, Any]) -> None:
    with pytest.raises(error) as caught:
        MoESpec(**(SIZES | wrong))
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_spec_wants_keywords_that_it_knows() -> None:
    with pytest.raises(TypeError, match="intermediate_size"):
        MoESpec(num_experts=4, top_k=2, hidden_size=8)
    with pytest.raises(TypeError, match="top_n"):
        MoESpec(**SIZES, top_n=1)
    with pytest.raises(TypeError):
        MoESpec(4, 2, 8, 6)


PROBLEM_CASES: dict[str, Case] = {
    "num_tokens below 0": (ValueError, ("num_tokens", ">= 0", "-1"), {"num_tokens": -1}),
    "num_tokens no int": (TypeError, ("num_tokens", "int", "1.5"), {"num_tokens": 1.5}),
    "spec none": (TypeError, ("spec", "MoESpec", "dict"), {"spec": SIZES}),
    "dtype unknown": ((ValueError, TypeError), ("dtype", "'float99'", "'bfloat16'"), {"dtype": "float99"}),
    "dtype of integers": ((ValueError, TypeError), ("dtype", "'int32'", "'bfloat16'"), {"dtype": "int32"}),
    "weight dtype unknown": (
        (ValueError, TypeError),
        ("weight_dtype", "'float99'"),
        {"weight_dtype": "float99"},
    ),
}


@by_name(PROBLEM_CASES)
def test_problem(error: Errors, words: tuple[str, ...], wrong: dict[str, Any]) -> None:
    with pytest.raises(error) as caught:
        Problem(**({"spec": SPEC, "num_tokens": 1, "dtype": "bfloat16"} | wrong))
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize("name", ["cudnn", "", "XLA", None, 3])
def test_select_backend(name: Any) -> None:
    problem = Problem(spec=SPEC, num_tokens=1, dtype="bfloat16")
    with pytest.raises(ValueError) as caught:
        select_backend(problem, name)
    for word in (repr(name), "'auto'", *map(repr, BACKENDS)):
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["auto", *BACKENDS])
def test_select_backend_answers_with_a_reason(name: str) -> None:
    """Tests of what is chosen when are in test_oracle.py."""
    spec = dataclasses.replace(SPEC, hidden_size=128, intermediate_size=192)
    for num_tokens in (0, 1, 64):
        problem = Problem(spec=spec, num_tokens=num_tokens, dtype="bfloat16")
        selection = select_backend(problem, name, device=H200)
        assert selection.backend in BACKENDS if name == "auto" else selection.backend == name
        assert selection.reason


# What the kernels do not do: words of the refusal, and the problem's and the device's differences.
CPU = DeviceInfo(platform="cpu", name="cpu")
REFUSALS: dict[str, tuple[tuple[str, ...], dict[str, Any], DeviceInfo]] = {
    "on a CPU": (("compute capability 9.0", "Hopper", "got cpu."), {}, CPU),
    "on another GPU": (
        ("compute capability 9.0", "got NVIDIA B200 10.0."),
        {},
        dataclasses.replace(H200, name="NVIDIA B200", compute_capability="10.0"),
    ),
    "float32": (("bfloat16 or float16", "float32"), {"dtype": "float32"}, H200),
    "D no multiple of 64": (("hidden_size", "64", "160"), {"hidden_size": 160}, H200),
    "D too small": (("hidden_size", "128", "64"), {"hidden_size": 64}, H200),
    "F no multiple of 64": (("intermediate_size", "64", "200"), {"intermediate_size": 200}, H200),
    "F too small": (("intermediate_size", "128", "64"), {"intermediate_size": 64}, H200),
}


KERNELS = [name for name in BACKENDS if name not in PORTABLE_BACKENDS]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("words", "differences", "device"), REFUSALS.values(), ids=REFUSALS)
def test_kernel_is_refused(
    words: tuple[str, ...], differences: dict[str, Any], device: DeviceInfo, kernel: str
) -> None:
    """Asked for, it is an error; otherwise the reason why another backend was chosen."""
    dtype = {"dtype": "bfloat16"} | {k: v for k, v in differences.items() if k == "dtype"}
    sizes = {k: v for k, v in differences.items() if k != "dtype"}
    spec = dataclasses.replace(SPEC, **({"hidden_size": 128, "intermediate_size": 128} | sizes))
    problem = Problem(spec=spec, num_tokens=1, **dtype)
    with pytest.raises(UnsupportedError) as caught:
        select_backend(problem, kernel, device=device)
    assert (caught.value.backend, caught.value.hint) == (kernel, "backend='xla', or 'auto'.")
    selection = select_backend(problem, device=device)
    assert (selection.backend, selection.config) == ("xla", None)
    assert f"{kernel}: {caught.value.reason}" in selection.reason
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.skipif(jax.devices()[0].platform == "gpu", reason="refused where there is no Hopper GPU")
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_is_refused_by_a_call(kernel: str) -> None:
    given = GOOD_EXPERTS | {"routing": Routing(IDS, WEIGHTS)}
    for function, good in ((fused_moe, GOOD_MOE), (fused_experts, given)):
        with pytest.raises(UnsupportedError, match=rf"^{kernel}: needs .*Hopper.*backend='xla'"):
            call(function, **good, backend=kernel)


def test_unsupported_error_says_who_why_and_what_works() -> None:
    error = UnsupportedError("xla", "got fp8 weights, needs bfloat16.", "dequantise them.")
    assert isinstance(error, NotImplementedError)
    assert not isinstance(error, ValueError | TypeError)
    for part in ("xla", "got fp8 weights", "dequantise them"):
        assert part in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.backend, copy.reason, copy.hint) == (error.backend, error.reason, error.hint)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32])
def test_ids_of_any_signed_dtype_are_taken(dtype: Any) -> None:
    """Also where an id can't be as large as the number of experts."""
    spec = dataclasses.replace(SPEC, num_experts=200)
    good = {"x": array(T, 8), "w13": array(200, 12, 8), "w2": array(200, 8, 6), "spec": spec}
    routing = Routing(array(T, 2, dtype=dtype), WEIGHTS)
    assert call(fused_experts, **good, routing=routing).shape == (T, 8)
