"""Sums a gradient buffer over ranks with messages of 8 or 16 bits, and keeps what rounding took for the next step.

    reduce-scatter: encode each peer's shard -> all-to-all -> the owner adds decoded shards to its own in fp32
    all-reduce:     the owner encodes the sum again -> all-gather -> all ranks decode the same bytes

Error feedback: the sender adds what its last message lost to the next one; so does the owner of a sum. No sum is ever
rounded but the final one. With `nodes`, ranks of a node first reduce-scatter in the gradients' own dtype, and codes
cross nodes only.

Sources: 1-bit Adam (arXiv 2102.02888), ZeRO++ (arXiv 2306.10209, quantized gradient communication).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .block_codes import BlockCodes
from .node_groups import NodeGroups

# Half the bytes of fp32, and the loss of a loss.
RESIDUAL_DTYPE = torch.bfloat16


class PendingReduce(NamedTuple):
    """A reduction that was started; `wait` ends it."""

    wait: Callable[[], None]


class CompressedReduce:
    """Reductions of one buffer of `numel` values, step after step; each is a collective of `group`.

    Attributes:
        scatters: reduce-scatter, else all-reduce.
        residuals: lost by the messages to each peer; for all-reduce also by the message of the sum.
    """

    def __init__(
        self,
        numel: int,
        device: torch.device,
        group: ProcessGroup,
        code: str,
        *,
        scatters: bool,
        nodes: NodeGroups | None = None,
    ) -> None:
        if scatters and numel % group.size():
            raise ValueError(f"a reduce-scatter of {numel} values over {group.size()} ranks: pad the buffer")
        self._peers, self._within = (group, None) if nodes is None else (nodes.between, nodes.within)
        self._ranks, self._rank = group.size(), group.rank()
        self._place = self._peers.rank()
        self._others = [each for each in range(self._peers.size()) if each != self._place]
        self._shard = -(-numel // self._ranks)
        self._codes = BlockCodes(code, self._shard)
        self.scatters = scatters
        shapes = [(len(self._others), self._shard), *([] if scatters else [(1, self._shard)])]
        self.residuals = [torch.zeros(shape, dtype=RESIDUAL_DTYPE, device=device) for shape in shapes]

    def start(self, gradient: Tensor, divisor: int = 1) -> PendingReduce:
        """Reduce `gradient` in place (for reduce-scatter this rank's shard of it), then divide."""
        missing = self._shard * self._ranks - gradient.numel()
        buffer = torch.nn.functional.pad(gradient, (0, missing)) if missing else gradient
        parts = self._reduced_within(buffer)
        sent = buffer.new_empty(len(self._others) * self._codes.row_bytes, dtype=torch.uint8)
        received = torch.empty_like(sent)
        for row, residual, peer in zip(self._rows(sent), self.residuals[0], self._others, strict=True):
            self._codes.encode(row, parts[peer], residual)
        sizes = [0 if each == self._place else self._codes.row_bytes for each in range(self._peers.size())]
        work = dist.all_to_all_single(received, sent, sizes, sizes, group=self._peers, async_op=True)
        # The bound arguments keep `sent` until the message has left.
        return PendingReduce(functools.partial(self._finish, work, sent, received, parts, buffer, gradient, divisor))

    def _finish(
        self, work: Any, _: Tensor, received: Tensor, parts: Tensor, buffer: Tensor, gradient: Tensor, divisor: int
    ) -> None:
        work.wait()
        own = parts[self._place]
        self._codes.add(self._rows(received), own, divisor)
        if self.scatters:
            if self._within is not None:
                buffer.view(self._ranks, -1)[self._rank] = own
            return
        row = received.new_empty(self._codes.row_bytes)
        self._codes.encode(row, own, self.residuals[1][0])
        rows = row.new_empty(self._peers.size() * len(row))
        dist.all_gather_into_tensor(rows, row, group=self._peers)
        for each, part in zip(self._rows(rows), parts, strict=True):
            self._codes.decode(each, part)
        if self._within is not None:
            for part, whole in zip(parts, buffer.view(len(parts), -1), strict=True):
                dist.all_gather_into_tensor(whole, part, group=self._within)
        if buffer is not gradient:
            gradient.copy_(buffer[: gradient.numel()])

    def _reduced_within(self, buffer: Tensor) -> Tensor:
        """[peers, shard]: the buffer's shards, or sums over the node of those that go to this rank's peers."""
        if self._within is None:
            return buffer.view(self._ranks, self._shard)
        wholes: Sequence[Tensor] = list(buffer.view(self._peers.size(), -1))
        parts = buffer.new_empty(len(wholes), self._shard)
        for part, whole in zip(parts, wholes, strict=True):
            dist.reduce_scatter_tensor(part, whole, group=self._within)
        return parts

    def _rows(self, message: Tensor) -> Tensor:
        return message.view(-1, self._codes.row_bytes)
