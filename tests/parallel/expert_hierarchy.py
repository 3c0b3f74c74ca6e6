"""A layer of experts over processes, its exchange on two levels, and the same layer in one process in float64."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_lite.parallel.expert import hierarchy
from mindspeed_lite.parallel.expert.hierarchy import collect, spread

HIDDEN = 6


@dataclass(frozen=True)
class Problem:
    """Routed tokens of every rank, and the experts."""

    ranks: int
    experts: int
    tokens: Sequence[int]
    topk: int
    # Experts that are never chosen.
    idle: Sequence[int] = ()

    def of_rank(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens [T, H], routing map and probabilities [T, E], and the gradient of the output [T, H], in float64."""
        made = torch.Generator().manual_seed(17 * rank + self.topk)
        count = self.tokens[rank]
        x, dy = (torch.randn(count, HIDDEN, dtype=torch.float64, generator=made) for _ in range(2))
        scores = torch.rand(count, self.experts, dtype=torch.float64, generator=made)
        scores[:, [*self.idle]] = -1.0
        chosen = scores.topk(self.topk, -1).indices
        routing_map = torch.zeros(count, self.experts, dtype=torch.bool).scatter_(1, chosen, True)
        probs = torch.rand(count, self.experts, dtype=torch.float64, generator=made) * routing_map
        return x, routing_map, probs, dy

    def weights(self) -> torch.Tensor:
        """[E, H, H]."""
        made = torch.Generator().manual_seed(self.experts)
        return torch.randn(self.experts, HIDDEN, HIDDEN, dtype=torch.float64, generator=made)


def expert(x: torch.Tensor, weight: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Not linear in the tokens, so that a row too many or too few shows."""
    return torch.tanh(x @ weight) * probs.unsqueeze(-1)


def definition(problem: Problem) -> dict[str, list[torch.Tensor]]:
    """Output and gradients of every rank, and of every expert's weight, in one process."""
    weight = problem.weights().requires_grad_()
    given = [problem.of_rank(rank) for rank in range(problem.ranks)]
    leaves = [(x.requires_grad_(), probs.requires_grad_()) for x, _, probs, _ in given]
    out = []
    for x, routing_map, probs, _ in given:
        y = torch.zeros_like(x)
        for number in range(problem.experts):
            token = routing_map[:, number].nonzero()[:, 0]
            y = y.index_add(0, token, expert(x[token], weight[number], probs[token, number]))
        out.append(y)
    torch.autograd.backward(out, [dy for *_, dy in given])
    assert weight.grad is not None
    return {
        "output": [y.detach() for y in out],
        "d tokens": [x.grad for x, _ in leaves],  # type: ignore[misc]
        # Of pairs that are routed: the others have no row.
        "d probs": [probs.grad for _, probs in leaves],  # type: ignore[misc]
        "d weight": list(weight.grad.chunk(problem.ranks)),
    }


def run(
    problem: Problem, rank: int, nodes: hierarchy.NodeGroups, dtype: torch.dtype = torch.float64
) -> dict[str, torch.Tensor]:
    """The same of this rank, tokens and experts in `dtype`."""
    x, routing_map, probs, dy = problem.of_rank(rank)
    x, dy, weight = x.to(dtype), dy.to(dtype), problem.weights().chunk(problem.ranks)[rank].to(dtype)
    for leaf in (x, probs, weight):
        leaf.requires_grad_()
    route = hierarchy.route_of(routing_map, nodes)
    rows = spread(x, route.tokens.to_nodes)
    arrived = spread(rows, route.tokens)
    arrived_probs = spread(spread(probs.reshape(-1), route.probs.to_nodes), route.probs)
    counts = rows_of_experts(problem, rank)
    # As Megatron: by source and expert; here computed expert by expert of each source.
    parts = zip(arrived.split(counts), arrived_probs.split(counts), strict=True)
    each = len(weight)
    y = torch.cat([expert(a, weight[place % each], p.to(dtype)) for place, (a, p) in enumerate(parts)])
    out = collect(collect(y, route.tokens), route.tokens.to_nodes)
    out.backward(dy)
    assert x.grad is not None and probs.grad is not None
    return {
        "output": out.detach(),
        "d tokens": x.grad,
        "d probs": probs.grad,
        "d weight": torch.zeros_like(weight) if weight.grad is None else weight.grad,
        "rows": arrived.detach(),
    }


def rows_of_experts(problem: Problem, rank: int) -> list[int]:
    """Rows of each source and, of these, of each of this rank's experts."""
    each = problem.experts // problem.ranks
    mine = slice(rank * each, (rank + 1) * each)
    return [n for source in range(problem.ranks) for n in problem.of_rank(source)[1][:, mine].sum(0).tolist()]


def rows_expected(problem: Problem, rank: int) -> torch.Tensor:
    """What Megatron's one all-to-all brings this rank: by source, then expert, then token."""
    each = problem.experts // problem.ranks
    rows = []
    for source in range(problem.ranks):
        x, routing_map, *_ = problem.of_rank(source)
        rows += [x[routing_map[:, rank * each + place]] for place in range(each)]
    return torch.cat(rows)


class Counted:
    """Bytes of all-to-alls that leave this rank, by rank, and by whether they are rows of tokens."""

    def __init__(self, ranks: int) -> None:
        self.rows, self.rest = [0] * ranks, [0] * ranks
        original = dist.all_to_all_single

        @functools.wraps(original)
        def all_to_all_single(out: Any, x: Any, received: Any, sent: Any, group: Any = None, **more: Any) -> Any:
            row = x.element_size() * (x[0].numel() if len(x) else 0)
            for peer, count in zip(dist.get_process_group_ranks(group), sent, strict=True):
                (self.rows if x.dim() == 2 and x.is_floating_point() else self.rest)[peer] += row * int(count)
            return original(out, x, received, sent, group=group, **more)

        dist.all_to_all_single = all_to_all_single
