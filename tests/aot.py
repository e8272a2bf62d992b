"""Compiling for an H200 on a machine without a GPU, and what came out of it.

`Compiler` runs the compiler that `moe_pallas.aot.toolchain` finds in other processes, since its plugin has no
place in one that runs tests on a CPU, and since a fault in a compiler can end its process. By hand, for a
function `build` that returns `(function, args)`:

    python tests/aot.py path/to/file.py:build
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

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
      max_launches: Of the whole program, Mosaic kernels included.
      max_registers: Of each Mosaic kernel.
      max_temp_bytes: Of the whole program.
      max_spill_bytes: Of each Mosaic kernel, stored and loaded, as the code has them; as much stack.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kernels: tuple[str, ...] = ()
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
        if launched != self.kernels:
            wrong.append(f"launches the Mosaic kernels {launched}, not {self.kernels}")
        wrong += [f"copies to or from the host in {name}" for name in report.host_copies]
        remarks = [(k.name, remark) for k in report.kernels for remark in k.remarks]
        if self.max_spill_bytes:
            remarks = [(name, remark) for name, remark in remarks if "spilled to local memory" not in remark]
        return wrong + [f"ptxas on {name}: {remark}" for name, remark in remarks]


class CompileError(Exception):
    """A program that did not compile: the compiler's message, or how its process ended."""


def _environment() -> dict[str, str]:
    """The variables of a process that compiles; what is set for tests on a CPU stays out."""
    variables = toolchain.environment()
    path = [str(TESTS), str(TESTS.parent), variables["PYTHONPATH"]]
    return {
        **{name: value for name, value in variables.items() if not name.startswith(("XLA_", "MOSAIC_"))},
        "PYTHONPATH": os.pathsep.join(path),
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        # What `_kernels` reads; a dump of everything takes longer than to compile.
        **{f"MOSAIC_GPU_DUMP_{what}": "1" for what in ("PTX", "PTXAS", "HOST_LLVM")},
        # A process is forked only if it has one thread; NumPy's would be another.
        "OPENBLAS_NUM_THREADS": "1",
    }


# In a process that has the plugin


def compile_here(function: Callable[..., Any], *args: Any) -> Report:
    """Compile for the H200 in this process, which `_environment` was made for; once only."""
    sharding = toolchain.described_sharding("h200")
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    begin = time.perf_counter()
    with _standard_output() as said:
        compiled = jax.jit(function).lower(*args).compile()
    compile_s = time.perf_counter() - begin
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text and memory
    kernels = _kernels(said.getvalue())
    launches, host_copies = _schedule(text, {kernel.name for kernel in kernels})
    return Report(
        kernels=kernels,
        launches=tuple(launches),
        host_copies=tuple(host_copies),
        temp_bytes=memory.temp_size_in_bytes,
        compile_s=compile_s,
    )


@contextlib.contextmanager
def _standard_output() -> Iterator[io.StringIO]:
    """What C++ prints in the meantime, filled in at the end."""
    said, stdout = io.StringIO(), os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            yield said
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(stdout, 1)
            os.close(stdout)
        file.seek(0)
        said.write(file.read().decode(errors="replace"))


