"""What the files of operators/ are written with: tensors of a call, and the checks that contracts share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tests.npu_contract.recorder import Call, Tensor

DTYPES = ("float16", "bfloat16", "float32")


class Make:
    """Makes the tensors of a call: zeros on a device, or drawn; `leaves` are those that want a gradient.

    eps: the coarsest of their dtypes.
    """

    def __init__(self, device: str, draws: bool = False) -> None:
        self.leaves: list[torch.Tensor] = []
        self.eps = 0.0
        self._device = device
        self._generator = torch.Generator().manual_seed(1) if draws else None

    def __call__(self, *shape: int, dtype: str = "bfloat16", grad: bool = True) -> torch.Tensor:
        kind = getattr(torch, dtype)
        self.eps = max(self.eps, torch.finfo(kind).eps)
        if self._generator is None:
            made = torch.zeros(shape, dtype=kind, device=self._device)
        else:
            made = torch.randn(shape, generator=self._generator).to(self._device, kind)
        if grad:
            self.leaves.append(made.requires_grad_())
        return made

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)


# Calls a public operator on tensors of `make`, and returns all that it computes.
OperatorCall = Callable[[Make], Any]


def by_name(call: Call, *names: str) -> Iterator[str]:
    """Arguments with a default, or that could be taken for another, are to be passed by name."""
    missing = [] if call.named is None else [name for name in names if name not in call.named]
    if missing:
        yield f"{', '.join(missing)} not passed by name"


def is_tensor(what: str, found: object, dtype: str, shape: tuple[int, ...]) -> Iterator[str]:
    if not isinstance(found, Tensor) or found.dtype != dtype or found.shape != tuple(shape):
        yield f"{what} is {found}: want {dtype}{list(shape)}"


def cumulative_ends(name: str, values: Sequence[int] | None, total: int) -> Iterator[str]:
    """Ends of consecutive pieces as Python ints: no leading zero, ascending, the last one is the total."""
    if not isinstance(values, (list, tuple)) or not values or any(type(value) is not int for value in values):
        yield f"{name} is {values!r}: want the cumulative ends as a list of Python ints"
        return
    if values[0] == 0:
        yield f"{name} {list(values)} has a leading zero: it lists ends only"
    if list(values) != sorted(values) or values[-1] != total:
        yield f"{name} {list(values)} is not cumulative to {total}"
