"""Predicts memory by category for each pipeline stage; its ranks are alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from . import activations, further_tokens, layers, optimizer, orders, parameters, schedule, swapped
from .layers import Chunk
from .optimizer import States
from .parameters import Parameters
from .pieces import MemoryEntry, hidden_bytes, keeps_norm_input
from .training import TrainingConfig

CATEGORIES = ("weights", "gradients", "optimizer", "activations")


@dataclass(frozen=True)
class Line:
    part: str
    name: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Rank:
    """Ranks of one pipeline stage.

    Attributes:
        ranks: first and last, in Megatron's default order.
        layers: including multi-token prediction.
        kept: micro-batches held at the peak, summed over chunks.
        lines: activations at the peak, largest first.
    """

    stage: int
    ranks: tuple[int, int]
    layers: int
    parameters: Parameters
    states: States
    kept: int
    lines: tuple[Line, ...]

    @property
    def activations(self) -> int:
        return sum(line.bytes for line in self.lines)

    @property
    def categories(self) -> dict[str, int]:
        states = self.states
        return dict(
            zip(CATEGORIES, (states.weights, states.gradients, states.optimizer, self.activations), strict=True)
        )

    @property
    def total(self) -> int:
        return sum(self.categories.values())


def ranks(training: TrainingConfig) -> list[Rank]:
    return [rank(training, stage, chunks) for stage, chunks in enumerate(orders.chunks_of_ranks(training))]


def rank(training: TrainingConfig, stage: int, chunks: list[Chunk]) -> Rank:
    per_stage = training.world_size // training.pp
    held = parameters.of_stage(training, chunks)
    kept, lines = peak(training, stage, chunks)
    return Rank(
        stage=stage,
        ranks=(stage * per_stage, (stage + 1) * per_stage - 1),
        layers=sum(len(chunk.layers) + chunk.further for chunk in chunks),
        parameters=held,
        states=optimizer.states(training, held, stage),
        kept=kept,
        lines=tuple(lines),
    )


def peak(training: TrainingConfig, stage: int, chunks: list[Chunk]) -> tuple[int, list[Line]]:
    """Micro-batches held at the activation peak, and its entries."""
    known: dict[object, tuple[list[MemoryEntry], list[MemoryEntry]]] = {}
    keys = [_kind(training, chunk, number) for number, chunk in enumerate(chunks)]
    for number, (key, chunk) in enumerate(zip(keys, chunks, strict=True)):
        if key not in known:
            known[key] = _after_forward(training, chunk, number), _in_backward(training, chunk, number)
    forward, backward = zip(*(known[key] for key in keys), strict=True)
    sizes, worst = [_bytes(each) for each in forward], [_bytes(each) for each in backward]

    pairs: dict[tuple[int, int], list[MemoryEntry]] = {}

    def beside(moment: schedule.Moment) -> list[MemoryEntry]:
        assert moment.forward is not None
        both = (moment.forward, moment.chunk)
        if both not in pairs:
            pairs[both] = _in_pair(training, chunks, *both)
        return pairs[both]

    def size(moment: schedule.Moment) -> int:
        running = worst[moment.chunk] if moment.forward is None else _bytes(beside(moment))
        others = sum(count * each for count, each in zip(moment.kept, sizes, strict=True))
        return others + running - sizes[moment.chunk]

    moment = max(schedule.moments(training, stage), key=size)
    entries = list(backward[moment.chunk] if moment.forward is None else beside(moment))
    kept = list(moment.kept)
    for number, count in enumerate(kept):
        entries += forward[number] * (count - (number == moment.chunk))
    if moment.forward is not None:
        kept[moment.forward] += 1
    for each in chunks:
        entries += activations.once(training, len(each.layers) + each.further, _has_mask(training, each))
    return sum(kept), _summed(entries)


def sizes(training: TrainingConfig, chunk: Chunk, number: int) -> tuple[int, int]:
    """Bytes kept after forward, and at the backward peak; number: chunk index on its rank."""
    return _bytes(_after_forward(training, chunk, number)), _bytes(_in_backward(training, chunk, number))


def kept_once(training: TrainingConfig, chunk: Chunk) -> int:
    """Bytes shared by all micro-batches."""
    return _bytes(activations.once(training, len(chunk.layers) + chunk.further, _has_mask(training, chunk)))


def _kind(training: TrainingConfig, chunk: Chunk, number: int) -> object:
    """Chunks of one kind are alike."""
    inside = tuple(layers.kind(training, layer, place, number) for place, layer in enumerate(chunk.layers))
    return replace(chunk, layers=()), inside


def _after_forward(training: TrainingConfig, chunk: Chunk, number: int) -> list[MemoryEntry]:
    found = [entry for group in _groups(training, chunk, number) for entry in group]
    found += activations.mask(training) if _has_mask(training, chunk) else []
    found += activations.embedding(training) if chunk.embeds else []
    if chunk.computes_loss:
        found += [*activations.loss(training), *further_tokens.loss(training)]
    return found


def _in_pair(training: TrainingConfig, chunks: list[Chunk], forward: int, backward: int) -> list[MemoryEntry]:
    """Peak of a forward that overlaps, layer by layer, with another's backward."""
    halves: list[tuple[list[list[MemoryEntry]], list[MemoryEntry]]] = []
    moments: list[list[MemoryEntry]] = []
    for number in (forward, backward):
        chunk = chunks[number]
        bare = replace(chunk, layers=(), normalizes=False, further=0, computes_loss=False)
        halves.append((_own_groups(training, chunk, number), _after_forward(training, bare, number)))
        moments.append(_after_forward(training, chunk, number))
    (there, rest), (back, others) = halves
    for place in range(0, max(len(there), len(back)), 2):
        # Forward attention precedes the other's expert backward, and experts its attention backward.
        left = max(0, len(back) - place)
        for ahead, still in ((place + 1, left), (place + 2, left - 1)):
            groups = [*there[:ahead], *back[: max(0, still)]]
            moments.append([*rest, *others, *(entry for group in groups for entry in group)])
    return max(moments, key=_bytes)


