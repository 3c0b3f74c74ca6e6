"""Copies of experts on every rank of a group, for one micro-batch: parameters go out, gradients come back to the owner.

    copies = CopyPlan(owners, like, group, pending).make(own)
    copies.wait()                  the parameters have arrived
    ...                            products with copies.of(0), copies.of(1), ...
    pending.finish()               after the backward pass: the owners' main gradients are complete

Each expert is one broadcast, and in the backward pass one sum in fp32 on its owner. There the sum is added to the main
gradients of the owner's parameters, or returned to autograd where they have none. A copy is a tensor of the graph and
no parameter: no optimizer and no checkpoint sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

Parameters = Sequence[torch.Tensor]


class PendingGradients:
    """Sums of copies' gradients on their way to their owners; at most those of one layer."""

    def __init__(self) -> None:
        self._works: list[Any] = []
        self._sums: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._is_closed = False

    def put(self, works: Sequence[Any], sums: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Keep messages under way; `sums` are (main gradient, what is added to it when they have arrived)."""
        self.finish()
        self._works, self._sums = [*works], [*sums]
        if self._is_closed:
            self.finish()

    def close(self) -> None:
        """From here on wait at once: a backward pass may be under way, and the caller calls `finish` no more."""
        self._is_closed = True
        self.finish()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for what is under way and add it to main gradients. No collective: ranks call it when they need to."""
        works, sums, self._works, self._sums = self._works, self._sums, [], []
        for work in works:
            work.wait()
        for main_grad, found in sums:
            main_grad.add_(found)


class CopyPlan(NamedTuple):
    """Which experts are copied, and how.

    Attributes:
        owners: of each copied expert, the rank of `group` that has it.
        like: the parameters of any expert of this rank, all of one dtype: shapes and kinds of all experts'.
        group: ranks that get copies. All of them make the same plan at the same place among their collectives.
        pending: where gradients are kept that are on their way to main gradients.
        accumulates: whether products add weight gradients to `main_grad` of what they multiply by, which copies have
            then, rather than give them to autograd.
        before_sending: called in the backward pass before the copies' gradients are read.
    """

    owners: Sequence[int]
    like: Parameters
    group: dist.ProcessGroup
    pending: PendingGradients
    accumulates: bool = False
    before_sending: Callable[[], object] | None = None

    @property
    def gradient_dtype(self) -> torch.dtype:
        return torch.promote_types(self.like[0].dtype, torch.float32)

    def make(self, own: Sequence[Parameters | None]) -> ExpertCopies:
        """Begin to send copies.

        Args:
            own: of each copied expert its parameters where this rank is the owner, else None.
        """
        flat = self.like[0].new_empty(len(self.owners), sum(each.numel() for each in self.like), requires_grad=False)
        # A rank without one of the experts takes part in the backward pass all the same.
        anchor = torch.empty(0, requires_grad=True)
        parameters = [each for expert in own for each in expert or ()]
        works: list[Any] = []
        # One grouped product adds to main gradients of the own experts and of copies, all in one dtype.
        like: Any = self.like[0]
        gradients = torch.zeros_like(flat, dtype=like.main_grad.dtype) if self.accumulates else None
        tensors = _Copy.apply(self, flat, works, gradients, own, anchor, *parameters)  # type: ignore[no-untyped-call]
        if gradients is not None:
            for tensor, main_grad in zip(tensors, self.parts(gradients), strict=True):
                tensor.main_grad = main_grad
        return ExpertCopies(tensors, len(self.like), works)

    def parts(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Views of `flat` [experts, elements] in the parameters' shapes, expert by expert."""
        for row in flat:
            for part, like in zip(row.split([each.numel() for each in self.like]), self.like, strict=True):
                yield part.view(like.shape)

    def send(self, flat: torch.Tensor) -> list[Any]:
        """Begin to send each row of its owner to all."""
        return [dist.broadcast(row, self._global(owner), self.group, async_op=True)
                for row, owner in zip(flat, self.owners, strict=True)]  # fmt: skip

    def reduce(self, flat: torch.Tensor) -> list[Any]:
        """Begin to add each row up on its owner; what other ranks have of it is lost."""
        return [dist.reduce(row, self._global(owner), group=self.group, async_op=True)
                for row, owner in zip(flat, self.owners, strict=True)]  # fmt: skip

    def _global(self, rank: int) -> int:
        found: int = dist.get_global_rank(self.group, rank)
        return found


class ExpertCopies:
    """The copies of one plan."""

    def __init__(self, tensors: Sequence[torch.Tensor], each: int, works: Sequence[Any]) -> None:
        self._tensors, self._each, self._works = tensors, each, works

    def __len__(self) -> int:
        return len(self._tensors) // self._each

    def of(self, expert: int) -> Parameters:
        """The parameters of the copied expert with this number in the plan; they can be read after `wait`."""
        return self._tensors[expert * self._each : (expert + 1) * self._each]

    @torch.no_grad()
    def wait(self) -> None:
        """Wait until all parameters have arrived."""
        works, self._works = self._works, ()
        for work in works:
            work.wait()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: CopyPlan,
        flat: torch.Tensor,
        works: list[Any],
        gradients: torch.Tensor | None,
        own: Sequence[Parameters | None],
        anchor: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.plan, ctx.gradients, ctx.own = plan, gradients, own
        ctx.set_materialize_grads(False)
        for row, expert in zip(flat, own, strict=True):
            if expert is not None:
                torch.cat([each.detach().reshape(-1) for each in expert], out=row)
        works += plan.send(flat)
        return tuple(plan.parts(flat))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: torch.Tensor | None) -> tuple[Any, ...]:
        plan, flat = ctx.plan, ctx.gradients
        if plan.before_sending is not None:
            plan.before_sending()
        if flat is None:
            shape = len(plan.owners), sum(each.numel() for each in plan.like)
            flat = plan.like[0].new_zeros(shape, dtype=plan.gradient_dtype, requires_grad=False)
        flat = flat.to(plan.gradient_dtype)
        for part, gradient in zip(plan.parts(flat), given, strict=True):
            if gradient is not None:
                part.add_(gradient)
        # Of the layer before, so that the sums of one layer alone are kept.
        plan.pending.finish()
        works = plan.reduce(flat)
        sums = list(plan.parts(flat))
        each = len(plan.like)
        mine = [
            (parameter, sums[place * each + number])
            for place, expert in enumerate(ctx.own)
            for number, parameter in enumerate(expert or ())
        ]
        if hasattr(plan.like[0], "main_grad"):
            plan.pending.put(works, [(parameter.main_grad, found) for parameter, found in mine])
            return (None,) * (6 + len(mine))
        for work in works:
            work.wait()
        return (*(None,) * 6, *(found.to(parameter.dtype) for parameter, found in mine))


__all__ = ["ExpertCopies", "CopyPlan", "PendingGradients"]
