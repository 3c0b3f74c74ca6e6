"""Runs Megatron's collectives over gloo."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .redirect import Redirects


def install(redirects: Redirects) -> None:
    if not dist.is_available():
        return
    replacements: dict[str, Callable[..., Any]] = {"barrier": _barrier, "isend": _isend}
    for name in ("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration"):
        replacements[name] = _over_gloo
    for name in ("all_reduce", "reduce_scatter_tensor", "_reduce_scatter_base"):
        replacements[name] = _averaging
    replacements |= {"all_gather": _all_gather, "reduce_scatter": _reduce_scatter}
    for name, wrap in replacements.items():
        if hasattr(dist, name):
            redirects.wrap(dist, name, wrap)


def _over_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def make(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        if "nccl" in str(call.arguments.get("backend")):
            call.arguments["backend"] = "gloo"
        for option in ("device_id", "pg_options"):
            call.arguments.pop(option, None)
        return original(*call.args, **call.kwargs)

    return make


def _barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return original(group, async_op)

    return barrier


def _isend(original: Callable[..., Any]) -> Callable[..., Any]:
    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron replaces the storage of a tensor in flight (`out.data = ...`), safe on a GPU by stream order. The
        # alias keeps the sent storage alive.
        return original(tensor.detach(), *args, **kwargs)

    return isend


def _averaging(original: Callable[..., Any]) -> Callable[..., Any]:
    """Average without gloo's AVG, absent in some torch releases: divide, then sum."""
    signature = inspect.signature(original)

    def reduce(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        given = call.arguments
        if given.get("op") == dist.ReduceOp.AVG:
            size = dist.get_world_size(given.get("group"))
            if "input" in given:
                given["input"] = given["input"] / size
            else:
                given["tensor"].div_(size)
            given["op"] = dist.ReduceOp.SUM
        return original(*call.args, **call.kwargs)

    return reduce


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather(tensor_list: Any, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if async_op or not _uneven(tensor_list):
            return original(tensor_list, tensor, group, async_op)
        longest = max(len(each) for each in tensor_list)
        parts = [each.new_empty(longest, *each.shape[1:]) for each in tensor_list]
        original(parts, _padded(tensor, longest), group)
        for each, part in zip(tensor_list, parts, strict=True):
            each.copy_(part[: len(each)])
        return None

    return all_gather


def _reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_scatter(
        output: torch.Tensor, input_list: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if async_op or not _uneven(input_list):
            return original(output, input_list, op, group, async_op)
        longest = max(len(each) for each in input_list)
        part = output.new_empty(longest, *output.shape[1:])
        dist.reduce_scatter_tensor(part, torch.cat([_padded(each, longest) for each in input_list]), op, group)
        output.copy_(part[: len(output)])
        return None

    return reduce_scatter


def _uneven(tensors: Any) -> bool:
    """Whether parts differ in size, which NCCL accepts and gloo does not."""
    return len({each.shape for each in tensors}) > 1 and all(each.dim() > 0 for each in tensors)


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    padded = tensor.new_zeros(length, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    return padded
