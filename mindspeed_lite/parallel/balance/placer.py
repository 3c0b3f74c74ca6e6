"""Moves experts between ranks during training; checkpoints use the home placement."""

from __future__ import annotations

import abc
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from . import placement as placements
from .copies import copied_bytes, measure_costs
from .counts import LoadAverage, predicted_loads, same_on_all_ranks
from .placement import SlotMove

# Parameters of an expert -> read-write access to all their training state.
StateOf = Callable[[Sequence[Tensor]], AbstractContextManager[list[Tensor]]]


@torch.no_grad()
def exchange(tensors: Sequence[Tensor], move: SlotMove, group: ProcessGroup) -> int:
    """Exchange tensors in place; returns the bytes sent. A collective.

    tensors: equal in number, shapes and dtypes on every rank of `group`.
    """
    rank = group.rank()
    stays = move.to[rank] == rank
    # Wide elements first, for alignment.
    some = [] if stays else sorted(tensors, key=lambda each: -each.element_size())
    parts = [each.detach().reshape(-1).view(torch.uint8) for each in some]
    sent = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(
        received,
        sent,
        [0 if stays or each != move.source[rank] else len(sent) for each in range(group.size())],
        [0 if stays or each != move.to[rank] else len(sent) for each in range(group.size())],
        group=group,
    )
    for each, part in zip(some, torch.split(received, [len(part) for part in parts]), strict=True):
        each.copy_(part.view(each.dtype).view(each.shape))
    return len(sent)


class PlacedExperts:
    """The experts of one layer over the ranks of `group`.

    Attributes:
        placement: [experts], the rank of each.
        home: placement in checkpoints and parameter names.
        wanted: placement to return to from home, or None.
    """

    def __init__(self, experts: int, group: ProcessGroup, device: torch.device) -> None:
        self.group, self.ranks = group, group.size()
        self.home = placements.contiguous(experts, self.ranks)
        self.placement = self.home
        self.wanted: list[int] | None = None
        self.average = LoadAverage(experts, device)
        self._index: Tensor | None = None

    @property
    def is_home(self) -> bool:
        return self.placement == self.home

    @property
    def intended(self) -> list[int]:
        return self.wanted or self.placement

    @property
    def experts_at(self) -> list[int]:
        return placements.experts_at(self.placement, self.ranks)

    def by_place(self, columns: Tensor) -> Tensor:
        """[..., experts] -> [..., places]; differentiable."""
        if self.is_home:
            return columns
        if self._index is None:
            self._index = torch.tensor(self.experts_at, device=columns.device)
        return columns.index_select(-1, self._index)

    def chosen(self, loads: list[float], price: float) -> tuple[list[int], float, float]:
        """Placement, and fullest rank over mean before and after."""
        before = self.intended
        after = placements.chosen(loads, before, self.ranks, price)
        mean = sum(loads) / self.ranks or 1.0
        now, then = (max(placements.rank_loads(loads, each, self.ranks)) / mean for each in (before, after))
        return after, now, then

    def move(self, after: list[int], parameters: Sequence[Sequence[Tensor]], state_of: StateOf) -> int:
        """Returns the bytes sent; parameters: of this rank's experts, by slot. A collective."""
        sent = 0
        for each in placements.slot_moves(after, self.placement, self.ranks):
            with state_of(parameters[each.slot]) as tensors:
                sent += exchange(tensors, each, self.group)
        self.placement, self.wanted, self._index = after, None, None
        return sent


class PlacementGroup(NamedTuple):
    group: ProcessGroup
    replicas: int


