"""Timeline of a gloo process: when it computes, when it waits, and when messages are in flight.

Messages of experts' process groups have a lane of their own; their bytes are counted by receiver.

Wraps the collectives of `torch.distributed`: call `install` before other modules import them by value. A message is in
flight from the call until the backend's thread completes it; the process waits inside `wait()` and inside synchronous
calls, and computes otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lab.network import sent_to_each

COMPUTE, WAIT, FLIGHT = "computes", "waits", "messages in flight"
EXPERTS = "messages of experts"
LANES = (COMPUTE, WAIT, FLIGHT, EXPERTS)
_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "_all_gather_base",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "irecv",
    "isend",
    "recv",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "_reduce_scatter_base",
    "send",
)


@dataclass(frozen=True)
class Span:
    """An interval of a lane, in seconds since the recording began."""

    lane: str
    name: str
    start: float
    end: float


class Timeline:
    """Context manager that records spans of this process.

    A span of WAIT is named EXPERTS, or after the function of another message.

    Attributes:
        is_of_experts: whether a process group is.
        sent: bytes of experts' messages, by receiving rank.
    """

    def __init__(self, is_of_experts: Callable[[Any], bool] = lambda group: False) -> None:
        self.is_of_experts = is_of_experts
        self.spans: list[Span] = []
        self.sent: dict[int, int] = {}
        self._began: float | None = None
        self._depth = 0
        self._computes_since = 0.0

    def __enter__(self) -> Timeline:
        self.spans, self.sent = [], {}
        self._began, self._computes_since = time.perf_counter(), 0.0
        return self

    def __exit__(self, *_: object) -> None:
        self._computed_until(self._now())
        self._began = None

    @property
    def waited(self) -> float:
        """Seconds of exposed communication."""
        return sum(span.end - span.start for span in self.spans if span.lane == WAIT)

    @property
    def waited_for_experts(self) -> float:
        """Seconds of exposed communication of experts."""
        return self.seconds(WAIT, EXPERTS)

    def seconds(self, lane: str, name: str | None = None) -> float:
        """Sum of the spans of a lane, optionally of one name; overlapping spans count twice."""
        found = (span for span in self.spans if span.lane == lane and name in (None, span.name))
        return sum(span.end - span.start for span in found)

    def install(self) -> Callable[[], None]:
        """Wrap the collectives of this process; returns an undo callable."""
        originals = [(module, name, getattr(module, name)) for name in _COLLECTIVES for module in _having(name)]
        # One wrapper for both modules: batch_isend_irecv compares by identity.
        changed = {original: self._around(name, original) for _, name, original in originals}
        for module, name, original in originals:
            setattr(module, name, changed[original])

        def remove() -> None:
            for module, name, original in originals:
                setattr(module, name, original)

        return remove

    def _around(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            # Some collectives call others.
            if self._began is None or self._depth:
                return original(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            group = given.get("group")
            lane = EXPERTS if self.is_of_experts(group) else FLIGHT
            waited_for = name if lane == FLIGHT else lane
            if lane != FLIGHT:
                ranks = dist.get_process_group_ranks(group)
                for peer, size in zip(ranks, sent_to_each(name, given, len(ranks)), strict=False):
                    if peer != dist.get_rank():
                        self.sent[peer] = self.sent.get(peer, 0) + size
            start = self._now()
            self._depth += 1
            try:
                handle = original(*args, **kwargs)
            finally:
                self._depth -= 1
            if handle is None or not hasattr(handle, "wait"):
                self._waited(waited_for, start)
                self._add(lane, name, start, self._now())
                return handle
            return _Watched(self, lane, name, start, handle)

        return collective

    def _now(self) -> float:
        return time.perf_counter() - (self._began or 0.0)

    def _add(self, lane: str, name: str, start: float, end: float) -> None:
        if self._began is not None and end > start:
            self.spans.append(Span(lane, name, start, end))

    def _waited(self, name: str, start: float) -> None:
        self._computed_until(start)
        self._computes_since = self._now()
        self._add(WAIT, name, start, self._computes_since)

    def _computed_until(self, end: float) -> None:
        self._add(COMPUTE, "compute", self._computes_since, end)


class _Watched:
    """A collective's handle that records waits and completion."""

    def __init__(self, timeline: Timeline, lane: str, name: str, start: float, handle: Any) -> None:
        self._timeline, self._lane, self._name, self._handle = timeline, lane, name, handle
        self._spans, self._under_way = timeline.spans, [start]
        # Sends and receives have no future: they are in flight until they are waited for.
        with contextlib.suppress(AttributeError, RuntimeError):
            handle.get_future().add_done_callback(lambda _: self._arrived())

    def _arrived(self) -> None:
        """Record completion; the backend's thread may call it after the wait or the recording has ended."""
        with contextlib.suppress(IndexError):  # already recorded
            start = self._under_way.pop()
            if self._spans is self._timeline.spans:
                self._timeline._add(self._lane, self._name, start, self._timeline._now())

    def wait(self, *args: Any) -> Any:
        start = self._timeline._now()
        result = self._handle.wait(*args)
        self._timeline._waited(self._name if self._lane == FLIGHT else self._lane, start)
        self._arrived()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def is_megatrons_expert_group(group: Any) -> bool:
    from megatron.core import parallel_state

    getters = ("get_expert_model_parallel_group", "get_expert_tensor_and_model_parallel_group")
    return any(group is getattr(parallel_state, each)() for each in getters)


