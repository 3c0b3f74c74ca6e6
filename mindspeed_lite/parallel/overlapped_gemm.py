"""Overlaps GEMMs with the collectives that feed them or that they feed, in chunks of rows.

A product needs all of a gathered matrix only in the end, and a reduction can send the first rows of a product while
the last ones are computed. So rows travel in several messages: a gather is sent whole before anything is computed,
the rank's own rows, which it has, are multiplied first, and the others as they come; a product is computed in the
order in which its chunks are reduced. No row's sum is formed in another order than in one product and one
collective, so the bits change only where a library chooses its kernel by the number of rows, or a collective sums
ranks in an order that depends on the size of the message.

Matrices are 2-D. What is split over a group of p ranks has m rows on each, of p m together, those of rank r from
r m on. `chunks` is the number of messages, at most the number of rows; 1 is one product and one collective, the one
after the other. Slices need not divide the rows.

Source: MindSpeed's CoC for the order of chunks; the rank's own rows first as in Flux (arXiv 2406.06858) and PyTorch's
asynchronous tensor parallelism.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist


class Pending:
    """A result whose last messages are still in flight."""

    def __init__(self, result: torch.Tensor, wait: list[Callable[[], object]], kept: list[torch.Tensor]) -> None:
        self._result, self._wait, self._kept = result, wait, kept

    def wait(self) -> torch.Tensor:
        """The result, once it is there for whatever this stream computes next. Raises what the collective raises."""
        for wait in self._wait:
            wait()
        self._wait, self._kept = [], []
        return self._result


def gather(x: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """All rows [p m, K] of x [m, K], in one message."""
    x = x.contiguous()
    whole = x.new_empty(group.size() * x.shape[0], x.shape[1])
    handle = dist.all_gather_into_tensor(whole, x, group=group, async_op=True)
    return Pending(whole, [handle.wait], [x])


def gather_matmul(
    x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, chunks: int, keep: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """y [p m, N] = X w, X [p m, K] being the rows x [m, K] of every rank, and X if it is to be kept; w: [K, N]."""
    size, rank, rows = group.size(), group.rank(), x.shape[0]
    if chunks < 2 or rows < 2:
        whole = gather(x, group).wait()
        return whole @ w, whole if keep else None
    x = x.contiguous()
    y = x.new_empty(size, rows, w.shape[1])
    kept = x.new_empty(size, rows, x.shape[1]) if keep else None
    coming = []
    for part in parts(rows, chunks):
        buffer = x.new_empty(size, part.stop - part.start, x.shape[1])
        handle = dist.all_gather_into_tensor(buffer.flatten(0, 1), x[part], group=group, async_op=True)
        coming.append((part, buffer, handle))
    torch.mm(x, w, out=y[rank])
    if kept is not None:
        kept[rank].copy_(x)
    for part, buffer, handle in coming:
        handle.wait()
        for other in range(size):
            if other == rank:
                continue
            torch.mm(buffer[other], w, out=y[other, part])
            if kept is not None:
                kept[other, part].copy_(buffer[other])
    return y.flatten(0, 1), None if kept is None else kept.flatten(0, 1)


def matmul_scatter(x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, chunks: int) -> Pending:
    """y [m, N], this rank's rows of the sum over ranks of x w; x: [p m, K], w: [K, N], any strides."""
    size = group.size()
    rows = x.shape[0] // size
    y = x.new_empty(rows, w.shape[1])
    blocks = x.reshape(size, rows, x.shape[1])
    waits, kept = [], []
    for part in parts(rows, chunks):
        if part == slice(0, rows):
            product = x @ w
        else:
            # The rows of this chunk on every rank: each rank receives a piece of its own that needs no shuffling.
            product = x.new_empty(size, part.stop - part.start, w.shape[1])
            for rank in range(size):
                torch.mm(blocks[rank, part], w, out=product[rank])
            product = product.flatten(0, 1)
        handle = dist.reduce_scatter_tensor(y[part], product, group=group, async_op=True)
        waits.append(handle.wait)
        kept.append(product)
    return Pending(y, waits, kept)


def matmul_reduce(x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, chunks: int) -> Pending:
    """y [M, N], the sum over ranks of x w; x: [M, K], w: [K, N], any strides."""
    y = x.new_empty(x.shape[0], w.shape[1])
    waits = []
    for part in parts(x.shape[0], chunks):
        torch.mm(x[part], w, out=y[part])
        waits.append(dist.all_reduce(y[part], group=group, async_op=True).wait)
    return Pending(y, waits, [])


def parts(rows: int, chunks: int) -> Iterator[slice]:
    """`rows` in at most `chunks` runs whose lengths differ by one at most; none is empty unless there are no rows."""
    count = max(1, min(chunks, rows))
    bounds = [rows * each // count for each in range(count + 1)]
    return (slice(start, stop) for start, stop in itertools.pairwise(bounds))
