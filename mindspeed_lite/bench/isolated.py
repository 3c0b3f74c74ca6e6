"""Runs work that may crash or hang in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class ProcessEnded(RuntimeError):
    """The process crashed, or hung and was killed.

    Attributes:
        code: its exit code, negative for a signal; None if it hung.
        printed: lines that it printed.
    """

    def __init__(self, code: int | None, printed: Sequence[str], seconds: float) -> None:
        self.code, self.printed = code, printed
        how = f"did not end within {seconds:g} s" if code is None else f"ended the process with {self.ending}"
        super().__init__(": ".join(filter(None, (how, " | ".join(printed[-4:])[-400:]))))

    @property
    def ending(self) -> str:
        """The signal, or the exit code."""
        code = self.code or 0
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def messages(work: Callable[[], Iterable[T]], seconds: float) -> Iterator[T]:
    """Yield what `work` yields in a new process.

    Args:
        work: can be pickled, as its messages can.
        seconds: longest time from one message to the next.

    Raises:
        ProcessEnded: the work is not done, and no further message will come.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="mindspeed-lite-") as folder:
        log = Path(folder, "log")
        process = context.Process(target=_send, args=(sender, log, work), daemon=True)
        process.start()
        sender.close()
        code = None
        try:
            while receiver.poll(seconds):
                message = receiver.recv()
                if not message:
                    return
                yield message[0]
        except EOFError:
            process.join(seconds)
            code = process.exitcode
        finally:
            process.kill()
            process.join()
        printed = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    raise ProcessEnded(code, [line.strip() for line in printed.splitlines() if line.strip()], seconds)


def _send(sender: Connection, log: Path, work: Callable[[], Iterable[T]]) -> None:
    """Send each message in a tuple, and an empty one at the end."""
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    for message in work():
        sender.send((message,))
    sender.send(())
