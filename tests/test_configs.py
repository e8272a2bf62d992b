"""Configurations asked for explicitly, out of tables, and by the cost model; times that are predicted."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import fit
from benchmarks.cases import MODELS, SCHEMES
from moe_pallas import (
    MoE,
    MoESpec,
    Problem,
    Routing,
    UnsupportedError,
    explain,
    fused_experts,
    fused_moe,
    select_backend,
)
from moe_pallas.configs import lookup
from moe_pallas.configs.heuristics import default_config, neighbours, search_space
from moe_pallas.configs.lookup import ENTRY, MODEL, NEIGHBOUR, Entry, configure, dump, key_of, parse
from moe_pallas.configs.predict import predicted_us
from moe_pallas.configs.schema import GroupedGemmConfig, SwapABConfig
from moe_pallas.oracle import assume_device
from moe_pallas.spec import H200, DeviceInfo

SPEC = MoESpec(num_experts=8, top_k=2, hidden_size=512, intermediate_size=256)
SWAP_AB = SwapABConfig(block_m=16, num_stages=4, up_rows=48)
GROUPED = GroupedGemmConfig(band=4)
CONFIGS = {"swap_ab": SWAP_AB, "grouped_gemm": GROUPED}


def make_problem(num_tokens: int = 8, quant: str = "none", **options: Any) -> Problem:
    spec = dataclasses.replace(SPEC, **options)
    return Problem(spec=spec, num_tokens=num_tokens, dtype="bfloat16", quant=quant)


@pytest.fixture(autouse=True)
def no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(lookup.VARIABLE, raising=False)
    monkeypatch.setattr(lookup, "shipped", lambda device: {})


# Asked for


@pytest.mark.parametrize("backend", CONFIGS)
@pytest.mark.parametrize("num_tokens", [1, 4096])  # whatever "auto" would take
def test_a_config_is_used_and_means_its_backend(backend: str, num_tokens: int) -> None:
    problem, config = make_problem(num_tokens), CONFIGS[backend]
    for asked in (backend, "auto"):
        selection = select_backend(problem, asked, config=config, device=H200)
        assert (selection.backend, selection.config, selection.source) == (backend, config, "explicit")
        assert selection.reason == "asked for explicitly"
        why = explain(problem, asked, config=config, device=H200)
        assert why.selection == selection
        assert why.smem_bytes == config.smem_bytes(problem)
        assert f"{config}, asked for explicitly" in str(why)
        assert {reason for _, reason in why.rejected} == {"not asked for"}


@pytest.mark.parametrize(
    ("config", "backend", "error", "words"),
    [
        (SWAP_AB, "grouped_gemm", ValueError, "belongs to backend='swap_ab'"),
        (SWAP_AB, "xla", ValueError, "belongs to backend='swap_ab'"),
        (GROUPED, "swap_ab", ValueError, "belongs to backend='grouped_gemm'"),
        ({"block_m": 8}, "swap_ab", TypeError, "SwapABConfig or GroupedGemmConfig"),
        ("block_m=8", "auto", TypeError, "str"),
        (SwapABConfig, "auto", TypeError, "SwapABConfig or"),
        (dataclasses.replace(SWAP_AB, block_m=16.0), "auto", TypeError, "block_m is an int; got 16.0"),
        (dataclasses.replace(GROUPED, num_stages="4"), "auto", TypeError, "num_stages is an int"),
        (dataclasses.replace(GROUPED, band=True), "auto", TypeError, "band is an int; got True"),
        (dataclasses.replace(SWAP_AB, num_stages=30), "auto", UnsupportedError, "bytes of shared memory"),
        (dataclasses.replace(GROUPED, up_block_n=64), "auto", UnsupportedError, "up_block_n is 128 or 256"),
        (dataclasses.replace(SWAP_AB, slabs=2), "swap_ab", UnsupportedError, "slabs is 1 unless"),
    ],
)
def test_a_config_that_cannot_be_is_refused(
    config: Any, backend: str, error: type[Exception], words: str
) -> None:
    for ask in (select_backend, explain):
        with pytest.raises(error, match=words):
            ask(make_problem(), backend, config=config, device=H200)
    x, logits = jnp.zeros((8, 512), jnp.bfloat16), jnp.zeros((8, 8))
    w13, w2 = (jnp.zeros(SPEC.param_shapes[name], jnp.bfloat16) for name in ("w13", "w2"))
    routing = Routing(jnp.zeros((8, 2), jnp.int32), jnp.zeros((8, 2)))
    with assume_device(H200):
        for call in (
            lambda: fused_moe(x, logits, w13, w2, spec=SPEC, backend=backend, config=config),
            lambda: fused_experts(x, routing, w13, w2, spec=SPEC, backend=backend, config=config),
            lambda: MoE(SPEC, backend=backend, config=config).select_backend(8),
        ):
            with pytest.raises(error, match=words):
                call()


def test_flax_layers_take_a_config() -> None:
    from flax import nnx

    from moe_pallas import flax_linen, flax_nnx

    assert flax_linen.MoE(SPEC, config=SWAP_AB).layer.config == SWAP_AB
    small = dataclasses.replace(SPEC, hidden_size=8, intermediate_size=8)
    assert flax_nnx.MoE(small, config=SWAP_AB, rngs=nnx.Rngs(0)).layer.config == SWAP_AB


def test_a_config_needs_a_hopper_gpu() -> None:
    with pytest.raises(UnsupportedError, match="Hopper"):
        select_backend(make_problem(), config=SWAP_AB, device=DeviceInfo(platform="cpu"))


@pytest.mark.parametrize("backend", CONFIGS)
def test_the_kernel_gets_the_config(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through `fused_moe`, `fused_experts` and the layer, which agrees with `explain`."""
    from moe_pallas.kernels import grouped_gemm, swap_ab

    module, config = {"swap_ab": swap_ab, "grouped_gemm": grouped_gemm}[backend], CONFIGS[backend]
    seen = []
    for name in ("fused_moe", "fused_experts"):

        def run(x: jax.Array, *args: Any, config: Any, **kwargs: Any) -> jax.Array:
            seen.append(config)
            return jnp.zeros_like(x)

        monkeypatch.setattr(module, name, run)
    layer = MoE(SPEC, config=config)
    assert hash(layer) == hash(MoE(SPEC, config=dataclasses.replace(config))) and layer != MoE(SPEC)
    params = layer.init(jax.random.key(0))
    params = {name: value.astype(jnp.bfloat16) for name, value in params.items()}
    x, logits = jnp.zeros((8, 512), jnp.bfloat16), jnp.zeros((8, 8))
    routing = Routing(jnp.zeros((8, 2), jnp.int32), jnp.zeros((8, 2)))
    weights = params["w13"], params["w2"]
    with assume_device(H200):
        fused_moe(x, logits, *weights, spec=SPEC, config=config)
        fused_experts(x, routing, *weights, spec=SPEC, config=config)
        layer.apply(params, x)
        assert layer.explain(8).selection == layer.select_backend(8)
        assert layer.select_backend(8).config == config
    assert set(seen) == {config} and len(seen) >= 3


