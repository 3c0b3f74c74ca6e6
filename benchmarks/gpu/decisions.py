"""Kernels of which one is to be chosen: ours, PyTorch's, Liger's and what PyTorch hides behind one function."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.gpu.operators import case_unit
from benchmarks.gpu.units import Unit
from mindspeed_lite.ops.case import Contender, Problem

Function = Callable[..., torch.Tensor]


def units(part: str, device: str, tiny: bool) -> list[Unit]:
    """A unit for each decision."""
    return [
        case_unit("rms_norm", "16384x4096", device, tiny, functools.partial(_triton_norm, False)),
        case_unit("layer_norm", "16384x4096", device, tiny, functools.partial(_triton_norm, True)),
        case_unit("cross_entropy", "4096x128256", device, tiny),
        case_unit("attention", "s=4096,b=1,n=32,g=8,d=128", device, tiny, _attention),
        case_unit("grouped_matmul", "32768x2048x1536x64", device, tiny),
        case_unit("vocab_embedding", "8192x4096x128256,main=1", device, tiny),
    ]


def _triton_norm(has_bias: bool, case: Problem) -> Sequence[Contender]:
    """Our one-pass kernels, whose backward is one launch where PyTorch's is two."""
    if case.device != "cuda":
        return []

    def load() -> Function:
        norm = importlib.import_module("mindspeed_lite.ops.norm.kernels").norm

        def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            out: torch.Tensor = norm(x, weight, bias, 1e-5, False)
            return out

        return run

    return [Contender("triton", load)]


def _attention(case: Problem) -> Sequence[Contender]:
    """Each implementation of PyTorch's attention alone."""
    if case.device != "cuda":
        return []
    backend: Any = torch.nn.attention.SDPBackend
    return [
        Contender("cuDNN", lambda: _sdpa(backend.CUDNN_ATTENTION)),
        Contender("FA2", lambda: _sdpa(backend.FLASH_ATTENTION)),
        Contender("FA3", _fa3),
    ]


def _sdpa(backend: Any) -> Function:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [b, n or g, s, d]
        with torch.nn.attention.sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).contiguous()

    return run


def _fa3() -> Function:
    """flash-attn 3 by its own function; torch would put it in the place of FA2 for the whole process."""
    function: Any = importlib.import_module("flash_attn_interface").flash_attn_func

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))  # [b, s, n or g, d]
        out = function(q, k, v, causal=True)
        context: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return context.transpose(0, 1).contiguous()

    return run
