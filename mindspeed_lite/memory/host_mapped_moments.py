"""Stores Adam's moments in host memory that the device addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from mindspeed_lite.memory import host

StateOf = Callable[[torch.Tensor], dict[str, Any]]

_NAMES = ("exp_avg", "exp_avg_sq")
# Bytes; a mapping for less does not pay off.
_SMALLEST = 1 << 16
# Bytes of moments per launch, and in memory at a time.
_PORTION = 1 << 28


class HostMappedMoments:
    """`StatePlacement` that puts moments into host memory in order of registration, up to a budget.

    Args:
        budget: bytes of all optimizers that share this; None for no limit.
        on_refusal: called once with the reason when memory is exhausted.
    """

    device_addressable = True

    def __init__(self, budget: int | None, on_refusal: Callable[[str], None] | None = None) -> None:
        self._budget = budget
        self._on_refusal = on_refusal
        # Parameter -> (state, host tensors).
        self._held: Any = WeakTensorKeyDictionary()
        self._refused = False

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensors in self._held.values() for tensor in tensors)

    def place(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        _, held = self._held.get(parameter, (None, ()))
        found = tuple(state[name] for name in _NAMES)
        if held and all(each is place for each, place in zip(found, held, strict=True)):
            return
        # A checkpoint may have replaced them.
        self._held.pop(parameter, None)
        size = sum(each.nbytes for each in found)
        if size < 2 * _SMALLEST or self._refused or (self._budget is not None and self.nbytes + size > self._budget):
            return
        try:
            places = tuple(host.empty(each.shape, each.dtype, each.device) for each in found)
        except MemoryError as error:
            # Earlier moments stay on the host; the rest stays on the device.
            self._refused = True
            if self._on_refusal is not None:
                self._on_refusal(str(error))
            return
        for name, place, each in zip(_NAMES, places, found, strict=True):
            place.copy_(each)
            state[name] = place
        self._held[parameter] = (state, places)

    def update_groups(self, parameters: Sequence[torch.Tensor]) -> Iterator[slice]:
        """Yields parameters in parts; updated pages may leave memory."""
        start, part = 0, []
        for place, parameter in enumerate(parameters):
            part += self._held.get(parameter, (None, ()))[1]
            if sum(each.nbytes for each in part) >= _PORTION or place == len(parameters) - 1:
                yield slice(start, place + 1)
                host.release(part)
                start, part = place + 1, []

    def fetch(self, parameters: Iterable[torch.Tensor], state_of: StateOf) -> None:
        """Nothing: the device addresses them."""

    def offload(self, parameters: Iterable[torch.Tensor], state_of: StateOf) -> None:
        """Move moments that were replaced back to host memory."""
        for parameter in parameters:
            state = state_of(parameter)
            if all(name in state for name in _NAMES):
                self.place(parameter, state)

    def restore(self) -> None:
        for state, places in self._held.values():
            for name, place in zip(_NAMES, places, strict=True):
                if state.get(name) is place:
                    state[name] = place.clone()
        self._held.clear()
