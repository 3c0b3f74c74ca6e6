"""Generates balanced `--pipeline-model-parallel-layout` values.

E embedding, t layer, m MTP layer, L loss.
"""

from __future__ import annotations

from collections.abc import Sequence


def balanced(layers: Sequence[float], further: float, count: int, output: float, stages: int) -> str | None:
    """Layout with the fastest slowest stage; None if there are too few layers.

    Args:
        layers: relative seconds of each.
        further: of an MTP layer; `count` of them stay together.
        output: of output layer and loss.
        stages: including virtual ones.
    """
    units = [*layers, *([further * count] if count else []), output]
    # The loss and MTP may each be a stage.
    if stages > len(units) or stages < 1:
        return None
    low, high = max(units), sum(units)
    for _ in range(40):
        middle = (low + high) / 2
        if len(_cut(units, middle)) <= stages:
            high = middle
        else:
            low = middle
    cuts = _spread(_cut(units, high * (1 + 1e-9)), stages)
    if cuts is None:
        return None
    letters = ["t"] * len(layers) + (["m" * count] if count else []) + ["L"]
    parts, begin = [], 0
    for size in cuts:
        parts.append("".join(letters[begin : begin + size]))
        begin += size
    return "|".join(["E" + parts[0], *parts[1:]])


def _cut(units: Sequence[float], most: float) -> list[int]:
    """Units per stage, filled from the end; the first stage embeds and gets the rest."""
    sizes: list[int] = []
    room = 0.0
    for unit in reversed(units):
        if not sizes or unit > room:
            sizes.append(0)
            room = most
        sizes[-1] += 1
        room -= unit
    return sizes[::-1]


def _spread(sizes: list[int], stages: int) -> list[int] | None:
    found = list(sizes)
    while len(found) < stages:
        place = max(range(len(found)), key=lambda each: found[each])
        if found[place] < 2:
            return None
        half = found[place] // 2
        found[place : place + 1] = [found[place] - half, half]
    return found