# Tables


def make_entry(problem: Problem, config: Any = SWAP_AB, **fields: Any) -> Entry:
    kernel = "swap_ab" if isinstance(config, SwapABConfig) else "grouped_gemm"
    values = {"kernel": kernel, "time_us": 10.0, "model_us": 11.0, "date": "2026-11-30", **fields}
    return Entry(problem=problem, config=config, **values)


def write(folder: Path, *entries: Entry) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / lookup.file_name("NVIDIA H200")
    path.write_text(dump(entries, "NVIDIA H200", "2026-11-30"), encoding="utf-8")
    return folder


def test_a_table_round_trips_in_order() -> None:
    fp8 = Problem(
        spec=MODELS["mixtral-8x7b"],
        num_tokens=512,
        dtype="bfloat16",
        quant="fp8_tensor",
        activation_scales=SCHEMES["fp8_tensor"].activations,
    )
    entries = [
        make_entry(make_problem(64, activation="relu2"), dataclasses.replace(SWAP_AB, block_m=64)),
        make_entry(make_problem(8)),
        make_entry(fp8, GroupedGemmConfig(down_block_n=128)),
    ]
    text = dump(entries, "NVIDIA H200", "2026-11-30")
    table = parse(text, "a table")
    assert {entry.key: entry.config for entry in table.values()} == {e.key: e.config for e in entries}
    assert dump(table.values(), "NVIDIA H200", "2026-11-30") == text
    assert len(text.splitlines()) == len(entries) + 2
    assert parse(dump([], "NVIDIA H200", "2026-11-30"), "an empty table") == {}


