"""Explains why a layout is not the best: constraint, memory or time."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from .candidates import RECOMPUTE, STATES, LayoutCandidate
from .search import FoundLayout, Result, Search
from .training import ArgumentError

_SIZES = {
    "TP": lambda each: each.tp, "PP": lambda each: each.pp, "VPP": lambda each: each.vpp, "CP": lambda each: each.cp,
    "EP": lambda each: each.ep, "MBS": lambda each: each.micro_batch,
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """Result for the layouts asked about.

    Attributes:
        result: of the search among them.
        smallest: if none fits, the runnable one with least memory.
    """

    asked: str
    result: Result
    smallest: FoundLayout | None


def condition(text: str) -> Callable[[LayoutCandidate], bool]:
    """Predicate for `PP8 TP4 recompute full`; raises ArgumentError."""
    words = text.replace(",", " ").split()
    tests: list[Callable[[LayoutCandidate], bool]] = []
    place = 0
    while place < len(words):
        word = words[place]
        size = re.fullmatch(r"([A-Za-z]+)=?(\d+)", word)
        following = words[place + 1] if place + 1 < len(words) else ""
        if size and size[1].upper() in _SIZES:
            tests.append(_sized(size[1].upper(), int(size[2])))
        elif word in ("recompute", "states") and following in (RECOMPUTE if word == "recompute" else STATES):
            tests.append(_named(word, following))
            place += 1
        else:
            raise ArgumentError(
                f"--why {text!r}: {word!r} is none of {', '.join(f'{name}N' for name in _SIZES)}, recompute "
                f"{'|'.join(RECOMPUTE)} and states {'|'.join(STATES)}"
            )
        place += 1
    if not tests:
        raise ArgumentError("--why names a layout, such as 'PP8' or 'TP4 PP2 recompute full'")
    return lambda candidate: all(test(candidate) for test in tests)


def ask(search: Search, text: str) -> Answer:
    wanted = condition(text)
    result = search.run(1, wanted)
    smallest = None
    if not result.best and result.too_large:
        frugal = [
            each for each in search.space() if wanted(each) and each.recompute == "full" and each.micro_batch == 1
        ]
        sizes: list[tuple[float, int, LayoutCandidate]] = []
        for each in frugal:
            try:
                full, training = search.training(each)
                sizes.append((search.least_bytes(training), len(sizes), full))
            except ArgumentError:
                continue
        if sizes:
            smallest = search.evaluate(min(sizes)[2])
    return Answer(text, result, smallest)


def _sized(name: str, number: int) -> Callable[[LayoutCandidate], bool]:
    return lambda candidate: _SIZES[name](candidate) == number


def _named(name: str, value: str) -> Callable[[LayoutCandidate], bool]:
    return lambda candidate: getattr(candidate, name) == value
