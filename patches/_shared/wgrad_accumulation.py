"""Adds a weight gradient to its main gradient; autograd gets a placeholder."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_lite.engine import Around, Function, Session
from mindspeed_lite.ops.accumulate_wgrad import accumulate_wgrad


def add(main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
    """main_grad [N, K] += dy^T x; dy: [M, N], x: [M, K]."""
    from megatron.core.tensor_parallel import layers

    kernels = getattr(layers, "fused_weight_gradient_mlp_cuda", None)
    if kernels is None:
        # The features were disabled before this backward pass.
        accumulate_wgrad(main_grad, dy.contiguous(), x.contiguous())
        return
    wide = main_grad.dtype == torch.float32
    accumulate = kernels.wgrad_gemm_accum_fp32 if wide else kernels.wgrad_gemm_accum_fp16
    accumulate(x.contiguous(), dy.contiguous(), main_grad)


def placeholder_grad(weight: Any) -> torch.Tensor | None:
    """Placeholder for autograd, whose hooks reduce main_grad."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight, requires_grad=False)


def _backward(wrapped: Function, session: Session) -> Function:
    def backward(ctx: Any, grad_output: Any) -> Any:
        found = wrapped(ctx, grad_output)
        if found[1] is not None or not ctx.gradient_accumulation_fusion:
            return found
        weight = getattr(ctx.next_functions[1][0], "variable", None)
        return found if weight is None else (found[0], placeholder_grad(weight), *found[2:])

    return backward


# Saved-tensor hooks copy the weight without its attributes, so Megatron would return no gradient.
PATCH = Around(
    "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward", _backward
)
