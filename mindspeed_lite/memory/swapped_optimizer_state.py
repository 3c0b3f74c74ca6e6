"""Stores optimizer state in host memory and copies it to the device for the step, in groups.

Three groups are on the device: one updated, one copied in, one out. Between steps tensors are placeholders: reads
return NaN, writes raise. `fetch` gives them values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from mindspeed_lite.memory.copy_engine import Buffer, CopyEngine, PinnedBufferPool
from mindspeed_lite.platform.side_stream import Event

StateOf = Callable[[torch.Tensor], dict[str, Any]]

_MOMENTS = ("exp_avg", "exp_avg_sq")
_PARAMETER = "param"
# Bytes; smaller tensors stay on the device.
_SMALLEST = 1 << 16


class _Place:
    """Host memory of one tensor.

    tensor: state tensor; None for the parameter itself, which a reference would keep alive.
    on_host: only the buffer has the values. pending_h2d: copy that compute has not waited for.
    """

    def __init__(self, tensor: torch.Tensor | None, buffer: Buffer, nbytes: int) -> None:
        self.tensor = tensor
        self.buffer = buffer
        self.nbytes = nbytes
        self.on_host = False
        self.pending_h2d: Event | None = None


class SwappedOptimizerState:
    """`StatePlacement` of moments and fp32 main parameters in host memory between steps.

    Args:
        times: groups per step, over all optimizers that share this.
        on_refusal: called once with the reason when host memory is exhausted.
    """

    device_addressable = False

    def __init__(self, engine: CopyEngine, times: int, on_refusal: Callable[[str], None] | None = None) -> None:
        self._engine = engine
        self._times = times
        self._on_refusal = on_refusal
        self._pool = PinnedBufferPool(engine)
        self._held: Any = WeakTensorKeyDictionary()
        self._own: Any = WeakTensorKeyDictionary()
        # Device memory with a copy in flight.
        self._leaving: deque[tuple[Event, torch.Tensor]] = deque()
        self._leaving_bytes = 0
        self._placeholders: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
        self._refused = False

    @property
    def nbytes(self) -> int:
        return sum(place.nbytes for places in self._held.values() for place in places.values())

    def register(self, parameters: Iterable[torch.Tensor]) -> None:
        """Register parameters for offloading; no other code may access their memory."""
        for parameter in parameters:
            if parameter.is_contiguous():
                self._own[parameter] = True
                self.place(parameter, {})
        self._settle()

    def place(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Offloads the parameter's state."""
        places = self._held.setdefault(parameter, {})
        self._forget(places, state)
        found = {name: state[name] for name in _MOMENTS if name in state}
        if parameter in self._own:
            found = {_PARAMETER: parameter, **found}
        for name, tensor in found.items():
            place = places.get(name)
            if place is None:
                buffer = self._buffer(tensor)
                if buffer is None:
                    continue
                if name != _PARAMETER:
                    # New object: a checkpoint may share the old one.
                    tensor = state[name] = tensor.detach()
                place = places[name] = _Place(None if name == _PARAMETER else tensor, buffer, tensor.nbytes)
            if not place.on_host:
                self._offload(tensor, place)
                self._settle(place.nbytes)

    def update_groups(self, parameters: Sequence[torch.Tensor]) -> Iterator[slice]:
        groups = self._groups(parameters)
        on_host = [self._on_host(parameters[group]) for group in groups]
        self._settle()
        for pairs in on_host[:1]:
            self._fetch(pairs)
        for group, pairs, following in zip(groups, on_host, [*on_host[1:], []], strict=False):
            # Starts the copy before compute waits for this group.
            self._fetch(following)
            self._ready(parameters[group])
            yield group
            for tensor, place in pairs:
                self._offload(tensor, place)
            self._settle(sum(place.nbytes for _, place in pairs))
        self._settle()

    def fetch(self, parameters: Iterable[torch.Tensor], state_of: StateOf) -> None:
        """Copies the parameters' state to the device, to read, write and replace."""
        some = list(parameters)
        for parameter in some:
            self._forget(self._held.get(parameter, {}), state_of(parameter))
        self._fetch(self._on_host(some))
        self._ready(some)

    def offload(self, parameters: Iterable[torch.Tensor], state_of: StateOf) -> None:
        for parameter in parameters:
            self.place(parameter, state_of(parameter))
        self._settle()

    def restore(self) -> None:
        self._settle()
        for parameter in list(self._held):
            self._fetch(self._on_host([parameter]))
            self._ready([parameter])
        self._held.clear()
        self._own.clear()

    def _groups(self, parameters: Sequence[torch.Tensor]) -> list[slice]:
        share, start, nbytes = self.nbytes / self._times, 0, 0
        found = []
        for number, parameter in enumerate(parameters):
            nbytes += sum(place.nbytes for place in self._held.get(parameter, {}).values())
            if nbytes >= share > 0 or number == len(parameters) - 1:
                found.append(slice(start, number + 1))
                start, nbytes = number + 1, 0
        return found

    def _on_host(self, parameters: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, _Place]]:
        return [
            (parameter if place.tensor is None else place.tensor, place)
            for parameter in parameters
            for place in self._held.get(parameter, {}).values()
            if place.on_host
        ]

    def _fetch(self, pairs: Iterable[tuple[torch.Tensor, _Place]]) -> None:
        for tensor, place in pairs:
            memory = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            place.pending_h2d = self._engine.h2d(place.buffer, _bytes_of(memory))
            tensor.data = memory
            place.on_host = False

    def _ready(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            for place in self._held.get(parameter, {}).values():
                if place.pending_h2d is not None:
                    self._engine.wait(place.pending_h2d)
                    place.pending_h2d = None

    def _offload(self, tensor: torch.Tensor, place: _Place) -> None:
        memory = tensor.data
        self._leaving.append((self._engine.d2h(_bytes_of(memory), place.buffer), memory))
        self._leaving_bytes += place.nbytes
        # Not an empty storage: reading that crashes, and the storage may be shared.
        tensor.data = self._placeholder(tensor).expand(tensor.shape)
        place.on_host, place.pending_h2d = True, None

    def _settle(self, keep: int = 0) -> None:
        """Frees the oldest memory until `keep` bytes are in flight; compute waits for the copies."""
        while self._leaving_bytes > keep:
            mark, memory = self._leaving.popleft()
            self._engine.wait(mark)
            self._leaving_bytes -= memory.nbytes

    def _forget(self, places: dict[str, _Place], state: Mapping[str, Any]) -> None:
        for name in _MOMENTS:
            if name in places and state.get(name) is not places[name].tensor:
                self._pool.release(places.pop(name).buffer)

    def _buffer(self, tensor: torch.Tensor) -> Buffer | None:
        if self._refused or tensor.nbytes < _SMALLEST or not tensor.is_contiguous():
            return None
        try:
            return self._pool.acquire(tensor.nbytes)
        except MemoryError as error:
            # Earlier tensors stay on the host; the rest stays on the device.
            self._refused = True
            if self._on_refusal is not None:
                self._on_refusal(str(error))
            return None

    def _placeholder(self, tensor: torch.Tensor) -> torch.Tensor:
        key = (tensor.device, tensor.dtype)
        if key not in self._placeholders:
            nothing = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
            self._placeholders[key] = torch.full((), nothing, dtype=tensor.dtype, device=tensor.device)
        return self._placeholders[key]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
