"""Options to run a layer: each part kept, recomputed or offloaded, in bytes and seconds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from . import offload
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
# Recomputing these releases their output after use; other parts release what they save inside.
RELEASED = {*NORMS, ACTIVATION, SHARED_ACTIVATION}
# Offloaded as a whole, with nested parts.
MOVABLE = (INPUT_NORM, ATTENTION, MLP_NORM, MLP)


@dataclass(frozen=True)
class LayerOption:
    """One way to run a layer; bytes and additional seconds per micro-batch.

    again: parts recomputed in backward.
    kept_late: part of `kept` in the MLP's half of the layer.
    back_late, back_early: bytes recomputed while the backward pass of that half runs.
    swapped: parts with offloaded activations. moved: their bytes.
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
    """Host copies of a layer, overlapped with both passes of the layer after it.

    followers: next layer of each in the same pass, or NONE.
    forward, backward: seconds of each layer, without recomputation.
    out, back: bytes per second.
    """

    followers: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    out: float
    back: float

    def exposed(self, chosen: Sequence[LayerOption]) -> tuple[float, ...]:
        """Seconds per layer by which copies exceed compute."""
        return tuple(
            0.0
            if follower == NONE or not option.moved
            else max(0.0, option.moved / self.out - self.forward[follower])
            + max(0.0, option.moved / self.back - self.backward[follower] - chosen[follower].seconds)
            for option, follower in zip(chosen, self.followers, strict=True)
        )


def transfers(records: Sequence[LayerRecord], out: float, back: float) -> Transfers:
    forward = tuple(each.cost(LAYER) for each in records)
    # Backward takes at least as long as forward.
    backward = tuple(each.cost(BACKWARD) or each.cost(LAYER) for each in records)
    return Transfers(tuple(each.follower for each in records), forward, backward, out, back)


def layer_options(
    record: LayerRecord, can: frozenset[str], swappable: frozenset[str] = frozenset()
) -> list[LayerOption]:
    """All non-dominated ways to run a layer; can, swappable: parts that may be recomputed, offloaded."""
    parts = [part for part in (*EARLY, *LATE) if part in can and record.cost(part) > 0]
    movable = [] if record.follower == NONE else [part for part in MOVABLE if part in swappable]
    found: dict[tuple[float, ...], LayerOption] = {}
    for again in _subsets(parts):
        if again & _inside(again):
            continue
        stay = again | ({MLP} if again & {EXPERTS, SHARED} else set())
        for swapped in _subsets([part for part in movable if part not in stay]):
            option = _option(record, again, swapped)
            found.setdefault(_measures(option), option)
    if LAYER in can:
        option = _whole_layer(record)
        found.setdefault(_measures(option), option)
    return _undominated(found)


def _inside(parts: frozenset[str]) -> set[str]:
    return set[str]().union(*(INSIDE.get(part, ()) for part in parts))


def _undominated(found: Mapping[tuple[float, ...], LayerOption]) -> list[LayerOption]:
    import numpy

    measures = numpy.array(list(found))
    # Measures are unique: only the option itself matches in all.
    return [
        option
        for mine, option in zip(measures, found.values(), strict=True)
        if (measures <= mine).all(axis=1).sum() == 1
    ]


def _subsets(parts: Sequence[str]) -> Iterator[frozenset[str]]:
    for count in range(len(parts) + 1):
        yield from map(frozenset, itertools.combinations(parts, count))


def _measures(option: LayerOption) -> tuple[float, ...]:
    return option.kept, option.seconds, option.moved, option.back_late, option.back_early, -option.kept_late


def _option(record: LayerRecord, again: frozenset[str], swapped: frozenset[str]) -> LayerOption:
    kept = kept_late = late = early = moved = 0
    for each in record.storages:
        if each.is_shared:
            continue
        if each.parts and _is_gone(each, again):
            is_late = bool(({*each.parts, each.leaves} - {""}) & set(LATE))
            late, early = (late + each.bytes, early) if is_late else (late, early + each.bytes)
        elif each.bytes >= offload.SMALLEST and _moves(each, record, again, swapped):
            moved += each.bytes
        elif each.parts or each.enters in again:
            kept += each.bytes
            kept_late += each.bytes if each.parts <= set(LATE) and each.enters != MLP_NORM else 0
    seconds = sum(record.cost(part) for part in again)
    return LayerOption(again, kept, kept_late, late, early, seconds, swapped if moved else frozenset(), moved)


def _is_gone(each: SavedStorage, again: frozenset[str]) -> bool:
    """True if recomputation of the parts `again` releases the storage; inputs of a part are kept."""
    if each.leaves in again & RELEASED:
        return True
    if each.enters in again or each.enters in NORMS or each.leaves in NORMS:
        return False
    return any(each.parts <= {part} | INSIDE.get(part, set()) for part in again)


def _moves(each: SavedStorage, record: LayerRecord, again: frozenset[str], swapped: frozenset[str]) -> bool:
    """True if offloaded: only offloaded parts save it, and no caller holds it."""
    # Autograd holds inputs of recomputed norms and activations as leaves.
    if each.enters and (each.enters in again or (each.enters == INPUT_NORM and record.is_first)):
        return False
    return bool(each.parts) and each.parts <= swapped | _inside(swapped)


def _whole_layer(record: LayerRecord) -> LayerOption:
    kept = sum(each.bytes for each in record.storages if each.enters == INPUT_NORM and not each.is_shared)
    back = record.bytes - kept
    return LayerOption(frozenset({LAYER}), kept, 0, back, back, record.cost(LAYER))
