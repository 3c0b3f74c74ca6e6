"""Predicts the overlap of communication and computation with two lanes: one computes, one sends.

`predict_overlap` runs the steps of a linear layer in the order of `mindspeed_lite.parallel.tp_linear`; the
last chunk of a reduction, and what exceeds the GEMMs, stays exposed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PHASES = ("column forward", "row forward", "row backward", "column backward")


@dataclass(frozen=True)
class Seconds:
    """Seconds of a pass's GEMMs and of its unchunked messages, each alone."""

    product: float
    weight: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0


@dataclass
class Lanes:
    """A process that computes and waits, and a link that sends one message at a time."""

    now: float = 0.0
    exposed: float = 0.0
    _link_free: float = field(default=0.0, repr=False)

    def send(self, seconds: float) -> float:
        """Arrival time of a message sent now."""
        self._link_free = max(self._link_free, self.now) + seconds
        return self._link_free

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, arrival: float) -> None:
        self.exposed += max(0.0, arrival - self.now)
        self.now = max(self.now, arrival)


def predict_overlap(phase: str, chunks: int, ranks: int, takes: Seconds) -> Lanes:
    """Run one pass (`PHASES`) of a sequence-parallel layer over `ranks` ranks in `chunks` messages."""
    lanes = Lanes()
    if phase in ("column forward", "row backward"):
        arrivals = [lanes.send(takes.gather / chunks) for _ in range(chunks)]
        own = takes.product / ranks if chunks > 1 else 0.0
        lanes.compute(own)
        for arrival in arrivals:
            lanes.wait(arrival)
            lanes.compute((takes.product - own) / chunks)
        lanes.compute(takes.weight)
        return lanes
    if phase not in PHASES:
        raise ValueError(f"no such pass: {phase!r}; one of {', '.join(PHASES)}")
    gathered = lanes.send(takes.gather) if phase == "column backward" else 0.0
    arrivals = []
    for _ in range(chunks):
        lanes.compute(takes.product / chunks)
        arrivals.append(lanes.send(takes.reduce / chunks))
    if phase == "column backward":
        lanes.wait(gathered)
        lanes.compute(takes.weight)
    for arrival in arrivals:
        lanes.wait(arrival)
    return lanes
