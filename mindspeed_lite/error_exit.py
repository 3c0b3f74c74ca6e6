"""Ends a process with one line and exit code 2 on this package's errors or a lost rank.

Also for missing dependencies; other exceptions go to the previous hook. Equal errors are printed once across ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import os
import re
import socket
import sys
import time
import traceback
from datetime import timedelta
from types import TracebackType
from typing import Any

TRACEBACK_VARIABLE = "MINDSPEED_LITE_TRACEBACK"
EXIT_CODE = 2

_PATIENCE = 5.0
_POLL = 0.02
_KEY = "mindspeed_lite/error"

_DEPENDENCIES = {
    "torch": "PyTorch is not installed: pip install torch",
    "megatron": "megatron.core cannot be found: install it (pip install megatron-core) or put a Megatron-LM checkout "
    "first on PYTHONPATH",
    "wrapt": "wrapt is not installed: pip install wrapt",
    "packaging": "packaging is not installed: pip install packaging",
}

# A message names one of the first and contains one of the second.
_BACKENDS = ("gloo", "nccl", "hccl", "tcpstore", "monitoredbarrier")
_SIGNS = (
    *("connection closed", "connection reset", "connection was likely closed", "connection refused", "broken pipe"),
    *("timed out", "timeout", "remote process", "remote error", "failed to recv", "failed to pass monitoredbarrier"),
    "aborted",
)
_MAX_CHARACTERS = 160

_before: Any = None
_is_on = False


def is_set(variable: str) -> bool:
    """Whether a variable is set to anything but "", 0, false, no or off."""
    return os.environ.get(variable, "").strip().lower() not in ("", "0", "false", "no", "off")


def wants_traceback() -> bool:
    return is_set(TRACEBACK_VARIABLE)


def describe(error: BaseException) -> str | None:
    """One line for the user; None for errors of other hooks."""
    if type(error).__module__.partition(".")[0] == __package__:
        return _broken_torch(error) or str(error) or None
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        package = error.name.partition(".")[0]
        loaded = sys.modules.get(f"{package}.core", sys.modules.get(package))
        is_absent = getattr(loaded, "__file__", None) is None
        # Partly present: the script does not fit that release.
        if is_absent and package in _DEPENDENCIES and error.name in (package, f"{package}.core"):
            return f"{_DEPENDENCIES[package]} (`mindspeed-lite doctor` says what else is missing)"
    return _broken_torch(error) or describe_lost_rank(error)


def describe_lost_rank(error: BaseException) -> str | None:
    """One line about a torch.distributed error that an ended or unresponsive rank causes; None for other errors."""
    first = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if first is not None and describe_lost_rank(first) is None:
        return None
    text = str(error)
    words = text.lower()
    is_distributed = type(error).__name__.startswith("Dist") or any(each in words for each in _BACKENDS)
    if not (isinstance(error, RuntimeError) and is_distributed and any(each in words for each in _SIGNS)):
        return None
    # gloo begins with "[file.cc:line]".
    reason = re.sub(r"^\[[^\]]*\.cc:\d+\]\s*", "", text.strip()).partition("\n")[0].rstrip(". ")
    return (
        f"another rank has ended or does not answer: {_place(error)} failed ({reason[:_MAX_CHARACTERS]}); look for "
        "what that rank said last. A rank that is only slow needs a longer --distributed-timeout-minutes; "
        "MINDSPEED_LITE_TRACEBACK=1 shows the traceback."
    )


def _place(error: BaseException) -> str:
    collective, caller = "waiting for a message", ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module.startswith("torch.distributed") and not name.startswith("_") and name != "wrapper":
            collective = name
        elif not module.startswith(("torch.", "contextlib")):
            caller = f" in {module}:{line} ({name})"
    return collective + caller


def _broken_torch(error: BaseException) -> str | None:
    if "torch" in sys.modules:
        return None
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None and chain[-1].__cause__ not in chain:
        chain.append(chain[-1].__cause__)
    names = [
        frame.f_globals.get("__name__", "")
        for each in chain
        if isinstance(each, (ImportError, OSError, RuntimeError))
        for frame, _ in traceback.walk_tb(each.__traceback__)
    ]
    if not any(name.partition(".")[0] == "torch" for name in names):
        return None
    root = " ".join(str(chain[-1]).split()) or type(chain[-1]).__name__
    return (
        f"PyTorch is installed but cannot be loaded: {root}: install what is missing, or PyTorch again "
        "(pip install --force-reinstall torch); libraries outside of it are found by LD_LIBRARY_PATH "
        "(`mindspeed-lite doctor` says more)"
    )


def install() -> None:
    global _before, _is_on
    _is_on = True
    if _before is None:
        _before, sys.excepthook = sys.excepthook, _hook


def remove() -> None:
    """Remove the hook; if wrapped by a third party it stays and passes everything on."""
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
        # torch.distributed's hook buffers until this one returns, which it does not.
        with contextlib.redirect_stderr(_stderr()):
            before(kind, error, trace)
    else:
        if before is not sys.__excepthook__:
            before(kind, error, trace)
        print_error(text, follows=describe_lost_rank(error) is not None)
    if not hasattr(sys, "ps1"):
        raise SystemExit(EXIT_CODE)


def print_error(text: str, program: str = "mindspeed_lite", stream: Any = None, follows: bool = False) -> None:
    """Print the error that ends this process, once for all ranks with the same one.

    Rank 0 prints first, since launchers may show no other rank.

    Args:
        follows: another rank caused it: print at once, unless some rank has printed an error.
    """
    for each in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            each.flush()
    is_alone, rank = os.environ.get("WORLD_SIZE", "1") == "1", os.environ.get("RANK", "0")
    where = "" if is_alone or (rank == "0" and not follows) else f" on rank {rank}"
    store, key = _store(), f"{_KEY}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    prints = True
    with contextlib.suppress(Exception):  # the store may have gone with its rank
        is_first = store is None or store.add(_KEY, 1) == 1
        if follows:
            prints = is_first
        elif store is not None and rank != "0":
            prints = not _appears(store, key) and store.add(f"{key}/ranks", 1) == 1
    if prints:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream = _stderr() if stream is None else stream
            stream.write(f"{program}: error{where}: {text}\n")
            stream.flush()
        if store is not None and rank == "0" and not follows:
            with contextlib.suppress(Exception):
                store.set(key, "1")
                time.sleep(10 * _POLL)  # this process may serve the store


def _appears(store: Any, key: str) -> bool:
    deadline = time.monotonic() + _PATIENCE
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True


def _store() -> Any:
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    try:
        dist: Any = importlib.import_module("torch.distributed")
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            found: Any = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=_PATIENCE))
        elif dist.is_available() and dist.is_initialized():
            found = dist.distributed_c10d._get_default_store()
            if not _is_served(found, dist):
                return None
        else:
            return None
        attempt = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"
        return dist.PrefixStore(attempt, found)
    except Exception:
        return None


def _is_served(store: Any, dist: Any) -> bool:
    """Whether the store's server lives; asking a dead one prints a page of frames."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        try:
            socket.create_connection((store.host, store.port), timeout=1.0).close()
        except OSError:
            return False
    return True


def _stderr() -> Any:
    return sys.__stderr__ if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None else sys.stderr


__all__ = [
    "EXIT_CODE",
    "TRACEBACK_VARIABLE",
    "describe",
    "describe_lost_rank",
    "install",
    "is_set",
    "print_error",
    "remove",
    "wants_traceback",
]
