"""Counts a model chunk's later micro-batches as its second one, without running them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mindspeed_lite.memory.saved_tensors import Tracker

from .work import WorkRecorder
from .world import World

# Arguments with which passes of a chunk are not calls of it, one after another, or micro-batches differ.
_INTERTWINED = (
    "pipeline_schedule", "schedules_method", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute",
    "recompute_in_bubble", "recompute_in_advance", "num_microbatches_with_partial_activation_checkpoints",
    "adaptive_memory",
)  # fmt: skip
# Keys of storages that repeated passes save: those of others are positive.
_keys = itertools.count(-1, -1)


@dataclass
class Counts:
    """What a rank's passes are counted in. is_recording: a pass is recorded now."""

    world: World
    recorder: WorkRecorder
    tracker: Tracker
    is_recording: bool = False


def install(chunks: Sequence[Any], args: Any, micro_batches: int, counts: Counts) -> None:
    """Run each chunk's first micro-batch, its second, which others repeat, and its last, which reduces gradients."""
    if micro_batches > 3 and not any(getattr(args, name, None) for name in _INTERTWINED):
        for chunk in chunks:
            _Chunk(chunk, micro_batches, counts)


@dataclass
class _Size:
    """Of a storage."""

    size: int

    def nbytes(self) -> int:
        return self.size


class _Pass:
    """What a forward or backward adds to a rank's counts, from here to `end`.

    own: keys of storages that its micro-batch has saved. is_whole: no other pass ran within it, and it read nothing of
    other ranks.
    """

    def __init__(self, counts: Counts, own: Iterable[int] = ()) -> None:
        recorder, tracker = counts.recorder, counts.tracker
        self._counts, self.is_whole = counts, not counts.is_recording
        counts.is_recording = True
        self._calls, self._waits = Counter(recorder.calls), Counter(recorder.synchronizations.counts)
        self._work = {place: (*each,) for place, each in recorder.counts.items()}
        self._began = recorder.clock and recorder.clock.copy()
        self._read, self._first = self._values(), len(counts.world.messages)
        self._references = {key: each.references for key, each in tracker._live.items()}
        self._others = self._references.keys() - own
        self._most = tracker.bytes()
        self._at_peak: list[Any] | None = None
        tracker.update_peak = self._update_peak  # type: ignore[method-assign]

    def end(self) -> None:
        recorder, tracker, world = self._counts.recorder, self._counts.tracker, self._counts.world
        # Its own again, if no pass within this one has put it back.
        vars(tracker).pop("update_peak", None)
        self.is_whole &= self._counts.is_recording and self._read == self._values()
        self._counts.is_recording = False
        self._messages = world.messages[self._first :]
        self._calls, self._waits = recorder.calls - self._calls, recorder.synchronizations.counts - self._waits
        self._work = {
            place: tuple(now - then for now, then in zip(each, self._work.get(place, (0, 0, 0)), strict=True))
            for place, each in recorder.counts.items()
        }
        self._ended = recorder.clock and recorder.clock.copy()
        # Storages that it saves, and other micro-batches' that it saves as well, by key and how often.
        self.own = [_sized(each) for key, each in tracker._live.items() if key not in self._references]
        self.shared = [
            (key, each) for key, each in tracker._live.items()
            for _ in range(each.references - self._references.get(key, each.references))
        ]  # fmt: skip

    def repeat(self, own: Iterable[int] = ()) -> None:
        recorder, tracker, world = self._counts.recorder, self._counts.tracker, self._counts.world
        world.messages += self._messages
        recorder.calls.update(self._calls)
        recorder.synchronizations.counts.update(self._waits)
        for place, more in self._work.items():
            recorder.counts[place] = [now + each for now, each in zip(recorder.counts[place], more, strict=True)]
        if recorder.clock and self._began and self._ended:
            recorder.clock.repeat(self._began, self._ended)
        if self._at_peak is not None:
            live, own = tracker._live, {*own}
            others = {key: each for key, each in live.items() if key not in own}
            tracker._live = others | {next(_keys): each for each in self._at_peak}
            tracker.update_peak()
            tracker._live = live

    def save(self) -> tuple[list[int], list[int]]:
        """Keys of storages that a repeated forward saves, and of other micro-batches' that it saves as well."""
        live = self._counts.tracker._live
        own = [next(_keys) for _ in self.own]
        live.update(zip(own, map(replace, self.own), strict=True))
        for key, each in self.shared:
            live.setdefault(key, replace(each, references=0)).references += 1
        self._counts.tracker._has_grown = True
        return own, [key for key, _ in self.shared]

    def _values(self) -> int:
        values = self._counts.world.values
        return 0 if values is None else values.count

    def _update_peak(self) -> None:
        tracker = self._counts.tracker
        Tracker.update_peak(tracker)
        if (now := tracker.bytes()) > self._most:
            self._most = now
            self._at_peak = [_sized(each) for key, each in tracker._live.items() if key not in self._others]