def _in_backward(training: TrainingConfig, chunk: Chunk, number: int) -> list[MemoryEntry]:
    """Entries at the backward peak: its start, or when a layer is restored."""
    groups = _groups(training, chunk, number)
    others = _after_forward(
        training, replace(chunk, layers=(), normalizes=False, further=0, computes_loss=False), number
    )
    moments = [_after_forward(training, chunk, number)]
    for place, group in enumerate(groups):
        if any(entry.restored for entry in group):
            # Backward runs in reverse; later layers are released.
            before = [entry for each in groups[:place] for entry in each]
            back = [replace(each, bytes=each.bytes + each.restored) for each in group]
            moments.append([*others, *before, *back])
    if swapped.moves(training):
        # The previous layer is restored during the last layer's backward.
        coming = [each for group in _last_but_one(training, chunk, number) for each in group]
        returned = [replace(each, bytes=each.restored, restored=0) for each in coming if each.restored]
        moments.append([*_after_forward(training, chunk, number), *returned])
    return max(moments, key=_bytes)


def _groups(training: TrainingConfig, chunk: Chunk, number: int) -> list[list[MemoryEntry]]:
    """Entries in groups restored together, in layer order."""
    found = _own_groups(training, chunk, number)
    found += [activations.final_norm(training)] if chunk.normalizes else []
    for place in range(len(chunk.layers), len(chunk.layers) + chunk.further):
        found += further_tokens.groups(training, place, number)
    return found


def _own_groups(training: TrainingConfig, chunk: Chunk, number: int) -> list[list[MemoryEntry]]:
    known: dict[object, list[MemoryEntry]] = {}
    own = []
    for place, layer in enumerate(chunk.layers):
        key = layers.kind(training, layer, place, number)
        if key not in known:
            known[key] = activations.layer(training, layer, place, number)
        own.append(known[key])
    own = swapped.layers(training, own)
    count = training.recompute_num_layers or 1
    if training.recompute_granularity != "full" or training.recompute_method == "block":
        whole = count if training.recompute_granularity == "full" else 0
        # A layer's MLP backward ends before its attention's begins.
        halves = [half for each in own[whole:] for half in _halves(each)]
        return [*(_recomputed(training, [each]) for each in own[:whole]), *halves]
    return [_recomputed(training, own[begin : begin + count]) for begin in range(0, len(own), count)]


def _recomputed(training: TrainingConfig, together: list[list[MemoryEntry]]) -> list[MemoryEntry]:
    """Layers that keep their input and restore the rest together."""
    again = sum(entry.bytes for each in together for entry in each)
    hidden = hidden_bytes(training)
    # The first norm saves the same input.
    again -= hidden if keeps_norm_input(training) else 0
    return [
        MemoryEntry("layers", "input, of which a layer is recomputed", hidden),
        MemoryEntry("layers", "recomputed", 0, again),
    ]


def _last_but_one(training: TrainingConfig, chunk: Chunk, number: int) -> list[list[MemoryEntry]]:
    own = [activations.layer(training, layer, place, number) for place, layer in enumerate(chunk.layers)]
    return swapped.layers(training, own)[-2:-1]


def _halves(layer: list[MemoryEntry]) -> list[list[MemoryEntry]]:
    return [[each for each in layer if (each.part == "attention") == first] for first in (True, False)]


def _has_mask(training: TrainingConfig, chunk: Chunk) -> bool:
    return training.create_attention_mask_in_dataloader and (chunk.has_embedding or chunk.computes_loss)


def _bytes(entries: Iterable[MemoryEntry]) -> int:
    return sum(entry.bytes for entry in entries)


def _summed(entries: Iterable[MemoryEntry]) -> list[Line]:
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for entry in entries:
        count, size = sums.get((entry.part, entry.name), (0, 0))
        if entry.bytes:
            sums[entry.part, entry.name] = (count + 1, size + entry.bytes)
    lines = [Line(*name, *both) for name, both in sums.items()]
    return sorted(lines, key=lambda line: -line.bytes)
