"""Overlaps GEMMs with adjacent collectives, in chunks of rows.

A gather multiplies the rank's own rows first; a GEMM follows the order in which its chunks are reduced. Summation order
is unchanged: bits differ only where a library chooses kernels by row count, or a collective its rank order by message
    size.

Matrices are 2-D; of p m rows over p ranks, r m to (r + 1) m belong to rank r. `chunks`: messages.

Source: chunk order of MindSpeed's CoC; own rows first as in Flux (arXiv 2406.06858) and PyTorch's async TP.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Pending:
    def __init__(self, result: Tensor, wait: list[Callable[[], object]], kept: list[Tensor]) -> None:
        self._result, self._wait, self._kept = result, wait, kept

    def wait(self) -> Tensor:
        """Raises the collective's errors."""
        for wait in self._wait:
            wait()
        self._wait, self._kept = [], []
        return self._result


def gather(x: Tensor, group: ProcessGroup) -> Pending:
    """x [m, K] of every rank -> [p m, K], in one message."""
    x = x.contiguous()
    whole = x.new_empty(group.size() * x.shape[0], x.shape[1])
    handle = dist.all_gather_into_tensor(whole, x, group=group, async_op=True)
    return Pending(whole, [handle.wait], [x])


def gather_matmul(
    x: Tensor, w: Tensor, group: ProcessGroup, chunks: int, keep: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(X w [p m, N], X if `keep`), where X [p m, K] gathers x [m, K]; w: [K, N]."""
    size, rank, rows = group.size(), group.rank(), x.shape[0]
    if chunks < 2 or rows < 2:
        whole = gather(x, group).wait()
        return whole @ w, whole if keep else None
    x = x.contiguous()
    y = x.new_empty(size, rows, w.shape[1])
    kept = x.new_empty(size, rows, x.shape[1]) if keep else None

    def send(part: slice) -> tuple[slice, Tensor, dist.Work]:
        buffer = x.new_empty(size, part.stop - part.start, x.shape[1])
        return part, buffer, dist.all_gather_into_tensor(buffer.flatten(0, 1), x[part], group=group, async_op=True)

    messages = map(send, parts(rows, chunks))
    # A product on CPU blocks the host: all messages go first. A device with one hardware queue starts kernels in the
    # order of issue, and a message waits for the one before it: each goes before the product that it overlaps with.
    coming = deque(itertools.islice(messages, chunks if x.device.type == "cpu" else 1))
    torch.mm(x, w, out=y[rank])
    if kept is not None:
        kept[rank].copy_(x)
    while coming:
        coming.extend(itertools.islice(messages, 1))
        part, buffer, handle = coming.popleft()
        handle.wait()
        for other in range(size):
            if other == rank:
                continue
            torch.mm(buffer[other], w, out=y[other, part])
            if kept is not None:
                kept[other, part].copy_(buffer[other])
    return y.flatten(0, 1), None if kept is None else kept.flatten(0, 1)


def matmul_scatter(x: Tensor, w: Tensor, group: ProcessGroup, chunks: int) -> Pending:
    """This rank's rows [m, N] of the sum over ranks of x w; x: [p m, K], w: [K, N], any strides."""
    size = group.size()
    rows = x.shape[0] // size
    y = x.new_empty(rows, w.shape[1])
    blocks = x.reshape(size, rows, x.shape[1])
    waits, kept = [], []
    for part in parts(rows, chunks):
        if part == slice(0, rows):
            product = x @ w
        else:
            # Every rank's rows of the chunk, so that receives are contiguous.
            product = x.new_empty(size, part.stop - part.start, w.shape[1])
            for rank in range(size):
                torch.mm(blocks[rank, part], w, out=product[rank])
            product = product.flatten(0, 1)
        handle = dist.reduce_scatter_tensor(y[part], product, group=group, async_op=True)
        waits.append(handle.wait)
        kept.append(product)
    return Pending(y, waits, kept)


def matmul_reduce(x: Tensor, w: Tensor, group: ProcessGroup, chunks: int) -> Pending:
    """The sum over ranks of x w, [M, N]; x: [M, K], w: [K, N], any strides."""
    y = x.new_empty(x.shape[0], w.shape[1])
    waits = []
    for part in parts(x.shape[0], chunks):
        torch.mm(x[part], w, out=y[part])
        waits.append(dist.all_reduce(y[part], group=group, async_op=True).wait)
    return Pending(y, waits, [])


def parts(rows: int, chunks: int) -> Iterator[slice]:
    """Split `rows` into at most `chunks` runs of nearly equal length."""
    count = max(1, min(chunks, rows))
    bounds = [rows * each // count for each in range(count + 1)]
    return (slice(start, stop) for start, stop in itertools.pairwise(bounds))


class FusedGemmCollective(ABC):
    """Fused GEMM and collective operators; unsupported calls run unchunked and pass the reason to `say`.

    The operators ignore `chunks`. `why_not` must be equal on all ranks of a group.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    @abstractmethod
    def why_not(self, x: Tensor, w: Tensor, group: ProcessGroup) -> list[str]:
        """Reasons why the operators cannot multiply x [M, K] by w [K, N]."""

    @abstractmethod
    def _gather(self, x: Tensor, w: Tensor, group: ProcessGroup, keep: bool) -> tuple[Tensor, Tensor | None]:
        """(GEMM of all rows, these rows if `keep`)."""

    @abstractmethod
    def _scatter(self, x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
        """This rank's rows of the sum over ranks."""

    def gather_matmul(
        self, x: Tensor, w: Tensor, group: ProcessGroup, chunks: int, keep: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        if not self._can(x, w, group):
            return gather_matmul(x, w, group, 1, keep)
        y, whole = self._gather(x.contiguous(), w, group, keep)
        return y, whole if keep else None

    def matmul_scatter(self, x: Tensor, w: Tensor, group: ProcessGroup, chunks: int) -> Pending:
        if not self._can(x, w, group):
            return matmul_scatter(x, w, group, 1)
        return Pending(self._scatter(x.contiguous(), w, group), [], [])

    def _can(self, x: Tensor, w: Tensor, group: ProcessGroup) -> bool:
        reasons = self.why_not(x, w, group)
        if reasons:
            self._say("; ".join(reasons))
        return not reasons