def test_buckets_are_powers_of_two_of_rows_an_expert() -> None:
    """2 T / 8 rows: T = 5 … 8 are in one, and what a layer does beside is in none."""
    buckets = [key_of("swap_ab", make_problem(tokens)).bucket for tokens in (0, 1, 2, 3, 4, 5, 8, 9, 64)]
    assert buckets == [-2, -2, -1, 0, 0, 1, 1, 2, 4]
    same = [make_problem(8), make_problem(7, expert_bias=True), make_problem(6, scoring="sigmoid")]
    assert len({key_of("swap_ab", problem) for problem in same}) == 1
    other = [make_problem(8, quant="fp8_block"), make_problem(8, activation="relu2"), make_problem(9)]
    assert len({key_of("swap_ab", problem) for problem in [*same, *other]}) == 4


def test_exact_then_neighbour_then_cost_model(tmp_path: Path) -> None:
    folder = write(tmp_path, make_entry(make_problem(8)))
    for num_tokens in (5, 8):
        selection = select_backend(make_problem(num_tokens), device=H200, tables=folder)
        assert (selection.config, selection.source) == (SWAP_AB, ENTRY)
    for num_tokens in (4, 16):
        problem = make_problem(num_tokens)
        selection = select_backend(problem, "swap_ab", device=H200, tables=folder)
        assert (selection.config, selection.source) == (SWAP_AB, NEIGHBOUR)
        why = explain(problem, "swap_ab", device=H200, tables=folder)
        assert why.selection == selection and "more tokens in the table" in str(why)
    for problem, kernel in (
        (make_problem(8, num_experts=16), "swap_ab"),
        (make_problem(8), "grouped_gemm"),
        (make_problem(8, quant="fp8_block"), "swap_ab"),
    ):
        selection = select_backend(problem, kernel, device=H200, tables=folder)
        assert (selection.config, selection.source) == (default_config(kernel, problem), MODEL)
    elsewhere = dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3")
    assert select_backend(make_problem(), device=elsewhere, tables=folder).source == MODEL


def test_the_nearest_neighbour_is_taken(tmp_path: Path) -> None:
    near, far = (dataclasses.replace(SWAP_AB, num_stages=stages) for stages in (3, 5))
    folder = write(tmp_path, make_entry(make_problem(1), far), make_entry(make_problem(8), near))
    assert configure("swap_ab", make_problem(16), H200.name, folder) == (near, NEIGHBOUR)


def test_a_neighbour_that_the_cost_model_finds_slow_is_not_taken(tmp_path: Path) -> None:
    """Blocks of 8 tokens, where an expert has 128: its weights would be read 16 times."""
    narrow = dataclasses.replace(SWAP_AB, block_m=8)
    folder = write(tmp_path, make_entry(make_problem(8), narrow))
    problem = make_problem(512)
    assert predicted_us(problem, narrow) > 1.1 * predicted_us(problem, default_config("swap_ab", problem))
    assert configure("swap_ab", problem, H200.name, folder)[1] == MODEL


