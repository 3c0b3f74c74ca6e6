"""Implementations that accumulate_wgrad is compared with; cases.py declares the cases."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from mindspeed_lite.ops.accumulate_wgrad import accumulate_wgrad
from mindspeed_lite.ops.case import Case


def ours(case: Case) -> Any:
    """The operator on a zeroed main gradient."""
    return _with_gradients(accumulate_wgrad)


def plain(case: Case) -> Any:
    """What a user without us has: autograd's product, and a hook that adds it."""
    return _with_gradients(lambda main_grad, dy, x: main_grad.add_(dy.t() @ x))


def apex(case: Case) -> Any:
    """Apex's kernel."""
    kernels: Any = importlib.import_module("fused_weight_gradient_mlp_cuda")

    def accumulate(main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        kernels.wgrad_gemm_accum_fp32(x, dy, main_grad)
        return main_grad

    return _with_gradients(accumulate)


def _with_gradients(accumulate: Any) -> Any:
    """dy^T x in fp32 by `accumulate`, which adds it to zeros in place, with the gradients of that formula."""

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(dy, x)
            wide = torch.promote_types(x.dtype, torch.float32)
            out: torch.Tensor = accumulate(torch.zeros(dy.shape[1], x.shape[1], dtype=wide, device=x.device), dy, x)
            return out

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            dy, x = ctx.saved_tensors
            narrow = gradient.to(x.dtype)  # [N, K]
            return x @ narrow.t(), dy @ narrow

    return Sum.apply
