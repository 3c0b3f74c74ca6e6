"""Prices flops, bytes and messages at the reached shares of a device's figures."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .devices import Figures
from .links import Links
from .work import PASSES, CollectiveCall, Direction, Product, Scores, Vector


@dataclass(frozen=True)
class PublishedDevice:
    """A device of `devices.FIGURES`, or of a user's file; `links`: measured ones, in place of the figures'."""

    name: str
    figures: Figures
    links: Links | None = None

    @property
    def memory(self) -> float:
        return self.figures.memory

    @property
    def ranks_per_node(self) -> int:
        return self.figures.node

    def product(self, work: Product, direction: Direction, width: int) -> float:
        """Efficiency falls with the smallest side; at least the memory time."""
        count = max(1, work.experts)
        least = max(1.0, min(work.rows / count, work.inner, work.columns))
        reached = self.figures.product * least / (least + self.figures.half_size)
        if work.experts:
            reached *= self.figures.grouped
        moved = (work.rows * (work.inner + work.columns) + work.inner * work.columns * count) * width
        peak = self.figures.flops * (2 / width if width > 2 else 1)
        return max(work.flops / (peak * reached), self._bytes(moved))

    def scores(self, work: Scores, is_backward: bool, width: int) -> float:
        """Two GEMMs forward, five backward; off-chip scores add vector work."""
        figures = self.figures
        share = figures.attention_backward if is_backward else figures.attention
        size = min(1.0, (work.query_size + work.value_size) / 256)
        keys = work.keys * work.share
        # Exponentials do not shrink with the head, nor a tile's overhead with its keys.
        reached = share * (2 * size / (1 + size)) * keys / (keys + figures.half_keys)
        seconds = work.flops * (2.5 if is_backward else 1.0) / (figures.flops * reached)
        if not work.is_flash:
            pairs = work.batch * work.rows * work.keys * work.heads
            passes = (10, 8) if work.softmax_width > width else (8, 6)
            seconds += self._bytes(pairs * max(width, work.softmax_width) * passes[0 if is_backward else 1])
        return seconds

    def vector(self, work: Vector, is_backward: bool, width: int) -> float:
        passes = PASSES[work.name][int(work.is_fused)][int(is_backward)]
        seconds = self._bytes(work.numbers * width * passes)
        is_scattered = work.name == "permute" and not work.is_fused
        return seconds * self.figures.bandwidth / self.figures.scatter if is_scattered else seconds

    def message(self, work: CollectiveCall) -> float:
        """Ring, or all pairs at once for an all-to-all; between nodes, the group uses all its adapters on a node."""
        figures, size = self.figures, work.group.size
        if size == 1:
            return 0.0
        if self.links is not None:
            return self.links.message(work)
        inside = work.group.per_node(figures.node)
        spans = inside < size
        # A full mesh has a link for each peer.
        link = min(figures.link, figures.peer * max(1, inside - 1)) if figures.peer else figures.link
        latency = figures.network_latency if spans else figures.latency
        if work.kind == "send":
            link = figures.peer or link
            return latency + work.bytes / (figures.network * figures.networks if spans else link * figures.links)
        moved = work.bytes * (size - 1) / size
        if work.kind == "all_to_all":
            nodes = size / inside
            away = moved - work.bytes * (inside - 1) / size
            near = (moved - away) / (link * figures.links)
            # Share of the rows' copies that cross.
            away *= nodes * (1 - (1 - 1 / nodes) ** work.chosen) / work.chosen
            share = figures.exchanges / (1 + figures.spread * math.log2(nodes))
            return latency * math.sqrt(size - 1) + max(near, away / (figures.network * share))
        rounds = 2 if work.kind == "all_reduce" else 1
        rate = link * figures.links
        if spans:
            rate = min(rate, figures.network * figures.networks * inside)
        return rounds * (latency * math.sqrt(size - 1) + moved / rate)

    def optimizer(self, parameters: float, is_fused: bool) -> float:
        """Adam: reads gradient, reads and writes main parameter and moments, writes weight; gradient norm."""
        return self._bytes(parameters * (4 + (30 if is_fused else 54)))

    def host_copy(self, size: float) -> float:
        return size / (self.figures.host_link * self.figures.links)

    def host(self, launches: float) -> float:
        return launches * self.figures.launch

    def layer_overhead(self, is_backward: bool) -> float:
        return 0.0

    def pass_overhead(self, is_backward: bool) -> float:
        return 0.0

    def step_overhead(self) -> float:
        return self.figures.step

    def shared(self, busy: float, makespan: float, ranks: int) -> float:
        return makespan

    def _bytes(self, size: float) -> float:
        return size / (self.figures.memory_bandwidth * self.figures.bandwidth)
