"""A check of the self-test, and how one ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

OK, SLOWER, FALLBACK, FAILED = "ok", "slower", "fallback", "failed"
GROUPS = ("device", "numerics", "speed")


@dataclass
class Outcome:
    """How a check ended; a check that raises has failed with what it raises."""

    text: str
    status: str = OK
    figures: list[dict[str, Any]] = field(default_factory=list)


class Check(NamedTuple):
    """One thing to find out."""

    group: str
    name: str
    run: Callable[[], Outcome]
