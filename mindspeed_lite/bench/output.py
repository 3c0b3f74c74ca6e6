"""Writes a report's files atomically."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any


class OutputError(OSError):
    """The folder cannot be written; the text says why and what to do."""


def check_writable(folder: str | Path) -> None:
    """Check before hours of measuring that the folder is writable. Raises OutputError."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"--out: cannot write into {folder}: {reason}; give a folder you may write") from error


def write(record: dict[str, Any], folder: str | Path) -> list[str]:
    """Write report.json, plots, report.md and report.html; return the names.

    report.json comes first, before rendering.
    """
    from mindspeed_lite.bench import plots, report

    files = record.setdefault("files", {"trace": [], "plots": []})
    write_file(Path(folder, "report.json"), dumps(record))
    drawn = plots.draw(record, folder)
    files["plots"] = [*drawn]
    captions = {name: plots.CAPTIONS[name] for name in drawn}
    found = {
        "report.json": dumps(record),
        "report.md": report.render(record, captions, html=False),
        "report.html": report.render(record, drawn, html=True),
    }
    for name, text in found.items():
        write_file(Path(folder, name), text)
    return [*found, *drawn]


def dumps(record: dict[str, Any]) -> str:
    """Strict JSON: non-finite floats become text."""
    return json.dumps(finite(record), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_file(path: Path, text: str) -> None:
    """Replace the file atomically."""
    part = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
