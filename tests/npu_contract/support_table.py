"""Which torch_npu release has the operators we call, as we call them: read from the wheels, written into docs/npu.md.

    python -m tests.npu_contract.support_table             reads the wheels, downloading those the cache lacks
    python -m tests.npu_contract.support_table --render    only renews the table from docs/npu_support.json
    python -m tests.npu_contract.support_table --check     writes nothing; exits with 1 if the table is out of date

A wheel of another torch cannot be imported, so its libraries are read as data: torch_npu registers operators by
schema strings, its autograd formulas are classes named `NpuXxxBackward0`, and its fake kernels are functions of a
Python file. What we call, and with which argument names, is read from our own source. A wheel that cannot be fetched
is said to be not read.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "npu.md"
DATA = ROOT / "docs" / "npu_support.json"
CACHE = ROOT / ".npu" / "wheels"
BEGIN, END = "<!-- torch_npu: begin -->", "<!-- torch_npu: end -->"

# Column -> what pip is asked for. Each line's newest release, and the oldest one, whose operators differ most.
WHEELS = {
    "2.7.1": "torch-npu==2.7.1",
    **{line: f"torch-npu=={line}.*" for line in ("2.7", "2.8", "2.9", "2.10", "2.11", "2.12", "2.13", "2.14")},
}
# A Python that every line has wheels for; their operators do not depend on it.
PYTHON = "3.11"


@dataclass
class Call:
    """What one of our files passes to an operator."""

    operator: str
    positional: int  # a `*sequence` counts as one
    keywords: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)


def calls(sources: Iterable[Path]) -> dict[str, Call]:
    """Every call of `torch_npu.npu_*` in `sources`, by operator; keywords of several call sites are united.

    Raises:
        ValueError: a `**name` whose keys cannot be read from the function around it.
    """
    found: dict[str, Call] = {}
    for path in sources:
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for node in ast.walk(function):
                    name = _npu_operator(node)
                    if name is not None:
                        assert isinstance(node, ast.Call)
                        call = found.setdefault(name, Call(name, 0))
                        call.positional = max(call.positional, len(node.args))
                        call.files.add(_shown(path))
                        for keyword in node.keywords:
                            call.keywords |= {keyword.arg} if keyword.arg else _keys(keyword.value, function, path)
    return found


def _npu_operator(node: ast.AST) -> str | None:
    called = node.func if isinstance(node, ast.Call) else None
    if not isinstance(called, ast.Attribute) or not isinstance(called.value, ast.Name):
        return None
    return called.attr if called.value.id == "torch_npu" and re.match(r"_?npu_", called.attr) else None


def _keys(value: ast.expr, function: ast.AST, path: Path) -> set[str]:
    """The keys that a `**value` can have: those of every dictionary that the function gives that name."""
    keys: set[str] = set()
    if isinstance(value, ast.Name):
        for node in ast.walk(function):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                if isinstance(target, ast.Name) and target.id == value.id:
                    given = getattr(node, "value", None)
                    keys |= {key.value for key in given.keys} if isinstance(given, ast.Dict) else set()
                elif (
                    isinstance(target, ast.Subscript)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == value.id
                    and isinstance(target.slice, ast.Constant)
                ):
                    keys.add(target.slice.value)
    if not keys:
        raise ValueError(f"{_shown(path)}: cannot tell what **{ast.unparse(value)} passes to an operator")
    return keys


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def our_calls() -> dict[str, Call]:
    """The calls of every backend in mindspeed_lite."""
    return calls(sorted((ROOT / "mindspeed_lite").rglob("*.py")))


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
    """The releases of CANN that a wheel's description names beside its own torch, with the wheel each is for."""
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


def verdict(call: Call, operators: Mapping[str, Mapping[str, Any]]) -> str:
    """Whether a wheel with these operators can serve our call, in the words of the table."""
    operator = operators.get(call.operator)
    if operator is None:
        return "absent"
    positional, keyword_only = arguments(operator["schema"])
    reasons = [f"no argument `{name}`" for name in sorted(call.keywords - {*positional, *keyword_only})]
    if call.positional > len(positional):
        reasons.append(f"takes {len(positional)} arguments by position, we pass {call.positional}")
    if not operator["autograd"]:
        reasons.append("no autograd formula")
    if not operator["fake"]:
        reasons.append("no fake kernel")
    return "; ".join(reasons) or "yes"


def table(data: Mapping[str, Any], ours: Mapping[str, Call]) -> str:
    """The Markdown between the markers."""
    columns = list(data["wheels"])
    rows = [["Operator", "Called by", *columns], ["---"] * (len(columns) + 2)]
    for name, call in sorted(ours.items()):
        cells = [
            verdict(call, wheel["operators"]) if "operators" in wheel and name in data["asked"] else "not read"
            for wheel in data["wheels"].values()
        ]
        rows.append([f"`{name}`", ", ".join(f"`{path}`" for path in sorted(call.files)), *cells])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines += ["", "By name we pass:", ""]
    for name, call in sorted(ours.items()):
        lines.append(f"- `{name}`: {', '.join(f'`{each}`' for each in sorted(call.keywords)) or 'nothing'}")
    lines += ["", "Wheels:", ""]
    for column, wheel in data["wheels"].items():
        if "operators" in wheel:
            said = f"`{wheel['wheel']}`, {wheel['count']} operators; "
            said += f"wants {', '.join(wheel['requires']) or 'no particular torch'}; "
            said += f"names CANN {', '.join(wheel['cann'])}" if wheel["cann"] else "names no CANN for it"
        else:
            said = f"not read: {wheel['why']}"
        lines.append(f"- {column}: {said}")
    return "\n".join(lines)


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


def gather(cache: Path, ours: Mapping[str, Call]) -> dict[str, Any]:
    """Every wheel's answer about the operators we call and about their backward operators."""
    wheels: dict[str, Any] = {}
    for column, requirement in WHEELS.items():
        try:
            found = read(fetch(requirement, cache))
        except (RuntimeError, ValueError, OSError, zipfile.BadZipFile) as error:
            wheels[column] = {"why": _without_hosts(str(error))}
        else:
            found["count"] = len(found["operators"])
            found["operators"] = {
                name: operator
                for name, operator in found["operators"].items()
                if name in ours or re.sub(r"_(backward|grad)$", "", name) in ours
            }
            wheels[column] = found
        print(f"{column}: {wheels[column].get('wheel') or wheels[column]['why']}", flush=True)
    return {"asked": sorted(ours), "wheels": wheels}


def _without_hosts(text: str) -> str:
    return re.sub(r"\w+://\S+", "the index", text)


def page(text: str, inside: str) -> str:
    """The page's text with what stands between the markers renewed."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE.name} has lost its markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{inside}\n{END}{after}"


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the table is out of date")
    parser.add_argument("--render", action="store_true", help="renew the table from docs/npu_support.json alone")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where downloaded wheels are kept")
    chosen = parser.parse_args(given)
    ours = our_calls()
    if not (chosen.check or chosen.render):
        DATA.write_text(json.dumps(gather(chosen.cache, ours), indent=1) + "\n", encoding="utf-8")
    data = json.loads(DATA.read_text(encoding="utf-8"))
    now = PAGE.read_text(encoding="utf-8")
    wanted = page(now, table(data, ours))
    if now == wanted:
        return 0
    if chosen.check:
        print("docs/npu.md is out of date: run `python -m tests.npu_contract.support_table --render`", file=sys.stderr)
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    print("docs/npu.md written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
