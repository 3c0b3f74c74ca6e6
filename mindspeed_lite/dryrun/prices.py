"""Seconds that an operator or a message of a dry run takes on a device, at the planner's prices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mindspeed_lite.planner.published import PublishedDevice
from mindspeed_lite.planner.work import Collective, CollectiveCall, Group, Product, Scores

# Matrices of a product among an operator's arguments.
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
_BY_INDEX = ("index", "gather", "scatter", "embedding", "masked_select")
_COLLECTIVES: dict[str, Collective] = {
    "all_reduce": "all_reduce", "all_to_all": "all_to_all", "all_to_all_single": "all_to_all",
    "reduce_scatter": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter", "reduce": "reduce_scatter",
}  # fmt: skip


def products(name: str, args: Sequence[Any]) -> list[Product]:
    """Of an operator of this name, without `_`; empty if it multiplies no matrices."""
    first = _PRODUCTS.get(name)
    if first is None:
        return []
    left, right = args[first : first + 2]
    return [Product(math.prod(left.shape[:-1]), left.shape[-1], right.shape[-1])]


def operator(
    device: PublishedDevice, name: str, products: Sequence[Product], scores: tuple[Scores, bool] | None, size: int,
    width: int,
) -> tuple[str, float]:  # fmt: skip
    """Category and seconds.

    name: of the operator, or module of a kernel. scores: of attention, and whether they are its backward's. size: bytes
    moved.
    """
    if scores is not None:
        return "attention", device.scores(*scores, width)
    if products:
        if is_grouped := "grouped_matmul" in name:
            products = [replace(each, experts=1) for each in products]
        seconds = sum(device.product(each, "forward", width) for each in products)
        return "experts" if is_grouped else "products", seconds
    figures = device.figures
    share = figures.scatter if name.startswith(_BY_INDEX) else figures.bandwidth
    return "vector", size / (figures.memory_bandwidth * share)


def message(device: PublishedDevice, kind: str, group: Sequence[int], size: int, width: int) -> float:
    """size: bytes that a rank sends, or receives of a scatter."""
    priced = _COLLECTIVES.get(kind, "all_gather")
    whole = size * len(group) if priced in ("all_gather", "reduce_scatter") and kind not in _WHOLE else size
    stride = group[1] - group[0] if len(group) > 1 else 1
    return device.message(CollectiveCall(priced, whole, Group(len(group), stride), width))


# Calls whose size is that of all ranks' parts.
_WHOLE = ("broadcast", "reduce")
