"""Names and prose of the code: no idioms where the field has a term, and one public class name for one thing."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(path for room in ("mindspeed_lite", "patches") for path in (ROOT / room).rglob("*.py"))
IDIOMS = re.compile(
    r"\b(whoever|nobody|somebody|is said|are said|said once|at odds|found out|the way back|steps? aside|by chance"
    r"|in whose stead)\b",
    re.IGNORECASE,
)
# `Case` is one word for every operator's call. The others are to be renamed; none is added.
SHARED_NAMES = {
    "Case",
    "Event",
    "Plan",
    "Shape",
    "Table",
}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(path: Path) -> list[str]:
    """The docstrings and comments of a file, each in one line."""
    source = path.read_text(encoding="utf-8")
    found = [
        node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = " ".join(token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT)
    return [" ".join(text.split()) for text in (*found, comments)]


@pytest.mark.parametrize("path", FILES, ids=name)
def test_docstrings_and_comments_use_the_terms_of_the_field(path: Path) -> None:
    assert not [found.group() for text in prose(path) for found in IDIOMS.finditer(text)]


# Reports under benchmarks/ quote the version that wrote them.
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if "benchmarks" not in p.parts)]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages_use_the_terms_of_the_field(page: Path) -> None:
    assert not [found.group() for found in IDIOMS.finditer(" ".join(page.read_text(encoding="utf-8").split()))]


def test_a_public_class_name_is_defined_once() -> None:
    modules = defaultdict(set)
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].add(name(path))
    shared = {each: sorted(paths) for each, paths in modules.items() if len(paths) > 1}
    assert shared.keys() <= SHARED_NAMES, shared
    assert shared.keys() >= SHARED_NAMES - {"Case"}, "a name is unique now: take it off SHARED_NAMES"
