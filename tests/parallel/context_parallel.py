"""One attention split over gloo ranks in every way, and the whole of it in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_lite.ops.attention import PositionalDropout
from mindspeed_lite.parallel import context
from mindspeed_lite.parallel.context.layout import Layout, packed_zigzag, stream_rows, zigzag
from mindspeed_lite.parallel.context.ring import Ring

NAMES = ("out", "dq", "dk", "dv", "dsink")
CAUSAL, FREE = (-1, 0), (-1, -1)


@dataclass(frozen=True)
class Problem:
    """One attention; `lengths`: of the sequences of a pack, each with the rows that padding adds, in chunks."""

    heads: int = 4
    groups: int = 4
    size: int = 8
    value_size: int = 8
    batch: int = 2
    chunk: int = 3
    band: tuple[int, int] = CAUSAL
    sink: bool = False
    dropout: float = 0.0
    lengths: tuple[tuple[int, int], ...] = ()
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def layout(self, ranks: int) -> Layout:
        if not self.lengths:
            return zigzag(2 * ranks * self.chunk, ranks)
        documents, padded, start = [], [], 0
        for length, chunks in self.lengths:
            stop = start + 2 * ranks * chunks
            documents.append((start, min(start + length, stop)))
            padded.append((start, stop))
            start = stop
        return packed_zigzag(tuple(documents), tuple(padded), ranks)

    def inputs(self, ranks: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """(q, k, v, sink if any) of the whole stream, and a gradient of the output."""
        generator = torch.Generator().manual_seed(3)
        layout = self.layout(ranks)
        rows = (sum(layout.rows(rank) for rank in range(ranks)), *(() if self.lengths else (self.batch,)))

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)

        tensors = [
            draw(*rows, self.heads, self.size),
            draw(*rows, self.groups, self.size),
            draw(*rows, self.groups, self.value_size),
        ]
        return tensors + [draw(self.heads)] * self.sink, draw(*rows, self.heads, self.value_size)


def definition(problem: Problem, ranks: int) -> list[torch.Tensor]:
    """(out, dq, dk, dv, dsink if any) in float64, from the whole matrix of scores."""
    tensors, dout = problem.inputs(ranks)
    q, k, v, *sink = leaves = [t.double().requires_grad_() for t in tensors]
    if problem.lengths:
        q, k, v = (t.unsqueeze(1) for t in (q, k, v))
    s, b, n, d = q.shape
    k, v = (t.repeat_interleave(n // problem.groups, 2) for t in (k, v))
    at = torch.arange(s)
    distance, (left, right) = at - at.unsqueeze(1), problem.band
    hidden = (distance < -left) if left >= 0 else torch.zeros(s, s, dtype=torch.bool)
    hidden = hidden | ((distance > right) if right >= 0 else False)
    document = torch.full((s,), -1)
    for number, (start, stop) in enumerate(problem.layout(ranks).documents):
        document[start:stop] = number
    hidden = hidden | (document.unsqueeze(1) != document) | (document == -1)
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * d**-0.5
    scores = scores.masked_fill(hidden, -torch.inf)
    if sink:
        scores = torch.cat([scores, sink[0].reshape(1, n, 1, 1).expand(b, n, s, 1)], -1)
    probs = scores.masked_fill((document == -1).unsqueeze(1), 0.0).softmax(-1)[..., :s]
    probs = probs.masked_fill(hidden, 0.0)
    if problem.dropout:
        seed = torch.randint(1 << 62, (), generator=torch.Generator().manual_seed(5))
        pairs = torch.arange(b).unsqueeze(1) * n + torch.arange(n)
        probs = probs * PositionalDropout(problem.dropout, seed, at, at, 0, n).scale_of(pairs).double()
    out = torch.einsum("bnst,tbnd->sbnd", probs, v)
    out = out.squeeze(1) if problem.lengths else out
    (out * dout).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def split(problem: Problem, ranks: int, rank: int, algorithm: context.Algorithm) -> list[torch.Tensor]:
    """(out, dq, dk, dv, dsink if any) of this rank's rows; dsink is summed over the ranks."""
    tensors, dout = problem.inputs(ranks)
    layout = problem.layout(ranks)
    own = torch.tensor(stream_rows(layout, rank), dtype=torch.int64)
    leaves = [t[own].requires_grad_() for t in tensors[:3]] + [t.clone().requires_grad_() for t in tensors[3:]]
    torch.manual_seed(5)
    out = context.attend(
        *leaves[:3],
        layout,
        algorithm,
        band=problem.band,
        dropout_p=problem.dropout,
        sink=leaves[3] if problem.sink else None,
    )
    out.backward(dout[own])
    gradients = [leaf.grad for leaf in leaves]
    assert all(gradient is not None for gradient in gradients)
    if problem.sink:
        dist.all_reduce(gradients[3])
    return [out.detach(), *gradients]  # type: ignore[list-item]


def rows_of(exact: list[torch.Tensor], problem: Problem, ranks: int, rank: int) -> list[torch.Tensor]:
    """The same of the definition's results."""
    own = torch.tensor(stream_rows(problem.layout(ranks), rank), dtype=torch.int64)
    return [t[own] if t.dim() > 1 else t for t in exact]


def algorithms(group: dist.ProcessGroup) -> dict[str, context.Algorithm]:
    """Every algorithm for these ranks; called by all of them."""
    ranks = group.size()
    second = dist.new_group(list(range(ranks)))
    found = {
        "ring": context.Algorithm(ring=Ring(group)),
        "ring, keys kept": context.Algorithm(ring=Ring(group, second, cache="half")),
        "ring, all kept": context.Algorithm(ring=Ring(group, cache="full")),
        "ulysses": context.Algorithm(ulysses=group),
        "ulysses, gathered keys": context.Algorithm(ulysses=group, gather_keys=True),
        "gathered": context.Algorithm(gathered=group),
    }
    for size in (size for size in range(2, ranks) if ranks % size == 0):
        inner = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks, size)]
        outer = [dist.new_group(list(range(first, ranks, size))) for first in range(size)]
        ulysses, ring = inner[group.rank() // size], outer[group.rank() % size]
        found[f"double ring of {size}"] = context.Algorithm(ring=Ring(group, second, window=size))
        found[f"hybrid of {size}"] = context.Algorithm(ulysses=ulysses, ring=Ring(ring))
        found[f"hybrid of {size}, gathered"] = context.Algorithm(ulysses=ulysses, gathered=ring)
    return found
