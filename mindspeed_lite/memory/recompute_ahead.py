"""Recomputes checkpointed functions ahead of their backward pass.

Recomputation needs only inputs, not the gradient. `recompute` does it early for one micro-batch of a chunk; the
checkpoint's own recomputation reuses that graph. Results are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

Function = Callable[..., Any]
Unit = tuple[int, int]
# Saves the RNG state; the returned function restores it within a `with` block.
Snapshot = Callable[[], Callable[[], AbstractContextManager[object]]]


class AheadFunction:
    def __init__(self, function: Function, snapshot: Snapshot, paused: Callable[[], AbstractContextManager[object]]):
        self._function, self._snapshot, self._paused = function, snapshot, paused
        self._inputs: tuple[Any, ...] = ()
        self._restored: Callable[[], AbstractContextManager[object]] | None = None
        self._outputs: Any = None

    def __call__(self, *inputs: Any) -> Any:
        if self._restored is None:
            self._inputs, self._restored = inputs, self._snapshot()
            with self._paused():
                return self._function(*inputs)
        if self._outputs is None:
            return self._function(*inputs)
        is_single = isinstance(self._outputs, torch.Tensor)
        # Weights need a graph even if no input needs a gradient.
        anchor = torch.empty(0, requires_grad=True)
        found = _Reattached.apply(self, anchor, *inputs)  # type: ignore[no-untyped-call]
        return found[0] if is_single else found

    def recompute(self) -> None:
        assert self._restored is not None, "it has not run yet"
        self._inputs = tuple(
            each.detach().requires_grad_(each.requires_grad) if isinstance(each, torch.Tensor) else each
            for each in self._inputs
        )
        with self._restored(), torch.enable_grad():
            self._outputs = self._function(*self._inputs)

    def _take(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        outputs = (self._outputs,) if isinstance(self._outputs, torch.Tensor) else tuple(self._outputs)
        inputs, self._inputs, self._outputs = self._inputs, (), None
        return inputs, outputs


class _Reattached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ahead: AheadFunction, anchor: torch.Tensor, *inputs: Any) -> Any:
        ctx.kept, outputs = ahead._take()
        ctx.outputs = outputs
        ctx.set_materialize_grads(False)
        found = tuple(each.detach() if isinstance(each, torch.Tensor) else each for each in outputs)
        ctx.mark_non_differentiable(
            *(
                new
                for new, each in zip(found, outputs, strict=True)
                if isinstance(each, torch.Tensor) and not each.requires_grad
            )
        )
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        pairs = [
            (each, grad)
            for each, grad in zip(ctx.outputs, grads, strict=True)
            if isinstance(each, torch.Tensor) and each.requires_grad and grad is not None
        ]
        ctx.outputs = None
        torch.autograd.backward([each for each, _ in pairs], [grad for _, grad in pairs])
        inputs, ctx.kept = ctx.kept, None
        return None, None, *(each.grad if isinstance(each, torch.Tensor) else None for each in inputs)


class RecomputedUnits:
    """Checkpoints of each unit (chunk, micro-batch).

    stores_others: units not recomputed ahead checkpoint nothing.
    """

    def __init__(self, snapshot: Snapshot, stores_others: bool) -> None:
        self._snapshot, self._stores_others = snapshot, stores_others
        self._units: frozenset[Unit] = frozenset()
        self._recorded: dict[Unit, list[AheadFunction]] = {}
        self._now: list[AheadFunction] | None = None
        self._is_stored = False

    def begin(self, units: frozenset[Unit]) -> None:
        self._units = units
        self._recorded.clear()

    def recording(self, forward: Callable[[int, Any], Any], chunk: int) -> Callable[[int, Any], Any]:
        def recorded(microbatch: int, received: Any) -> Any:
            if (chunk, microbatch) in self._units:
                self._now = self._recorded[chunk, microbatch] = []
            self._is_stored = self._now is None and self._stores_others
            with self._ended():
                return forward(microbatch, received)

        return recorded

    @contextmanager
    def _ended(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._now, self._is_stored = None, False

    @contextmanager
    def _paused(self) -> Iterator[None]:
        now, self._now = self._now, None
        try:
            yield
        finally:
            self._now = now

    def checkpoint(self, checkpoint: Function, function: Function, arguments: Sequence[Any], inputs: Any) -> Any:
        """Calls `checkpoint(function, *arguments, *inputs)`, recorded, or the function itself.

        With `stores_others`, functions whose inputs need no gradient run without a checkpoint, which would lose weight
        gradients.
        """
        tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
        loses_gradients = bool(tensors) and not any(each.requires_grad for each in tensors)
        if self._is_stored or (self._now is not None and self._stores_others and loses_gradients):
            return function(*inputs)
        if self._now is not None:
            function = AheadFunction(function, self._snapshot, self._paused)
            self._now.append(function)
        return checkpoint(function, *arguments, *inputs)

    def recompute(self, chunk: int, microbatch: int) -> None:
        for each in self._recorded.pop((chunk, microbatch)):
            each.recompute()
