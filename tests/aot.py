"""Compiling for an H200 on a machine without a GPU, and what came out of it.

`Compiler` runs the compiler that `moe_pallas.aot.toolchain` finds in other processes, since its plugin has no
place in one that runs tests on a CPU, and since a fault in a compiler can end its process. By hand, for a
function `build` that returns `(function, args)`:

    python tests/aot.py path/to/file.py:build
"""

from __future__ import annotations

import importlib
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from moe_pallas.aot import toolchain
from moe_pallas.aot.toolchain import why_not

TESTS = Path(__file__).resolve().parent
# What the plugin allows one block, `shared_memory_per_block_optin` of the description.
MAX_SMEM_BYTES = 232_448


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What ptxas says of one Mosaic GPU kernel.

    Attributes:
      name: The `kernel_name` that it was made with.
      registers: Per thread.
      spill_bytes: Stored and loaded because registers ran out.
      stack_bytes: Local memory per thread, spilled registers included.
      smem_bytes: Dynamic shared memory per block: scratch, barriers and alignment.
      wgmma_count: `wgmma.mma_async` instructions in the PTX.
      remarks: Warnings, and performance that ptxas says is lost (serialised WGMMA, ignored setmaxnreg).
    """

    name: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    smem_bytes: int
    wgmma_count: int
    remarks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One operation of the scheduled program that puts work on the GPU.

    Attributes:
      name: The `kernel_name` of a Mosaic kernel, XLA's name of anything else.
      kind: "mosaic", the target of another custom call, else the HLO opcode: "fusion", "copy", "sort", …
      times: How often it runs: the product of the trip counts of the loops around it, where XLA knows them; a
        loop of unknown length counts once and stands in `Report.host_copies`.
    """

    name: str
    kind: str
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a compiled program consists of.

    Attributes:
      kernels: The Mosaic kernels that were compiled, in order; one launched twice may stand here once.
      launches: In the order of the schedule; of a conditional, the longest branch.
      host_copies: Operations that move data to or from the host in mid-program: transfers, callbacks, and
        the decisions of conditionals and of loops whose length XLA does not know.
      temp_bytes: Device memory that XLA sets aside for the program, beside arguments and results.
      compile_s: Wall time of tracing, lowering and compiling, in seconds.
    """

    kernels: tuple[Kernel, ...]
    launches: tuple[Launch, ...]
    host_copies: tuple[str, ...]
    temp_bytes: int
    compile_s: float

    @property
    def num_launches(self) -> int:
        return sum(launch.times for launch in self.launches)

    def __str__(self) -> str:
        lines = []
        for k in self.kernels:
            lines.append(
                f"{k.name}: {k.registers} registers, {k.spill_bytes} bytes spilled, {k.stack_bytes} of stack"
                f", {k.smem_bytes} of shared memory, {k.wgmma_count} wgmma"
            )
            lines += [f"  {remark}" for remark in k.remarks]
        lines.append(f"{self.num_launches} launches, {self.temp_bytes / 1e6:.3f} MB of temporary memory")
        lines += [f"  {x.kind} {x.name}" + (f" × {x.times}" if x.times > 1 else "") for x in self.launches]
        lines += [f"host copy: {name}" for name in self.host_copies]
        return "\n".join([*lines, f"compiled in {self.compile_s:.2f} s"])


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program, and what it is held to. Never allowed: remarks of ptxas, host copies.

    Attributes:
      name: Of the case; the id of its test.
      function: Importable, or a `functools.partial` of such a function: it travels to another process.
      args: `jax.ShapeDtypeStruct`s, or pytrees of them.
      kernels: The names of the Mosaic kernels that are launched, in order.
      in_any_order: Of these names: XLA's choice.
      max_launches: Of the whole program, Mosaic kernels included.
      max_registers: Of each Mosaic kernel.
      max_temp_bytes: Of the whole program.
      max_spill_bytes: Of each Mosaic kernel, stored and loaded, as the code has them; as much stack.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kernels: tuple[str, ...] = ()
    in_any_order: bool = False
    max_launches: int
    max_registers: int = 255
    max_temp_bytes: int = 0
    max_spill_bytes: int = 0

    def violations(self, report: Report) -> list[str]:
        """What the report breaks, one line each."""
        launched = tuple(x.name for x in report.launches for _ in range(x.times) if x.kind == "mosaic")
        limits = [("launches", report.num_launches, self.max_launches)]
        limits.append(("bytes of temporary memory", report.temp_bytes, self.max_temp_bytes))
        for kernel in report.kernels:
            limits.append((f"registers in {kernel.name}", kernel.registers, self.max_registers))
            limits.append((f"bytes spilled in {kernel.name}", kernel.spill_bytes, self.max_spill_bytes))
            limits.append((f"bytes of stack in {kernel.name}", kernel.stack_bytes, self.max_spill_bytes))
            limits.append((f"bytes of shared memory in {kernel.name}", kernel.smem_bytes, MAX_SMEM_BYTES))
        wrong = [f"{got} {what}, at most {most} allowed" for what, got, most in limits if got > most]
        order = sorted if self.in_any_order else tuple
        if order(launched) != order(self.kernels):
            wrong.append(f"launches the Mosaic kernels {launched}, not {self.kernels}")
        wrong += [f"copies to or from the host in {name}" for name in report.host_copies]
        remarks = [(k.name, remark) for k in report.kernels for remark in k.remarks]
        if self.max_spill_bytes:
            remarks = [(name, remark) for name, remark in remarks if "spilled to local memory" not in remark]
        return wrong + [f"ptxas on {name}: {remark}" for name, remark in remarks]


class CompileError(Exception):
    """A program that did not compile: the compiler's message, or how its process ended."""


