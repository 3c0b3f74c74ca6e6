"""Builds the CANN libraries that torch_npu asks for and this machine has not.

`build(site, torch, out)` reads from the wheel's own libraries what they need, and leaves in `out`:

    libcann_stub.so   cann/device.c, and a refusal for every other function that nobody here defines
    <missing>.so      an empty library per missing one, which brings libcann_stub.so with it
    libopapi.so       cann/operators.c, and an answer for every aclnn function that the wheel can call by name
    cann_allocator.so only for a CUDA build of torch: see cann/allocator.cpp

A refusal returns 200006, CANN's "feature unsupported", so that to really use a device is an error and never a
silent success. What the device answers is decided by CANN_STUB_MODE, in the C files.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent / "cann"

# Functions of the Python interpreter, which the process itself defines.
_PYTHON = re.compile(r"_?Py[A-Z_]")
# Names of C++ data: tables of virtual functions, type information, guards.
_DATA = re.compile(r"_Z(T[VITSC]|G)")
_ACLNN = re.compile(rb"\0(aclnn[A-Z]\w*)(?=\0)")
# Parts of torch that a wheel for NPU cannot use, and that are slow to read.
_FOREIGN = ("cuda", "nvrtc", "nvshmem", "cupti")


class ToolError(RuntimeError):
    """A tool that builds the stubs is missing or has failed."""


class Missing(NamedTuple):
    """What a wheel's libraries ask for and nobody here has."""

    libraries: list[str]
    functions: list[str]
    data: list[str]
    operators: list[str]


def build(site: Path, torch: Path, out: Path) -> Missing:
    """Build every stub for the torch_npu in `site` and the torch whose package folder is `torch`."""
    cuda = bool(list(torch.glob("lib/libtorch_cuda.so*"))) and (torch / "include/c10/core/AllocatorConfig.h").is_file()
    _require("gcc", "nm", "readelf", *(["g++"] if cuda else []))
    missing = survey(site, torch)
    out.mkdir(parents=True)
    answered = _compile(out, "device.c")
    refused = [f"CANN_REFUSE({name})" for name in missing.functions if name not in answered]
    data = [f"CANN_DATA({name})" for name in missing.data]
    _link(out, "libcann_stub.so", "device.o", _source(out, "refusals.c", refused + data))
    empty = _source(out, "empty.c", [])
    for library in missing.libraries:
        _link(out, library, empty, "-lcann_stub")
    _compile(out, "operators.c")
    sizes = [f"CANN_SIZE({name})" for name in missing.operators if name.endswith("GetWorkspaceSize")]
    calls = [f"CANN_CALL({name})" for name in missing.operators if not name.endswith("GetWorkspaceSize")]
    _link(out, "libopapi.so", "operators.o", _source(out, "aclnn.c", sizes + calls), "-lcann_stub")
    if cuda:
        _run(
            ["g++", "-std=c++20", "-shared", "-fPIC", "-O1", f"-I{torch / 'include'}", "-o", "cann_allocator.so",
             str(SOURCES / "allocator.cpp"), f"-L{torch / 'lib'}", "-l:libc10.so"], out,
        )  # fmt: skip
    for left in (*out.glob("*.o"), *out.glob("*.c")):
        left.unlink()
    return missing


def survey(site: Path, torch: Path) -> Missing:
    """Read the libraries of the wheel in `site`, and what torch and this system offer them."""
    wheel = _libraries(site / "torch_npu")
    if not wheel:
        raise ToolError(f"there is no torch_npu in {site}")
    others = [path for path in _libraries(torch / "lib") if not any(word in path.name for word in _FOREIGN)]
    others += _libraries(site / "torch_npu.libs")
    here = {path.name for path in (*wheel, *others)}
    absent, system = [], []
    for name in sorted(_needed(wheel) - here):
        found = _run(["gcc", f"-print-file-name={name}"]).strip()
        if os.path.isabs(found):
            system.append(Path(found))
        elif not (torch / "lib" / name).exists():
            absent.append(name)
    offered = _symbols("--defined-only", [*wheel, *others, *system])
    # A name with a version belongs to a system library that is there; a weak one may stay undefined.
    wanted = {name for name in _symbols("--undefined-only", wheel, kinds="U") if "@" not in name} - offered
    wanted = {name for name in wanted if not _PYTHON.match(name)}
    data = {name for name in wanted if _DATA.match(name)}
    operators = {name.decode() for path in wheel for name in _ACLNN.findall(path.read_bytes())}
    return Missing(absent, sorted(wanted - data), sorted(data), sorted(operators))


def _libraries(folder: Path) -> list[Path]:
    """The shared libraries below `folder`."""
    return [path for path in sorted(folder.rglob("*.so*")) if path.is_file() and _is_elf(path)]


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _needed(libraries: Iterable[Path]) -> set[str]:
    text = _run(["readelf", "-d", *map(str, libraries)])
    return set(re.findall(r"\(NEEDED\).*\[(.+?)\]", text))


def _symbols(which: str, libraries: Iterable[Path], kinds: str = "") -> set[str]:
    """Dynamic symbols; a defined one without its version, an undefined one with it, if it has one."""
    found = set()
    for line in _run(["nm", "-D", which, *map(str, libraries)]).splitlines():
        words = line.split()
        if len(words) < 2 or line.endswith(":") or (kinds and words[-2] not in kinds):
            continue
        found.add(words[-1].partition("@")[0] if which == "--defined-only" else words[-1])
    return found


def _source(out: Path, name: str, lines: Iterable[str]) -> str:
    (out / name).write_text("\n".join(['#include "stub.h"', *lines, ""]))
    return name


def _compile(out: Path, name: str) -> set[str]:
    """Compile one of our sources, and say which functions it defines."""
    target = Path(name).with_suffix(".o").name
    _run(["gcc", "-c", "-fPIC", "-O1", f"-I{SOURCES}", "-o", target, str(SOURCES / name)], out)
    return {line.split()[-1] for line in _run(["nm", "--defined-only", target], out).splitlines() if line}


def _link(out: Path, library: str, *parts: str) -> None:
    _run(
        ["gcc", "-shared", "-fPIC", "-O1", "-fno-builtin", f"-I{SOURCES}", f"-Wl,-soname,{library}", "-o", library,
         "-L.", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", *parts, "-lpthread"], out,
    )  # fmt: skip


def _require(*tools: str) -> None:
    absent = [tool for tool in tools if shutil.which(tool) is None]
    if absent:
        raise ToolError(
            f"{', '.join(absent)} not found: stub CANN libraries are built with gcc, g++ and binutils "
            "(apt-get install gcc g++ binutils)"
        )


def _run(command: list[str], folder: Path | None = None) -> str:
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if ran.returncode:
        said = "\n".join(ran.stderr.strip().splitlines()[:5])
        raise ToolError(f"{' '.join(command[:4])} ... failed while building stub CANN libraries:\n{said}")
    return ran.stdout
