"""Recognizes torch.distributed errors caused by an ended or unresponsive rank.

Processes ended by launcher or NCCL watchdog raise no such error.
"""

from __future__ import annotations

import re
import traceback

# A message names one of the first and contains one of the second.
_BACKENDS = ("gloo", "nccl", "hccl", "tcpstore", "monitoredbarrier")
_SIGNS = (
    *("connection closed", "connection reset", "connection was likely closed", "connection refused", "broken pipe"),
    *("timed out", "timeout", "remote process", "remote error", "failed to recv", "failed to pass monitoredbarrier"),
    "aborted",
)
_MAX_CHARACTERS = 160


def describe(error: BaseException) -> str | None:
    """One line about the lost rank; None for other or nested errors."""
    first = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if first is not None and describe(first) is None:
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
