"""Stores fp32 main parameters as the model's bf16 weights plus int16 low halves.

The optimizer's parameters are placeholders: reads return NaN, writes raise. `widen` gives them values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from mindspeed_lite.ops.adamw import halves

Highs = Callable[[], Mapping[torch.Tensor, torch.Tensor]]


class SplitFP32Params:
    """Splits parameters; highs: returns parameter -> contiguous bf16 high half.

    highs is called anew each time, since weights may move.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, highs: Highs) -> None:
        # Not its state: loading a checkpoint replaces that dictionary.
        self._optimizer = weakref.ref(optimizer)
        self._highs = highs
        self._lows: dict[torch.Tensor, torch.Tensor] = {}
        # Low halves of parameters that are fp32 for now.
        self._unused: dict[torch.Tensor, torch.Tensor] = {}
        for parameter, high in highs().items():
            low = torch.empty(parameter.numel(), dtype=torch.int16, device=parameter.device)
            self._give_up(parameter, high, low)

    def halves(self) -> dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Parameter -> (high, low) of all split ones."""
        highs = self._highs()
        return {parameter: (highs[parameter], low) for parameter, low in self._lows.items()}

    def joined(self, parameter: torch.Tensor, squares: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """fp32 copies of a split parameter and its second moment; empty if not split.

        squares: signed second moment, if the state stores it otherwise.
        """
        low = self._lows.get(parameter)
        if low is None:
            return {}
        squares = self._squares(parameter) if squares is None else squares
        word = halves.join(self._highs()[parameter], low, squares).view(parameter.shape)
        return {"param": word} if squares is None else {"param": word, "exp_avg_sq": squares.abs()}

    def widen(self, parameters: Iterable[torch.Tensor]) -> None:
        """Make parameters fp32 and writable."""
        for parameter in parameters:
            if parameter not in self._lows:
                continue
            plain, squares = self.joined(parameter), self._squares(parameter)
            if squares is not None:
                squares.abs_()
            parameter.data = plain["param"]
            self._unused[parameter] = self._lows.pop(parameter)

    def narrow(self, parameters: Iterable[torch.Tensor]) -> None:
        """Split what `widen` has joined."""
        highs = self._highs()
        for parameter in parameters:
            if parameter in self._unused:
                self._give_up(parameter, highs[parameter], self._unused.pop(parameter))

    def restore(self) -> None:
        self.widen(list(self._lows))
        self._unused.clear()

    def _give_up(self, parameter: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
        halves.split(parameter.data.contiguous(), high, low, self._squares(parameter))
        parameter.data = torch.full((), float("nan"), device=parameter.device).expand(parameter.shape)
        self._lows[parameter] = low

    def _squares(self, parameter: torch.Tensor) -> torch.Tensor | None:
        optimizer = self._optimizer()
        state: Mapping[str, Any] = {} if optimizer is None else optimizer.state.get(parameter, {})
        found: torch.Tensor | None = state.get("exp_avg_sq")
        return found