class Placer(abc.ABC):
    """Places the experts of every layer; subclasses access the model and its optimizers.

    interval: steps between two placements. break_even: tokens per step to gain per moved slot; None to measure it.
    layers: in the order of the first forward pass. prices: break-even by the sizes of an expert's parameters.
    """

    def __init__(self, interval: int, break_even: float | None) -> None:
        self.layers: weakref.WeakKeyDictionary[Any, PlacedExperts] = weakref.WeakKeyDictionary()
        self._interval, self._break_even = interval, break_even
        self._served: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self.prices: dict[tuple[int, ...], float] = {}
        self._step = 0

    @abc.abstractmethod
    def placement_group(self) -> PlacementGroup | None:
        """None if there is none, after logging why."""

    @abc.abstractmethod
    def experts(self, layer: Any) -> Sequence[torch.nn.Module]:
        """This rank's experts, by slot."""

    @abc.abstractmethod
    def why_not(self, layer: Any) -> str:
        """Reason why a layer cannot be balanced, the same on every rank; "" if it can."""

    @abc.abstractmethod
    def state_of(self) -> StateOf:
        """Requested once before each exchange."""

    @abc.abstractmethod
    def has_moved(self) -> None:
        """Called after each exchange."""

    @abc.abstractmethod
    def say(self, kind: str, text: str) -> None:
        """Log a "fallback", a "decision", or a "move"."""

    def end_step(self) -> None:
        """Place experts if due; then a collective."""
        self._step += 1
        for each in self.layers.values():
            each.average.end_step()
        if self._step % self._interval == 0:
            self._place()
        else:
            self._move({layer: each.wanted for layer, each in self.layers.items() if each.wanted is not None})

    def go_home(self) -> None:
        """Restore the home placement until the end of the next step. A collective."""
        away = {layer: each for layer, each in self.layers.items() if not each.is_home}
        places = [each.placement for each in away.values()]
        self._move({layer: each.home for layer, each in away.items()})
        for each, before in zip(away.values(), places, strict=True):
            each.wanted = before

    @property
    def away(self) -> list[Any]:
        return [layer for layer, each in self.layers.items() if not each.is_home]

    def _place(self) -> None:
        found = self.placement_group()
        layers = self._served_layers(found.group) if found else []
        if found is None or not layers:
            return
        plans, imbalances = {}, []
        averages = [self.layers[each].average for each in layers]
        for layer, totals in zip(layers, predicted_loads(averages, found.group), strict=True):
            loads = [each / found.replicas for each in totals]
            price = self._price(layer, sum(loads) / len(loads), found.group)
            plans[layer], *both = self.layers[layer].chosen(loads, price)
            imbalances.append(both)
        moves = sum(placements.moved(after, self.layers[layer].intended) for layer, after in plans.items())
        start = time.perf_counter()
        sent = self._move(plans)
        if moves:
            before, after = (sum(each) / len(layers) for each in zip(*imbalances, strict=True))
            self.say(
                "move",
                f"step {self._step}: {moves} experts of {len(layers)} layers change places, rank 0 sends "
                f"{sent / 1e6:.1f} MB in {time.perf_counter() - start:.2f} s; fullest rank over the mean, predicted: "
                f"{before:.3f} before, {after:.3f} after",
            )

    def _served_layers(self, group: ProcessGroup) -> list[Any]:
        new = [each for each in self.layers if each not in self._served]
        if new:
            device = next(new[0].parameters()).device
            same = same_on_all_ranks([_fingerprint(self.experts(each)) for each in new], group, device)
            for layer, is_same in zip(new, same, strict=True):
                reason = self.why_not(layer)
                if not reason and not is_same:
                    reason = "experts of ranks differ in shape, or in what is trained"
                self._served[layer] = not reason
                if reason:
                    self.say("fallback", reason)
        return [each for each in self.layers if self._served[each]]

    def _price(self, layer: Any, tokens: float, group: ProcessGroup) -> float:
        """Break-even in tokens per step; tokens: approximate, of an expert."""
        if self._break_even is not None:
            return float(self._break_even)
        parameters = [*self.experts(layer)[0].parameters()]
        shapes = tuple(each.numel() for each in parameters)
        if shapes not in self.prices:
            costs = measure_costs(parameters, round(tokens), self.layers[layer].group, group)
            with self.state_of()(parameters) as tensors:
                size = torch.tensor(sum(each.nbytes for each in tensors), device=parameters[0].device)
            dist.all_reduce(size, dist.ReduceOp.MAX, group=group)
            share = int(size) / copied_bytes(parameters)
            price = self.prices[shapes] = costs.break_even_of_move(share, self._interval)
            self.say(
                "decision", f"experts of a slot move where that takes {price:.3g} tokens a step off the fullest rank"
            )
        return self.prices[shapes]

    def _move(self, plans: Mapping[Any, list[int]]) -> int:
        """Returns the bytes sent. A collective."""
        moving = {layer: after for layer, after in plans.items() if after != self.layers[layer].placement}
        for layer in plans:
            self.layers[layer].wanted = None
        if not moving:
            return 0
        state_of, sent = self.state_of(), 0
        for layer, after in moving.items():
            parameters = [[*each.parameters()] for each in self.experts(layer)]
            sent += self.layers[layer].move(after, parameters, state_of)
        self.has_moved()
        return sent


def _fingerprint(experts: Sequence[torch.nn.Module]) -> int:
    text = [
        [(tuple(each.shape), str(each.dtype), each.requires_grad) for each in expert.parameters()] for expert in experts
    ]
    return zlib.crc32(repr(text).encode())
