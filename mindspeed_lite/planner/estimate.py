"""Predicts memory by category for each pipeline stage, from traced parts; its ranks are alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from . import optimizer, orders, schedule, swapped, traces
from .layers import Chunk, kinds_in
from .optimizer import States
from .parameters import Parameters
from .traces import ModelTrace, Part, Saved
from .training import TrainingConfig

CATEGORIES = ("weights", "gradients", "optimizer", "activations")
# Part of the model, and what it saves.
Entry = tuple[str, Saved]


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
        lines: activations at the peak by module, largest first.
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


def rank(training: TrainingConfig, stage: int, chunks: Sequence[Chunk]) -> Rank:
    per_stage = training.world_size // training.pp
    held = parameters_of(training, chunks)
    kept, lines = _peak(training, stage, chunks)
    return Rank(
        stage=stage,
        ranks=(stage * per_stage, (stage + 1) * per_stage - 1),
        layers=sum(len(chunk.layers) + chunk.further for chunk in chunks),
        parameters=held,
        states=optimizer.states(training, held, stage),
        kept=kept,
        lines=lines,
    )


def parameters_of(training: TrainingConfig, chunks: Sequence[Chunk]) -> Parameters:
    """Of a stage, exact."""
    trace = traces.of(training)
    dense = experts = 0
    for number, chunk in enumerate(chunks):
        for _, part in _parts(training, trace, chunk, number):
            dense, experts = dense + part.dense, experts + part.experts
        is_tied = training.pp > 1 and not training.untie_embeddings_and_output_weights
        dense += trace.words * ((chunk.further > 0 and not chunk.embeds) + (chunk.computes_loss and is_tied))
    return Parameters(dense, experts)


def sizes(training: TrainingConfig, chunk: Chunk, number: int) -> tuple[int, int]:
    """Bytes kept after forward, and at the backward peak; number: chunk index on its rank."""
    held = _Held.of(training, chunk, number)
    return held.bytes, held.worst


def kept_once(training: TrainingConfig, chunk: Chunk) -> int:
    """Bytes shared by all micro-batches."""
    return sum(_size(part.once) for _, part in _parts(training, traces.of(training), chunk, 0))


def _parts(training: TrainingConfig, trace: ModelTrace, chunk: Chunk, number: int) -> list[tuple[str, Part]]:
    names = [trace.layers[kind] for kind in kinds_in(training, chunk.layers, number)]
    found = [("embedding", trace.parts["embedding"])] if chunk.embeds else []
    found += [("layers", part) for part in names]
    for is_there, name in ((chunk.normalizes, "norm"), (chunk.further, "further"), (chunk.computes_loss, "output")):
        found += [(name, trace.parts[name])] if is_there else []
    return found


@dataclass(frozen=True)
class _Held:
    """What a chunk holds: after a forward, and at the peak of its backward. others: of `kept`, not of a layer."""

    kept: list[Entry]
    peak: list[Entry]
    others: list[Entry]
    layers: list[Entry]

    @cached_property
    def bytes(self) -> int:
        return sum(_size(saved) for _, saved in self.kept)

    @cached_property
    def worst(self) -> int:
        return sum(_size(saved) for _, saved in self.peak)

    @classmethod
    def of(cls, training: TrainingConfig, chunk: Chunk, number: int) -> _Held:
        return _held(training, tuple(_parts(training, traces.of(training), chunk, number)))

    @classmethod
    def of_parts(cls, training: TrainingConfig, parts: Sequence[tuple[str, Part]]) -> _Held:
        trace, units = traces.of(training), _together(training, list(parts))
        others: list[Entry] = [("layers", trace.shared)] if any(name == "layers" for name, _ in units) else []
        kept, back = [(name, part.kept) for name, part in units], []
        own = [place for place, (name, _) in enumerate(units) if name == "layers"]
        if swapped.moves(training):
            names = swapped.chosen(training)
            for place in own[:-1]:
                stays = {
                    path: each for path, each in kept[place][1].items() if not swapped.is_moved(names, path, *each)
                }
                gone = {path: each for path, each in kept[place][1].items() if path not in stays}
                kept[place], back = ("layers", stays), [("layers", gone)]
        most, before, peak = 0, 0, list(kept)
        for place, (name, part) in enumerate(units):
            if (size := before + _size(part.peak)) > most:
                most, peak = size, [*kept[:place], (name, part.peak)]
            before += _size(kept[place][1])
        # The last layer but one comes back during the last one's backward.
        return cls(
            [*others, *kept], [*others, *peak, *back],
            [*others, *(each for each in kept if each[0] == "embedding")], [kept[place] for place in own],
        )  # fmt: skip


@lru_cache(maxsize=1024)
def _held(training: TrainingConfig, parts: tuple[tuple[str, Part], ...]) -> _Held:
    return _Held.of_parts(training, parts)


def _together(training: TrainingConfig, units: list[tuple[str, Part]]) -> list[tuple[str, Part]]:
    """Layers that are recomputed together keep one input."""
    count = training.recompute_num_layers or 1
    if training.recompute_granularity != "full" or training.recompute_method == "block" or count == 1:
        return units
    layers = [part for name, part in units if name == "layers"]
    groups = [layers[begin : begin + count] for begin in range(0, len(layers), count)]
    joined = [("layers", Part(0, 0, {}, each[0].kept, _sum(part.peak for part in each))) for each in groups]
    first = [each for each in units if each[0] == "embedding"]
    return [*first, *joined, *(each for each in units if each[0] not in ("embedding", "layers"))]


def _peak(training: TrainingConfig, stage: int, chunks: Sequence[Chunk]) -> tuple[int, tuple[Line, ...]]:
    """Micro-batches held at the activation peak, and its entries."""
    held = [_Held.of(training, chunk, number) for number, chunk in enumerate(chunks)]
    sizes, worst = [each.bytes for each in held], [each.worst for each in held]

    def run_by(moment: schedule.Moment) -> list[Entry]:
        return held[moment.chunk].peak if moment.forward is None else _in_pair(held[moment.forward], held[moment.chunk])

    def size(moment: schedule.Moment) -> int:
        others = sum(count * each for count, each in zip(moment.kept, sizes, strict=True))
        running = worst[moment.chunk] if moment.forward is None else sum(_size(each) for _, each in run_by(moment))
        return others + running - sizes[moment.chunk]

    moment = max(schedule.moments(training, stage), key=size)
    entries = list(run_by(moment))
    for number, count in enumerate(moment.kept):
        entries += held[number].kept * (count - (number == moment.chunk))
    for number, chunk in enumerate(chunks):
        entries += [(name, part.once) for name, part in _parts(training, traces.of(training), chunk, number)]
    lines = [Line(part, path, *each) for part, saved in _by_part(entries).items() for path, each in saved.items()]
    return sum(moment.kept) + (moment.forward is not None), tuple(sorted(lines, key=lambda line: -line.bytes))


def _in_pair(forward: _Held, backward: _Held) -> list[Entry]:
    """Peak of a forward that overlaps, layer by layer, with another's backward."""
    there, back = (_halves(each.layers) for each in (forward, backward))
    moments = [forward.kept, backward.kept]
    for place in range(0, max(len(there), len(back)), 2):
        # Forward attention precedes the other's expert backward, and experts its attention backward.
        left = max(0, len(back) - place)
        for ahead, still in ((place + 1, left), (place + 2, left - 1)):
            moments.append([*forward.others, *backward.others, *there[:ahead], *back[: max(0, still)]])
    return max(moments, key=lambda entries: sum(_size(saved) for _, saved in entries))


def _halves(layers: Iterable[Entry]) -> list[Entry]:
    """Attention and MLP of each layer."""
    return [
        (name, {path: each for path, each in saved.items() if path.startswith(("input_", "self_")) == first})
        for name, saved in layers
        for first in (True, False)
    ]


def _size(saved: Saved) -> int:
    return sum(size for _, size in saved.values())


def _sum(several: Iterable[Saved]) -> Saved:
    found: dict[str, tuple[int, int]] = {}
    for saved in several:
        for path, (count, size) in saved.items():
            number, total = found.get(path, (0, 0))
            found[path] = number + count, total + size
    return found


def _by_part(entries: Iterable[Entry]) -> dict[str, Saved]:
    found: dict[str, list[Saved]] = {}
    for part, saved in entries:
        found.setdefault(part, []).append(saved)
    return {part: _sum(each) for part, each in found.items()}
