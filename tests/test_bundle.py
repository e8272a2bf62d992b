"""Bundles of compiled programs: from one process to another bit by bit, or refused with the reason."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
import serving_step
from failure_cases import assert_same_bits
from serving_step import MAX_TOKENS

from moe_pallas import UnsupportedError, aot
from moe_pallas.aot import toolchain
from moe_pallas.warmup import no_recompile, token_buckets, warmup

ROOT = Path(__file__).parents[1]
FILE = Path(serving_step.__file__)
BUCKETS = token_buckets(MAX_TOKENS)


def run_python(*arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, env=os.environ | variables
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def random_calls() -> dict[int, tuple[Any, ...]]:
    """One call for each bucket."""
    rng, params = np.random.default_rng(0), jax.tree.map(np.asarray, serving_step.params())
    return {
        bucket: (
            params,
            np.arange(8, dtype=np.int32),
            rng.standard_normal((bucket, 128), np.float32),
            np.int32(max(bucket - 1, 1)),
        )
        for bucket in BUCKETS
    }


SERVE = """
import pickle, sys
import jax
from moe_pallas import aot
from moe_pallas.warmup import no_recompile

bundle, calls, results = sys.argv[1:]
with no_recompile():
    programs = aot.load(bundle)
    with open(calls, "rb") as file:
        calls = pickle.load(file)
    outputs = {bucket: jax.device_get(programs[bucket](*args)) for bucket, args in calls.items()}
assert "serving_step" not in sys.modules
with open(results, "wb") as file:
    pickle.dump((list(programs), outputs), file)
