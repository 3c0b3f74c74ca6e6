"""Ends a process on an error of this package or for want of another rank: one line, exit code 2, no traceback.

Python calls `sys.excepthook` for an exception that no code catches. The hook here takes the errors of this package, a
missing dependency of it, and what a collective raises when another rank is lost (`lost_rank`); every other exception
goes to the hook that was installed before. An error that several ranks share is printed once. Only the standard library
is imported until an error is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import os
import socket
import sys
import time
import traceback
from datetime import timedelta
from types import TracebackType
from typing import Any

from mindspeed_lite import lost_rank

TRACEBACK_VARIABLE = "MINDSPEED_LITE_TRACEBACK"
EXIT_CODE = 2

# Seconds a rank waits for the others to fail alike, before it names itself as the one that failed.
_PATIENCE = 5.0
_POLL = 0.02

_DEPENDENCIES = {
    "torch": "PyTorch is not installed: pip install torch",
    "megatron": "megatron.core cannot be found: install it (pip install megatron-core) or put a Megatron-LM checkout "
    "first on PYTHONPATH",
    "wrapt": "wrapt is not installed: pip install wrapt",
    "packaging": "packaging is not installed: pip install packaging",
}

_before: Any = None
_is_on = False


def describe(error: BaseException) -> str | None:
    """What to tell the user of an error, without its traceback; None for an error that another hook is to show."""
    causes = _causes(error)
    if any(_is_of_loading_torch(each) for each in causes):
        root = " ".join(str(causes[-1]).split()) or type(causes[-1]).__name__
        return (
            f"PyTorch is installed but cannot be loaded: {root}: install what is missing, or PyTorch again "
            "(pip install --force-reinstall torch); libraries outside of it are found by LD_LIBRARY_PATH "
            "(`mindspeed-lite doctor` says more)"
        )
    if type(error).__module__.partition(".")[0] == __package__:
        return str(error) or None
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        top = error.name.partition(".")[0]
        # With a part of it present, what is missing is between the script and that release.
        if top in _DEPENDENCIES and error.name in (top, f"{top}.core") and not _is_loaded(top):
            return f"{_DEPENDENCIES[top]} (`mindspeed-lite doctor` says what else is missing)"
    return lost_rank.describe(error)


def _is_loaded(package: str) -> bool:
    return getattr(sys.modules.get(f"{package}.core", sys.modules.get(package)), "__file__", None) is not None


def _is_of_loading_torch(error: BaseException) -> bool:
    """Whether `import torch` raised it: it passed through torch's own code, and there is no torch now."""
    if not isinstance(error, (ImportError, OSError, RuntimeError)) or "torch" in sys.modules:
        return False
    frames = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(name.partition(".")[0] == "torch" for name in frames)


def _causes(error: BaseException) -> list[BaseException]:
    """The error, what caused it, and so on."""
    found = [error]
    while found[-1].__cause__ is not None and found[-1].__cause__ not in found:
        found.append(found[-1].__cause__)
    return found


def install() -> None:
    """Put the hook in place; again is no change."""
    global _before, _is_on
    _is_on = True
    if _before is None:
        _before, sys.excepthook = sys.excepthook, _hook


def remove() -> None:
    """Take the hook back; where another party, such as torch.distributed, has wrapped it, it passes everything on."""
    global _before, _is_on
    _is_on = False
    if _before is not None and sys.excepthook is _hook:
        sys.excepthook, _before = _before, None


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    before = _before or sys.__excepthook__
    text = describe(error) if _is_on else None
    if text is None:
        before(kind, error, trace)
        return
    if wants_traceback():
        # torch.distributed's hook keeps what is written until this one returns, which it does not.
        with contextlib.redirect_stderr(_stream()):
            before(kind, error, trace)
    else:
        if before is not sys.__excepthook__:
            before(kind, error, trace)
        if lost_rank.describe(error) is None:
            tell(text)
        else:
            _tell_first(text)
    if not hasattr(sys, "ps1"):  # a prompt stays
        raise SystemExit(EXIT_CODE)


def wants_traceback() -> bool:
    """Whether the environment asks for the traceback of this package's errors."""
    return os.environ.get(TRACEBACK_VARIABLE, "").strip().lower() not in ("", "0", "false", "no", "off")


