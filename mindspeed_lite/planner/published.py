"""Prices flops, bytes and messages at assumed shares of published peaks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .devices import Assumptions, Figures
from .work import PASSES, CollectiveCall, Direction, Product, Scores, Vector


@dataclass(frozen=True)
class PublishedDevice:
    """A device of `devices.FIGURES`."""

    name: str
    figures: Figures
    assumed: Assumptions = field(default_factory=Assumptions)

    @property
    def ranks_per_node(self) -> int:
        return self.figures.node

    def product(self, work: Product, direction: Direction, width: int) -> float:
        """Efficiency falls with the smallest side; at least the memory time."""
        weights = work.inner * work.columns * max(1, work.experts)
        rows = work.rows / max(1, work.experts)
        least = max(1.0, min(rows, work.inner, work.columns))
        reached = self.assumed.product * least / (least + self.assumed.half_rows)
        moved = (work.rows * (work.inner + work.columns) + weights) * width
        peak = self.figures.flops * (2 / width if width > 2 else 1)
        return max(work.flops / (peak * reached), self._bytes(moved)) + self.assumed.launch

    def scores(self, work: Scores, is_backward: bool, width: int) -> float:
        """Two GEMMs forward, five backward; off-chip scores add vector work."""
        share = self.assumed.attention_backward if is_backward else self.assumed.attention
        seconds = work.flops * (2.5 if is_backward else 1.0) / (self.figures.flops * share)
        if not work.is_flash:
            pairs = work.batch * work.rows * work.keys * work.heads
            seconds += self._bytes(pairs * width * (10 if is_backward else 8))
        return seconds + self.assumed.launch

    def vector(self, work: Vector, is_backward: bool, width: int) -> float:
        passes = PASSES[work.name][int(work.is_fused)][int(is_backward)]
        return self._bytes(work.numbers * width * passes) + (self.assumed.launch if passes else 0.0)

    def message(self, work: CollectiveCall) -> float:
        """Ring, or all pairs at once for an all-to-all; between nodes, the group uses all its adapters on a node."""
        size = work.group.size
        if size == 1:
            return 0.0
        inside = work.group.per_node(self.ranks_per_node)
        link, network = (each * self.assumed.link for each in (self.figures.link, self.figures.network))
        spans = inside < size
        latency = self.assumed.network_latency if spans else self.assumed.latency
        if work.kind == "send":
            return latency + work.bytes / (network if spans else link)
        moved = work.bytes * (size - 1) / size
        if work.kind == "all_to_all":
            away = work.bytes * (size - inside) / size
            return latency * math.sqrt(size - 1) + max((moved - away) / link, away / network)
        rounds = 2 if work.kind == "all_reduce" else 1
        rate = min(link, network * inside) if spans else link
        return rounds * (latency * math.sqrt(size - 1) + moved / rate)

    def optimizer(self, parameters: float, is_fused: bool) -> float:
        """Adam: reads gradient, reads and writes main parameter and moments, writes weight; gradient norm."""
        return self._bytes(parameters * (4 + (30 if is_fused else 54)))

    def host_copy(self, size: float) -> float:
        return size / (self.figures.host_link * self.assumed.link)

    def layer_overhead(self, is_backward: bool) -> float:
        return 0.0

    def pass_overhead(self, is_backward: bool) -> float:
        return 0.0

    def step_overhead(self) -> float:
        return 0.0

    def shared(self, busy: float, makespan: float, ranks: int) -> float:
        return makespan

    def _bytes(self, size: float) -> float:
        return size / (self.figures.memory_bandwidth * self.assumed.bandwidth)
