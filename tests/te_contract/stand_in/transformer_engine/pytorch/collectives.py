"""Collectives, and which tokens a rank of context parallelism holds: two chunks of each sequence, mirrored."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def partitioned_indices(cu_seqlens: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """Places of this rank's tokens in a whole pack."""
    places = []
    for start, end in zip(cu_seqlens.tolist()[:-1], cu_seqlens.tolist()[1:], strict=True):
        chunks = (
            torch.arange(start, end).chunk(2 * size) if end > start else [torch.empty(0, dtype=torch.long)] * 2 * size
        )
        places += [chunks[rank], chunks[2 * size - 1 - rank]]
    return torch.cat(places)


def size_of(group: Any) -> int:
    """Ranks of a group; one for none."""
    return dist.get_world_size(group) if group is not None else 1


def gather(tensor: torch.Tensor, group: Any, dim: int = 0) -> torch.Tensor:
    """The shards of all ranks along `dim`."""
    if size_of(group) == 1:
        return tensor
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(size_of(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim)


def reduce(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum over ranks."""
    if size_of(group) > 1:
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=group)
    return tensor


def reduce_scatter(tensor: torch.Tensor, group: Any, dim: int = 0) -> torch.Tensor:
    """This rank's shard along `dim` of the sum over ranks."""
    if size_of(group) == 1:
        return tensor
    return reduce(tensor, group).chunk(size_of(group), dim)[dist.get_rank(group)].contiguous()


class Gather(torch.autograd.Function):
    """Differentiable `gather`."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
        """Gather shards."""
        ctx.group, ctx.dim = group, dim
        return gather(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Sum over ranks and scatter."""
        return reduce_scatter(grads[0], ctx.group, ctx.dim), None, None
