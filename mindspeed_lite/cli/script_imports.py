"""Packages that a training script imports at its start, found in its source."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.util import resolve_name
from pathlib import Path

Source = tuple[Path, str]  # file, package for relative imports


def missing_packages(script: Path | None) -> dict[str, Path]:
    """Packages that cannot be found, with the file that imports them.

    Follows top-level imports into the script's folder and Megatron. None: Megatron's training loop.
    """
    followed = ["megatron"]
    if script is not None:
        followed += [each.stem for each in script.parent.iterdir() if each.suffix == ".py" or each.is_dir()]
    waiting: list[Source] = list(_executed("megatron.training.training")) if script is None else [(script, "")]
    found: dict[str, Path] = {}
    seen: set[Path] = set()
    while waiting:
        file, package = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        for name in _imports(file, package):
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and not _is_found(top):
                found.setdefault(top, file)
            elif top in followed:
                waiting += _executed(name)
    return found


@functools.cache
def _is_found(package: str) -> bool:
    return PathFinder.find_spec(package) is not None


@functools.cache
def _executed(name: str) -> tuple[Source, ...]:
    """Sources that importing a module runs: its packages' and its own."""
    found, folders, package = [], [Path(each) for each in sys.path], ""
    for part in name.split("."):
        inner = f"{package}.{part}".lstrip(".")
        for folder in folders:
            choices = [(folder / part / "__init__.py", inner), (folder / f"{part}.py", package)]
            found += [each for each in choices if each[0].is_file()][:1]
        folders, package = [folder / part for folder in folders if (folder / part).is_dir()], inner
    return tuple(found)


def _imports(path: Path, package: str) -> Iterator[str]:
    # Up to the first function or class: parsing all of Megatron takes seconds.
    head = re.split(r"^(?:def|class|async|@)", path.read_text("utf-8", "replace"), maxsplit=1, flags=re.MULTILINE)[0]
    try:
        body = ast.parse(head).body
    except (SyntaxError, ValueError):
        return
    for node in body:
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            base = resolve_name(module, package) if node.level else module
            yield from (f"{base}.{each.name}" for each in node.names)
