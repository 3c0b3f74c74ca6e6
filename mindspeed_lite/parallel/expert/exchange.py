"""Async collectives with separate issue and wait; code in between overlaps in both passes.

    out = issue(x, ...)         forward: starts the message         backward: waits for the gradient
    shared_expert(...)                   overlaps                             overlaps
    messages.wait()                      waits for it                         (gradient already sent)

Autograd runs ready nodes in reverse order, so the same operators overlap with the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Splits = Sequence[int] | None


class Collective(Protocol):
    def start(self, x: Tensor) -> tuple[Any, Tensor]:
        """(work, out) for a contiguous x [rows, ...]; `out` is valid after `work.wait()`."""

    def reversed(self) -> Collective:
        """The gradient's collective."""


class AllToAll(NamedTuple):
    """All-to-all of rows; `received` and `sent` are rows per rank, None for equal splits.

    group: None for a single rank.
    """

    received: Splits
    sent: Splits
    group: ProcessGroup | None

    def start(self, x: Tensor) -> tuple[Any, Tensor]:
        rows = len(x) if self.received is None else int(sum(self.received))
        out = x.new_empty(rows, *x.shape[1:])
        return dist.all_to_all_single(out, x, self.received, self.sent, group=self.group, async_op=True), out

    def run(self, x: Tensor) -> Tensor:
        if self.group is None:
            return x
        work, out = self.start(x.contiguous())
        work.wait()
        return out

    def reversed(self) -> AllToAll:
        return AllToAll(self.sent, self.received, self.group)


class AllGather(NamedTuple):
    group: ProcessGroup

    def start(self, x: Tensor) -> tuple[Any, Tensor]:
        out = x.new_empty(len(x) * self.group.size(), *x.shape[1:])
        return dist.all_gather_into_tensor(out, x, group=self.group, async_op=True), out

    def reversed(self) -> ReduceScatter:
        return ReduceScatter(self.group)


class ReduceScatter(NamedTuple):
    group: ProcessGroup

    def start(self, x: Tensor) -> tuple[Any, Tensor]:
        out = x.new_empty(len(x) // self.group.size(), *x.shape[1:])
        return dist.reduce_scatter_tensor(out, x, group=self.group, async_op=True), out

    def reversed(self) -> AllGather:
        return AllGather(self.group)


class Messages:
    """Messages in flight, and jobs to overlap with them in backward."""

    def __init__(self) -> None:
        self._works: list[tuple[Any, Tensor, Tensor]] = []
        self._jobs: list[Callable[[], None]] = []
        self.takes_jobs = False
        # Autograd sequence number of the previous message's gradient wait.
        self._place: int | None = None
        # Of the dispatch's first message, and whether jobs overlap with dispatch gradients.
        self._first: int | None = None
        self._expects_jobs = False

    def begin(self, is_dispatch: bool = True) -> None:
        """Group subsequent messages: backward sends all of them before it waits for one.

        is_dispatch: messages bring tokens to experts; otherwise gradients travel first. With `expect_jobs`, result
            gradients overlap with all other operators and dispatch gradients with the jobs.
        """
        if is_dispatch:
            self._place, self._first, self._expects_jobs = None, None, False
        elif self._expects_jobs and self._first is not None:
            self._place = self._first + 2
        else:
            self._place = None

    def expect_jobs(self) -> None:
        """Jobs between gradients that reach experts and those that leave them."""
        self._expects_jobs = True

    def place(self, node: Any) -> None:
        """Order a node after its group's messages."""
        self._place = node._sequence_nr() - 2 if self._place is None else self._place - 1
        if self._first is None:
            self._first = self._place
        node._set_sequence_nr(max(0, self._place))

    def __len__(self) -> int:
        return len(self._works) + len(self._jobs)

    def send(self, x: Tensor, collective: Collective) -> Tensor:
        """Valid after `wait`; x [rows, ...]."""
        x = x.contiguous()
        work, out = collective.start(x)
        self._works.append((work, x, out))
        return out

    @torch.no_grad()
    def wait(self, leaving: int = 0) -> None:
        # Outside the graph: gloo copies a sum into place in wait().
        while len(self._works) > leaving:
            self._works.pop(0)[0].wait()

    def put(self, job: Callable[[], None], is_certain: bool = False) -> bool:
        """Run a job before the wait for the next message; returns False if none will come."""
        if self.takes_jobs or is_certain:
            self._jobs.append(job)
        return self.takes_jobs or is_certain

    def run_jobs(self) -> None:
        while self._jobs:
            self._jobs.pop(0)()


class _Return(torch.autograd.Function):
    """Identity; its backward runs the jobs and waits for `_Leave`'s gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, messages: Messages, with_jobs: bool) -> Tensor:
        ctx.messages, ctx.with_jobs = messages, with_jobs
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if ctx.with_jobs:
            ctx.messages.takes_jobs = False
        ctx.messages.run_jobs()
        ctx.messages.wait()
        return grad, None, None


class _Leave(torch.autograd.Function):
    """Sends rows, in backward their gradients. Never waits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: Collective, messages: Messages, with_jobs: bool) -> Tensor:
        ctx.collective, ctx.messages, ctx.with_jobs = collective, messages, with_jobs
        return messages.send(x, collective)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if not ctx.with_jobs:
            # After the experts there is another message.
            ctx.messages.takes_jobs = True
        return ctx.messages.send(grad, ctx.collective.reversed()), None, None, None


def issue(x: Tensor, collective: Collective, messages: Messages, with_jobs: bool) -> Tensor:
    """Start a collective of x [rows, ...], valid after `messages.wait()`; differentiable.

    with_jobs: jobs overlap with the gradient's message (tokens to experts); else they follow it.
    """
    back = _Return.apply(x, messages, with_jobs)  # type: ignore[no-untyped-call]
    if back.grad_fn is not None:
        messages.place(back.grad_fn)
    out: Tensor = _Leave.apply(back, collective, messages, with_jobs)  # type: ignore[no-untyped-call]
    return out
