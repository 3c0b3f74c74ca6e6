"""Cross-entropy over a vocabulary that a group of ranks shares."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..recorded import recorded


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, smoothing: float, group: Any, ignored: int
    ) -> Any:
        values = logits.float()
        rank, size = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
        shard = values.size(-1)
        maximum = values.amax(-1, keepdim=True)
        if size > 1:
            dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
        shifted = values - maximum
        local = target - rank * shard
        is_here = (local >= 0) & (local < shard)
        of_target = shifted.gather(-1, local.clamp(0, shard - 1)[..., None]).squeeze(-1).where(is_here, 0.0)
        sums = torch.stack([shifted.exp().sum(-1), of_target, shifted.sum(-1)])
        if size > 1:
            dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        words = shard * size
        loss = log_sum - (1 - smoothing) * sums[1] - smoothing / words * sums[2]
        counts = target != ignored
        ctx.save_for_backward(shifted - log_sum[..., None], local, is_here, counts)
        ctx.smoothing, ctx.words, ctx.dtype = smoothing, words, logits.dtype
        return loss.where(counts, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        log_probabilities, local, is_here, counts = ctx.saved_tensors
        grad = log_probabilities.exp() - ctx.smoothing / ctx.words
        at_target = local.clamp(0, grad.size(-1) - 1)[..., None]
        grad = grad.scatter_add(-1, at_target, -(1 - ctx.smoothing) * is_here.float()[..., None])
        return (grad * (grads[0] * counts)[..., None]).to(ctx.dtype), None, None, None, None


@recorded
def parallel_cross_entropy(given: Any) -> torch.Tensor:
    """Losses fp32 [s, b] of logits [s, b, v / ranks]; their mean over targets that count with `reduce_loss`."""
    target, ignored = given.target.reshape(given.inp.shape[:2]), given.ignore_idx
    losses: torch.Tensor = _CrossEntropy.apply(
        given.inp, target, given.label_smoothing, given.dist_process_group, ignored
    )
    return losses.sum() / (target != ignored).sum() if given.reduce_loss else losses
