"""Objects under whose name Megatron's own code runs on something else: a part of a layer, in pieces of our choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Through(torch.nn.Module):
    """A function where Megatron asks for a module; it is called often and holds nothing, so nothing is set up."""

    function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "function", function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class InPlaceOf:
    """`original`, but for the attributes given."""

    def __init__(self, original: Any, **others: Any) -> None:
        self._original = original
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
