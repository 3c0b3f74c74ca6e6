"""Same training in other arithmetic: measures what rounding alone changes.

float32 for a 16-bit training; for float32 matmuls that sum the inner dimension in reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
# Operator -> index of its first factor; the second follows.
_PRODUCTS = {
    _aten.mm.default: 0,
    _aten.bmm.default: 0,
    _aten.addmm.default: 1,
    _aten.baddbmm.default: 1,
    _aten.addbmm.default: 1,
}
_DRAWS = (_aten.normal_.default, _aten.uniform_.default)


class ReversedReductionOrder(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Context in which matmuls, forward and backward, sum in reverse order."""

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
    """Context in which float32 tensors are initialised with torch's draws for `dtype`."""

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
