"""accumulate_wgrad: against the product and the addition that autograd and a gradient hook make of it.

The operator adds in place, and a case must give the same at every call: every contender adds to a main gradient that
has just been zeroed, as in the first micro-batch, and zeroing is part of all times. Counted as bytes forward: dy and x
read, main_grad zeroed, read and written; as operations: those of the product. The backward pass, which a training step
does not have here, is that of the formula: two products with the output's gradient.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import torch

from mindspeed_lite.bench.operators import OURS, TORCH, Case, Contender, Work, compiled, dtype_name, peers
from mindspeed_lite.ops.accumulate_wgrad import accumulate_wgrad


def shapes(device: str, quick: bool) -> list[str]:
    """The layers of this project's CPU runs (query-key-value, MLP, output layer), and Llama 8B's MLP."""
    if quick:
        return ["1024x1024x3072"]
    if device == "cpu":
        return ["1024x1024x3072", "1024x2816x1024", "1024x1024x32768", "4096x1024x3072"]
    return ["8192x4096x6144", "8192x4096x28672", "8192x14336x4096"]


def case(text: str, device: str, dtype: torch.dtype) -> Case:
    """The case of `ROWSxINPUTxOUTPUT`."""
    match = re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)[xX]([1-9]\d*)", text)
    if match is None:
        raise ValueError("want ROWSxINPUTxOUTPUT with all at least 1, for example 1024x1024x3072")
    rows, k, n = (int(part) for part in match.groups())

    def make() -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        dy, x = (torch.randn(rows, width, generator=generator).to(device, dtype) for width in (n, k))
        return dy.requires_grad_(), x.requires_grad_()

    inputs, product = rows * (n + k) * dtype.itemsize, 2 * rows * n * k
    main = n * k * torch.float32.itemsize
    forward = Work(inputs + 3 * main, product)
    backward = Work(2 * inputs + main, 2 * product)
    return Case(
        operator="accumulate_wgrad",
        name=f"{rows}x{k}x{n} {dtype_name(dtype)}",
        device=device,
        dtype=dtype,
        make=make,
        forward=forward,
        both=Work(forward.bytes + backward.bytes, forward.flops + backward.flops),
        contenders=(
            Contender(OURS, lambda: _with_gradients(accumulate_wgrad)),
            Contender(TORCH, lambda: _with_gradients(plain)),
            compiled(lambda: _with_gradients(plain)),
            *peers(device, ("fused_weight_gradient_mlp_cuda", Contender("apex", _apex))),
        ),
    )


def plain(main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What a user without us has: autograd's product, and a hook that adds it."""
    return main_grad.add_(dy.t() @ x)


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


def _apex() -> Any:
    kernels: Any = importlib.import_module("fused_weight_gradient_mlp_cuda")

    def accumulate(main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        kernels.wgrad_gemm_accum_fp32(x, dy, main_grad)
        return main_grad

    return _with_gradients(accumulate)
