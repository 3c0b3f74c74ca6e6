"""Forks ranks that end as scripts do: output in files, exceptions to `sys.excepthook`, an exit code."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def start(body: Callable[[], Any], out: Path, err: Path, folder: Path | None = None, **environment: str) -> int:
    """Fork `body()`, in a session of its own, and return its process; `out` and `err` may be one file."""
    pid = os.fork()
    if pid:
        return pid
    code: object = 1
    try:
        os.setsid()
        os.chdir(folder or os.getcwd())
        os.environ.update(environment)
        files = {path: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for path in {out, err}}
        os.dup2(files[out], 1)
        os.dup2(files[err], 2)
        # What is forked has the server's streams and hooks.
        sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.excepthook = sys.__excepthook__
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            code = body() or 0
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


def wait(
    pids: Sequence[int],
    timeout: float,
    is_time: Callable[[], bool] = lambda: False,
    sent: signal.Signals = signal.SIGKILL,
    grace: float = float("inf"),
) -> list[int]:
    """The exit codes. All are sent a signal as soon as `is_time()`, and are killed after the timeout, or so many
    seconds of grace after the first that failed: it leaves the others waiting in a collective.
    """
    codes: dict[int, int] = {}
    deadline, is_sent = time.monotonic() + timeout, False

    def send(what: signal.Signals) -> None:
        for pid in pids:
            if pid not in codes:
                os.kill(pid, what)

    while True:
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        if len(codes) == len(pids):
            return [codes[pid] for pid in pids]
        if any(codes.values()):
            deadline = min(deadline, time.monotonic() + grace)
        if time.monotonic() > deadline:
            send(signal.SIGKILL)
        if not is_sent and is_time():
            is_sent = True
            send(sent)
        time.sleep(0.005)
