"""Megatron's collectives over gloo: groups named "nccl", averages, barriers by device, sends of moving storage, and
parts of different sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from . import lanes, streams
from .redirect import Redirects


def install(redirects: Redirects) -> None:
    """Send every process group over gloo, and give gloo what Megatron takes for granted of NCCL."""
    if not dist.is_available():
        return
    c10d = dist.distributed_c10d

    def over_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            if isinstance(kwargs.get("backend"), str):
                kwargs["backend"] = _gloo(kwargs["backend"])
            args = tuple(_gloo(each) if isinstance(each, str) else each for each in args)
            for option in ("device_id", "pg_options"):
                kwargs.pop(option, None)
            return original(*args, **kwargs)

        return make

    for function in ("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration"):
        changed = over_gloo(getattr(dist, function))
        redirects.set(dist, function, changed)
        redirects.set(c10d, function, changed)

    own_barrier = dist.barrier

    @functools.wraps(own_barrier)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return own_barrier(group, async_op)

    redirects.set(dist, "barrier", barrier)
    redirects.set(c10d, "barrier", barrier)

    own_isend = dist.isend

    @functools.wraps(own_isend)
    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron swaps the storage of a tensor in flight (`out.data = ...`), which stream order makes safe on a
        # GPU. The alias keeps what is being sent alive.
        return own_isend(tensor.detach(), *args, **kwargs)

    redirects.set(dist, "isend", isend)
    redirects.set(c10d, "isend", isend)

    def averaging(original: Callable[..., Any], averaged: int) -> Callable[..., Any]:
        """Not every release's gloo averages: divide this rank's contribution first, then sum.

        `averaged`: index of the contribution, which only a reduction in place may change.
        """

        @functools.wraps(original)
        def reduce(*args: Any, **kwargs: Any) -> Any:
            position = averaged + 1
            op = kwargs.get("op", args[position] if len(args) > position else dist.ReduceOp.SUM)
            if op == dist.ReduceOp.AVG:
                group = kwargs.get("group", args[position + 1] if len(args) > position + 1 else None)
                keyword = ("tensor", "input")[averaged]
                contribution = args[averaged] if len(args) > averaged else kwargs[keyword]
                if averaged == 0:
                    contribution.div_(dist.get_world_size(group))
                elif len(args) > averaged:
                    share = contribution / dist.get_world_size(group)
                    args = (*args[:averaged], share, *args[averaged + 1 :])
                else:
                    kwargs[keyword] = contribution / dist.get_world_size(group)
                if "op" in kwargs:
                    kwargs["op"] = dist.ReduceOp.SUM
                else:
                    args = (*args[:position], dist.ReduceOp.SUM, *args[position + 1 :])
            return original(*args, **kwargs)

        return reduce

    for function, averaged in (("all_reduce", 0), ("reduce_scatter_tensor", 1), ("_reduce_scatter_base", 1)):
        if hasattr(c10d, function):
            changed = averaging(getattr(c10d, function), averaged)
            redirects.set(c10d, function, changed)
            if hasattr(dist, function):
                redirects.set(dist, function, changed)

    own_all_gather, own_reduce_scatter = dist.all_gather, dist.reduce_scatter
    reduce_scatter_tensor = dist.reduce_scatter_tensor  # with averages, as above

    @functools.wraps(own_all_gather)
    def all_gather(tensor_list: Any, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if async_op or not _uneven(tensor_list):
            return own_all_gather(tensor_list, tensor, group, async_op)
        longest = max(len(each) for each in tensor_list)
        parts = [each.new_empty(longest, *each.shape[1:]) for each in tensor_list]
        own_all_gather(parts, _padded(tensor, longest), group)
        for each, part in zip(tensor_list, parts, strict=True):
            each.copy_(part[: len(each)])
        return None

    @functools.wraps(own_reduce_scatter)
    def reduce_scatter(
        output: torch.Tensor, input_list: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if async_op or not _uneven(input_list):
            return own_reduce_scatter(output, input_list, op, group, async_op)
        longest = max(len(each) for each in input_list)
        part = output.new_empty(longest, *output.shape[1:])
        reduce_scatter_tensor(part, torch.cat([_padded(each, longest) for each in input_list]), op, group)
        output.copy_(part[: len(output)])
        return None

    for function, changed in (("all_gather", all_gather), ("reduce_scatter", reduce_scatter)):
        redirects.set(dist, function, changed)
        redirects.set(c10d, function, changed)

    # Last, around what the others made of them: in a stream of its own a collective is not waited for.
    for function in ("all_gather_into_tensor", "all_reduce", "all_to_all_single", "reduce_scatter_tensor"):
        changed = lanes.collective(getattr(dist, function), streams.current_lane)
        redirects.set(dist, function, changed)
        redirects.set(c10d, function, changed)


def _uneven(tensors: Any) -> bool:
    """NCCL takes such parts, which experts have many of; gloo takes parts of one size."""
    return len({each.shape for each in tensors}) > 1 and all(each.dim() > 0 for each in tensors)


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    padded = tensor.new_zeros(length, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    return padded


def _gloo(backend: str) -> str:
    return "gloo" if "nccl" in backend else backend
