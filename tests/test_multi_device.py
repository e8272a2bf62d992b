"""Several devices as a user meets them: the page's programs, two processes, the decode loop, the costs."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from processes import ROOT, environment

from benchmarks import projection
from moe_pallas import MoESpec
from moe_pallas.configs.collectives import Layout, collectives, moved_bytes, visit_probability
from moe_pallas.oracle import select_strategy

PAGE = (ROOT / "docs" / "multi_device.md").read_text(encoding="utf-8")
FIRST, SEVERAL_HOSTS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
QWEN = projection.LAYERS["qwen3-235b-a22b"]


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_the_first_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(FIRST, {})
    assert capsys.readouterr().out.startswith(
        "(4, 16, 64) every shard of the experts has all tokens: gather moves"
    )


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """What the page shows for several hosts, as two processes of two devices each and as one of four."""
    (tmp_path / "train.py").write_text(SEVERAL_HOSTS)

    def run(processes: int) -> list[str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        command = [sys.executable, str(tmp_path / "train.py"), address, str(processes)]
        started = [
            subprocess.Popen(
                [*command, str(process)],
                env=environment(num_devices=4 // processes),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for process in range(processes)
        ]
        done = [process.communicate(timeout=200) for process in started]
        assert all(process.returncode == 0 for process in started), done
        return [out.splitlines()[-1] for out, _ in done]  # below what Gloo says

    (alone,) = run(1)
    together = run(2)
    loss = alone.split(": ")[1]
    assert alone == f"process 0 of 1, 4 devices: {loss}"
    assert together == [f"process {process} of 2, 4 devices: {loss}" for process in range(2)]


def test_the_decode_loop_says_the_same_on_a_mesh() -> None:
    def run(*args: str) -> str:
        command = [sys.executable, "examples/decode_loop.py", "--max_new_tokens", "40", *args]
        done = subprocess.run(
            command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    plain, sharded = run(), run("--mesh", "expert=4,tensor=2", "--check")
    assert "mesh:     expert 4, tensor 2" in sharded
    assert "passed" in sharded
    text = plain.split("model: ")[0]
    assert len(text) > 40
    assert sharded.split("model: ")[0] == text


# The cost model


def test_bytes_by_hand() -> None:
    """8 shards of one node, 64 tokens of D = 4096 in bfloat16 each, top-8 of 128."""
    layout = Layout(expert=8, tokens_over_experts=True)
    row = 4096 * 2
    gather = collectives("gather", QWEN, 64, layout)
    assert moved_bytes(gather) == 7 * 64 * (2 * row + 8 * 8)
    chance = visit_probability(QWEN, 8)
    assert chance == pytest.approx(1 - (112 / 128) ** 8, abs=0.02)
    exchanged = collectives("all_to_all", QWEN, 64, layout)
    assert moved_bytes(exchanged) == pytest.approx(7 * (64 * chance * (2 * row + 8 * 8) + 8))
    replicated = collectives("gather", QWEN, 64, Layout(expert=4, tensor=2))
    assert [step.name for step in replicated] == ["all-reduce"]
    assert moved_bytes(replicated) == pytest.approx(2 * 7 / 8 * 64 * row)
    assert collectives("gather", QWEN, 64, Layout()) == ()


def test_a_token_is_never_sent_twice_to_a_shard() -> None:
    few = MoESpec(num_experts=8, top_k=8, hidden_size=64, intermediate_size=64)
    assert visit_probability(few, 2) == 1.0


@pytest.mark.parametrize(
    ("tokens", "layout", "options", "strategy", "reason"),
    [
        (1, Layout(expert=8, tokens_over_experts=True), {}, "gather", "least modelled time"),
        (4096, Layout(expert=8, tokens_over_experts=True), {}, "all_to_all", "least modelled time"),
        (4096, Layout(expert=8, tokens_over_experts=True), {"platform": "cpu"}, "gather", "no ragged"),
        (4096, Layout(expert=8), {}, "gather", "every shard of the experts has all tokens"),
        (4096, Layout(tensor=8), {}, "gather", "experts are not split"),
        (
            1,
            Layout(expert=8, tokens_over_experts=True),
            {"strategy": "all_to_all"},
            "all_to_all",
            "asked for",
        ),
    ],
    ids=str,
)
def test_the_choice_names_its_reason(
    tokens: int, layout: Layout, options: dict[str, str], strategy: str, reason: str
) -> None:
    selection = select_strategy(QWEN, tokens, layout, **options)
    assert selection.strategy == strategy
    assert reason in selection.reason
    assert re.search(r"moves [\d.]+ [kM]B a GPU", selection.reason)


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="'auto', 'gather', 'all_to_all'"):
        select_strategy(QWEN, 1, Layout(), strategy="broadcast")


def test_the_notes_hold_the_projection() -> None:
    notes = (ROOT / "BUILD_NOTES.md").read_text(encoding="utf-8")
    assert projection.table() in notes, "python -m benchmarks.projection"
    assert projection.assumptions() in notes.replace("\n", " ")