def _environment(dump: Path) -> dict[str, str]:
    """The variables of a process that compiles; what is set for tests on a CPU stays out."""
    variables = toolchain.environment()
    path = [str(TESTS), str(TESTS.parent), variables["PYTHONPATH"]]
    return {
        **{name: value for name, value in variables.items() if not name.startswith(("XLA_", "MOSAIC_"))},
        "PYTHONPATH": os.pathsep.join(path),
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "MOSAIC_GPU_DUMP_TO": str(dump),
    }


# In a process that has the plugin


def compile_here(function: Callable[..., Any], *args: Any) -> Report:
    """Compile for the H200 in this process, which `_environment` was made for; once only."""
    sharding = toolchain.described_sharding("h200")
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    begin = time.perf_counter()
    compiled = jax.jit(function).lower(*args).compile()
    compile_s = time.perf_counter() - begin
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text and memory
    kernels = _kernels(Path(os.environ["MOSAIC_GPU_DUMP_TO"]))
    launches, host_copies = _schedule(text, {kernel.name for kernel in kernels})
    return Report(
        kernels=kernels,
        launches=tuple(launches),
        host_copies=tuple(host_copies),
        temp_bytes=memory.temp_size_in_bytes,
        compile_s=compile_s,
    )


def _kernels(dump: Path) -> tuple[Kernel, ...]:
    """Read what Mosaic wrote down: NAME_COUNTER.ptx, .ptxas and .mlir-passes.log of each kernel."""
    stems = {path.stem.rpartition("_")[::2]: path for path in dump.glob("*.ptxas")}
    kernels = []
    for (name, _), path in sorted(stems.items(), key=lambda item: int(item[0][1])):
        said = path.read_text(encoding="utf-8")

        def number(pattern: str, text: str = said, file: Path = path) -> int:
            if (match := re.search(pattern, text)) is None:
                raise CompileError(f"{file.name} has no match of {pattern!r}:\n{text[:2000]}")
            return int(match.group(1))

        mlir = path.with_suffix(".mlir-passes.log").read_text(encoding="utf-8")
        size = re.search(r"gpu\.launch .* dynamic_shared_memory_size %([\w.$-]+)", mlir)
        kernels.append(
            Kernel(
                name=name,
                registers=number(r"Used (\d+) registers"),
                spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
                stack_bytes=number(r"(\d+) bytes stack frame"),
                smem_bytes=number(rf"%{re.escape(size[1])} = \S*constant\W(\d+)", mlir) if size else 0,
                wgmma_count=path.with_suffix(".ptx").read_text(encoding="utf-8").count("wgmma.mma_async"),
                remarks=tuple(re.findall(r"^.*(?:warning|Performance Loss).*$", said, re.MULTILINE)),
            )
        )
    return tuple(kernels)


# They name, wait for or reshape what is there already.
_NO_LAUNCH = re.compile(
    r"parameter|constant|tuple|get-tuple-element|bitcast|after-all|add-dependency|opt-barrier|.*-done"
)
_HOST_OPCODES = {"infeed", "outfeed", "send", "recv"}
_HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_OPERATION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)")


