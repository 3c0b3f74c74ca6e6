"""Runs a module's forward within a context, through hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch


class HookedModule:
    def __init__(self, module: torch.nn.Module, make: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._make = make
        self._open: list[tuple[contextlib.AbstractContextManager[Any], Any]] = []
        self.handles = (
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave, always_call=True),
        )

    def __reduce__(self) -> Any:
        """Copies do nothing: their hooks are never removed."""
        return _idle, ()

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        context = self._make()
        self._open.append((context, context.__enter__()))

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        context, entered = self._open.pop()
        context.__exit__(None, None, None)
        if callable(entered) and output is not None:
            entered(output[0] if isinstance(output, tuple) else output)


def _idle() -> HookedModule:
    found = HookedModule.__new__(HookedModule)
    found._make, found._open, found.handles = contextlib.nullcontext, [], ()  # type: ignore[assignment]
    return found
