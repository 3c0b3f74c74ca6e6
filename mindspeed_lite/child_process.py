"""A process that does not outlive the block it was started for."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = ["child_process", "kill"]


def kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a process with everything in its session, and wait ten seconds for it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    # What a driver holds is not killed, and not waited for.
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(10.0)


@contextlib.contextmanager
def child_process(
    command: Sequence[str], end: Callable[[subprocess.Popen[bytes]], None] = kill, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in a session of its own and end it with the block, however that is left.

    Args:
        command: argv.
        end: called with the process on the way out, also if it has ended by itself.
        options: of `subprocess.Popen`.

    Raises:
        OSError: the command cannot be started.
    """
    child: subprocess.Popen[bytes] | None = None
    try:
        with _interrupt_deferred():
            child = subprocess.Popen(command, start_new_session=True, **options)
        yield child
    finally:
        if child is not None:
            end(child)


@contextlib.contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block: inside, the handle of a process that runs would be lost."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        signal.raise_signal(signal.SIGINT)