def test_an_entry_that_does_not_fit_the_call_is_not_taken(tmp_path: Path) -> None:
    folder = write(tmp_path, make_entry(make_problem(8)))
    problem = dataclasses.replace(make_problem(8), dtype="float32", weight_dtype="float32")
    assert select_backend(problem, device=H200, tables=folder).backend == "xla"


def test_own_tables_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, theirs, ours = (dataclasses.replace(SWAP_AB, num_stages=stages) for stages in (3, 4, 5))
    table = parse(dump([make_entry(make_problem(8), ours)], "NVIDIA H200", ""), "shipped")
    monkeypatch.setattr(lookup, "shipped", lambda device: table if device == H200.name else {})
    assert configure("swap_ab", make_problem(8), H200.name) == (ours, ENTRY)
    monkeypatch.setenv(lookup.VARIABLE, str(write(tmp_path / "variable", make_entry(make_problem(8), own))))
    assert configure("swap_ab", make_problem(8), H200.name) == (own, ENTRY)
    argument = write(tmp_path / "argument", make_entry(make_problem(8), theirs))
    assert configure("swap_ab", make_problem(8), H200.name, argument) == (theirs, ENTRY)
    # What was measured for the call, by anyone, before what was measured for another.
    write(tmp_path / "argument", make_entry(make_problem(16), theirs))
    assert lookup.load(argument, H200.name).keys() == {key_of("swap_ab", make_problem(16))}
    assert configure("swap_ab", make_problem(8), H200.name, argument) == (ours, ENTRY)
    with assume_device(H200):
        assert MoE(SPEC).select_backend(8).config == own
    assert configure("swap_ab", make_problem(8), H200.name, tmp_path / "nothing") == (ours, ENTRY)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda table: table.update(format=2), "format is 1; got 2"),
        (lambda table: table.pop("device"), r"missing \['device'\]"),
        (lambda table: table.update(extra=1), r"unknown \['extra'\]"),
        (lambda table: table.update(entries={}), "entries is a list"),
        (lambda table: table["entries"].append(3), "entry 1 is wrong: an object was expected; got 3"),
        (lambda table: table["entries"].append(table["entries"][0]), "entry 1 is wrong: an entry before it"),
        (lambda table: table["entries"][0].update(colour=1), r"entry 0 is wrong: .*unknown \['colour'\]"),
        (lambda table: table["entries"][0].update(kernel="cudnn"), "there is no kernel 'cudnn'"),
        (lambda table: table["entries"][0].update(gated=1), "gated is of type bool; got 1"),
        (lambda table: table["entries"][0].update(quant="int4"), "int4"),
        (lambda table: table["entries"][0].update(num_tokens=-1), "num_tokens"),
        (lambda table: table["entries"][0].update(top_k=9), "top_k"),
        (lambda table: table["entries"][0].update(time_us="1"), "time_us is of type float; got '1'"),
        (lambda table: table["entries"][0].update(time_us=0), "times are positive"),
        (lambda table: table["entries"][0].update(model_us=float("nan")), "times are positive"),
        (lambda table: table["entries"][0]["config"].pop("block_m"), r"missing \['block_m'\]"),
        (lambda table: table["entries"][0]["config"].update(band=8), r"unknown \['band'\]"),
        (lambda table: table["entries"][0]["config"].update(block_m=24), "not legal: block_m is 8, 16, 32"),
        (lambda table: table["entries"][0]["config"].update(block_m=16.0), "block_m is an integer"),
        (lambda table: table["entries"][0]["config"].update(num_stages=32), "bytes of shared memory"),
        (lambda table: table["entries"][0]["config"].update(up_splits=True), "up_splits is an integer"),
    ],
)
def test_a_malformed_table_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    folder = write(tmp_path, make_entry(make_problem(8)))
    path = folder / lookup.file_name(H200.name)
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))
    with pytest.raises(ValueError, match=words) as refused:
        select_backend(make_problem(8), device=H200, tables=folder)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"table"'])
