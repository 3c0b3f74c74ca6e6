"""A layer of experts over processes with copies of some, whose definition is that of `expert_hierarchy`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_lite.parallel.balance.copies import CopyPlan, PendingGradients, Slots, gather_counts
from mindspeed_lite.parallel.expert.exchange import AllToAll, Messages, issue
from tests.parallel.expert_hierarchy import Problem, expert

# Where gradients go: to autograd, to main gradients of parameters, and to those of copies too.
KINDS = ("autograd", "main", "accumulated")
# Rows of an expert's two parameters.
PARTS = (2, 4)


class _Accumulating(torch.autograd.Function):
    """x @ weight, whose weight's gradient is added to its main gradient, as Megatron's linear layers do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        weight.main_grad += x.t() @ dy
        return dy @ weight.t(), None


def _expert(x: torch.Tensor, parameters: Sequence[Any], probs: torch.Tensor, kind: str) -> torch.Tensor:
    if kind != "accumulated":
        return expert(x, torch.cat([*parameters]), probs)
    parts = zip(x.split(PARTS, 1), parameters, strict=True)
    y: Any = sum(_Accumulating.apply(part, weight) for part, weight in parts)  # type: ignore[no-untyped-call]
    return torch.tanh(y) * probs.unsqueeze(-1)


def run(problem: Problem, rank: int, group: Any, copied: Sequence[int], kind: str) -> dict[str, torch.Tensor]:
    """Output, gradients, and rows that this rank computes."""
    x, routing_map, probs, dy = problem.of_rank(rank)
    slots = Slots(problem.ranks, problem.experts // problem.ranks, tuple(copied))
    own = [
        [part.clone().requires_grad_() for part in each.split(PARTS)]
        for each in problem.weights().chunk(problem.ranks)[rank]
    ]
    every: list[Any] = [part for each in own for part in each]
    for leaf in (x, probs):
        leaf.requires_grad_()
    if kind != "autograd":
        for part in every:
            part.main_grad = torch.zeros_like(part)
    pending = PendingGradients()
    plan = CopyPlan(slots.owners, own[0], group, pending, kind == "accumulated")
    copies = plan.make([own[number % slots.local] if owner == rank else None
                        for number, owner in zip(copied, slots.owners, strict=True)])  # fmt: skip
    places = [*own, *(copies.of(number) for number in range(len(copied)))]

    to_places, probs_of_places = slots.route(routing_map, probs, rank)
    place, token = to_places.t().nonzero(as_tuple=True)
    counts, _ = gather_counts(to_places, problem.ranks, group)
    each = len(places)
    mine = slice(rank * each, (rank + 1) * each)
    received = [sum(source[mine]) for source in counts]
    sent = [sum(counts[rank][other * each : (other + 1) * each]) for other in range(problem.ranks)]
    messages = Messages()
    there = AllToAll(received, sent, group)
    rows = issue(x[token], there, messages, False)
    row_probs = issue(probs_of_places[token, place], there, messages, False)
    messages.wait()
    copies.wait()
    sizes = [count for source in counts for count in source[mine]]
    parts = zip(rows.split(sizes), row_probs.split(sizes), strict=True)
    y = torch.cat([_expert(a, places[at % each], p, kind) for at, (a, p) in enumerate(parts)])
    back = issue(y, there.reversed(), messages, False)
    messages.wait()
    out = torch.zeros_like(x).index_add(0, token, back)
    out.backward(dy)
    pending.finish()
    dist.barrier()

    def gradient(part: Any) -> torch.Tensor:
        found = torch.zeros_like(part) if part.grad is None else part.grad
        return found + part.main_grad if hasattr(part, "main_grad") else found

    assert x.grad is not None and probs.grad is not None
    return {
        "output": out.detach(),
        "d tokens": x.grad,
        "d probs": probs.grad,
        "d weight": torch.stack([torch.cat([gradient(part) for part in each]) for each in own]),
        "rows": torch.tensor(sum(sizes)),
    }