def tell(text: str, program: str = "mindspeed_lite", stream: Any = None) -> None:
    """Print an error that ends this process on `stream` or stderr, once for all ranks that end with the same one.

    Rank 0 speaks where it is among them. An error that not all ranks share is printed with the rank.
    """
    _flush()
    rank, world = _number("RANK", 0), _number("WORLD_SIZE", 1)
    store = _store(world)
    if store is None:
        _print(program, text, rank if world > 1 else None, stream)
        return
    ranks = _Ranks(store, text, rank, world)
    try:
        is_speaker, is_shared = ranks.agree()
    except Exception:  # the store has gone with the rank that served it, which has spoken
        if rank != 0 and ranks.was_seen:
            return
        is_speaker, is_shared = True, False
    if is_speaker:
        _print(program, text, None if is_shared else rank, stream)
        ranks.spoken()
    else:
        ranks.wait_until_spoken()


def _tell_first(text: str) -> None:
    """Print an error that follows from the end of another rank, unless a rank has printed one.

    At once: a launcher ends the other ranks as soon as it sees that one has ended.
    """
    _flush()
    store = _store(_number("WORLD_SIZE", 1))
    try:
        is_first = store is None or store.add(_PREFIX, 1) == 1
    except Exception:  # the store has gone with the rank that served it
        is_first = True
    if is_first:
        _print("mindspeed_lite", text, _number("RANK", 0))


class _Ranks:
    """Which of the ranks with one error prints it."""

    def __init__(self, store: Any, text: str, rank: int, world: int) -> None:
        self._store = store
        self._rank, self._world = rank, world
        self._key = f"{_PREFIX}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        self.was_seen = False

    def agree(self) -> tuple[bool, bool]:
        """Whether this rank prints, and whether all ranks have the error."""
        self._store.add(_PREFIX, 1)
        if self._rank == 0:
            self._store.set(f"{self._key}/first", "1")
            return True, self._wait(lambda: self._store.add(f"{self._key}/others", 0) >= self._world - 1)
        if self._wait(lambda: self._store.check([f"{self._key}/first"])):
            self.was_seen = True
            self._store.add(f"{self._key}/others", 1)
            return False, True
        return self._store.add(f"{self._key}/speakers", 1) == 1, False

    def spoken(self) -> None:
        try:
            self._store.set(f"{self._key}/spoken", "1")
        except Exception:
            return

    def wait_until_spoken(self) -> None:
        # The launcher ends the other ranks as soon as one has ended.
        try:
            self._wait(lambda: self._store.check([f"{self._key}/spoken"]), times=2)
        except Exception:
            return

    def _wait(self, condition: Any, times: int = 1) -> bool:
        deadline = time.monotonic() + times * _PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL)
        return True


_PREFIX = "mindspeed_lite/error"


def _store(world: int) -> Any:
    """Where the ranks of this job meet: torchrun's own store, else that of the process group; None without one."""
    if world < 2:
        return None
    try:
        dist: Any = importlib.import_module("torch.distributed")
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            found: Any = dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                timeout=timedelta(seconds=_PATIENCE),
            )
        elif dist.is_available() and dist.is_initialized():
            found = dist.distributed_c10d._get_default_store()
            if _is_gone(found, dist):
                return None
        else:
            return None
        attempt = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"
        return dist.PrefixStore(attempt, found)
    except Exception:
        return None


def _is_gone(store: Any, dist: Any) -> bool:
    """Whether the rank that served a store has ended; torch prints a page of frames if it is asked for something."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return False
    try:
        socket.create_connection((store.host, store.port), timeout=1.0).close()
    except OSError:
        return True
    return False


def _number(variable: str, default: int) -> int:
    try:
        return int(os.environ.get(variable, default))
    except ValueError:
        return default


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue


def _stream() -> Any:
    return sys.__stderr__ if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None else sys.stderr


def _print(program: str, text: str, rank: int | None, stream: Any = None) -> None:
    where = "" if rank is None else f" on rank {rank}"
    stream = _stream() if stream is None else stream
    try:
        stream.write(f"{program}: error{where}: {text}\n")
        stream.flush()
    except (OSError, ValueError, AttributeError):
        return


__all__ = ["EXIT_CODE", "TRACEBACK_VARIABLE", "describe", "install", "remove", "tell", "wants_traceback"]