def _sized(each: Any) -> Any:
    return replace(each, storage=_Size(each.storage.nbytes()), references=1)


class _Chunk:
    """In place of a chunk's `forward`."""

    def __init__(self, chunk: Any, micro_batches: int, counts: Counts) -> None:
        self._forward, self._last, self.counts = chunk.forward, micro_batches, counts
        self._number = 0
        self._inputs: list[torch.Tensor] = []
        # Of the second micro-batch: its passes, the first of them None if they cannot be repeated, and its output.
        self.forward: _Pass | None = None
        self.backward: _Pass | None = None
        self.output: Callable[[], torch.Tensor]
        if inner := next((each for each in chunk.modules() if hasattr(each, "set_input_tensor")), None):
            self._set_inputs, inner.set_input_tensor = inner.set_input_tensor, self._take_inputs
            chunk.forward = self

    def _take_inputs(self, given: Any) -> None:
        self._inputs = [each for each in (given if isinstance(given, list) else [given]) if each is not None]
        self._set_inputs(given)

    def __call__(self, *given: Any, **options: Any) -> Any:
        self._number += 1
        if self._number == 2:
            return self._second(*given, **options)
        if self.forward is None or self._number == self._last:
            return self._forward(*given, **options)
        anchor = torch.empty((), requires_grad=True)
        return _Repeated.apply(self, anchor, *self._inputs)  # type: ignore[no-untyped-call]

    def _second(self, *given: Any, **options: Any) -> Any:
        live = self.counts.tracker._live
        before = {*live}
        forward = _Pass(self.counts)
        output = self._forward(*given, **options)
        forward.end()
        own = live.keys() - before
        if forward.is_whole and isinstance(output, torch.Tensor) and output.grad_fn is not None:
            self.forward, shape, dtype = forward, output.shape, output.dtype
            self.output = lambda: torch.empty(shape, dtype=dtype)
            output.grad_fn.register_prehook(lambda gradients: self._backward_begins(own))
        return output

    def _backward_begins(self, own: Iterable[int]) -> None:
        self.backward = _Pass(self.counts, own)
        torch.autograd.Variable._execution_engine.queue_callback(self.backward.end)


class _Repeated(torch.autograd.Function):
    """A chunk's passes of a micro-batch that are counted and not run."""

    @staticmethod
    def forward(ctx: Any, chunk: _Chunk, _: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        assert chunk.forward is not None
        chunk.forward.repeat()
        ctx.chunk, ctx.saved, ctx.inputs = chunk, chunk.forward.save(), [(each.shape, each.dtype) for each in inputs]
        return chunk.output()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        own, shared = ctx.saved
        ctx.chunk.backward.repeat(own)
        for key in (*own, *shared):
            ctx.chunk.counts.tracker.release(key)
        return None, None, *(torch.empty(shape, dtype=dtype) for shape, dtype in ctx.inputs)
