"""2-norm of gradients, and their scaling, for clipping."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@torch.no_grad()
def l2norm(tensors: Sequence[Tensor]) -> Tensor:
    """sqrt(sum of squares of all elements), a 0-d fp32 tensor; a norm of norms, as in Megatron.

    tensors: at least one, on one device, any floating-point dtypes. float64 if all are. PyTorch's foreach norm is the
    fastest on every device.
    """
    dtype = torch.float64 if all(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors), 2, dtype=dtype)))
    return norm


def total_norm(norm: Tensor, group: ProcessGroup | None) -> Tensor:
    """2-norm over all ranks of `group`, 0-d, of each rank's fp32 `norm`.

    float64 where the device has it, as Megatron goes on with on the host.
    """
    total = norm**2
    dist.all_reduce(total, group=group)
    return total.reshape(()).to(torch.float32 if total.device.type == "npu" else torch.float64).sqrt()


def scale_into(targets: Sequence[Tensor], sources: Sequence[Tensor], scale: float | Tensor) -> None:
    """targets = scale * sources, in place where they are the same tensors. scale: a number or a 0-d tensor."""
    if any(source is not target for source, target in zip(sources, targets, strict=True)):
        torch._foreach_copy_(list(targets), list(sources))
    torch._foreach_mul_(list(targets), scale)  # type: ignore[arg-type]
