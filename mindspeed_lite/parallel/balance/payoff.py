"""Measures the cost of copying or moving an expert, and of a token on the fullest rank.

Copy: parameter broadcast and fp32 gradient reduction. Token: GEMMs of both passes and four row messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

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
        """The same for a move, in tokens per step.

        share: bytes of a move over those of a copy. steps: until the next placement.
        """
        return self.copy * share / (self.products * steps) if self.products else float("inf")


def copied_bytes(parameters: Sequence[torch.Tensor]) -> int:
    return sum(each.numel() * (each.element_size() + 4) for each in parameters)


@torch.no_grad()
def measure(
    parameters: Sequence[torch.Tensor], rows: int, sharers: dist.ProcessGroup, all_sharers: dist.ProcessGroup
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

    sent = _seconds(lambda: dist.broadcast(flat, root, sharers), flat.device)
    summed = _seconds(lambda: dist.reduce(gradients, root, group=sharers), flat.device)
    multiplied = _seconds(multiply, flat.device)
    row = 4 * hidden * sent / flat.numel()
    # The backward pass has two GEMMs per forward GEMM.
    found = torch.tensor([sent + summed, 3 * multiplied / len(inputs[0]), row], dtype=torch.float64, device=flat.device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=all_sharers)
    return CopyCosts(*found.tolist())


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    found = []
    for _ in range(_ROUNDS):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
