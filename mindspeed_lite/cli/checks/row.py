"""A finding of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Row:
    """One finding; `fix` says how to get what is missing."""

    check: str
    status: Status
    text: str
    fix: str = ""


def ok(check: str, text: str) -> Row:
    """As it should be."""
    return Row(check, "ok", text)


def note(check: str, text: str, fix: str = "") -> Row:
    """Worth knowing; training starts all the same."""
    return Row(check, "note", text, fix)


def problem(check: str, text: str, fix: str) -> Row:
    """In the way of training; `fix` says what to do."""
    return Row(check, "problem", text, fix)


def said(error: BaseException) -> str:
    """An exception as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
