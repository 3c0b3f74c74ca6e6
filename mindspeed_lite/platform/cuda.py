"""CUDA device: Megatron's native device, so nothing is changed in PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .redirect import Redirects


name = "cuda"
distributed_backend = "nccl"


def available() -> list[str]:
    if torch.version.cuda is None and torch.version.hip is None:
        return [f"torch {torch.__version__} is built without CUDA"]
    if not torch.cuda.is_available():
        return ["torch finds no CUDA device (no driver, no GPU, or CUDA_VISIBLE_DEVICES hides it)"]
    return []


def describe() -> str:
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"


def install(redirects: Redirects) -> None:
    """Change nothing."""