def _kernels(said: str) -> tuple[Kernel, ...]:
    """Read what Mosaic printed: each kernel's PTX, then ptxas's words, then the LLVM of what launches it."""
    kernels = []
    for text in said.split("// Generated by LLVM NVPTX Back-End")[1:]:

        def find(pattern: str, text: str = text) -> str:
            if (match := re.search(pattern, text)) is None:
                raise CompileError(f"Mosaic printed no match of {pattern!r}:\n{text[-4000:]}")
            return match[1]

        def number(pattern: str) -> int:
            return int(find(pattern))

        kernels.append(
            Kernel(
                name=find(r"\.entry (\w+)_mosaic_gpu_kernel\("),
                registers=number(r"Used (\d+) registers"),
                spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
                stack_bytes=number(r"(\d+) bytes stack frame"),
                # The kernel, the sizes of grid, cluster and block, then what is asked for.
                smem_bytes=number(r"call i32 @mosaic_gpu_launch_kernel\(ptr %\d+, (?:i32 \d+, ){9}i32 (\d+)"),
                wgmma_count=text.count("wgmma.mma_async"),
                remarks=tuple(re.findall(r"^ptxas.*(?:warning|Performance Loss).*$", text, re.MULTILINE)),
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


# A process for each program: one that has compiled a kernel before says nothing about it. Each is a fork of
# one that has imported what it needs, which takes longer than to compile a small program.


def serve() -> None:
    """Have forks compile what standard input asks for; their exit statuses go to standard output."""
    # Compilers print: the pipe is kept out of their reach.
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    gc.disable()  # forks end before it would pay
    with contextlib.suppress(EOFError):
        while True:
            folder, timeout_s, request = pickle.load(sys.stdin.buffer)
            with contextlib.suppress(Exception):  # the fork meets it again, and says so
                pickle.loads(request)
            assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
            if not (process := os.fork()):
                _answer(folder, timeout_s, request)
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            print(status, file=pipe, flush=True)


def _answer(folder: Path, timeout_s: float, request: bytes) -> NoReturn:
    """Leave a report or the compiler's message in the folder's ``reply``, and in ``said`` what is printed."""
    said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)  # its signal ends the process
    reply: Report | str
    try:
        function, args = pickle.loads(request)
        reply = compile_here(function, *args)
    except Exception as error:
        reply = "".join(traceback.format_exception_only(error)).strip()
    (folder / "reply").write_bytes(pickle.dumps(reply))
    os._exit(0)


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
        self._idle: list[subprocess.Popen[bytes]] = []

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Report]:
        """Begin to compile `jax.jit(function)`.

        Args:
          function: Importable, or a `functools.partial` of such a function: it travels to another process.
          *args: `jax.ShapeDtypeStruct`s, or pytrees of them.

        Returns:
          The report to come; CompileError instead, with the compiler's words, if there is none.
        """
        return self._pool.submit(self._compile, pickle.dumps((function, args)))

    def compile(self, function: Callable[..., Any], *args: Any) -> Report:
        """`submit`, and wait."""
        return self.submit(function, *args).result()

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for server in self._idle:
            with server:  # closes its input, which ends it, and waits
                pass

    def _compile(self, request: bytes) -> Report:
        server = self._idle.pop() if self._idle else _start_server()
        try:
            return _ask(server, request, self._timeout_s)
        finally:
            self._idle.append(server)


def _start_server() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "import aot; aot.serve()"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment())


def _ask(server: subprocess.Popen[bytes], request: bytes, timeout_s: float) -> Report:
    assert server.stdin and server.stdout
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pickle.dump((folder, timeout_s, request), server.stdin)
        server.stdin.flush()
        status = int(server.stdout.readline() or server.wait())
        if status == -signal.SIGALRM:
            raise CompileError(f"not compiled within {timeout_s:g} s")
        if status:
            said = folder / "said"
            text = said.read_text(errors="replace")[-4000:] if said.exists() else ""
            raise CompileError(f"the compiling process ended with status {status}:\n{text}")
        reply = pickle.loads((folder / "reply").read_bytes())
    if isinstance(reply, str):
        raise CompileError(reply)
    return reply


def _compile_built(module: str, name: str) -> str:
    function, args = getattr(importlib.import_module(module), name)()
    return str(compile_here(function, *args))


def main() -> None:
    if why := why_not():
        sys.exit(why)
    path, _, name = sys.argv[1].rpartition(":")
    sys.path.insert(0, str(Path(path).resolve().parent))
    code = f"import aot; print(aot._compile_built({Path(path).stem!r}, {name!r}))"
    # What the compilers print is of use only after a failure.
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True)
    print(done.stdout, end="")
    sys.exit(done.stderr if done.returncode else 0)


if __name__ == "__main__":
    main()
