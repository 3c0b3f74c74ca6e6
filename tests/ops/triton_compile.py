"""Compiles Triton kernels for an H100 or a B200 on a machine that has none, and says what they need of it.

    compile_for(90, "package.module:kernel", {"x": "*bf16", "eps": "fp32", "n": "i32"}, {"BLOCK": 1024}, num_warps=8)

A kernel is named, not passed: under Triton's interpreter, where tests run, it cannot be compiled, so another process
imports it. That process is started once and compiles whatever is asked of it.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tests.harness.checkouts import ROOT


class Resources(NamedTuple):
    """What one thread (registers) and one program (shared, warps) of a kernel take."""

    registers: int
    spills: int
    """Bytes of registers written to memory and read back."""
    shared: int
    """Bytes of shared memory."""
    warps: int
    special: int
    """Exponentials, logarithms, roots and reciprocals in the code of one thread."""

    @property
    def programs(self) -> int:
        """How many programs a multiprocessor holds at once: of compute capability 9.0 or 10.0."""
        allocated = -(-self.registers // 8) * 8  # a warp takes registers in units of 256
        by_registers = 65536 // (allocated * 32 * self.warps)
        by_memory = 227 * 1024 // (self.shared + 1024)
        return min(by_registers, by_memory, 64 // self.warps, 32)


class CompileError(RuntimeError):
    """The kernel does not compile; the message is Triton's."""


def compile_for(
    arch: int,
    kernel: str,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any] | None = None,
    divisible: Sequence[str] = (),
    **options: int,
) -> Resources:
    """Compile the kernel named "module:attribute".

    arch: 90 for Hopper, 100 for Blackwell.
    signature: Triton's type of each argument that is no constexpr ("*bf16", "*fp32", "i32", "i64", "fp32").
    divisible: integers that are multiples of 16, as Triton sees at run time; addresses always are.
    options: num_warps, num_stages.
    """
    return _compiled(json.dumps([arch, kernel, dict(signature), dict(constexprs or {}), list(divisible), options]))


def compile_sm90(
    kernel: str, signature: Mapping[str, str], constexprs: Mapping[str, Any] | None = None, **options: int
) -> Resources:
    """`compile_for` Hopper, no integer known to be a multiple of anything."""
    return compile_for(90, kernel, signature, constexprs, **options)


@functools.cache
def _compiled(asked: str) -> Resources:
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(asked + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    if not answer:
        _server.cache_clear()
        raise CompileError(f"the compiling process ended with {server.wait()}")
    found = json.loads(answer)
    if "error" in found:
        raise CompileError(found["error"])
    return Resources(**found)


@functools.cache
def _server() -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    cache = tempfile.TemporaryDirectory(prefix="triton-compile-")  # what was compiled before tells no register count
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.ops.triton_compile"],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": path, "TRITON_CACHE_DIR": cache.name},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def end() -> None:
        server.kill()
        server.wait()
        cache.cleanup()

    atexit.register(end)
    return server


# ---- in the other process ----


def _compile(
    arch: int,
    name: str,
    signature: dict[str, str],
    constexprs: dict[str, Any],
    divisible: list[str],
    options: dict[str, int],
) -> Resources:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, attribute = name.partition(":")
    kernel = getattr(importlib.import_module(module), attribute)
    while not isinstance(kernel, triton.JITFunction):
        kernel = kernel.fn  # of an autotuner or of heuristics
    missing = set(kernel.arg_names) - set(signature) - set(constexprs)
    unknown = (set(signature) | set(constexprs)) - set(kernel.arg_names)
    if missing or unknown:
        raise ValueError(f"{name}: no type for {sorted(missing)}, no argument {sorted(unknown)}")
    types = {argument: signature.get(argument, "constexpr") for argument in kernel.arg_names}
    # As for a call at run time: data begins at multiples of 16 bytes.
    aligned = {
        (kernel.arg_names.index(argument),): [["tt.divisibility", 16]]
        for argument, kind in signature.items()
        if kind.startswith("*") or argument in divisible
    }
    compiled = triton.compile(
        ASTSource(kernel, types, constexprs, aligned), target=GPUTarget("cuda", arch, 32), options=options
    )
    registers, spills = _assembled(compiled.asm["ptx"], arch)
    special = len(re.findall(r"\b(?:ex2|lg2|rcp|rsqrt|sqrt)\.approx", compiled.asm["ptx"]))
    return Resources(registers, spills, compiled.metadata.shared, compiled.metadata.num_warps, special)


def _assembled(ptx: str, arch: int) -> tuple[int, int]:
    """Registers and spilled bytes, by the assembler that Triton brings."""
    from triton import knobs

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(ptx)
        source.flush()
        assembler = knobs.nvidia.ptxas_blackwell if arch >= 100 else knobs.nvidia.ptxas
        command = [assembler.path, "-v", f"--gpu-name=sm_{arch}a", source.name, "-o", os.devnull]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", said)]
    spills = [int(number) for number in re.findall(r"(\d+) bytes spill", said)]
    if len(registers) != 1 or len(spills) != 2:
        raise RuntimeError(f"ptxas said: {said}")
    return registers[0], sum(spills)


def _serve() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Triton prints what it could not compile
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = _compile(*json.loads(line))._asdict()
        except Exception as error:  # whatever goes wrong is the caller's
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
