"""Seconds of gradient reductions: exact, and in 8 or 16 bits (`--grad-reduce-compression`)."""

from __future__ import annotations

from . import optimizer
from .training import TrainingConfig
from .work import Collective, CollectiveCall, DeviceCosts, Group, Vector

# Bytes of a value on the wire; int8 and fp8 with an fp32 scale for 64.
CODE_BYTES = {"int8": 1 + 4 / 64, "fp8": 1 + 4 / 64, "bf16": 2.0}
# Passes over fp32 values of `parallel.block_codes`, in those of a gradient's accumulation.
_ENCODE, _DECODE = 16.5 / 5, 6.0 / 5


def exact_reduction(training: TrainingConfig, count: float, group: Group, device: DeviceCosts) -> float:
    kind: Collective = "reduce_scatter" if training.use_distributed_optimizer else "all_reduce"
    width = optimizer.gradient_width(training)
    return device.message(CollectiveCall(kind, count * width, group, width))


def compressed_reduction(training: TrainingConfig, count: float, group: Group, device: DeviceCosts) -> float:
    """Exact within nodes where the scope says so, then codes between all ranks or between nodes."""
    scope = training.grad_reduce_compression_scope
    local = 1 if scope == "all" else group.per_node(device.ranks_per_node)
    if local == group.size:
        if scope == "between-nodes":
            return exact_reduction(training, count, group, device)
        local = 1
    within = exact_reduction(training, count, Group(local, group.stride), device) if local > 1 else 0.0
    return within + coded_reduction(training, count / local, Group(group.size // local, group.stride * local), device)


def coded_reduction(training: TrainingConfig, count: float, group: Group, device: DeviceCosts) -> float:
    """Encode, exchange, decode; for all-reduce also the sum's way back."""
    size, sent = count * CODE_BYTES[training.grad_reduce_compression], count * (1 - 1 / group.size)
    seconds = device.message(CollectiveCall("all_to_all", size, group)) + _conversion(sent, sent, device)
    if training.use_distributed_optimizer:
        return seconds
    gathered = device.message(CollectiveCall("all_gather", size, group))
    return seconds + gathered + _conversion(count / group.size, count, device)


def _conversion(encoded: float, decoded: float, device: DeviceCosts) -> float:
    return device.vector(Vector("accumulate", encoded * _ENCODE + decoded * _DECODE), True, 4)
