"""Prices a micro-batch's work on a device: seconds per pass and category."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .layer_work import PartWork, Traffic
from .work import DeviceCosts, Direction, Product

Parts = Mapping[str, float]


def add(*several: Parts) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in several:
        for name, value in each.items():
            found[name] = found.get(name, 0.0) + value
    return found


def scaled(parts: Parts, factor: float) -> dict[str, float]:
    return {name: value * factor for name, value in parts.items()}


@dataclass(frozen=True)
class PassSeconds:
    """One micro-batch in a part of the model; `recompute` belongs to backward."""

    forward: Parts = field(default_factory=dict)
    input_grad: Parts = field(default_factory=dict)
    weight_grad: Parts = field(default_factory=dict)
    recompute: Parts = field(default_factory=dict)

    def __add__(self, other: PassSeconds) -> PassSeconds:
        return PassSeconds(
            add(self.forward, other.forward),
            add(self.input_grad, other.input_grad),
            add(self.weight_grad, other.weight_grad),
            add(self.recompute, other.recompute),
        )

    def __mul__(self, count: int) -> PassSeconds:
        passes = (self.forward, self.input_grad, self.weight_grad, self.recompute)
        return PassSeconds(*(scaled(each, count) for each in passes))

    @property
    def all(self) -> dict[str, float]:
        """Forward and backward; recomputation is its own category."""
        found = add(self.forward, self.input_grad, self.weight_grad)
        again = sum(self.recompute.values())
        return {**found, "recomputation": again} if again else found


def price(work: PartWork, again: PartWork, device: DeviceCosts, width: int, overlap: float) -> PassSeconds:
    """overlap: share of a message that can overlap with computation, 0 to 1."""
    forward = _forward(work, device, width, overlap)
    backward = _operators(work, device, width, True, ("input_grad",))
    weight = _products(work.products, device, width, "weight_grad")
    backward = add(backward, _exposed(work, device, add(backward, weight), overlap, True))
    backward = add(backward, _waits(device, work.launches[1], backward, weight))
    repeated = {} if again == PartWork() else _forward(again, device, width, overlap)
    return PassSeconds(forward, backward, weight, repeated)


def _forward(work: PartWork, device: DeviceCosts, width: int, overlap: float) -> dict[str, float]:
    found = _operators(work, device, width, False, ("forward",))
    found = add(found, _exposed(work, device, found, overlap, False))
    return add(found, _waits(device, work.launches[0], found))


def _waits(device: DeviceCosts, launches: float, *computed: Parts) -> dict[str, float]:
    """Seconds that the device waits for the host."""
    waits = device.host(launches) - sum(sum(each.values()) for each in computed)
    return {"host": waits} if waits > 0 else {}


def _operators(
    work: PartWork, device: DeviceCosts, width: int, is_backward: bool, directions: Iterable[Direction]
) -> dict[str, float]:
    found = add(*(_products(work.products, device, width, each) for each in directions))
    return add(
        found,
        {"attention": sum(device.scores(each, is_backward, width) for each in work.scores)},
        {"vector": sum(device.vector(each, is_backward, width) for each in work.vectors)},
        {"vector": work.layers * device.layer_overhead(is_backward)},
    )


def _products(products: Iterable[Product], device: DeviceCosts, width: int, direction: Direction) -> dict[str, float]:
    found = {"products": 0.0, "experts": 0.0}
    counts: dict[Product, int] = {}
    for each in products:
        counts[each] = counts.get(each, 0) + 1
    for each, count in counts.items():
        found["experts" if each.experts else "products"] += count * device.product(each, direction, width)
    return found


def _exposed(
    work: PartWork, device: DeviceCosts, computed: Parts, overlap: float, is_backward: bool
) -> dict[str, float]:
    """Exposed message seconds by category; computation hides only once."""
    found: dict[str, float] = {}
    room = {
        "products": computed.get("products", 0.0) + computed.get("experts", 0.0),
        "attention": computed.get("attention", 0.0),
        "pair": sum(computed.values()),
    }
    for each in work.traffic:
        count = each.backward if is_backward else each.forward
        if not count:
            continue
        seconds = count * device.message(each.message)
        hidden = _hidden(each, seconds, room, overlap)
        found[each.category] = found.get(each.category, 0.0) + seconds - hidden
    return found


def _hidden(each: Traffic, seconds: float, room: dict[str, float], overlap: float) -> float:
    if not each.beside:
        return 0.0
    # First and last parts are always exposed: a quarter of four chunks, a layer of a pair.
    most = 0.75 if each.beside != "pair" else 0.9
    hidden = min(seconds * most * overlap, room[each.beside])
    room[each.beside] -= hidden
    return hidden
