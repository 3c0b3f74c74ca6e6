"""A process that does not outlive the block it was started for."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = ["child_process", "kill", "terminate"]


def kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a process with everything in its session, and wait ten seconds for it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    # What a driver holds is not killed, and not waited for.
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(10.0)


def terminate(child: subprocess.Popen[bytes]) -> None:
    """Ask a process and its session to end, and kill what is left after ten seconds.

    A launcher ends workers that have sessions of their own when it is asked, and leaves them when it is killed.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(10.0)
    kill(child)


@contextlib.contextmanager
def child_process(
    command: Sequence[str], end: Callable[[subprocess.Popen[bytes]], None] = kill, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in a session of its own and end it with the block, however that is left.

    SIGTERM leaves it as Ctrl-C does, by KeyboardInterrupt, unless the caller handles or ignores that signal.

    Args:
        command: argv.
        end: called with the process on the way out, also if it has ended by itself.
        options: of `subprocess.Popen`.

    Raises:
        OSError: the command cannot be started.
    """
    child: subprocess.Popen[bytes] | None = None
    with _termination_raised():
        try:
            with _signals_deferred():
                child = subprocess.Popen(command, start_new_session=True, **options)
            yield child
        finally:
            if child is not None:
                with _signals_deferred():
                    end(child)


@contextlib.contextmanager
def _termination_raised() -> Iterator[None]:
    """Let SIGTERM raise in the block: by default it ends Python at once, and what runs in other sessions stays."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def leave(number: int, _: object) -> None:
        # One is enough.
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Let signals wait for the end of the block: inside, a process that runs would be lost."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    deferred = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(each, lambda number, _: received.append(number)) for each in deferred]
    try:
        yield
    finally:
        for number, handler in zip(deferred, before, strict=True):
            signal.signal(number, handler)
    for each in received:
        signal.raise_signal(each)