def draw(path: Path, arms: Mapping[str, Mapping[int, Sequence[Span]]], title: str) -> None:
    """Write a PNG with one panel per arm and the lanes of every rank."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colours = {COMPUTE: "#2a9d8f", WAIT: "#e76f51", FLIGHT: "#8ab6d6", EXPERTS: "#6a7fc1"}
    shown = _shown(spans for arm in arms.values() for spans in arm.values())
    ranks = max(len(spans) for spans in arms.values())
    longest = max((span.end for arm in arms.values() for spans in arm.values() for span in spans), default=1.0)
    figure = Figure(figsize=(11, 0.9 + len(arms) * (0.5 + 0.25 * len(shown) * ranks)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(arms), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (arm, by_rank) in zip(panels, arms.items(), strict=True):
        labels: list[str] = []
        for rank, spans in by_rank.items():
            for lane in shown:
                places = [(1e3 * span.start, 1e3 * (span.end - span.start)) for span in spans if span.lane == lane]
                panel.broken_barh(places, (len(labels) - 0.4, 0.8), color=colours[lane], edgecolor="white", lw=0.3)
                labels.append(f"rank {rank} {lane}")
        waited = [sum(each.end - each.start for each in spans if each.lane == WAIT) for spans in by_rank.values()]
        text = ", ".join(f"{1e3 * each:.0f}" for each in waited)
        experts = [sum(each.end - each.start for each in spans if _is_of_experts(each)) for spans in by_rank.values()]
        if any(experts):
            text += f", {', '.join(f'{1e3 * each:.0f}' for each in experts)} of these for experts"
        panel.set_title(f"{arm}: ranks wait {text} ms", fontsize=9, loc="left")
        panel.set_yticks(range(len(labels)), labels, fontsize=7)
        panel.invert_yaxis()
        panel.set_xlim(0, 1e3 * longest)
    panels[-1].set_xlabel("ms")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)


def _is_of_experts(span: Span) -> bool:
    return span.lane == WAIT and span.name == EXPERTS


def _shown(ranks: Iterable[Sequence[Span]]) -> list[str]:
    """The lanes of any process, and that of experts where used."""
    used = {span.lane for spans in ranks for span in spans}
    return [lane for lane in LANES if lane in used or lane != EXPERTS]


def _having(name: str) -> list[Any]:
    return [module for module in (dist, dist.distributed_c10d) if hasattr(module, name)]