def _schedule(text: str, kernel_names: set[str]) -> tuple[list[Launch], list[str]]:
    """The launches and host copies of a scheduled HLO module in its text form."""
    computations: dict[str, list[tuple[str, ...]]] = {}
    entry = name = ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name = header[2]
            entry = name if header[1] else entry
            computations[name] = []
        elif name and (operation := _OPERATION.match(line)):
            computations[name].append(operation.groups())
    host_copies: list[str] = []

    def called(rest: str, attribute: str) -> str:
        match = re.search(rf'\b{attribute}="?%?([\w.$-]+)', rest)
        assert match, (attribute, rest[:500])
        return match[1]

    def walk(computation: str, times: int) -> list[Launch]:
        launches: list[Launch] = []
        for name, result, opcode, rest in computations[computation]:
            target = called(rest, "custom_call_target") if opcode == "custom-call" else ""
            in_host_memory = "S(5)" in result and not _NO_LAUNCH.fullmatch(opcode)
            if opcode in _HOST_OPCODES or "callback" in target or in_host_memory:
                host_copies.append(name)
            if opcode == "while":
                count = re.search(r'"known_trip_count":\{"n":"(\d+)"', rest)
                if count is None:
                    host_copies.append(name)
                    launches += walk(called(rest, "condition"), times)
                launches += walk(called(rest, "body"), times * (int(count[1]) if count else 1))
            elif opcode == "conditional":
                host_copies.append(name)
                group = re.search(r"branch_computations=\{([^}]*)\}", rest)
                branches = (
                    re.findall(r"[\w.-]+", group[1])
                    if group
                    else [called(rest, "true_computation"), called(rest, "false_computation")]
                )
                launches += max((walk(branch, times) for branch in branches), key=len)
            elif opcode == "call":
                launches += walk(called(rest, "to_apply"), times)
            elif opcode == "async-start":
                launches += walk(called(rest, "calls"), times)
            elif target.startswith("mosaic_gpu"):
                scope = re.search(r'op_name="([^"]*)"', rest)
                parts = reversed(scope[1].split("/") if scope else [])
                kernel = next((part for part in parts if part in kernel_names), name)
                launches.append(Launch(name=kernel, kind="mosaic", times=times))
            elif not _NO_LAUNCH.fullmatch(opcode):
                launches.append(Launch(name=name, kind=target or opcode, times=times))
        return launches

    return walk(entry, 1), host_copies


# A process for each program: one that has compiled a kernel before says nothing about it.


def answer() -> None:
    """Compile what standard input asks for; a report or the compiler's message goes to standard output."""
    # Compilers print: the pipe is kept out of their reach.
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    reply: Report | str
    try:
        function, args = pickle.load(sys.stdin.buffer)
        reply = compile_here(function, *args)
    except Exception as error:
        reply = "".join(traceback.format_exception_only(error)).strip()
    with pipe:
        pickle.dump(reply, pipe)


def _compile(request: bytes, timeout_s: float) -> Report:
    command = [sys.executable, "-c", "import aot; aot.answer()"]
    with tempfile.TemporaryDirectory() as dump:
        try:
            done = subprocess.run(
                command,
                input=request,
                env=_environment(Path(dump)),
                capture_output=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as expired:
            raise CompileError(f"not compiled within {timeout_s:g} s") from expired
    if done.returncode:
        said = done.stderr.decode(errors="replace")[-4000:]
        raise CompileError(f"the compiling process ended with status {done.returncode}:\n{said}")
    reply = pickle.loads(done.stdout)
    if isinstance(reply, str):
        raise CompileError(reply)
    return reply


class Compiler:
    """Compiles for the H200, each program in a process of its own. A context manager.

    Args:
      num_workers: How many programs are compiled at the same time.
      timeout_s: After which a compilation is given up, and counts as failed.
    """

    def __init__(self, num_workers: int = 2, timeout_s: float = 300.0) -> None:
        if why := why_not():
            raise CompileError(why)
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="aot")

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Report]:
        """Begin to compile `jax.jit(function)`.

        Args:
          function: Importable, or a `functools.partial` of such a function: it travels to another process.
          *args: `jax.ShapeDtypeStruct`s, or pytrees of them.

        Returns:
          The report to come; CompileError instead, with the compiler's words, if there is none.
        """
        return self._pool.submit(_compile, pickle.dumps((function, args)), self._timeout_s)

    def compile(self, function: Callable[..., Any], *args: Any) -> Report:
        """`submit`, and wait."""
        return self.submit(function, *args).result()

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def _compile_built(module: str, name: str) -> str:
    function, args = getattr(importlib.import_module(module), name)()
    return str(compile_here(function, *args))


def main() -> None:
    if why := why_not():
        sys.exit(why)
    path, _, name = sys.argv[1].rpartition(":")
    sys.path.insert(0, str(Path(path).resolve().parent))
    with tempfile.TemporaryDirectory() as dump:
        code = f"import aot; print(aot._compile_built({Path(path).stem!r}, {name!r}))"
        # What the compilers print is of use only after a failure: nvdisasm is missing and need not be there.
        done = subprocess.run(
            [sys.executable, "-c", code], env=_environment(Path(dump)), capture_output=True, text=True
        )
    print(done.stdout, end="")
    sys.exit(done.stderr if done.returncode else 0)


if __name__ == "__main__":
    main()
