"""Digests of the sources that a figure was measured with: a figure with another one is older than the code."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

from mindspeed_lite.ops import discovery

OPS = Path(__file__).resolve().parents[1] / "mindspeed_lite" / "ops"
# Of an operator's folder, what no CUDA call runs.
_OTHERS = ("cpu.py", "npu.py", "cases.py")


def of_operator(name: str) -> str:
    """Of the Triton kernels of an operator; where it has none, of the functions that a CUDA call runs."""
    return digest(_sources(name))


def of_sources(name: str) -> str:
    """Of all that decides which kernels an operator launches, with which constants, and how Triton compiles them."""
    texts = [*_sources(name), (OPS / "row_kernels.py").read_text(), version("triton")]
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:12]


def _sources(name: str) -> list[str]:
    operator = importlib.import_module(discovery.package(name)).OPERATOR
    folder = OPS / operator.reference.__module__.split(".")[2]
    return [path.read_text() for path in sorted(folder.glob("*.py")) if path.name not in _OTHERS]


@functools.cache
def of_all() -> str:
    """Of all operators: the trainings' and the tests'."""
    return hashlib.sha256("".join(map(of_operator, discovery.OPERATORS)).encode()).hexdigest()[:12]


def digest(sources: Iterable[str]) -> str:
    functions = [each for source in sources for each in _functions(ast.parse(source))]
    kernels = [each for each in functions if any("jit" in ast.dump(one) for one in each.decorator_list)]
    text = "\n".join(ast.dump(each) for each in kernels or functions)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Functions of a module without their docstrings."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
            yield node
