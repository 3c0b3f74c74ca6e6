"""Runs the recomputation of checkpointed functions before their backward pass, when the caller has time for it.

A checkpoint runs a function without a graph, and once more with one when its gradient has arrived. The second run needs
the inputs alone. Here it may come earlier: `recompute` runs what a unit of work, such as one micro-batch of a model
chunk, has checkpointed, and the checkpoint's own second run is given that graph. The checkpoint stays the host's.

The same function runs on the same inputs with the same random numbers, so results keep their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

Function = Callable[..., Any]
Unit = tuple[int, int]
# Takes the state of random numbers now; the function that it returns restores it within a `with` block.
Snapshot = Callable[[], Callable[[], AbstractContextManager[object]]]


class AheadFunction:
    """A function for a checkpoint: called by its forward, then, unless `recompute` came before, by its backward."""

    def __init__(self, function: Function, snapshot: Snapshot, paused: Callable[[], AbstractContextManager[object]]):
        self._function, self._snapshot, self._paused = function, snapshot, paused
        self._inputs: tuple[Any, ...] = ()
        self._restored: Callable[[], AbstractContextManager[object]] | None = None
        self._outputs: Any = None

    def __call__(self, *inputs: Any) -> Any:
        if self._restored is None:
            self._inputs, self._restored = inputs, self._snapshot()
            # What a checkpoint within this one does is its own matter.
            with self._paused():
                return self._function(*inputs)
        if self._outputs is None:
            return self._function(*inputs)
        is_single = isinstance(self._outputs, torch.Tensor)
        # Without an input to train the outputs have a graph all the same: that of the weights.
        anchor = torch.empty(0, requires_grad=True)
        found = _Reattached.apply(self, anchor, *inputs)  # type: ignore[no-untyped-call]
        return found[0] if is_single else found

    def recompute(self) -> None:
        """Run the function on its inputs with a graph."""
        assert self._restored is not None, "it has not run yet"
        self._inputs = tuple(
            each.detach().requires_grad_(each.requires_grad) if isinstance(each, torch.Tensor) else each
            for each in self._inputs
        )
        with self._restored(), torch.enable_grad():
            self._outputs = self._function(*self._inputs)

    def _take(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return inputs and outputs, and forget them."""
        outputs = (self._outputs,) if isinstance(self._outputs, torch.Tensor) else tuple(self._outputs)
        inputs, self._inputs, self._outputs = self._inputs, (), None
        return inputs, outputs


class _Reattached(torch.autograd.Function):
    """The outputs of a recomputation, as a function of the inputs that the checkpoint has made for its own."""

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
    """What the checkpoints of each unit are to recompute, in the order of their forward passes.

    snapshot: how random numbers are kept.
    stores_others: units that are not recomputed ahead checkpoint nothing; else they recompute in their backward pass.
    """

    def __init__(self, snapshot: Snapshot, stores_others: bool) -> None:
        self._snapshot, self._stores_others = snapshot, stores_others
        self._units: frozenset[Unit] = frozenset()
        self._recorded: dict[Unit, list[AheadFunction]] = {}
        self._now: list[AheadFunction] | None = None
        self._is_stored = False

    def begin(self, units: frozenset[Unit]) -> None:
        """Begin a training step in which `units` are recomputed ahead."""
        self._units = units
        self._recorded.clear()

    def recording(self, forward: Callable[[int, Any], Any], chunk: int) -> Callable[[int, Any], Any]:
        """Return a chunk's forward pass (micro-batch, input) that records what it checkpoints."""

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
        """Call `checkpoint(function, *arguments, *inputs)` as the unit that runs now wants it.

        A checkpoint gives an output without a gradient where no input needs one, though weights of the function may.
        Where the model would not recompute by itself, the function then runs plainly.
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
        """Recompute what a unit has checkpointed; its forward has ended."""
        for each in self._recorded.pop((chunk, microbatch)):
            each.recompute()
