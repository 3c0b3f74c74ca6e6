"""Hooks of the documentation site: folders in the navigation, and links that leave docs/, which become plain text."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\[([^\]\n]+)\]\(([^)#\s]+)[^)\s]*\)")
_ROW, _CODE = re.compile(r"^\|.*$", re.MULTILINE), re.compile(r"`[^`]*`")


def on_config(config: Any) -> Any:
    """Expands `folder/` in the navigation to the pages in it."""
    config["nav"] = [_expanded(entry) for entry in config["nav"]]
    return config


def _expanded(entry: Any) -> Any:
    if isinstance(entry, list):
        return [_expanded(each) for each in entry]
    ((title, value),) = entry.items()
    if isinstance(value, str) and value.endswith("/"):
        folder = ROOT / "docs" / value
        value = [path.relative_to(ROOT / "docs").as_posix() for path in sorted(folder.rglob("*.md"))]
    elif isinstance(value, list):
        value = [_expanded(each) for each in value]
    return {title: value}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leaves the text of links that leave docs/; a bar in code needs no escape in a table here."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def inside(found: re.Match[str]) -> str:
        text, link = found.groups()
        if re.match(r"[a-z]+:", link) or posixpath.normpath(posixpath.join(folder, link)).startswith("docs/"):
            return found.group()
        return text

    markdown = _ROW.sub(lambda row: _CODE.sub(lambda code: code.group().replace("\\|", "|"), row.group()), markdown)
    return _LINK.sub(inside, markdown)
