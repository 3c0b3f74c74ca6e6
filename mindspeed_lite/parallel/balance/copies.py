"""Copies hot experts to every rank for one micro-batch; gradients return to the owner.

    copies = CopyPlan(owners, like, group, pending).make(own)
    copies.wait()
    ...                            GEMMs with copies.of(0), copies.of(1), ...
    pending.finish()               after the backward pass: main gradients are complete

Each expert is one broadcast and one fp32 reduction to the owner's main gradients, or to autograd without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed_lite.platform.timer import seconds_of

Parameters = Sequence[Tensor]


class Slots(NamedTuple):
    """Places on each rank: its `local` experts, then a slot per copied expert.

    Tokens of a copied expert stay on their rank. All ranks have equally many places, so the token exchange is
    unchanged.
    """

    ranks: int
    local: int
    copied: tuple[int, ...]

    @property
    def owners(self) -> list[int]:
        return [expert // self.local for expert in self.copied]

    def experts(self) -> list[int]:
        """[places], the expert of each place."""
        found: list[int] = []
        for rank in range(self.ranks):
            found += [*range(rank * self.local, (rank + 1) * self.local), *self.copied]
        return found

    def open(self, rank: int) -> list[bool]:
        """[places], whether tokens of `rank` go there; one such place per expert."""
        owners = self.owners
        away = {expert for expert, owner in zip(self.copied, owners, strict=True) if owner != rank}
        found: list[bool] = []
        for other in range(self.ranks):
            found += [expert not in away for expert in range(other * self.local, (other + 1) * self.local)]
            found += [other == rank and owner != rank for owner in owners]
        return found

    def route(self, routing_map: Tensor, probs: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """[T, experts] -> [T, places]; closed places have no token."""
        index = torch.tensor(self.experts(), device=probs.device)
        is_open = torch.tensor(self.open(rank), device=probs.device)
        return routing_map.index_select(1, index) & is_open, probs.index_select(1, index)


def gather_counts(
    routing_map: Tensor, ranks: int, group: ProcessGroup, refuses: bool = False
) -> tuple[list[list[int]], bool]:
    """([ranks][experts] tokens by source rank, whether any rank refuses), equal on all ranks.

    Args:
        routing_map: [T, experts] bool, this rank's tokens.
        group: all ranks that share experts; ranks with shards of the same experts are adjacent.
    """
    counts = routing_map.sum(0, dtype=torch.int64)
    sent = torch.cat([counts, counts.new_full((1,), int(refuses))])
    table = counts.new_empty(group.size() * len(sent))
    dist.all_gather_into_tensor(table, sent, group=group)
    found: list[list[int]] = table.view(ranks, -1, len(sent)).sum(1).tolist()
    return [row[:-1] for row in found], any(row[-1] for row in found)


class PendingGradients:
    """Gradient reductions in flight, at most one layer's."""

    def __init__(self) -> None:
        self._works: list[Any] = []
        self._sums: list[tuple[Tensor, Tensor]] = []
        self._is_closed = False

    def put(self, works: Sequence[Any], sums: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Track messages in flight; sums: (main gradient, addend)."""
        self.finish()
        self._works, self._sums = [*works], [*sums]
        if self._is_closed:
            self.finish()

    def close(self) -> None:
        """Wait immediately from here on; a backward pass may still run."""
        self._is_closed = True
        self.finish()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait and add the sums. No collective."""
        works, sums, self._works, self._sums = self._works, self._sums, [], []
        for work in works:
            work.wait()
        for main_grad, found in sums:
            main_grad.add_(found)


class CopyPlan(NamedTuple):
    """Experts to copy to all ranks of `group`; equal on all of them.

    owners: rank in `group` of each copied expert.
    like: parameters of any expert, of one dtype.
    accumulates: GEMMs add weight gradients to the copies' `main_grad`.
    before_sending: called in backward before gradients are read.
    """

    owners: Sequence[int]
    like: Parameters
    group: ProcessGroup
    pending: PendingGradients
    accumulates: bool = False
    before_sending: Callable[[], object] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.owners), sum(each.numel() for each in self.like)

    def make(self, own: Sequence[Parameters | None]) -> ExpertCopies:
        """Start sending; own: parameters of each copied expert of this rank, None for others."""
        like: Any = self.like[0]
        flat = like.new_empty(self.shape, requires_grad=False)
        # Every rank runs backward.
        anchor = torch.empty(0, requires_grad=True)
        parameters = [each for expert in own for each in expert or ()]
        works: list[Any] = []
        # One grouped GEMM adds to both.
        gradients = torch.zeros_like(flat, dtype=like.main_grad.dtype) if self.accumulates else None
        tensors = _Copy.apply(self, flat, works, gradients, own, anchor, *parameters)  # type: ignore[no-untyped-call]
        if gradients is not None:
            for tensor, main_grad in zip(tensors, self.parts(gradients), strict=True):
                tensor.main_grad = main_grad
        return ExpertCopies(tensors, len(self.like), works)

    def parts(self, flat: Tensor) -> Iterator[Tensor]:
        """Views of `flat` [experts, elements] in the parameters' shapes."""
        for row in flat:
            for part, like in zip(row.split([each.numel() for each in self.like]), self.like, strict=True):
                yield part.view(like.shape)

    def send(self, flat: Tensor) -> list[Any]:
        return [dist.broadcast(row, self._global(owner), self.group, async_op=True)
                for row, owner in zip(flat, self.owners, strict=True)]  # fmt: skip

    def reduce(self, flat: Tensor) -> list[Any]:
        """Start to sum each row on its owner; other ranks' rows are left undefined."""
        return [dist.reduce(row, self._global(owner), group=self.group, async_op=True)
                for row, owner in zip(flat, self.owners, strict=True)]  # fmt: skip

    def _global(self, rank: int) -> int:
        found: int = dist.get_global_rank(self.group, rank)
        return found


