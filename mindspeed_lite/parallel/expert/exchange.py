"""A collective that is issued and waited for apart, in both passes: what runs between is beside it.

    out = issue(x, ...)         forward: the message leaves         backward: its gradient is waited for
    shared_expert(...)                   runs beside it                       runs beside it
    messages.wait()                      it has arrived                       (its gradient left when it was there)

Autograd runs what is ready in the opposite order of the forward pass, so that the operators that ran between the two
stand between them in the backward pass too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

Splits = Sequence[int] | None


class Collective(Protocol):
    """What ranks exchange, and what they exchange for its gradient."""

    def start(self, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """(work, out) of x [rows, ...], contiguous; `out` has its numbers when `work` has been waited for."""

    def reversed(self) -> Collective:
        """The one that brings gradients back."""


class AllToAll(NamedTuple):
    """`received` and `sent` are rows by rank; None for equal parts."""

    received: Splits
    sent: Splits
    group: dist.ProcessGroup

    def start(self, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
        rows = len(x) if self.received is None else int(sum(self.received))
        out = x.new_empty(rows, *x.shape[1:])
        return dist.all_to_all_single(out, x, self.received, self.sent, group=self.group, async_op=True), out

    def reversed(self) -> AllToAll:
        return AllToAll(self.sent, self.received, self.group)


class AllGather(NamedTuple):
    """The rows of all ranks, one rank's behind the other's."""

    group: dist.ProcessGroup

    def start(self, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
        out = x.new_empty(len(x) * self.group.size(), *x.shape[1:])
        return dist.all_gather_into_tensor(out, x, group=self.group, async_op=True), out

    def reversed(self) -> ReduceScatter:
        return ReduceScatter(self.group)


class ReduceScatter(NamedTuple):
    """Each rank's part of the sum over all ranks."""

    group: dist.ProcessGroup

    def start(self, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
        out = x.new_empty(len(x) // self.group.size(), *x.shape[1:])
        return dist.reduce_scatter_tensor(out, x, group=self.group, async_op=True), out

    def reversed(self) -> AllGather:
        return AllGather(self.group)


class Messages:
    """Messages under way, with what they read and write, and what is to run beside the next one of a backward pass."""

    def __init__(self) -> None:
        self._works: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
        self._jobs: list[Callable[[], None]] = []
        # Whether a gradient is to leave that jobs can run beside.
        self.takes_jobs = False
        # Where autograd places the wait for the gradient of the message before, of those that are issued together.
        self._place: int | None = None
        # The first place of the dispatch, and whether its messages will have jobs beside them.
        self._first: int | None = None
        self._expects_jobs = False

    def begin(self, is_dispatch: bool = True) -> None:
        """Those issued from here on belong together: in the backward pass all leave before one is waited for.

        is_dispatch: they bring tokens to experts; else they bring back what became of those of the last dispatch. The
            gradients of the latter are the first to travel. If those of the dispatch will have jobs beside them
            (`expect_jobs`), all that ran beside either message in the forward pass runs beside the first.
        """
        if is_dispatch:
            self._place, self._first, self._expects_jobs = None, None, False
        elif self._expects_jobs and self._first is not None:
            self._place = self._first + 2
        else:
            self._place = None

    def expect_jobs(self) -> None:
        """Jobs will be put between the gradients that come from experts and those that are sent on from them."""
        self._expects_jobs = True

    def place(self, node: Any) -> None:
        """Put a backward pass behind those of the messages' own, and of what is ordered by these."""
        self._place = node._sequence_nr() - 2 if self._place is None else self._place - 1
        if self._first is None:
            self._first = self._place
        node._set_sequence_nr(max(0, self._place))

    def __len__(self) -> int:
        return len(self._works) + len(self._jobs)

    def send(self, x: torch.Tensor, collective: Collective) -> torch.Tensor:
        """What the ranks exchange of x [rows, ...]; its numbers are there after `wait`."""
        x = x.contiguous()
        work, out = collective.start(x)
        self._works.append((work, x, out))
        return out

    @torch.no_grad()
    def wait(self, leaving: int = 0) -> None:
        """Wait for the messages, the oldest first, until so many are left."""
        # Without a graph: gloo copies a sum into place while it is waited for.
        while len(self._works) > leaving:
            self._works.pop(0)[0].wait()

    def put(self, job: Callable[[], None], is_certain: bool = False) -> bool:
        """Run `job` beside the next message, before that is waited for; False if there will be none.

        is_certain: the caller knows that there will be one.
        """
        if self.takes_jobs or is_certain:
            self._jobs.append(job)
        return self.takes_jobs or is_certain

    def run_jobs(self) -> None:
        """Run what was put, the oldest first."""
        while self._jobs:
            self._jobs.pop(0)()


class _Return(torch.autograd.Function):
    """In the backward pass: wait for the gradient that `_Leave` sent, behind the jobs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, messages: Messages, with_jobs: bool) -> torch.Tensor:
        ctx.messages, ctx.with_jobs = messages, with_jobs
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        if ctx.with_jobs:
            ctx.messages.takes_jobs = False
        ctx.messages.run_jobs()
        ctx.messages.wait()
        return grad, None, None


class _Leave(torch.autograd.Function):
    """Send the rows, and in the backward pass their gradients back; both are waited for elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, collective: Collective, messages: Messages, with_jobs: bool) -> torch.Tensor:
        ctx.collective, ctx.messages, ctx.with_jobs = collective, messages, with_jobs
        return messages.send(x, collective)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        if not ctx.with_jobs:
            # Experts come next, and behind them another message.
            ctx.messages.takes_jobs = True
        return ctx.messages.send(grad, ctx.collective.reversed()), None, None, None


def issue(x: torch.Tensor, collective: Collective, messages: Messages, with_jobs: bool) -> torch.Tensor:
    """What the ranks exchange of x [rows, ...], to be read behind `messages.wait()` alone.

    Args:
        with_jobs: whether the message of its backward pass is the one that jobs run beside (tokens to experts), or
            one behind which jobs come up (tokens from experts).
    """
    back = _Return.apply(x, messages, with_jobs)  # type: ignore[no-untyped-call]
    if back.grad_fn is not None:
        messages.place(back.grad_fn)
    out: torch.Tensor = _Leave.apply(back, collective, messages, with_jobs)  # type: ignore[no-untyped-call]
    return out


__all__ = ["AllGather", "AllToAll", "Collective", "Messages", "ReduceScatter", "issue"]
