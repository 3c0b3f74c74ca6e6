"""Chooses what to trace for a layer; keeps the traced pieces of the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .layers import Chunk
from .parameters import Parameters
from .pieces import MemoryEntry, activation_is_recomputed, norm_is_recomputed, zero_memory_level
from .traced import NOTHING, LayerTrace, ModelPiece, Part, split
from .training import ArgumentError, TrainingConfig

Parts = Mapping[Part, ModelPiece]
# Of each kind: the first also holds what all layers share.
LAYERS = 2
MICRO_BATCHES = 2
# Arguments of a layout, and those that a schedule of one stage does not take.
_LAYOUT = (
    "tensor_model_parallel_size", "sequence_parallel", "context_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "micro_batch_size", "context_parallel_algo", "ulysses_degree_in_cp",
    "recompute_modules",
)  # fmt: skip
_OFF = (
    "overlap_moe_expert_parallel_comm", "moe_fb_overlap", "schedules_method", "pipeline_schedule",
    "delay_wgrad_compute", "swap_attention", "recompute_norm_num_layers", "recompute_activation_function_num_layers",
    "moe_zero_memory_num_layers",
)  # fmt: skip


@dataclass(frozen=True)
class TraceRequest:
    """A training to trace. kinds: of layers, True with experts. arguments: that differ from the command's."""

    world_size: int
    kinds: tuple[bool, ...] = (False,)
    arguments: tuple[tuple[str, Any], ...] = ()


def of_layer(training: TrainingConfig, number: int, place: int, chunk: int, further: int = 0) -> TraceRequest:
    """What to trace for a layer of the model at a place of a chunk."""
    given: dict[str, Any] = {name: getattr(training, name) or None for name in _LAYOUT}
    given |= dict.fromkeys(_OFF)
    is_whole = training.recompute_granularity == "full"
    if is_whole and training.recompute_method == "block" and place >= (training.recompute_num_layers or 1):
        given |= {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}
    elif is_whole:
        given |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    else:
        given["recompute_granularity"] = training.recompute_granularity or None
    given["recompute_norm"] = norm_is_recomputed(training, place, chunk) and training.recompute_norm
    given["recompute_activation_function"] = activation_is_recomputed(training, place, chunk)
    given["moe_zero_memory"] = zero_memory_level(training, place, chunk) or "disable"
    given["mtp_num_layers"] = further or None
    if len(training.cp_comm_type) > 1:
        given["cp_comm_type"] = (training.cp_comm_type[number],)
    kinds = tuple(sorted({training.is_moe(each) for each in range(training.num_layers)}))
    size = math.lcm(training.tp * training.cp, training.ep * training.etp)
    return TraceRequest(size, kinds, tuple(given.items()))


class TracingError(ArgumentError):
    """A choice that cannot be trained; one line."""


Tracer = Callable[[Sequence[TraceRequest]], Sequence[LayerTrace | TracingError]]


