"""Writes a report's files into a folder, each at once or not at all."""

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
    """Make the folder, and make sure that a file can be made in it.

    Raises:
        OutputError: it cannot; to be asked before hours of measuring.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".write-test-", dir=folder)
        os.close(descriptor)
        os.unlink(name)
    except OSError as error:
        raise OutputError(
            f"--out: cannot write into {folder}: {error.strerror or error}; give a folder you may write"
        ) from error


def write(record: dict[str, Any], folder: str | Path) -> list[str]:
    """Write report.json, the plots, report.md and report.html; returns their names.

    The plots' names are put into the record. report.json is written before anything is rendered.
    """
    from mindspeed_lite.bench import plots
    from mindspeed_lite.bench import report as pages

    files = record.setdefault("files", {"trace": [], "plots": []})
    write_file(Path(folder, "report.json"), dumps(record))
    drawn = plots.draw(record, folder)
    files["plots"] = [*drawn]
    write_file(Path(folder, "report.json"), dumps(record))
    write_file(Path(folder, "report.md"), pages.markdown(record, {name: plots.CAPTIONS[name] for name in drawn}))
    write_file(Path(folder, "report.html"), pages.html(record, drawn))
    return ["report.json", "report.md", "report.html", *drawn]


def dumps(record: dict[str, Any]) -> str:
    """The record as JSON that every reader takes: what is not finite becomes text."""
    return json.dumps(finite(record), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """`value` with every float that is not finite as "nan", "inf" or "-inf"."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def write_file(path: Path, text: str) -> None:
    """Replace the file in one step: a reader sees the old one or the new one."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            # mkstemp makes it readable for its owner alone.
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
