"""Bytes that a rank sends in a training step, by kind of message and group."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from . import devices, step_time
from .links import Message, sent
from .published import PublishedDevice
from .step_time import Pricer
from .training import TrainingConfig
from .work import CollectiveCall


@dataclass(frozen=True)
class _Wire(PublishedDevice):
    """A device that computes at once; a message takes a second per byte, of one kind or (None) of no kind."""

    counted: Message | None = None
    seen: set[Message] = field(default_factory=set)

    def message(self, work: CollectiveCall) -> float:
        key = work.kind, work.group
        if work.group.size > 1:
            self.seen.add(key)
        return sent(work) if key == self.counted else 0.0


def bytes_of_step(training: TrainingConfig, ranks_per_node: int) -> dict[Message, float]:
    """Messages that computation may hide are counted too. Raises ArgumentError for an invalid layout."""
    figures = replace(
        devices.FIGURES["h100-sxm"],
        flops=1e30, memory_bandwidth=1e30, host_link=1e30, node=ranks_per_node, launch=0.0, step=0.0,
    )  # fmt: skip
    nothing = _Wire("", figures)
    step_time.step(training, Pricer(nothing, 0.0))
    found = {}
    for key in sorted(nothing.seen, key=str):
        step = step_time.step(training, Pricer(_Wire("", figures, counted=key), 0.0))
        found[key] = step.seconds
    return {key: count for key, count in found.items() if count >= 1}
