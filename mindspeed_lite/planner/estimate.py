"""Predicts the memory of each rank, category by category; ranks of a pipeline stage are alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from . import activations, further_tokens, optimizer, orders, parameters, schedule, swapped
from .layers import Chunk
from .optimizer import States
from .parameters import Parameters
from .pieces import MemoryEntry, hidden_bytes, keeps_norm_input
from .training import TrainingConfig

CATEGORIES = ("weights", "gradients", "optimizer", "activations")


@dataclass(frozen=True)
class Line:
    """What an entry adds up to at the peak."""

    part: str
    name: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Rank:
    """Every rank of one pipeline stage.

    Attributes:
        ranks: the first of them and the last, in Megatron's default order.
        layers: how many layers it holds, those of multi-token prediction included.
        kept: micro-batches whose activations it holds at the peak, summed over its model chunks.
        lines: what the activations are made of then, largest first.
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
    """One for each pipeline stage."""
    return [rank(training, stage, chunks) for stage, chunks in enumerate(orders.chunks_of_ranks(training))]


def rank(training: TrainingConfig, stage: int, chunks: list[Chunk]) -> Rank:
    """That of one pipeline stage, which holds these chunks."""
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
    """How many micro-batches are kept when most is, and the entries of that moment."""
    forward = [_after_forward(training, chunk, number) for number, chunk in enumerate(chunks)]
    backward = [_in_backward(training, chunk, number) for number, chunk in enumerate(chunks)]
    sizes, worst = [_bytes(each) for each in forward], [_bytes(each) for each in backward]

    pairs: dict[tuple[int, int], list[MemoryEntry]] = {}

    def beside(moment: schedule.Moment) -> list[MemoryEntry]:
        """The entries of the two micro-batches of an overlapped pair."""
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
    """Bytes that a micro-batch keeps in a chunk after its forward pass, and at the worst moment of its backward pass.

    number: of the chunk among those of its rank.
    """
    return _bytes(_after_forward(training, chunk, number)), _bytes(_in_backward(training, chunk, number))


def kept_once(training: TrainingConfig, chunk: Chunk) -> int:
    """Bytes that all micro-batches of a chunk share."""
    return _bytes(activations.once(training, len(chunk.layers) + chunk.further, _has_mask(training, chunk)))


def _after_forward(training: TrainingConfig, chunk: Chunk, number: int) -> list[MemoryEntry]:
    """What a micro-batch keeps in a chunk from its forward to its backward pass."""
    found = [entry for group in _groups(training, chunk, number) for entry in group]
    found += activations.mask(training) if _has_mask(training, chunk) else []
    found += activations.embedding(training) if chunk.embeds else []
    if chunk.computes_loss:
        found += [*activations.loss(training), *further_tokens.loss(training)]
    return found


def _in_pair(training: TrainingConfig, chunks: list[Chunk], forward: int, backward: int) -> list[MemoryEntry]:
    """The worst moment of a forward pass that runs layer by layer beside another micro-batch's backward pass."""
    halves: list[tuple[list[list[MemoryEntry]], list[MemoryEntry]]] = []
    moments: list[list[MemoryEntry]] = []
    for number in (forward, backward):
        chunk = chunks[number]
        bare = replace(chunk, layers=(), normalizes=False, further=0, computes_loss=False)
        halves.append((_own_groups(training, chunk, number), _after_forward(training, bare, number)))
        moments.append(_after_forward(training, chunk, number))
    (there, rest), (back, others) = halves
    for place in range(0, max(len(there), len(back)), 2):
        # Attention runs forward before the other's experts run backward, and experts before the other's attention.
        left = max(0, len(back) - place)
        for ahead, still in ((place + 1, left), (place + 2, left - 1)):
            groups = [*there[:ahead], *back[: max(0, still)]]
            moments.append([*rest, *others, *(entry for group in groups for entry in group)])
    return max(moments, key=_bytes)


def _in_backward(training: TrainingConfig, chunk: Chunk, number: int) -> list[MemoryEntry]:
    """The entries of the worst moment of the backward pass: its start, or when a layer has got back what it gave up."""
    groups = _groups(training, chunk, number)
    others = _after_forward(
        training, replace(chunk, layers=(), normalizes=False, further=0, computes_loss=False), number
    )
    moments = [_after_forward(training, chunk, number)]
    for place, group in enumerate(groups):
        if any(entry.restored for entry in group):
            # The first one to run is the last of the model; what is behind it has been released.
            before = [entry for each in groups[:place] for entry in each]
            back = [replace(each, bytes=each.bytes + each.restored) for each in group]
            moments.append([*others, *before, *back])
    if swapped.moves(training):
        # While the last layer runs backward, the one before it comes back.
        coming = [each for group in _last_but_one(training, chunk, number) for each in group]
        returned = [replace(each, bytes=each.restored, restored=0) for each in coming if each.restored]
        moments.append([*_after_forward(training, chunk, number), *returned])
    return max(moments, key=_bytes)


def _groups(training: TrainingConfig, chunk: Chunk, number: int) -> list[list[MemoryEntry]]:
    """The entries of a chunk's layers in groups of what comes back together in the backward pass, in their order."""
    found = _own_groups(training, chunk, number)
    found += [activations.final_norm(training)] if chunk.normalizes else []
    for place in range(len(chunk.layers), len(chunk.layers) + chunk.further):
        found += further_tokens.groups(training, place, number)
    return found


def _own_groups(training: TrainingConfig, chunk: Chunk, number: int) -> list[list[MemoryEntry]]:
    own = [activations.layer(training, layer, place, number) for place, layer in enumerate(chunk.layers)]
    own = swapped.layers(training, own)
    count = training.recompute_num_layers or 1
    if training.recompute_granularity != "full" or training.recompute_method == "block":
        whole = count if training.recompute_granularity == "full" else 0
        # The MLP of a layer is through before its attention begins.
        halves = [half for each in own[whole:] for half in _halves(each)]
        return [*(_recomputed(training, [each]) for each in own[:whole]), *halves]
    return [_recomputed(training, own[begin : begin + count]) for begin in range(0, len(own), count)]


def _recomputed(training: TrainingConfig, layers: list[list[MemoryEntry]]) -> list[MemoryEntry]:
    """Layers of which the input is kept, and the rest comes back together."""
    again = sum(entry.bytes for each in layers for entry in each)
    hidden = hidden_bytes(training)
    # The first norm keeps that very input, if it keeps one.
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
