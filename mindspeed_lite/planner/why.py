"""Explains why a layout is not the best: constraint, memory or time."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from . import candidates
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
        excluded: why there is none, or empty.
    """

    asked: str
    result: Result
    smallest: FoundLayout | None
    excluded: str


@dataclass(frozen=True)
class Question:
    """Sizes and memory options of the layouts asked about."""

    sizes: Mapping[str, int]
    options: Mapping[str, str]

    def accepts(self, candidate: LayoutCandidate) -> bool:
        if candidate.states == "swapped" and "states" not in self.options:
            return False
        return all(_SIZES[name](candidate) == number for name, number in self.sizes.items()) and all(
            getattr(candidate, name) == value for name, value in self.options.items()
        )


def question(text: str) -> Question:
    """Reads `PP8 TP4 recompute full`; raises ArgumentError."""
    words = text.replace(",", " ").split()
    sizes: dict[str, int] = {}
    options: dict[str, str] = {}
    place = 0
    while place < len(words):
        word = words[place]
        size = re.fullmatch(r"([A-Za-z]+)=?(\d+)", word)
        following = words[place + 1] if place + 1 < len(words) else ""
        if size and size[1].upper() in _SIZES:
            sizes[size[1].upper()] = int(size[2])
        elif word in ("recompute", "states") and following in (RECOMPUTE if word == "recompute" else STATES):
            options[word] = following
            place += 1
        else:
            raise ArgumentError(
                f"--why {text!r}: {word!r} is none of {', '.join(f'{name}N' for name in _SIZES)}, recompute "
                f"{'|'.join(RECOMPUTE)} and states {'|'.join(STATES)}"
            )
        place += 1
    if not sizes and not options:
        raise ArgumentError("--why names a layout, such as 'PP8' or 'TP4 PP2 recompute full'")
    return Question(sizes, options)


def ask(search: Search, text: str) -> Answer:
    asked = question(text)
    vpp = asked.sizes.get("VPP", 0)
    result = search.run(1, asked.accepts, vpp)
    smallest = None
    if not result.best and result.too_large:
        frugal = [
            each
            for each in search.space(vpp)
            if asked.accepts(each) and each.recompute == asked.options.get("recompute", "full")
        ]
        least = min(each.micro_batch for each in frugal)
        sizes: list[tuple[float, int, LayoutCandidate]] = []
        for each in frugal:
            try:
                if each.micro_batch == least:
                    full, training = search.training(each)
                    sizes.append((search.least_bytes(full, training), len(sizes), full))
            except ArgumentError:
                continue
        if sizes:
            smallest = search.evaluate(min(sizes)[2])
    return Answer(text, result, smallest, "" if result.considered else _excluded(search, asked.sizes))


def _excluded(search: Search, sizes: Mapping[str, int]) -> str:
    """The fewest of these sizes that no layout has, with their rules."""
    base, node = search.base(1), min(search.pricer.device.ranks_per_node, candidates.MOST_TP)
    rules = {
        "TP": f"TP divides {base.num_attention_heads} heads and the devices, and is at most {node}",
        "PP": f"PP divides the devices, and is at most {base.num_layers} layers, an embedding and a loss",
        "VPP": "VPP needs PP above 1, micro-batches in multiples of PP, and a layer for each stage",
        "CP": f"CP is a power of 2 that leaves a rank {candidates.SHORTEST} tokens",
        "EP": f"EP divides {base.num_experts} experts and a stage's devices",
        "MBS": f"MBS is 1, 2, 4, 8 or 16, and with data parallelism divides a batch of {base.global_batch_size}",
    }
    every = list(search.layouts(sizes.get("VPP", 0)))
    for count in range(1, len(sizes) + 1):
        for names in itertools.combinations(sizes, count):
            if not any(all(_SIZES[name](each) == sizes[name] for name in names) for each in every):
                which = " with ".join(f"{name}{sizes[name]}" for name in names)
                return f"{search.world_size} devices have no {which}: {'; '.join(rules[name] for name in names)}"
    return ""
