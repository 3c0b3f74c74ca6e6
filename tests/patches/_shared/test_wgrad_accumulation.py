"""Main gradients: what is added to them, and what hooks of autograd get in place of the gradient."""

from __future__ import annotations

import pytest
import torch

import mindspeed_lite
from mindspeed_lite.patches._shared import wgrad_accumulation
from tests.harness.processes import forked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@forked("megatron")
def test_the_product_is_added_once_in_the_main_gradients_own_precision(dtype):
    generator = torch.Generator().manual_seed(1)
    dy, x = torch.randn(6, 4, generator=generator).bfloat16(), torch.randn(6, 3, generator=generator).bfloat16()
    main = torch.ones(4, 3, dtype=dtype)
    with mindspeed_lite.enabled(use_gradient_accumulation_fusion=True):
        # Strided, as slices of larger tensors are.
        wgrad_accumulation.add(main, dy.t().contiguous().t(), x)
    assert torch.allclose(main.double(), 1 + dy.double().t() @ x.double(), rtol=2**-7, atol=2**-7)


def test_hooks_get_a_stand_in_where_they_count_gradients():
    weight = torch.nn.Parameter(torch.randn(4, 3))
    assert wgrad_accumulation.placeholder_grad(weight) is None, "no hook counts gradients"
    weight.grad_added_to_main_grad = False
    given = wgrad_accumulation.placeholder_grad(weight)
    assert given.shape == weight.shape and weight.grad_added_to_main_grad and not given.requires_grad
    weight.zero_out_wgrad = True
    assert not wgrad_accumulation.placeholder_grad(weight).any()
