"""How many rows each expert has, on the host or on the device, wherever a backend needs to know it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# E numbers: an int64 tensor [E], or integers of the host.
Counts = torch.Tensor | Sequence[int]


def on_host(counts: Counts, rows: int) -> list[int]:
    """As integers; waits for the device if that is where they are and if there are any rows."""
    if not isinstance(counts, torch.Tensor):
        return list(counts)
    found: list[int] = counts.tolist() if rows else [0] * len(counts)
    return found


def on_device(counts: Counts, device: torch.device) -> torch.Tensor:
    """As an int64 tensor; what is sent from the host is waited for, but on CUDA."""
    if isinstance(counts, torch.Tensor):
        return counts.to(device)
    cuda = device.type == "cuda"
    return torch.tensor(counts, dtype=torch.int64, pin_memory=cuda).to(device, non_blocking=cuda)
