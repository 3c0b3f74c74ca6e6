"""What a wheel of torch_npu says of its operators, read as data: a wheel for another torch cannot be imported.

torch_npu registers operators by schema strings, its autograd formulas are classes named `NpuXxxBackward0`, and its fake
kernels are functions of a Python file.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# A Python that every line has wheels for; their operators do not depend on it.
PYTHON = "3.11"


def fetch(requirement: str, cache: Path) -> Path:
    """The wheel pip chooses for `requirement`, downloaded unless `cache` has it.

    Raises:
        RuntimeError: pip finds or gets none; the text is the end of what it said.
    """
    folder = cache / re.sub(r"[^\w.]+", "_", requirement)
    have = sorted(folder.glob("*.whl"))
    if have:
        return have[-1]
    folder.mkdir(parents=True, exist_ok=True)
    options = f"--quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version {PYTHON}"
    command = [sys.executable, "-m", "pip", "download", *options.split(), "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    have = sorted(folder.glob("*.whl"))
    if done.returncode or not have:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise RuntimeError(said[-1].removeprefix("ERROR: ") if said else f"pip ended with {done.returncode}")
    return have[-1]


def read(where: Path) -> dict[str, Any]:
    """What a wheel (or a folder it is installed in) says of every npu operator: schema, autograd, fake kernel."""
    files = _files(where)
    libraries = [name for name in files if re.search(r"(^|/)lib(torch_npu|op_plugin)[^/]*\.so", name)]
    fakes = _text(files, "meta/_meta_registrations.py")
    metadata = _text(files, ".dist-info/METADATA")
    schemas: dict[str, str] = {}
    nodes: set[str] = set()
    for name in libraries:
        binary = files[name]()
        # Each search begins with plain letters, which is fast over a hundred megabytes.
        for match in re.finditer(rb"npu_\w+(?:\.\w+)?\([ -~]*\) -> [ -~]+(?=\0)", binary):
            start = match.start() - (binary[match.start() - 1 : match.start()] == b"_")
            if binary[max(start - 5, 0) : start].endswith((b"\0", b"npu::")):
                schema = binary[start : match.end()].decode()
                schemas.setdefault(schema.partition("(")[0], schema)
        nodes |= {match[0].decode() for match in re.finditer(rb"Npu[A-Za-z0-9]+Backward(?=\d)", binary)}
    if not schemas:
        raise ValueError(f"{where.name}: no operator schemas found in {', '.join(libraries) or 'its files'}")
    return {
        "wheel": where.name,
        "requires": re.findall(r"^Requires-Dist: (torch\b.*)$", metadata, re.MULTILINE),
        "cann": _cann(metadata, where.name),
        "operators": {
            name: {
                "schema": schema,
                "autograd": _node(name) in nodes,
                "fake": re.search(rf"@impl\(\w+, *['\"]{re.escape(name)}['\"]", fakes) is not None,
            }
            for name, schema in sorted(schemas.items())
        },
    }


def _files(where: Path) -> dict[str, Callable[[], bytes]]:
    """Every file of a wheel or folder, read when called."""
    if where.is_dir():
        return {str(path.relative_to(where)): path.read_bytes for path in where.rglob("*") if path.is_file()}
    archive = zipfile.ZipFile(where)
    return {name: functools.partial(archive.read, name) for name in archive.namelist()}


def _text(files: Mapping[str, Callable[[], bytes]], ending: str) -> str:
    return "\n".join(read().decode("utf-8", errors="replace") for name, read in files.items() if name.endswith(ending))


def _cann(metadata: str, wheel: str) -> list[str]:
    """The releases of CANN that a wheel's description names with its own torch, and the wheel each is for."""
    torch = re.search(r"-(\d+\.\d+\.\d+)", wheel)
    row = r"^\| *CANN (\S+) *\| *([\d.]+) *\| *(\S+) *\|"
    pairs = [found.groups() for found in re.finditer(row, metadata, re.MULTILINE)]
    named = [f"{cann} for {extension}" for cann, theirs, extension in pairs if torch and theirs == torch[1]]
    return named or sorted(set(re.findall(r"Install CANN (\d[\w.]*\w)", metadata)))


def _node(operator: str) -> str:
    """The autograd class of an operator: npu_rms_norm -> NpuRmsNormBackward (its number is left out)."""
    return "".join(part[:1].upper() + part[1:] for part in operator.split("_")) + "Backward"


def arguments(schema: str) -> tuple[list[str], list[str]]:
    """Names of the positional and of the keyword-only arguments of a schema."""
    inside = schema[schema.index("(") + 1 : schema.rindex(") -> ")]
    positional: list[str] = []
    keyword_only: list[str] = []
    into = positional
    for part in _at_commas(inside):
        if part.strip() == "*":
            into = keyword_only
        elif part.strip():
            into.append(part.partition("=")[0].split()[-1])
    return positional, keyword_only


def _at_commas(text: str) -> list[str]:
    """`text` in pieces, split at the commas that stand in no bracket."""
    pieces, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    return pieces
