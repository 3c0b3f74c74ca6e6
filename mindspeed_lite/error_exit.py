"""Ends a process with one line and exit code 2 on this package's errors or a lost rank.

Also for missing dependencies; other exceptions go to the previous hook. Equal errors are printed once per node.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from mindspeed_lite.text_layout import columns, wrapped

TRACEBACK_VARIABLE = "MINDSPEED_LITE_TRACEBACK"
EXIT_CODE = 2

_HEAD_START = 1.0

_DEPENDENCIES = {
    "torch": "PyTorch is not installed: pip install torch",
    "megatron": "megatron.core cannot be found: install it (pip install megatron-core) or put a Megatron-LM checkout "
    "first on PYTHONPATH",
    "wrapt": "wrapt is not installed: pip install wrapt",
    "packaging": "packaging is not installed: pip install packaging",
    "rich": "rich is not installed: pip install rich",
}

# An error of a lost rank names one of the first and contains one of the second.
_BACKENDS = ("gloo", "nccl", "hccl", "tcpstore", "monitoredbarrier")
_SIGNS = (
    *("connection closed", "connection reset", "connection was likely closed", "connection refused", "broken pipe"),
    *("timed out", "timeout", "remote process", "remote error", "failed to recv", "failed to pass monitoredbarrier"),
    "aborted",
)

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
        return str(error) or None
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        package = error.name.partition(".")[0]
        loaded = sys.modules.get(f"{package}.core", sys.modules.get(package))
        is_absent = getattr(loaded, "__file__", None) is None
        # Partly present: the script does not fit that release.
        if is_absent and package in _DEPENDENCIES and error.name in (package, f"{package}.core"):
            return f"{_DEPENDENCIES[package]} (`mindspeed-lite doctor` says what else is missing)"
    return describe_lost_rank(error)


def describe_lost_rank(error: BaseException) -> str | None:
    """One line about an ended or unresponsive rank, from an error of torch.distributed; None for other errors.

    Processes ended by launcher or NCCL watchdog raise no such error.
    """
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
        f"another rank has ended or does not answer: {_place(error)} failed ({reason[:160]}); look for "
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
    """Print the error that ends this process, once for all ranks of a node with the same one.

    Rank 0 prints first, since launchers may show no other rank.

    Args:
        follows: another rank caused it: print at once, unless some rank has printed an error.
    """
    for each in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            each.flush()
    is_alone, rank = os.environ.get("WORLD_SIZE", "1") == "1", os.environ.get("RANK", "0")
    if not is_alone:
        if not follows and os.environ.get("LOCAL_RANK", rank) != "0":
            time.sleep(_HEAD_START)
        is_first = _claim("any")
        if not (is_first if follows else _claim(text)):
            return
    where = "" if is_alone or (rank == "0" and not follows) else f" on rank {rank}"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream = _stderr() if stream is None else stream
        line = f"{program}: error{where}: {text}"
        # A log has one line, whatever COLUMNS says.
        stream.write("\n".join(wrapped(line, columns(stream)) if stream.isatty() else [line]) + "\n")
        stream.flush()


def _claim(what: str) -> bool:
    """Whether this launcher's processes on this node have not claimed `what` in the last minute."""
    names = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    launch = [str(os.getppid()), *(os.environ.get(name, "") for name in names)]
    with contextlib.suppress(OSError):  # containers reuse process ids: add the start time
        launch += Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19:20]
    key = hashlib.sha256("\n".join([*launch, what]).encode()).hexdigest()[:16]
    path = os.path.join(tempfile.gettempdir(), f"mindspeed_lite-error-{key}")
    with contextlib.suppress(OSError):
        if time.time() - os.path.getmtime(path) > 60.0:
            os.unlink(path)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:
        pass
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
