"""How much of an exchange of experts can be hidden at all: a step of each feature's order, computed and sent by turns.

Two lanes (`lab.two_lanes`): a process that computes and waits, and a link that sends one message at a
time. A step is its products; what else it computes is taken to be spread over them alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lab.two_lanes import Lanes

# A flash attention's backward pass computes five products for the two of its forward pass.
_SCORES_BACKWARD = 2.5


class Layer(NamedTuple):
    """Seconds of the forward products of one layer and micro-batch, and of one of its four messages.

    Attributes:
        attention: projections.
        scores: of attention.
        experts: this rank's.
        first: of the shared expert, its first product.
        second: its second one.
    """

    attention: float
    scores: float
    experts: float
    first: float = 0.0
    second: float = 0.0
    message: float = 0.0

    @property
    def computed(self) -> float:
        """Of both passes."""
        linear = self.attention + self.experts + self.first + self.second
        return 3 * linear + (1 + _SCORES_BACKWARD) * self.scores

    def scaled(self, seconds: float) -> Layer:
        """The same products in so many seconds of both passes."""
        return Layer(*(each * seconds / self.computed for each in self[:5]))


# (layer, layers, micro-batches) -> the lanes at the end of a step.
Order = Callable[[Layer, int, int], Lanes]


def layer_of(tokens: int, hidden: int, width: int, topk: int, shared: int) -> Layer:
    """Multiplications of one layer in the place of seconds; `width` and `shared` are those of a gated expert."""
    return Layer(
        attention=4.0 * tokens * hidden * hidden,
        scores=1.0 * tokens * tokens * hidden,  # of the causal half
        experts=3.0 * topk * tokens * hidden * width,
        first=2.0 * tokens * hidden * shared,
        second=1.0 * tokens * hidden * shared,
    )


def plain(layer: Layer, layers: int, micro_batches: int) -> Lanes:
    """Nothing beside any message."""
    lanes = Lanes()
    for _ in range(layers * micro_batches):
        lanes.compute(layer.computed)
        for _ in range(4):
            lanes.wait(lanes.send(layer.message))
    return lanes


def between(layer: Layer, layers: int, micro_batches: int) -> Lanes:
    """`--moe-alltoall-overlap-comm`: the shared expert and experts' weight gradients beside messages."""
    lanes = Lanes()

    def beside(seconds: float) -> None:
        arrival = lanes.send(layer.message)
        lanes.compute(seconds)
        lanes.wait(arrival)

    for _ in range(layers * micro_batches):
        lanes.compute(layer.attention + layer.scores)
        beside(layer.first)
        lanes.compute(layer.experts)
        beside(layer.second)
    for _ in range(layers * micro_batches):
        beside(2 * (layer.first + layer.second))
        lanes.compute(layer.experts)
        beside(layer.experts)
        lanes.compute(2 * layer.attention + _SCORES_BACKWARD * layer.scores)
    return lanes


def combined(layer: Layer, layers: int, micro_batches: int) -> Lanes:
    """`--moe-fb-overlap` without pipeline and shared expert: a forward pass beside a backward pass of another one."""
    lanes = Lanes()
    for _ in range(layers):
        lanes.compute(layer.attention + layer.scores)
        lanes.wait(lanes.send(layer.message))
        lanes.compute(layer.experts)
        lanes.wait(lanes.send(layer.message))
    for _ in range(micro_batches - 1):
        _pairs(lanes, layer, layers)
    weights = 0.0
    for _ in range(layers):
        arrival = lanes.send(layer.message)
        lanes.compute(weights)
        lanes.wait(arrival)
        lanes.compute(layer.experts)
        arrival = lanes.send(layer.message)
        lanes.compute(layer.experts)
        lanes.wait(arrival)
        lanes.compute(layer.attention + _SCORES_BACKWARD * layer.scores)
        weights = layer.attention
    lanes.compute(weights)
    return lanes


def _pairs(lanes: Lanes, layer: Layer, layers: int) -> None:
    """One micro-batch's forward pass and another's backward pass: see `patches/moe_fb_overlap.py`."""
    weights = tokens_came = 0.0
    for number in range(layers):
        gradients_come = lanes.send(layer.message)  # B combine
        lanes.compute(weights)
        lanes.wait(tokens_came)
        lanes.compute(layer.attention + layer.scores)
        tokens_go = lanes.send(layer.message)  # F dispatch
        lanes.wait(gradients_come)
        lanes.compute(layer.experts)
        gradients_go = lanes.send(layer.message)  # B dispatch
        weights = layer.experts
        if number == layers - 1:
            lanes.compute(weights)
            weights = 0.0
        lanes.wait(tokens_go)
        lanes.compute(layer.experts)
        tokens_came = lanes.send(layer.message)  # F combine
        lanes.wait(gradients_go)
        lanes.compute(layer.attention + _SCORES_BACKWARD * layer.scores)
        weights += layer.attention
    lanes.compute(weights)
    lanes.wait(tokens_came)


def could_hide(order: Order, layer: Layer, layers: int, micro_batches: int) -> float:
    """Seconds of computation of a step that a message may stand beside."""
    if order is between:
        return layers * micro_batches * (3 * (layer.first + layer.second) + layer.experts)
    return layers * (micro_batches - 1) * layer.computed


__all__ = ["Layer", "Order", "between", "combined", "could_hide", "layer_of", "plain"]
