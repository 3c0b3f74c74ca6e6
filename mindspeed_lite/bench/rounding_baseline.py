"""The same training in other arithmetic, to judge a difference of losses by: what rounding alone changes.

float32       for a training in 16 bits: how far its own rounding takes it
other order   for one in float32: matrix products sum their inner dimension from the other end
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
# Operator -> index of its first factor among the arguments; the second one follows.
_PRODUCTS = {
    _aten.mm.default: 0,
    _aten.bmm.default: 0,
    _aten.addmm.default: 1,
    _aten.baddbmm.default: 1,
    _aten.addbmm.default: 1,
}
_DRAWS = (_aten.normal_.default, _aten.uniform_.default)


class ReversedReductionOrder(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Within the block matrix products, forward and backward, sum their inner dimension from the other end."""

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
    """Within the block float32 tensors are initialised with the values that torch draws for `dtype`, which differ."""

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
