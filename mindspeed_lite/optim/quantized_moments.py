"""Stores optimizer moments as bf16 or fp8 codes in its state, with the same keys and shapes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch

from mindspeed_lite.ops.adamw import moments

_NAMES = ("exp_avg", "exp_avg_sq")


class QuantizedMoments:
    """Quantizes moments; dtype: parameter -> torch.bfloat16, torch.uint8 (fp8) or torch.float32."""

    def __init__(self, optimizer: torch.optim.Optimizer, dtype: Callable[[torch.Tensor], torch.dtype]) -> None:
        # Not its state: loading a checkpoint replaces that dictionary.
        self._optimizer = weakref.ref(optimizer)
        self._dtype = dtype
        self._blocks: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def _state(self) -> MutableMapping[torch.Tensor, dict[str, Any]]:
        optimizer = self._optimizer()
        return {} if optimizer is None else optimizer.state

    def zeros(self, parameter: torch.Tensor) -> None:
        dtype = self._dtype(parameter)
        for name in _NAMES:
            self._state[parameter][name] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        if dtype == torch.uint8:
            self._blocks[parameter] = _exponents(parameter)

    def blocks(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Quantize the moments of `parameter`; return the block exponents of both in fp8, else None."""
        self.narrow([parameter])
        return self._blocks.get(parameter)

    def fp32_copy(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """fp32 copies, the second with its sign; empty if stored as fp32."""
        found = self._state.get(parameter, {})
        if any(name not in found for name in _NAMES) or found["exp_avg"].dtype == torch.float32:
            return {}
        both = moments.unpack(found["exp_avg"], found["exp_avg_sq"], self._blocks.get(parameter))
        return dict(zip(_NAMES, both, strict=True))

    def restore(self) -> None:
        self.widen(list(self._state))

    def widen(self, parameters: Iterable[torch.Tensor]) -> None:
        """Make moments fp32 and writable."""
        for parameter in parameters:
            plain = self.fp32_copy(parameter)
            if plain:
                self._state[parameter].update(plain)
                self._blocks.pop(parameter, None)

    def narrow(self, parameters: Iterable[torch.Tensor]) -> None:
        """Quantizes to nearest; dequantized values return to their codes."""
        for parameter in parameters:
            found, dtype = self._state.get(parameter, {}), self._dtype(parameter)
            if dtype == torch.float32 or any(name not in found for name in _NAMES):
                continue
            if found["exp_avg"].dtype != torch.float32:
                continue
            codes = [torch.empty(found[name].shape, dtype=dtype, device=found[name].device) for name in _NAMES]
            blocks = _exponents(parameter) if dtype == torch.uint8 else None
            moments.pack((found["exp_avg"], found["exp_avg_sq"]), codes[0], codes[1], blocks)
            found.update(zip(_NAMES, codes, strict=True))
            if blocks is not None:
                self._blocks[parameter] = blocks


def _exponents(parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = parameter.numel()
    return moments.exponents(size, parameter.device), moments.exponents(size, parameter.device)