class ModelPieces:
    """Pieces of the trainings of a command; each choice is traced once. Methods raise TracingError."""

    def __init__(self, trace: Tracer) -> None:
        self._trace = trace
        self._known: dict[TraceRequest, Parts] = {}

    def layer(self, training: TrainingConfig, number: int, place: int, chunk: int) -> ModelPiece:
        """Layer `number` at a place of a chunk."""
        choice = of_layer(training, number, place, chunk)
        return self._of(training, choice)[LAYERS * choice.kinds.index(training.is_moe(number)) + 1]

    def part(self, training: TrainingConfig, part: Part) -> ModelPiece:
        return self._of(training, of_layer(training, 0, 0, 0))[part]

    def common(self, training: TrainingConfig) -> ModelPiece:
        """What the layers of a chunk share: masks, and angles of rotary embeddings."""
        found = self._of(training, of_layer(training, 0, 0, 0))
        return found[0] - found[1]

    def further(self, training: TrainingConfig, place: int, chunk: int) -> ModelPiece:
        """A layer of multi-token prediction, which embeds again."""
        one, without = self._further(training, place, chunk)
        return replace(one["further"], kept=one["further"].kept + (one["embedding"] - without["embedding"]).kept)

    def loss(self, training: TrainingConfig) -> ModelPiece:
        """The output layer, and its further uses for multi-token prediction."""
        if not training.mtp_num_layers:
            return self.part(training, "output")
        one, without = self._further(training, 0, 0)
        again = one["output"] - without["output"]
        return sum([again] * training.mtp_num_layers, start=without["output"])

    def _further(self, training: TrainingConfig, place: int, chunk: int) -> tuple[Parts, Parts]:
        """Pieces with one layer of multi-token prediction, and without."""
        last = training.num_layers - 1
        one, none = (self._of(training, of_layer(training, last, place, chunk, further=count)) for count in (1, 0))
        return one, none

    def layers(self, training: TrainingConfig, chunk: Chunk, number: int) -> list[ModelPiece]:
        """Layers of a chunk, or groups of those that are recomputed together."""
        found = [self.layer(training, layer, place, number) for place, layer in enumerate(chunk.layers)]
        count = training.recompute_num_layers or 1
        if training.recompute_granularity != "full" or training.recompute_method == "block" or count == 1:
            return found
        groups = [found[first : first + count] for first in range(0, len(found), count)]
        return [replace(
            sum(group, start=NOTHING), kept=group[0].kept,
            restored=sum(each.restored for each in group) + sum(each.bytes for each in group[1:]),
        ) for group in groups]  # fmt: skip

    def groups(self, training: TrainingConfig, chunk: Chunk, number: int) -> list[list[MemoryEntry]]:
        """Entries of a chunk's layers, in groups that backward releases one after the other."""
        found: list[list[MemoryEntry]] = []
        for piece in self.layers(training, chunk, number):
            entries = _entries(piece)
            found += [[each for each in entries if (each.part == "attention") == first] for first in (True, False)]
        return found

    def after_layers(self, training: TrainingConfig, chunk: Chunk, number: int) -> list[list[MemoryEntry]]:
        """Entries of the final norm and of multi-token prediction."""
        found = [_entries(self.part(training, "norm"))] if chunk.normalizes else []
        places = range(len(chunk.layers), len(chunk.layers) + chunk.further)
        return found + [_entries(self.further(training, place, number)) for place in places]

    def around(self, training: TrainingConfig, chunk: Chunk) -> list[MemoryEntry]:
        """Entries of embedding, masks and loss."""
        found = _entries(self.part(training, "embedding")) if chunk.embeds else []
        found += _entries(self.common(training)) if chunk.embeds or chunk.computes_loss else []
        return found + (_entries(self.loss(training)) if chunk.computes_loss else [])

    def shared(self, training: TrainingConfig, chunk: Chunk) -> list[MemoryEntry]:
        """Entries that all micro-batches share."""
        pieces = [self.common(training), *self.layers(training, chunk, 0)]
        pieces += [self.part(training, "output")] if chunk.computes_loss else []
        return [entry for piece in pieces for entry in piece.shared.elements()]

    def parameters(self, training: TrainingConfig, chunks: Sequence[Chunk]) -> Parameters:
        found = Parameters(0)
        is_copied = training.pp > 1 and not training.untie_embeddings_and_output_weights
        for number, chunk in enumerate(chunks):
            pieces = self.layers(training, chunk, number)
            pieces += [self.part(training, "embedding")] if chunk.has_embedding else []
            pieces += [self.part(training, "norm")] if chunk.normalizes else []
            pieces += [self.further(training, 0, 0)] * chunk.further if chunk.further else []
            # Tied weights of the last stage are a copy.
            pieces += [self.part(training, "embedding" if is_copied else "output")] if chunk.computes_loss else []
            found = sum((each.parameters for each in pieces), start=found)
        return found

    def _of(self, training: TrainingConfig, choice: TraceRequest) -> Parts:
        if choice not in self._known:
            (trace,) = self._trace([choice])
            if isinstance(trace, TracingError):
                raise trace
            self._known[choice] = split(trace, LAYERS * len(choice.kinds), training.width)
        return self._known[choice]


def _entries(piece: ModelPiece) -> list[MemoryEntry]:
    found = list(piece.kept.elements())
    return [*found, MemoryEntry("mlp", "recomputed", 0, piece.restored)] if piece.restored else found
