"""Megatron's collectives over gloo: groups named "nccl", averages, barriers by device, sends of moving storage."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

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


def _gloo(backend: str) -> str:
    return "gloo" if "nccl" in backend else backend
