"""Stores fp32 main parameters as the bf16 weights of the model and an int16 low half each.

The parameters stay in the optimizer's groups, with shape and dtype, but are placeholders: reads return NaN, writes
raise. Use `materialized()` to access values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from mindspeed_lite.ops.adamw import halves

Highs = Callable[[], Mapping[torch.Tensor, torch.Tensor]]


class SplitFP32Params:
    """The split parameters of an optimizer.

    highs: returns parameter -> its contiguous bf16 high half, of any shape; called whenever needed, since the owner of
        the weights may move them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, highs: Highs) -> None:
        # Not its state, which is another dictionary after loading a checkpoint.
        self._optimizer = weakref.ref(optimizer)
        self._highs = highs
        self._lows: dict[torch.Tensor, torch.Tensor] = {}
        for parameter, high in highs().items():
            low = torch.empty(parameter.numel(), dtype=torch.int16, device=parameter.device)
            self._give_up(parameter, high, low)

    def halves(self) -> dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Parameter -> (high, low) for all that are split now."""
        highs = self._highs()
        return {parameter: (highs[parameter], low) for parameter, low in self._lows.items()}

    def joined(self, parameter: torch.Tensor, squares: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """fp32 copies of a split parameter and its second moment; empty if it is not split.

        squares: the second moment with its sign, if the state stores it otherwise.
        """
        low = self._lows.get(parameter)
        if low is None:
            return {}
        squares = self._squares(parameter) if squares is None else squares
        word = halves.join(self._highs()[parameter], low, squares).view(parameter.shape)
        return {"param": word} if squares is None else {"param": word, "exp_avg_sq": squares.abs()}

    @contextmanager
    def materialized(self, parameters: Iterable[torch.Tensor] | None = None) -> Iterator[None]:
        """Inside, the parameters (all by default) are fp32 and may be read and written."""
        lows: dict[torch.Tensor, torch.Tensor] = {}
        try:
            for parameter in list(self._lows if parameters is None else parameters):
                if parameter in self._lows:
                    lows[parameter] = self._restore(parameter)
            yield
        finally:
            highs = self._highs()
            for parameter, low in lows.items():
                self._give_up(parameter, highs[parameter], low)

    def restore(self) -> None:
        """Store all parameters as fp32 for good."""
        for parameter in list(self._lows):
            self._restore(parameter)

    def _restore(self, parameter: torch.Tensor) -> torch.Tensor:
        """Make the parameter fp32; returns its low half."""
        plain, squares = self.joined(parameter), self._squares(parameter)
        if squares is not None:
            squares.abs_()
        parameter.data = plain["param"]
        return self._lows.pop(parameter)

    def _give_up(self, parameter: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
        halves.split(parameter.data.contiguous(), high, low, self._squares(parameter))
        parameter.data = torch.full((), float("nan"), device=parameter.device).expand(parameter.shape)
        self._lows[parameter] = low

    def _squares(self, parameter: torch.Tensor) -> torch.Tensor | None:
        optimizer = self._optimizer()
        state: Mapping[str, Any] = {} if optimizer is None else optimizer.state.get(parameter, {})
        found: torch.Tensor | None = state.get("exp_avg_sq")
        return found
