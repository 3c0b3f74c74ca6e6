"""Recognizes errors of torch.distributed that say that another rank has ended or does not answer.

gloo, NCCL, HCCL and the store each say it in words of their own, from a collective or from the wait for one. Whatever
feature or part of Megatron sent the message, `describe` makes one line of it. A job whose launcher ends the other ranks
first, or whose NCCL watchdog ends the process, raises no such error.
"""

from __future__ import annotations

import re
import traceback
from types import FrameType

# What speaks, and its words for a peer that ended or does not answer.
_SPEAKERS = ("gloo", "nccl", "hccl", "tcpstore", "monitoredbarrier")
_SIGNS = (
    "connection closed",
    "connection reset",
    "connection was likely closed",
    "connection refused",
    "broken pipe",
    "timed out",
    "timeout",
    "remote process",
    "remote error",
    "failed to recv",
    "failed to pass monitoredbarrier",
    "aborted",
)
_LENGTH = 160


def describe(error: BaseException) -> str | None:
    """One line about the rank that is lost, or None for an error that is about none.

    Raised while another error was handled, such as by a barrier in `finally`, it follows from that one, which has to be
    seen.
    """
    first = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if first is not None and describe(first) is None:
        return None
    text = str(error)
    words = text.lower()
    speaks = type(error).__name__.startswith("Dist") or any(each in words for each in _SPEAKERS)
    if not isinstance(error, RuntimeError) or not speaks or not any(each in words for each in _SIGNS):
        return None
    # Of gloo: [where in its source] what happened.
    reason = re.sub(r"^\[[^\]]*\.cc:\d+\]\s*", "", text.strip()).partition("\n")[0].rstrip(". ")
    return (
        f"another rank has ended or does not answer: {_place(error)} failed ({reason[:_LENGTH]}); look for what that "
        "rank said last. A rank that is only slow needs a longer --distributed-timeout-minutes; "
        "MINDSPEED_LITE_TRACEBACK=1 shows the traceback."
    )


def _place(error: BaseException) -> str:
    """The collective, and the line that called it."""
    frames = list(traceback.walk_tb(error.__traceback__))
    names = [frame.f_code.co_name for frame, _ in frames if _module(frame).startswith("torch.distributed")]
    public = [name for name in names if not name.startswith("_") and name != "wrapper"]
    what = public[-1] if public else "waiting for a message"
    callers = [each for each in frames if not _module(each[0]).startswith(("torch.", "contextlib"))]
    if not callers:
        return what
    frame, line = callers[-1]
    return f"{what} in {_module(frame)}:{line} ({frame.f_code.co_name})"


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name
