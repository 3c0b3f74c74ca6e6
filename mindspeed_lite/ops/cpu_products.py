"""What PyTorch's matrix products on this machine's processor are good for."""

from __future__ import annotations

import functools

import torch


@functools.cache
def has_bf16() -> bool:
    """Whether the processor multiplies bf16 matrices no slower than fp32 ones.

    Without AVX-512 oneDNN has no such product, and PyTorch's own is about eight times slower than fp32's: there an
    operator widens its inputs, multiplies, and rounds once.
    """
    known = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    if known is not None:
        return bool(known())
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")
