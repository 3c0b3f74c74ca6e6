"""The ways to run a layer, each part of it kept, computed again or moved to the host, as bytes and seconds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .layer_records import (
    ACTIVATION,
    ATTENTION,
    BACKWARD,
    EXPERTS,
    INPUT_NORM,
    INSIDE,
    LAYER,
    MLP,
    MLP_NORM,
    NONE,
    SHARED,
    SHARED_ACTIVATION,
    LayerRecord,
    SavedStorage,
)

EARLY, LATE = (INPUT_NORM, ATTENTION), (MLP_NORM, ACTIVATION, EXPERTS, SHARED_ACTIVATION, SHARED, MLP)
NORMS = {INPUT_NORM, MLP_NORM}
# Of these the output is released once it has been used; of other parts what they save inside.
RELEASED = {*NORMS, ACTIVATION, SHARED_ACTIVATION}
# What is moved as one, with all that is inside of it.
MOVABLE = (INPUT_NORM, ATTENTION, MLP_NORM, MLP)


@dataclass(frozen=True)
class Way:
    """A way to run a layer.

    Attributes:
        again: the parts that are computed again in the backward pass.
        kept: bytes of a micro-batch. kept_late: of these, what the MLP's half of the layer keeps.
        back_late, back_early: bytes that are back while the backward pass of that half runs.
        seconds: that it computes longer for each micro-batch.
        swapped: the parts whose activations wait in host memory. moved: bytes of a micro-batch that do.
    """

    again: frozenset[str]
    kept: int
    kept_late: int
    back_late: int
    back_early: int
    seconds: float
    swapped: frozenset[str] = frozenset()
    moved: int = 0


@dataclass(frozen=True)
class Transfers:
    """How copies to the host and back run beside the layers.

    A layer's copies to the host run in the forward pass of the layer behind it, those back in that one's backward pass.

    Attributes:
        followers: the layer behind each one in the same pass, or NONE.
        forward, backward: seconds of each layer's passes, without what runs again.
        out, back: bytes a second.
    """

    followers: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    out: float
    back: float

    def before(self, layer: int) -> int:
        """The layer that a layer follows, or NONE."""
        return self.followers.index(layer) if layer in self.followers else NONE

    def exposed(self, chosen: Sequence[Way]) -> tuple[float, ...]:
        """Seconds for each layer that its copies take longer than the compute they hide behind."""
        return tuple(
            0.0
            if behind == NONE or not way.moved
            else max(0.0, way.moved / self.out - self.forward[behind])
            + max(0.0, way.moved / self.back - self.backward[behind] - chosen[behind].seconds)
            for way, behind in zip(chosen, self.followers, strict=True)
        )


def transfers(records: Sequence[LayerRecord], out: float, back: float) -> Transfers:
    """Copies at so many bytes a second beside layers with these records."""
    forward = tuple(each.cost(LAYER) for each in records)
    # A backward pass that was not seen takes at least as long as the forward pass.
    backward = tuple(each.cost(BACKWARD) or each.cost(LAYER) for each in records)
    return Transfers(tuple(each.follower for each in records), forward, backward, out, back)


def ways(
    record: LayerRecord, can: frozenset[str], swappable: frozenset[str] = frozenset(), smallest: int = 0
) -> list[Way]:
    """All ways to run a layer, without those that another one beats.

    Args:
        can: the parts that may be computed again.
        swappable: the parts that may be moved, storages from `smallest` bytes on.
    """
    parts = [part for part in (*EARLY, *LATE) if part in can and record.cost(part) > 0]
    movable = [] if record.follower == NONE else [part for part in MOVABLE if part in swappable]
    found: dict[tuple[float, ...], Way] = {}
    for again in _subsets(parts):
        if again & _inside(again):
            continue
        # Experts that run again keep their inputs on the device.
        stay = again | ({MLP} if again & {EXPERTS, SHARED} else set())
        for swapped in _subsets([part for part in movable if part not in stay]):
            way = _way(record, again, swapped, smallest)
            found.setdefault(_measures(way), way)
    if LAYER in can:
        way = _whole(record)
        found.setdefault(_measures(way), way)
    return _unbeaten(found)


def _inside(parts: frozenset[str]) -> set[str]:
    """The parts inside of these."""
    return set[str]().union(*(INSIDE.get(part, ()) for part in parts))


def _unbeaten(found: Mapping[tuple[float, ...], Way]) -> list[Way]:
    """The ways that no other one equals in all measures and beats in one."""
    import numpy

    measures = numpy.array(list(found))
    # No two have the same measures, so only a way itself is at least as good in all of them.
    return [
        way for mine, way in zip(measures, found.values(), strict=True) if (measures <= mine).all(axis=1).sum() == 1
    ]


def _subsets(parts: Sequence[str]) -> Iterator[frozenset[str]]:
    for count in range(len(parts) + 1):
        yield from map(frozenset, itertools.combinations(parts, count))


def _measures(way: Way) -> tuple[float, ...]:
    return way.kept, way.seconds, way.moved, way.back_late, way.back_early, -way.kept_late


def _way(record: LayerRecord, again: frozenset[str], swapped: frozenset[str], smallest: int) -> Way:
    kept = kept_late = late = early = moved = 0
    for each in record.storages:
        if each.is_shared:
            continue
        if each.parts and _is_gone(each, again):
            is_late = bool(({*each.parts, each.leaves} - {""}) & set(LATE))
            late, early = (late + each.bytes, early) if is_late else (late, early + each.bytes)
        elif each.bytes >= smallest and _moves(each, record, again, swapped):
            moved += each.bytes
        elif each.parts or each.enters in again:
            kept += each.bytes
            kept_late += each.bytes if each.parts <= set(LATE) and each.enters != MLP_NORM else 0
    seconds = sum(record.cost(part) for part in again)
    return Way(again, kept, kept_late, late, early, seconds, swapped if moved else frozenset(), moved)


def _is_gone(each: SavedStorage, again: frozenset[str]) -> bool:
    """Whether a storage need not be kept; what a part starts from stays, unless it is inside one that runs again."""
    if each.leaves in again & RELEASED:
        return True
    if each.enters in again or each.enters in NORMS or each.leaves in NORMS:
        return False
    return any(each.parts <= {part} | INSIDE.get(part, set()) for part in again)


def _moves(each: SavedStorage, record: LayerRecord, again: frozenset[str], swapped: frozenset[str]) -> bool:
    """Whether the host holds a storage: nothing but parts that are moved saves it, and no caller holds it."""
    # What a norm or an activation is computed again from is a leaf, which autograd itself holds.
    if each.enters and (each.enters in again or (each.enters == INPUT_NORM and record.is_first)):
        return False
    return bool(each.parts) and each.parts <= swapped | _inside(swapped)


def _whole(record: LayerRecord) -> Way:
    kept = sum(each.bytes for each in record.storages if each.enters == INPUT_NORM and not each.is_shared)
    back = record.bytes - kept
    return Way(frozenset({LAYER}), kept, 0, back, back, record.cost(LAYER))
