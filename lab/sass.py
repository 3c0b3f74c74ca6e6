"""Compiles recorded launches for a GPU that is not there and counts their instructions."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from lab.launches import Launch

_WIDTHS = {"64": 8, "128": 16, "U8": 1, "S8": 1, "U16": 2, "S16": 2, "256": 32}


class Count(NamedTuple):
    """Instructions of a warp: all, on the special function unit, and the bytes of its global memory accesses."""

    issued: int = 0
    special: int = 0
    bytes: int = 0
    tensor: int = 0


class Kernel(NamedTuple):
    """What a compiled kernel takes; counts once through the code, of that inside loops, and of the innermost
    loop with matrix products."""

    registers: int
    spills: int
    shared: int
    warps: int
    once: Count
    loops: Count
    inner: Count
    # By argument: how many times its memory is read and written.
    passes: dict[str, int]

    @property
    def programs(self) -> int:
        """Programs that a multiprocessor holds, for compute capability 9.0 and 10.0."""
        allocated = -(-self.registers // 8) * 8  # a warp takes registers in units of 256
        by_registers = 65536 // (allocated * 32 * self.warps)
        return min(by_registers, 227 * 1024 // (self.shared + 1024), 64 // self.warps, 32)


def compile_launch(launch: Launch, arch: int) -> Kernel:
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = launch.kernel.arg_names
    types = {name: launch.signature.get(name, "constexpr") for name in names}
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in launch.signature.items()
        if kind.startswith("*") or name in launch.divisible
    }
    constants: dict[Any, Any] = {(names.index(name),): value for name, value in launch.constants.items()}
    compiled = triton.compile(
        ASTSource(launch.kernel, types, constants, aligned),
        target=GPUTarget("cuda", arch, 32),
        options={name: value for name, value in launch.options.items() if value is not None},
    )
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        assembler = knobs.nvidia.ptxas_blackwell if arch >= 100 else knobs.nvidia.ptxas
        ptx.write_text(compiled.asm["ptx"])
        said = subprocess.run(
            [assembler.path, "-v", f"--gpu-name=sm_{arch}a", str(ptx), "-o", str(cubin)],
            check=True, capture_output=True, text=True,
        ).stderr  # fmt: skip
        text = subprocess.run(
            [knobs.nvidia.nvdisasm.path, "-c", str(cubin)], check=True, capture_output=True, text=True
        ).stdout
    once, loops, inner = count_sass(text)
    return Kernel(
        registers=int(re.findall(r"Used (\d+) registers", said)[0]),
        spills=sum(int(number) for number in re.findall(r"(\d+) bytes spill", said)),
        shared=compiled.metadata.shared,
        warps=compiled.metadata.num_warps,
        once=once,
        loops=loops,
        inner=inner,
        passes=passes(compiled.asm["ttir"]),
    )


def count_sass(text: str) -> tuple[Count, Count, Count]:
    """Counts of a kernel's listing: all, what lies between backward branches and their labels, and the least of these
    with matrix products.
    """
    lines: list[str] = []
    labels: dict[str, int] = {}
    backward: list[tuple[int, int]] = []
    for line in text.splitlines():
        label = re.match(r"\s*(\.L_x_\d+):", line)
        found = re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line)
        if label:
            labels[label[1]] = len(lines)
        elif found and not found[1].startswith("NOP"):
            branch = re.search(r"\bBRA.*\(?(\.L_x_\d+)", found[1])
            if branch and branch[1] in labels and labels[branch[1]] < len(lines):  # not the last, to itself
                backward.append((labels[branch[1]], len(lines)))
            lines.append(found[1])
    inside = {place for start, end in backward for place in range(start, end + 1)}
    products = [one for one in (_count(lines[start : end + 1]) for start, end in backward) if one.tensor]
    return _count(lines), _count([lines[place] for place in sorted(inside)]), min(products, default=Count())


def _count(lines: list[str]) -> Count:
    issued = special = size = tensor = 0
    for line in lines:
        name = re.sub(r"^@!?U?P\w+\s+", "", line).split()[0]
        parts = name.split(".")
        issued += 1
        special += parts[0] == "MUFU"
        tensor += parts[0] in ("HGMMA", "HMMA", "UTCHMMA")
        if parts[0] in ("LDG", "STG", "LDGSTS"):
            size += 32 * next((_WIDTHS[part] for part in parts if part in _WIDTHS), 4)
    return Count(issued, special, size, tensor)


def passes(ttir: str) -> dict[str, int]:
    """By argument, how many times a program reads (once a loop with loads of it) and writes its memory."""
    base: dict[str, str] = {}
    reads: dict[str, set[int]] = {}
    writes: set[str] = set()
    loop, loops = 0, 0
    depth: list[int] = []
    for line in ttir.splitlines():
        if re.search(r"= scf\.(for|while)|^\s*scf\.(for|while)", line):
            loops += 1
            depth.append(len(line) - len(line.lstrip()))
            loop = loops
            # A pointer carried around the loop.
            for name, start in re.findall(r"(%\w+) = (%\w+)", line.partition("iter_args")[2]):
                base[name] = base.get(start, start)
        elif depth and line.startswith(" " * depth[-1] + "}") and "do {" not in line:
            depth.pop()
            loop = loops if depth else 0
        found = re.match(r"\s*(%\w+) = (?:tt|arith)\.(\w+) (%\w+)", line)
        if found and found[2] in ("addptr", "splat", "broadcast", "expand_dims", "bitcast"):
            base[found[1]] = base.get(found[3], found[3])
        if found and found[2] == "load":
            reads.setdefault(base.get(found[3], found[3]), set()).add(loop)
        stored = re.match(r"\s*tt\.store (%\w+)", line)
        if stored:
            writes.add(base.get(stored[1], stored[1]))
    # One value read outside the loops does not count.
    return {
        name.lstrip("%"): (len(reads.get(name, set()) - {0}) or name in reads) + (name in writes)
        for name in sorted({*reads, *writes})
    }
