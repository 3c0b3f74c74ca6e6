"""Entropy of a vocabulary chunk's distribution and the gradient of loss and entropy.

U = sum_v exp(x_v - M) (x_v - M) is a fourth row of the statistics (M, S, p). Backends without kernels for it use
PyTorch in row blocks, as `reference`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.ops.cross_entropy.loss import shifted
from mindspeed_lite.ops.cross_entropy.reference import blocks


def statistics(kernels: Any, logits: Tensor, target: Tensor, start: int) -> Tensor:
    """[4, T], with U."""
    if hasattr(kernels, "entropy_gradient"):
        found: Tensor = kernels.statistics(logits, target, start, entropy=True)
        return found
    statistics = kernels.statistics(logits, target, start)
    sums = torch.empty_like(statistics[0])
    for block in blocks(*logits.shape):
        distance = shifted(logits[block].to(sums.dtype), statistics[0, block, None])  # [t, V]
        torch.sum(distance.exp().mul_(distance), dim=-1, out=sums[block])
    return torch.cat([statistics, sums[None]])


def entropies(statistics: Tensor) -> Tensor:
    _, sums, _, weighted = statistics
    entropy: Tensor = sums.log() - weighted / sums
    return entropy


def gradient(
    kernels: Any,
    logits: Tensor,
    target: Tensor,
    start: int,
    statistics: Tensor,
    dloss: Tensor,
    entropy: Tensor,
    dentropy: Tensor,
) -> None:
    """Overwrites logits [T, V] with the gradient of loss and entropy."""
    if hasattr(kernels, "entropy_gradient"):
        kernels.entropy_gradient(logits, target, start, statistics, dloss, entropy, dentropy)
        return
    top, sums = statistics
    log_sums = sums.log()
    width = logits.shape[1]
    own = torch.where((target >= start) & (target < start + width), dloss, 0.0)[:, None]
    column = (target - start).clamp(0, width - 1)[:, None]
    for block in blocks(*logits.shape):
        log_p = shifted(logits[block].to(top.dtype), (top + log_sums)[block, None])  # [t, V]
        factor = (log_p + entropy[block, None]).mul_(-dentropy[block, None]).add_(dloss[block, None])
        found = log_p.exp_().mul_(factor)
        found.scatter_(1, column[block], found.gather(1, column[block]) - own[block])
        logits[block] = found
