"""How a process ends: its output, its exit code, and what it leaves behind.

A case is forked from a process that has the slow imports behind it (`processes.forked`) and gets a session, a folder
and files for its output of its own; an exception that leaves it goes to `sys.excepthook`, as the interpreter has it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    interrupt_when: Callable[[], bool] | None = None,
) -> list[Ending]:
    """Fork `body(rank)` in `folder` once a rank; send SIGINT to all as soon as `interrupt_when()`."""
    mark, logs = uuid.uuid4().hex, folder.parent / f"{folder.name}-logs"
    folder.mkdir(parents=True, exist_ok=True)
    logs.mkdir()
    before = _files(folder)
    pids = [_start(body, rank, folder, logs, {**(environment or {}), _MARK: mark}) for rank in range(ranks)]
    codes: dict[int, int] = {}
    deadline = time.monotonic() + _TIMEOUT
    while len(codes) < ranks:
        for rank, pid in enumerate(pids):
            if rank not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        if interrupt_when is not None and interrupt_when():
            interrupt_when = None
            for pid in pids:
                os.kill(pid, signal.SIGINT)
        if time.monotonic() > deadline:
            for rank, pid in enumerate(pids):
                if rank not in codes:
                    os.kill(pid, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.01)
    outlived = _marked(mark)
    for pid in outlived:
        os.kill(pid, signal.SIGKILL)
    files = _files(folder) - before
    return [
        Ending(
            codes[rank],
            (logs / f"{rank}.out").read_text().splitlines(),
            (logs / f"{rank}.err").read_text().splitlines(),
            files,
            outlived,
        )
        for rank in range(ranks)
    ]


def _start(body: Callable[[int], Any], rank: int, folder: Path, logs: Path, environment: Mapping[str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code: object = 1
    try:
        os.setsid()
        os.chdir(folder)
        os.environ.update(environment)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(logs / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        # What is forked has the server's streams and hooks.
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.excepthook = sys.__excepthook__
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            code = body(rank) or 0
        except SystemExit as ending:
            code = ending.code
        except BaseException as error:
            try:
                sys.excepthook(type(error), error, error.__traceback__)
            except SystemExit as ending:
                code = ending.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0)
    raise AssertionError


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
