"""Who may import whom, and what `import moe_pallas` does without being asked."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "moe_pallas"

# What a leaf may import beside the standard library. A leaf that is not there yet has no files.
LEAVES = {
    "moe_pallas.errors": set(),
    "moe_pallas.spec": set(),
    "moe_pallas.untrusted": set(),
    "moe_pallas.reference": {"numpy", "moe_pallas.spec", "moe_pallas.errors", "moe_pallas.reference_fp8"},
    "moe_pallas.reference_fp8": {"numpy", "ml_dtypes", "moe_pallas.spec"},
    "moe_pallas.activations": {"jax", "moe_pallas.spec"},
    "moe_pallas.configs.lists": {"moe_pallas.spec"},
    "moe_pallas.configs.schema": {"moe_pallas.spec", "moe_pallas.errors", "moe_pallas.configs.lists"},
    "moe_pallas.configs.collectives": {"moe_pallas.spec"},
    "moe_pallas.configs.heuristics": {"moe_pallas.spec", "moe_pallas.configs"},
    "moe_pallas.configs.predict": {"moe_pallas.spec", "moe_pallas.configs"},
    "moe_pallas.configs.lookup": {"moe_pallas.spec", "moe_pallas.configs"},
}
KERNELS_NEVER = ["moe_pallas.oracle", "moe_pallas.layers", "moe_pallas.reference"]
PACKAGE_NEVER = ["benchmarks", "examples", "tests"]
# Name → the only modules (or packages) that may import it.
KEPT_TO = {
    "jax._src": {"moe_pallas.kernels._mgpu"},
    "flax": {"moe_pallas.flax_nnx", "moe_pallas.flax_linen"},
    "safetensors": {"moe_pallas.interop"},
}


def within(name: str, parent: str) -> bool:
    return name == parent or name.startswith(parent + ".")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(source: str, module: str, is_package: bool = False) -> set[str]:
    """The dotted names that a module's source imports, wherever in it, `from a import b` as `a.b`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: None if is_package else -1]
                parents = package[: len(package) - (node.level - 1)]
                base = ".".join(parents + ([node.module] if node.module else []))
            found.update(f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr == "_src" and ast.unparse(node.value) == "jax":
            found.add("jax._src")
    return found


def violations(module: str, imported: set[str]) -> list[str]:
    """What is wrong with a module that imports these names."""
    wrong = []
    for name in sorted(imported):
        if module in LEAVES:
            standard = name.split(".")[0] in sys.stdlib_module_names
            if not standard and not any(within(name, allowed) for allowed in LEAVES[module]):
                wrong.append(f"{module} is a leaf and may not import {name}")
        if within(module, "moe_pallas.kernels") and any(within(name, never) for never in KERNELS_NEVER):
            wrong.append(f"{module} is a kernel and may not import {name}")
        if any(within(name, never) for never in PACKAGE_NEVER):
            wrong.append(f"{module} belongs to the package and may not import {name}")
        for kept, homes in KEPT_TO.items():
            if within(name, kept) and not any(within(module, home) for home in homes):
                wrong.append(f"{module} imports {name}, which only {', '.join(sorted(homes))} may")
    return wrong


@pytest.mark.parametrize("module", MODULES)
def test_module_keeps_the_import_rule(module: str) -> None:
    path = MODULES[module]
    imported = imports_of(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
    assert violations(module, imported) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("moe_pallas.errors", "import numpy"),
        ("moe_pallas.errors", "from .spec import MoESpec"),
        ("moe_pallas.spec", "from moe_pallas import UnsupportedError"),
        ("moe_pallas.spec", "def f():\n    import jax.numpy as jnp"),
        ("moe_pallas.reference", "from jax import numpy as np"),
        ("moe_pallas.reference", "from moe_pallas import routing"),
        ("moe_pallas.activations", "import numpy as np"),
        ("moe_pallas.configs.schema", "from ..oracle import explain"),
        ("moe_pallas.kernels.swap_ab", "from moe_pallas import oracle"),
        ("moe_pallas.kernels.swap_ab", "from .. import layers"),
        ("moe_pallas.kernels.swap_ab", "from ..reference import moe"),
        ("moe_pallas.kernels.swap_ab", "from jax import _src"),
        ("moe_pallas.xla", "from jax._src import core"),
        ("moe_pallas.xla", "import jax\njax._src.core"),
        ("moe_pallas.testing", "import tests.cases"),
        ("moe_pallas.warmup", "from benchmarks import cases"),
        ("moe_pallas.layers", "from flax import nnx"),
        ("moe_pallas.layers", "import safetensors.numpy"),
    ],
)
def test_a_breach_is_seen(module: str, source: str) -> None:
    assert len(violations(module, imports_of(source, module))) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("moe_pallas.spec", "from __future__ import annotations\nimport dataclasses, collections.abc"),
        (
            "moe_pallas.reference",
            "import numpy as np\nfrom moe_pallas.spec import MoESpec\nfrom . import errors",
        ),
        ("moe_pallas.activations", "import jax.numpy as jnp\nfrom .spec import Activation"),
        ("moe_pallas.kernels._mgpu", "from jax._src.pallas.mosaic_gpu import core"),
        (
            "moe_pallas.interop.checkpoints",
            "from safetensors import safe_open\nfrom .layouts import join_gate_up",
        ),
        ("moe_pallas.flax_nnx", "from flax import nnx"),
        ("moe_pallas.xla", "import jax.experimental.pallas as pl\nfrom moe_pallas import plan"),
    ],
)
def test_a_rightful_import_is_let_through(module: str, source: str) -> None:
    assert violations(module, imports_of(source, module)) == []


IMPORT_ALONE = """
import sys

BLOCKED = {"flax", "safetensors", "optax", "matplotlib"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
import moe_pallas

for name in getattr(moe_pallas, "__all__", []):
    getattr(moe_pallas, name)
loaded = BLOCKED & sys.modules.keys()
assert not loaded, loaded

import jax._src.xla_bridge
assert not jax._src.xla_bridge._backends, jax._src.xla_bridge._backends
"""


def test_import_needs_no_extra_and_touches_no_device() -> None:
    """Bare `import moe_pallas` works without the extras, and leaves jax free to be configured."""
    done = subprocess.run([sys.executable, "-c", IMPORT_ALONE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
