"""Measures what rounding alone changes: the same training in other arithmetic, to judge a difference of losses.

Two rounding baselines, both with the same initial weights, data and mathematics:

float32       for a training in 16 bits: how far its own rounding takes it from a training that hardly rounds
other order   for one in float32: addition is not associative, so a matrix product whose inner dimension is walked
              backwards rounds differently and is as right as before
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
# Where the two factors stand among the arguments; the inner dimension is the first's last, the second's last but one.
_PRODUCTS = {
    _aten.mm.default: 0,
    _aten.bmm.default: 0,
    _aten.addmm.default: 1,
    _aten.baddbmm.default: 1,
    _aten.addbmm.default: 1,
}
_DRAWS = (_aten.normal_.default, _aten.uniform_.default)


class ReversedReductionOrder(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Within the block every matrix product, forward and backward, sums its inner dimension from the other end."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        place = _PRODUCTS.get(func)
        if place is not None:
            args = list(args)
            args[place] = args[place].flip(-1)
            args[place + 1] = args[place + 1].flip(-2)
        return func(*args, **(kwargs or {}))


class SampleRandomInDtype(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Within the block float32 tensors are filled with the random numbers that `dtype` would have drawn.

    torch draws other numbers for other dtypes; without this a training in float32 begins from other weights.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.dtype = dtype

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _DRAWS and args[0].dtype == torch.float32:
            drawn = torch.empty_like(args[0], dtype=self.dtype)
            func(drawn, *args[1:], **(kwargs or {}))
            return args[0].copy_(drawn)
        return func(*args, **(kwargs or {}))
