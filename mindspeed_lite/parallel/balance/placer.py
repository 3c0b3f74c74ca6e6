"""Decides when the experts of a training change places, and exchanges them: every few steps, home, and back again.

The room above says what this one asks of a training: `Placer` has a method for each question.
"""

from __future__ import annotations

import abc
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import payoff
from .load_average import alike, predicted
from .placed_experts import PlacedExperts
from .placement import moved

# Parameters of an expert -> a context in which all tensors that training keeps of them may be read and written.
StateOf = Callable[[Sequence[torch.Tensor]], AbstractContextManager[list[torch.Tensor]]]


class PlacementGroup(NamedTuple):
    """The ranks that hold experts of the same layers, and how often each expert is among them."""

    group: dist.ProcessGroup
    replicas: int


class Placer(abc.ABC):
    """Places of the experts of every layer.

    Args:
        interval: steps between two placements.
        break_even: tokens of a step that the fullest rank must lose for each slot in which experts move; measured if
            it is None.

    Attributes:
        layers: places by layer; in the order of the first forward pass, which all deciders share.
        prices: of an exchange of a slot, in tokens of a step, by the sizes of an expert's parameters.
    """

    def __init__(self, interval: int, break_even: float | None) -> None:
        self.layers: weakref.WeakKeyDictionary[Any, PlacedExperts] = weakref.WeakKeyDictionary()
        self._interval, self._break_even = interval, break_even
        self._served: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self.prices: dict[tuple[int, ...], float] = {}
        self._step = 0

    @abc.abstractmethod
    def deciders(self) -> PlacementGroup | None:
        """None, with the reason said, where there are none."""

    @abc.abstractmethod
    def experts(self, layer: Any) -> Sequence[torch.nn.Module]:
        """This rank's, by slot."""

    @abc.abstractmethod
    def why_not(self, layer: Any) -> str:
        """Why its experts stay where they are, the same on every decider; "" if they may move."""

    @abc.abstractmethod
    def state_of(self) -> StateOf:
        """How to reach an expert's tensors, asked once before each exchange."""

    @abc.abstractmethod
    def has_moved(self) -> None:
        """Called after each exchange."""

    @abc.abstractmethod
    def say(self, kind: str, text: str) -> None:
        """A "fallback", a "decision", or a "move"."""

    def end_step(self) -> None:
        """Between an optimizer's step and the next forward pass. A collective where it is time to place."""
        self._step += 1
        for each in self.layers.values():
            each.average.end_step()
        if self._step % self._interval == 0:
            self._place()
        else:
            self._move({layer: each.wanted for layer, each in self.layers.items() if each.wanted is not None})

    def go_home(self) -> None:
        """Put every expert back where its name says; after the next step it returns. A collective."""
        away = {layer: each for layer, each in self.layers.items() if not each.is_home}
        places = [each.placement for each in away.values()]
        self._move({layer: each.home for layer, each in away.items()})
        for each, before in zip(away.values(), places, strict=True):
            each.wanted = before

    @property
    def away(self) -> list[Any]:
        """Layers whose experts are elsewhere."""
        return [layer for layer, each in self.layers.items() if not each.is_home]

    def _place(self) -> None:
        """Choose places for the predicted loads. A collective."""
        deciders = self.deciders()
        layers = self._served_layers(deciders.group) if deciders else []
        if deciders is None or not layers:
            return
        plans, imbalances = {}, []
        averages = [self.layers[each].average for each in layers]
        for layer, totals in zip(layers, predicted(averages, deciders.group), strict=True):
            # One replica of the experts has an equal part of the tokens.
            loads = [each / deciders.replicas for each in totals]
            price = self._price(layer, sum(loads) / len(loads), deciders.group)
            plans[layer], *both = self.layers[layer].chosen(loads, price)
            imbalances.append(both)
        moves = sum(moved(after, self.layers[layer].intended) for layer, after in plans.items())
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

    def _served_layers(self, group: dist.ProcessGroup) -> list[Any]:
        new = [each for each in self.layers if each not in self._served]
        if new:
            same = alike([_fingerprint(self.experts(each)) for each in new], group, next(new[0].parameters()).device)
            for layer, is_same in zip(new, same, strict=True):
                reason = self.why_not(layer) or (
                    "" if is_same else "experts of ranks differ in shape, or in what is trained"
                )
                self._served[layer] = not reason
                if reason:
                    self.say("fallback", reason)
        return [each for each in self.layers if self._served[each]]

    def _price(self, layer: Any, tokens: float, group: dist.ProcessGroup) -> float:
        """Tokens of a step that the fullest rank must lose for the exchange of a slot; tokens: of an expert, about."""
        if self._break_even is not None:
            return float(self._break_even)
        parameters = [*self.experts(layer)[0].parameters()]
        shapes = tuple(each.numel() for each in parameters)
        if shapes not in self.prices:
            costs = payoff.measure(parameters, round(tokens), self.layers[layer].group, group)
            with self.state_of()(parameters) as tensors:
                size = torch.tensor(sum(each.nbytes for each in tensors), device=parameters[0].device)
            # Shards of ranks differ in size.
            dist.all_reduce(size, dist.ReduceOp.MAX, group=group)
            share = int(size) / payoff.copied_bytes(parameters)
            self.prices[shapes] = costs.break_even_of_move(share, self._interval)
            tokens = self.prices[shapes]
            self.say(
                "decision", f"experts of a slot move where that takes {tokens:.3g} tokens a step off the fullest rank"
            )
        return self.prices[shapes]

    def _move(self, plans: Mapping[Any, list[int]]) -> int:
        """Bring layers to these placements; returns the bytes that this rank sent. A collective."""
        moving = {layer: after for layer, after in plans.items() if after != self.layers[layer].placement}
        for layer in plans:
            self.layers[layer].wanted = None
        if not moving:
            return 0
        state_of, sent = self.state_of(), 0

        def of_slot(experts: Sequence[torch.nn.Module], slot: int) -> AbstractContextManager[list[torch.Tensor]]:
            return state_of([*experts[slot].parameters()])

        for layer, after in moving.items():
            sent += self.layers[layer].move(after, partial(of_slot, self.experts(layer)))
        self.has_moved()
        return sent


def _fingerprint(experts: Sequence[torch.nn.Module]) -> int:
    """A number of what experts must have in common to change places."""
    text = [
        [(tuple(each.shape), str(each.dtype), each.requires_grad) for each in expert.parameters()] for expert in experts
    ]
    return zlib.crc32(repr(text).encode())


__all__ = ["PlacementGroup", "Placer", "StateOf"]
