"""What our backends pass to the operators of torch_npu, read from their source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


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
        ValueError: a `**name` whose keys cannot be read from the file.
    """
    found: dict[str, Call] = {}
    for path in sources:
        module = ast.parse(path.read_text(encoding="utf-8"))
        for function in ast.walk(module):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for node in ast.walk(function):
                    name = _npu_operator(node)
                    if name is not None:
                        assert isinstance(node, ast.Call)
                        call = found.setdefault(name, Call(name, 0))
                        call.positional = max(call.positional, len(node.args))
                        call.files.add(_shown(path))
                        for keyword in node.keywords:
                            call.keywords |= (
                                {keyword.arg} if keyword.arg else _keys(keyword.value, function, module, path)
                            )
    return found


def _npu_operator(node: ast.AST) -> str | None:
    called = node.func if isinstance(node, ast.Call) else None
    if not isinstance(called, ast.Attribute) or not isinstance(called.value, ast.Name):
        return None
    return called.attr if called.value.id == "torch_npu" and re.match(r"_?npu_", called.attr) else None


def _keys(value: ast.expr, function: ast.FunctionDef | ast.AsyncFunctionDef, module: ast.AST, path: Path) -> set[str]:
    """The keys that a `**value` can have: those of every dictionary that the function gives that name.

    Where it comes from elsewhere, out of a function or through the function's own `**name`: those of every dictionary
    of the file, and what its callers pass beyond its parameters.
    """
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
        keys = _strings_of_dictionaries(module) | _passed_on(function, module)
    if not keys:
        raise ValueError(f"{_shown(path)}: cannot tell what **{ast.unparse(value)} passes to an operator")
    return keys


def _strings_of_dictionaries(module: ast.AST) -> set[str]:
    keys = [key for node in ast.walk(module) if isinstance(node, ast.Dict) for key in node.keys]
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def _passed_on(function: ast.FunctionDef | ast.AsyncFunctionDef, module: ast.AST) -> set[str]:
    own = {each.arg for each in (*function.args.args, *function.args.kwonlyargs)}
    called = [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function.name
    ]
    return {keyword.arg for node in called for keyword in node.keywords if keyword.arg} - own


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def our_calls() -> dict[str, Call]:
    """The calls of every backend in mindspeed_lite."""
    return calls(sorted((ROOT / "mindspeed_lite").rglob("*.py")))
