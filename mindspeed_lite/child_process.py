"""A child process that ends with its block."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = ["child_process", "kill", "terminate"]

_SECONDS = 10.0


def kill(child: subprocess.Popen[bytes], number: int = signal.SIGKILL) -> None:
    """Signal a process and its session, and wait up to ten seconds."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_SECONDS)


def terminate(child: subprocess.Popen[bytes]) -> None:
    """Ask a process and its session to end, then kill the rest.

    torchrun ends workers in their own sessions when asked, but leaves them when killed.
    """
    kill(child, signal.SIGTERM)
    kill(child)


@contextlib.contextmanager
def child_process(
    command: Sequence[str], end: Callable[[subprocess.Popen[bytes]], None] = kill, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in its own session and end it with the block.

    SIGTERM and SIGHUP raise KeyboardInterrupt unless the caller handles or ignores them. `end(process)` is called at
    the end; `options`: of `subprocess.Popen`. Raises OSError.
    """
    pending: list[int] = []
    with _termination_raises(), contextlib.ExitStack() as deferred:
        # An exception inside Popen would leave the child running.
        deferred.enter_context(_handled_by(lambda number, _: pending.append(number)))
        child = subprocess.Popen(command, start_new_session=True, **options)
        try:
            deferred.close()
            if pending:
                signal.raise_signal(pending[0])
            yield child
        finally:
            with _handled_by(signal.SIG_IGN):  # a second Ctrl-C does not leave processes behind
                end(child)


@contextlib.contextmanager
def _termination_raises() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt once; by default `finally` would not run."""
    is_main = threading.current_thread() is threading.main_thread()
    ends = [each for each in (signal.SIGTERM, signal.SIGHUP) if is_main and signal.getsignal(each) is signal.SIG_DFL]

    def leave(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for each in ends:
        signal.signal(each, leave)
    try:
        yield
    finally:
        for each in ends:
            signal.signal(each, signal.SIG_DFL)


@contextlib.contextmanager
def _handled_by(handler: Any) -> Iterator[None]:
    """Handle SIGINT, SIGTERM and SIGHUP so within the block; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # What is ignored stays so, and the child inherits it.
    before = {each: signal.getsignal(each) for each in ends if signal.getsignal(each) not in (signal.SIG_IGN, None)}
    for each in before:
        signal.signal(each, handler)
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
