"""Fused GEMM and collective over PyTorch's CUDA symmetric memory.

A rank copies rows over NVLink on its own stream during the GEMM, without NCCL. Scattered results are summed over ranks
in one pass and rounded once.

Source: torch.ops.symm_mem (torch.distributed._symmetric_memory); arXiv 2406.06858 (Flux) for the decomposition.
"""

from __future__ import annotations

import functools
import socket
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .overlapped_gemm import FusedGemmCollective

# Group -> why it has no symmetric memory, or None.
_found: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()


class Symmetric(FusedGemmCollective):
    """PyTorch's fused GEMM and collective operators over symmetric memory; support is checked once per group."""

    def why_not(self, x: Tensor, w: Tensor, group: ProcessGroup) -> list[str]:
        if x.dtype != w.dtype:
            return [f"{x.dtype} times {w.dtype}"]
        if not x.shape[0]:
            return ["there are no rows"]
        if group not in _found:
            _found[group] = prepare(group, x.device)
        reason = _found[group]
        return [] if reason is None else [reason]

    def _gather(self, x: Tensor, w: Tensor, group: ProcessGroup, keep: bool) -> tuple[Tensor, Tensor | None]:
        whole, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, group.group_name, return_A=keep)
        return y, whole

    def _scatter(self, x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
        y: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, group.group_name)
        return y


def prepare(group: ProcessGroup, device: torch.device) -> str | None:
    """Set up symmetric memory; returns the reason of a failure, equal on all ranks. A collective."""
    own = _missing() or _alone(device)
    shared: list[Any] = [None] * group.size()
    dist.all_gather_object(shared, (own, socket.gethostname(), device.index), group=group)
    for reason, _, _ in shared:
        if reason is not None:
            return str(reason)
    hosts = sorted({host for _, host, _ in shared})
    if len(hosts) > 1:
        return f"the group's ranks are on {len(hosts)} hosts, and symmetric memory is that of one"
    peers: list[Any] = [None] * group.size()
    dist.all_gather_object(peers, [_reaches(device, index) for _, _, index in shared], group=group)
    if not all(map(all, peers)):
        return "the group's devices do not reach each other's memory"
    _register(group)
    return None


@functools.cache
def _missing() -> str | None:
    try:
        import torch.distributed._symmetric_memory
    except ImportError as error:
        return f"torch {torch.__version__} has no symmetric memory: {error}"
    for name, argument in (("fused_all_gather_matmul", "return_A"), ("fused_matmul_reduce_scatter", "reduce_op")):
        operator = getattr(torch.ops.symm_mem, name, None)
        if operator is None or argument not in {each.name for each in operator.default._schema.arguments}:
            return f"torch {torch.__version__} has no symm_mem::{name} with {argument}"
    return None


def _alone(device: torch.device) -> str | None:
    """Reason why a device has no symmetric memory, or None."""
    if device.type != "cuda":
        return f"symmetric memory is that of CUDA devices, and this is {device.type}"
    return None


def _reaches(device: torch.device, other: int | None) -> bool:
    # Invisible devices may be reachable; the operators' set-up checks them.
    if other is None or other == device.index or other >= torch.cuda.device_count():
        return True
    return torch.cuda.can_device_access_peer(device, other)


def _register(group: ProcessGroup) -> None:
    from torch.distributed import _symmetric_memory

    enable = getattr(_symmetric_memory, "enable_symm_mem_for_group", None)
    # Deprecated in newer versions.
    if enable is not None and not hasattr(enable, "__deprecated__"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            enable(group.group_name)
