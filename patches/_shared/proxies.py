"""Proxies that take the place of a layer or one of its parts, so that Megatron's own code runs on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class FunctionModule(torch.nn.Module):
    """A function where Megatron asks for a module; without parameters, so `Module.__init__` is skipped."""

    function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "function", function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class AttributeOverride:
    """`original` with some attributes overridden; everything else is read from it."""

    def __init__(self, original: Any, **others: Any) -> None:
        self._original = original
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        # A copy is asked for attributes before it has one.
        if name == "_original":
            raise AttributeError(name)
        return getattr(self._original, name)