class ExpertCopies:
    def __init__(self, tensors: Sequence[Tensor], each: int, works: Sequence[Any]) -> None:
        self._tensors, self._each, self._works = tensors, each, works

    def __len__(self) -> int:
        return len(self._tensors) // self._each

    def of(self, number: int) -> Parameters:
        return self._tensors[number * self._each : (number + 1) * self._each]

    @torch.no_grad()
    def wait(self) -> None:
        works, self._works = self._works, ()
        for work in works:
            work.wait()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: CopyPlan,
        flat: Tensor,
        works: list[Any],
        gradients: Tensor | None,
        own: Sequence[Parameters | None],
        anchor: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.plan, ctx.gradients, ctx.own = plan, gradients, own
        ctx.set_materialize_grads(False)
        for row, expert in zip(flat, own, strict=True):
            if expert is not None:
                torch.cat([each.detach().reshape(-1) for each in expert], out=row)
        works += plan.send(flat)
        return tuple(plan.parts(flat))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
        plan: CopyPlan = ctx.plan
        if plan.before_sending is not None:
            plan.before_sending()
        dtype = torch.promote_types(plan.like[0].dtype, torch.float32)
        if ctx.gradients is None:
            flat = plan.like[0].new_zeros(plan.shape, dtype=dtype, requires_grad=False)
        else:
            flat = ctx.gradients.to(dtype)
        for part, gradient in zip(plan.parts(flat), given, strict=True):
            if gradient is not None:
                part.add_(gradient)
        # Keeps only one layer's sums.
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


# The fastest counts.
_ROUNDS = 4


class CopyCosts(NamedTuple):
    """Seconds of one copy, one row's GEMMs, and one row's four messages."""

    copy: float
    products: float
    messages: float

    @property
    def break_even(self) -> float:
        """Tokens a copy must take off the fullest rank to pay."""
        saved = self.products + self.messages
        return self.copy / saved if saved else float("inf")

    def break_even_of_move(self, share: float, steps: int) -> float:
        """Break-even of a move, in tokens per step.

        share: bytes of a move over those of a copy. steps: until the next placement.
        """
        return self.copy * share / (self.products * steps) if self.products else float("inf")


def copied_bytes(parameters: Sequence[Tensor]) -> int:
    return sum(each.numel() * (each.element_size() + 4) for each in parameters)


@torch.no_grad()
def measure_costs(
    parameters: Sequence[Tensor], rows: int, sharers: ProcessGroup, all_sharers: ProcessGroup
) -> CopyCosts:
    """Time copies and GEMMs; returns the slowest rank's times.

    parameters: of one expert, [N, K]. rows: approximate tokens per expert and micro-batch.
    sharers, all_sharers: ranks that copies go to, that must decide alike.
    """
    matrices = [each.detach() for each in parameters if each.dim() == 2]
    inputs = [torch.ones(max(1, rows), each.shape[1], dtype=each.dtype, device=each.device) for each in matrices]
    hidden = inputs[0].shape[1]
    flat = torch.zeros(sum(each.numel() for each in parameters), dtype=matrices[0].dtype, device=matrices[0].device)
    gradients = torch.zeros_like(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
    root = dist.get_global_rank(sharers, 0)

    def multiply() -> None:
        for x, matrix in zip(inputs, matrices, strict=True):
            torch.nn.functional.linear(x, matrix)

    sent, summed, multiplied = (
        min(seconds_of(run, flat.device) for _ in range(_ROUNDS))
        for run in (
            lambda: dist.broadcast(flat, root, sharers),
            lambda: dist.reduce(gradients, root, group=sharers),
            multiply,
        )
    )
    row = 4 * hidden * sent / flat.numel()
    # The backward pass has two GEMMs per forward GEMM.
    found = torch.tensor([sent + summed, 3 * multiplied / len(inputs[0]), row], dtype=torch.float64, device=flat.device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=all_sharers)
    return CopyCosts(*found.tolist())
