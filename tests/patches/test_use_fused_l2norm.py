"""`--use-fused-l2norm` in real Megatron: output and gradient beside float64, its reason, and what it keeps."""

from __future__ import annotations

import pytest
import torch

import mindspeed_lite
from tests.harness.compare import assert_not_worse
from tests.harness.processes import forked


def run(x, dy):
    """Output and gradient of Megatron's module for [s, b, heads, d]."""
    from megatron.core.transformer.torch_norm import L2Norm

    leaf = x.detach().requires_grad_()
    y = L2Norm(hidden_size=x.size(-1), eps=1e-5)(leaf)
    return [y.detach(), *torch.autograd.grad(y, leaf, dy)]


def definition(x, dy):
    leaf = x.double().requires_grad_()
    y = leaf * torch.rsqrt(leaf.pow(2).mean(-1, keepdim=True) + 1e-5)
    return [y.detach(), *torch.autograd.grad(y, leaf, dy.double())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@forked("megatron")
def test_output_and_gradient_are_as_near_to_float64_as_megatrons(dtype):
    generator = torch.Generator().manual_seed(3)
    x, dy = (torch.randn(9, 2, 4, 64, generator=generator).to(dtype) for _ in range(2))
    off, saved = run(x, dy), []
    with mindspeed_lite.enabled(use_fused_l2norm=True, strict=True):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            on = run(x, dy)
        again = run(x.clone(), dy)
    assert_not_worse(on, off, definition(x, dy), 2 * torch.finfo(dtype).eps, ["y", "dx"])
    assert all(torch.equal(a, b) for a, b in zip(on, again, strict=True))
    # Its input, the weight of ones, and a number per row at most.
    assert sum(each.numel() for each in saved) <= x.numel() + 64 + x.numel() // 64
    assert all(torch.equal(a, b) for a, b in zip(run(x, dy), off, strict=True))