def test_what_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    path = write(tmp_path) / lookup.file_name(H200.name)
    path.write_text(text)
    with pytest.raises(ValueError, match=r"nvidia_h200\.json is no table of configurations"):
        lookup.load(tmp_path, H200.name)


TABLES = Path(lookup.__file__).parent / "tables"


def test_there_is_a_table_for_the_h200() -> None:
    assert TABLES / lookup.file_name(H200.name) in set(TABLES.iterdir())


@pytest.mark.parametrize("path", sorted(TABLES.iterdir()), ids=lambda path: path.name)
def test_shipped_tables_are_as_they_were_written_and_every_entry_is_legal(path: Path) -> None:
    """`parse` lets no other pass; said once more, since a CTA without the memory is a crash."""
    text = path.read_text(encoding="utf-8")
    head, table = json.loads(text), parse(text, path.name)
    assert path.name == lookup.file_name(head["device"])
    assert dump(table.values(), head["device"], head["date"]) == text
    for entry in table.values():
        assert entry.config.validate(entry.problem) is None
        for tokens in range(1, entry.problem.num_tokens + 1):
            problem = dataclasses.replace(entry.problem, num_tokens=tokens)
            if key_of(entry.kernel, problem) == entry.key:
                assert entry.config.validate(problem) is None


# The cost model


def test_predictions_are_as_near_as_build_notes_says() -> None:
    """Of the layers measured, for the routing that was measured."""
    rows = fit.parts(list(fit.measured()))
    errors = {what: [abs(row.error()) for row in some] for what, some in rows.items()}
    for what, count, mean, worst in (
        ("swap_ab", 109, 0.021, 0.11),
        ("swap_ab, more tokens", 41, 0.17, 0.53),
        ("grouped_gemm", 92, 0.022, 0.12),
    ):
        assert len(errors[what]) >= count
        assert statistics.mean(errors[what]) <= mean
        assert max(errors[what]) <= worst


@pytest.mark.parametrize("quant", ["none", "fp8_channel", "fp8_block"])
def test_explain_predicts_a_time_above_the_floor(quant: str) -> None:
    for model, spec in MODELS.items():
        for tokens in (0, 1, 8, 64, 512, 8192):
            problem = Problem(spec=spec, num_tokens=tokens, dtype="bfloat16", quant=quant)
            why = explain(problem, device=H200)
            if why.selection.backend == "xla":
                assert why.predicted_us is None
            elif tokens:
                assert why.floor_us < why.predicted_us < 4 * why.floor_us + 25, (model, tokens)
                assert f"predicted {why.predicted_us:.1f} us, floor {why.floor_us:.1f} us" in str(why)
    unknown = explain(make_problem(8), device=dataclasses.replace(H200, name="NVIDIA H20"))
    assert (unknown.predicted_us, unknown.floor_us) == (None, None)
    assert "predicted unknown" in str(unknown)


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3-tp8"])
@pytest.mark.parametrize("quant", ["none", "fp8_block"])
@pytest.mark.parametrize("backend", CONFIGS)
def test_the_search_space_is_legal_and_has_what_the_model_chooses(
    model: str, quant: str, backend: str
) -> None:
    if (model, backend, quant) == ("deepseek-v3-tp8", "grouped_gemm", "fp8_block"):
        model = "olmoe"
    for tokens in (1, 64):
        problem = Problem(spec=MODELS[model], num_tokens=tokens, dtype="bfloat16", quant=quant)
        chosen, space = default_config(backend, problem), list(search_space(backend, problem))
        assert chosen in space and len(set(space)) == len(space)
        near = list(neighbours(chosen, problem))
        assert near and all(config.validate(problem) is None for config in space + near)
        for config in near:
            changed = [
                name for name, value in dataclasses.asdict(config).items() if value != getattr(chosen, name)
            ]
            assert len(changed) == 1