"""


def test_a_fresh_process_serves_what_another_built(tmp_path: Path) -> None:
    """Built by one process, run by another without a compilation, and the same bits as in this one."""
    bundle, calls, results = (tmp_path / name for name in ("step.bundle", "calls", "results"))
    command = ("-m", "moe_pallas.aot", "--device=here", f"--max_tokens={MAX_TOKENS}", f"--output={bundle}")
    said = run_python(*command, f"{FILE}:build")
    assert said.startswith(f"{bundle}: 4 programs, ")
    calls.write_bytes(pickle.dumps(random_calls()))
    run_python("-c", SERVE, str(bundle), str(calls), str(results))
    buckets, outputs = pickle.loads(results.read_bytes())
    assert tuple(buckets) == BUCKETS
    programs = warmup(serving_step.step, MAX_TOKENS, serving_step.build()[1])
    for bucket, args in random_calls().items():
        expected = programs[bucket](*args)
        for name in ("y", "history"):
            assert_same_bits(outputs[bucket][name], expected[name])


def test_a_bundle_says_what_is_in_it(tmp_path: Path) -> None:
    news = []
    header = aot.build(
        f"{FILE}:build",
        tmp_path / "x.bundle",
        device="here",
        max_tokens=MAX_TOKENS,
        progress=lambda *new: news.append(new),
    )
    assert header == aot.read_header(tmp_path / "x.bundle")
    assert (header.jax, header.jaxlib) == (jax.__version__, jaxlib.__version__)
    assert header.device.platform == jax.devices()[0].platform
    assert header.buckets == BUCKETS
    assert [new[:3] for new in news] == [(i, 4, bucket) for i, bucket in enumerate(BUCKETS, 1)]
    assert [path.name for path in tmp_path.iterdir()] == ["x.bundle"]
    first, second, _ = (tmp_path / "x.bundle").read_bytes().split(b"\n", 2)
    assert first == b"moe_pallas bundle 1"
    assert json.loads(second)["buckets"] == list(BUCKETS)


def test_what_cannot_be_saved_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="got 0 programs of 0 devices"):
        aot.save({}, tmp_path / "x.bundle")
    if jax.device_count() > 1:
        mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        split = jax.jit(lambda x: x + 1, in_shardings=jax.NamedSharding(mesh, jax.P("x")))
        with pytest.raises(ValueError, match="1 programs of 2 devices"):
            aot.save({2: split.lower(np.ones(2, np.float32)).compile()}, tmp_path / "x.bundle")
    if jax.devices()[0].platform == "cpu":
        monkeypatch.setattr("moe_pallas.aot.bundle._has_compilation_cache", lambda: True)
        with pytest.raises(ValueError, match="came from the compilation cache can't be saved"):
            aot.save({1: jax.jit(jnp.sin).lower(1.0).compile()}, tmp_path / "x.bundle")
    assert list(tmp_path.iterdir()) == []


# Refused before anything is unpickled


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


@pytest.fixture
def trap(tmp_path: Path) -> Callable[..., Path]:
    """Make a bundle with something else inside, and perhaps another header."""

    def make(**changes: Any) -> Path:
        path = tmp_path / "x.bundle"
        aot.save({1: jax.jit(jnp.sin).lower(np.float32(1)).compile()}, path)
        payload = pickle.dumps(Trap(tmp_path / "unpickled"))
        first, second, _ = path.read_bytes().split(b"\n", 2)
        header = json.loads(second)
        header |= {"payload_bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}
        device = header["device"] | changes.pop("device", {})
        text = json.dumps(header | {"device": device} | changes).encode()
        path.write_bytes(b"\n".join([first, text, payload]))
        return path

    return make


def test_a_bundle_that_fits_is_unpickled(trap: Callable[..., Path], tmp_path: Path) -> None:
    """What loading means, and that the tests below would see it."""
    with pytest.raises(AttributeError):
        aot.load(trap())
    assert (tmp_path / "unpickled").is_dir()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"jax": "0.9.1"}, f"it needs jax 0.9.1, here is {jax.__version__}."),
        ({"jaxlib": "0.9.1"}, f"it needs jaxlib 0.9.1, here is {jaxlib.__version__}."),
        ({"device": {"platform": "tpu"}}, "it needs platform tpu, here is "),
        ({"device": {"name": "NVIDIA H300"}}, "it needs device NVIDIA H300, here is "),
        ({"device": {"compute_capability": "9.9"}}, "it needs compute capability 9.9, here is "),
        ({"device": {"num_sms": 78}}, "it needs number of SMs 78, here is "),
        ({"jax": "0.9.1", "jaxlib": "0.9.0"}, "it needs jax 0.9.1, here is .*; it needs jaxlib 0.9.0, here"),
    ],
)
def test_another_machines_bundle_is_refused(
    trap: Callable[..., Path], tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"aot.load: .*x.bundle does not fit this machine: {reason}"):
        aot.load(trap(**changes))
    assert not (tmp_path / "unpickled").exists()


def test_a_damaged_bundle_is_refused(trap: Callable[..., Path], tmp_path: Path) -> None:
    path = trap()
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole + b".", whole[:-1] + b"!", whole[: whole.rindex(b"\n") + 1]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"x\.bundle is damaged: \d+ bytes of programs, of \d+ with"):
            aot.load(path)
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "does not begin with"),
        (pickle.dumps(Trap(Path("unpickled"))), "does not begin with"),
        (b"moe_pallas bundle 1\n", "its header can't be read"),
        (b"moe_pallas bundle 1\nno json\n", "its header can't be read"),
        (b"moe_pallas bundle 1\n[]\n", "its header can't be read"),
        (b'moe_pallas bundle 1\n{"device": {}}\n', "its header can't be read"),
        (b'moe_pallas bundle 1\n{"device": {}, "device": {}}\n', "its header can't be read .*'device' twice"),
        (b'moe_pallas bundle 1\n{"device": ' + b"[" * 10**5, "its header can't be read .*deep"),
    ],
    ids=lambda value: repr(value)[:48],
)
def test_another_file_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "x.bundle"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"x\.bundle is no bundle: .*{reason}"):
        aot.load(path)


def test_a_header_without_an_end_is_not_read_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "x.bundle"
    with path.open("wb") as file:
        file.write(b"moe_pallas bundle 1\n")
        file.truncate(2**28)  # holes; would be many times the machine's memory as well
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"x\.bundle is no bundle"):
        aot.read_header(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**25


def test_another_version_of_the_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.bundle").write_bytes(b"moe_pallas bundle 2\n...")
    with pytest.raises(UnsupportedError, match="has format 2, this moe_pallas reads 1"):
        aot.load(tmp_path / "x.bundle")


# Building


@pytest.mark.parametrize("target", ["build", "no/such/file.py:build", f"{FILE}:", f"{FILE.parent}:build"])
def test_a_target_that_is_none_is_refused(target: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"target is like 'path/to/file\.py:function'"):
        aot.build(target, tmp_path / "x.bundle", device="here")


def test_what_cannot_be_built_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="device is one of 'h100', 'h200', 'here'; got 'b300'"):
        aot.build(f"{FILE}:build", tmp_path / "x.bundle", device="b300")
    with pytest.raises(RuntimeError, match=r"did not compile for here, status 1:\n(.*\n)*.*no attribute 'x'"):
        aot.build(f"{FILE}:x", tmp_path / "x.bundle", device="here")
    (tmp_path / "json.py").touch()
    with pytest.raises(RuntimeError, match=r"json/__init__\.py has its name"):
        aot.build(f"{tmp_path / 'json.py'}:build", tmp_path / "x.bundle", device="here")
    monkeypatch.setenv(toolchain.TOOLCHAIN_VARIABLE, str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"aot\.build: h200: needs JAX's CUDA plugin .*device='here'"):
        aot.build(f"{FILE}:build", tmp_path / "x.bundle", device="h200")


@pytest.mark.aot
@pytest.mark.parametrize(("device", "name"), [("h200", "NVIDIA H200"), ("h100", "NVIDIA H100 80GB HBM3")])
def test_a_bundle_is_built_without_its_gpu(device: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.bundle"
    header = aot.build(f"{FILE}:build_layer", path, device=device, max_tokens=2)
    assert (header.device.name, header.device.compute_capability, header.device.num_sms) == (name, "9.0", 132)
    assert header.buckets == (1, 2)
    if jax.devices()[0].device_kind != name:
        with pytest.raises(UnsupportedError, match=f"it needs device {name}, here is "):
            aot.load(path)


# On the GPU


def assert_serves_the_same(path: Path) -> None:
    """What the bundle has of `serving_step.build_experts`, and what is compiled here."""
    with no_recompile():
        loaded = aot.load(path)
    step, args = serving_step.build_experts()
    rng = np.random.default_rng(0)
    for bucket, program in warmup(step, max(loaded), args).items():
        x, logits, w13, w2 = (
            rng.standard_normal(a.shape, np.float32).astype(a.dtype) for a in args(bucket)[:4]
        )
        call = x, logits, w13, w2, np.int32(bucket)
        with no_recompile():
            y = loaded[bucket](*call)
        assert_same_bits(y, program(*call))


@pytest.mark.gpu
def test_gpu_a_bundle_built_here_runs(tmp_path: Path) -> None:
    step, args = serving_step.build_experts()
    aot.save(warmup(step, 300, args), tmp_path / "x.bundle")
    assert_serves_the_same(tmp_path / "x.bundle")


@pytest.mark.gpu
@pytest.mark.aot
def test_gpu_a_bundle_built_for_a_described_h200_runs(tmp_path: Path) -> None:
    if (kind := jax.devices()[0].device_kind) != "NVIDIA H200":
        pytest.skip(f"built for an H200, here is {kind}")
    aot.build(f"{FILE}:build_experts", tmp_path / "x.bundle", device="h200", max_tokens=300)
    assert_serves_the_same(tmp_path / "x.bundle")
