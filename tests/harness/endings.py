"""How a process ends: its output, its exit code, and what is left of it.

A case is forked from a process that has made the slow imports (`processes.forked`) and gets a folder of its own.
"""

from __future__ import annotations

import functools
import os
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.ranks import start, wait

_MARK = "ENDING_OF_TEST"
_TIMEOUT = 400.0


@dataclass(frozen=True)
class Ending:
    """One process: its exit code, the lines of its output, files it made and processes that outlived it."""

    code: int
    out: list[str]
    err: list[str]
    files: set[str]
    processes: list[int]


def endings(
    body: Callable[[int], Any],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    ranks: int = 1,
    interrupt_when: Callable[[], bool] = lambda: False,
) -> list[Ending]:
    """Fork `body(rank)` in `folder` once a rank; send SIGINT to all as soon as `interrupt_when()`."""
    mark, logs = uuid.uuid4().hex, folder.parent / f"{folder.name}-logs"
    folder.mkdir(parents=True, exist_ok=True)
    logs.mkdir()
    before = _files(folder)
    given = {**(environment or {}), _MARK: mark}
    pids = [
        start(functools.partial(body, rank), logs / f"{rank}.out", logs / f"{rank}.err", folder, **given)
        for rank in range(ranks)
    ]
    codes = wait(pids, _TIMEOUT, interrupt_when, signal.SIGINT)
    outlived = _marked(mark)
    for pid in outlived:
        os.kill(pid, signal.SIGKILL)
    files = _files(folder) - before
    lines = [[(logs / f"{rank}.{name}").read_text().splitlines() for name in ("out", "err")] for rank in range(ranks)]
    return [Ending(code, *own, files, outlived) for code, own in zip(codes, lines, strict=True)]


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


def _marked(mark: str) -> list[int]:
    """Processes that carry the mark in their environment; one that is just ending gets a minute."""
    found: list[int] = []
    for _ in range(1200):
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if f"{_MARK}={mark}".encode() in (path / "environ").read_bytes():
                    found.append(int(path.name))
            except OSError:
                continue
        if not found:
            break
        time.sleep(0.05)
    return found
