"""Hooks of the documentation site: folders in the navigation, and links that leave docs/.

A link from a page to a file of the repository outside docs/ becomes a page of the site: Markdown and notebooks as they
are, anything else as a listing. So every link on a page works in the repository and on the site.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=[)#])")

_ROW, _CODE = re.compile(r"^\|.*$", re.MULTILINE), re.compile(r"`[^`]*`")


def _page_of(outside: str) -> str:
    """Where the site has the file `outside`, a path from the repository's root."""
    return f"repository/{outside.removesuffix('.md')}.md"


def _outside(page: str, link: str) -> str | None:
    """The repository's path of a link that leaves docs/; None for every other link."""
    if re.match(r"[a-z]+:", link) or link.startswith("/"):
        return None
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith(("docs/", "..")) or not (ROOT / path).exists() else path


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


def on_files(files: Files, config: Any) -> Files:
    """Adds a page for every file outside docs/ that a page links to, and for those that such a page links to."""
    wanted = {
        target
        for file in files.documentation_pages()
        for target in _targets(file.src_uri, (ROOT / "docs" / file.src_uri).read_text(encoding="utf-8"))
    }
    done: set[str] = set()
    while wanted - done:
        for path in sorted(wanted - done):
            done.add(path)
            text = _text(path)
            files.append(File.generated(config, _page_of(path), content=text, inclusion=_inclusion()))
            wanted |= _targets(_page_of(path), text)
    return files


def _inclusion() -> Any:
    from mkdocs.structure.files import InclusionLevel

    return InclusionLevel.NOT_IN_NAV


def _text(path: str) -> str:
    source = ROOT / path
    if source.is_dir():
        entries = sorted(each.relative_to(ROOT).as_posix() for each in source.glob("*.py"))
        return f"# {path}\n\n" + "\n".join(f"- `{each}`" for each in entries) + "\n"
    text = source.read_text(encoding="utf-8")
    if path.endswith(".md"):
        # Its links start at its own folder: let them start at the page that stands for it.
        here = posixpath.dirname(path)

        def moved(found: re.Match[str]) -> str:
            link = found.group(1)
            if re.match(r"[a-z]+:", link):
                return link
            target = posixpath.normpath(posixpath.join(here, link))
            target = _page_of(target) if not target.startswith("docs/") else target.removeprefix("docs/")
            return posixpath.relpath(target, posixpath.dirname(_page_of(path)))

        return _LINK.sub(moved, text)
    if path.endswith(".ipynb"):
        cells = ((each["cell_type"], "".join(each["source"])) for each in json.loads(text)["cells"])
        return "\n\n".join(code if kind == "markdown" else f"```python\n{code}\n```" for kind, code in cells) + "\n"
    language = {".py": "python", ".sh": "sh", ".json": "json", ".cpp": "cpp"}.get(source.suffix, "text")
    return f"# {path}\n\n````{language}\n{text}\n````\n"


def _targets(page: str, text: str) -> set[str]:
    if page.startswith("repository/"):
        links = {posixpath.normpath(posixpath.join(posixpath.dirname(page), each)) for each in _LINK.findall(text)}
        paths = {each.removeprefix("repository/") for each in links if each.startswith("repository/")}
        return {found for each in paths if (found := _source_of(each))}
    return {found for each in _LINK.findall(text) if (found := _outside(page, each))}


def _source_of(path: str) -> str | None:
    """The file that a page of the site stands for."""
    bare = path.removesuffix(".md")
    return next((each for each in (bare, path) if (ROOT / each).exists()), None)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Points links that leave docs/ to the pages made for them; a bar in code needs no escape in a table here."""
    here = page.file.src_uri
    markdown = _ROW.sub(lambda row: _CODE.sub(lambda code: code.group().replace("\\|", "|"), row.group()), markdown)
    if here.startswith("repository/"):
        return markdown

    def moved(found: re.Match[str]) -> str:
        outside = _outside(here, found.group(1))
        if outside is None:
            return found.group(1)
        return posixpath.relpath(_page_of(outside), posixpath.dirname(here) or ".")

    return _LINK.sub(moved, markdown)
