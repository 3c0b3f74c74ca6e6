"""The norm of gradients: against values by hand, and on CPU Megatron's own bits."""

from __future__ import annotations

import pytest
import torch

from mindspeed_lite.optim.grad_norm import l2norm


def test_it_is_the_norm_of_all_elements_together() -> None:
    found = l2norm([torch.tensor([[3.0, 0.0]]), torch.tensor([4.0]), torch.zeros(0), torch.tensor(12.0)])
    assert found.shape == () and found.dtype == torch.float32 and found.item() == 13.0
    assert l2norm([torch.ones(2, dtype=torch.float64)]).dtype == torch.float64


def test_on_cpu_the_bits_are_megatrons() -> None:
    for sizes in ((300_001, 5, 90_000), (1,), (17, 0, 4096, 3), (1_000_003,) * 3):
        tensors = [torch.randn(size, generator=torch.Generator().manual_seed(size)) * 0.01 for size in sizes]
        assert torch.equal(l2norm(tensors), torch.norm(torch.tensor([torch.norm(tensor) for tensor in tensors])))


def test_extreme_values() -> None:
    assert l2norm([torch.tensor([1e19, 1e19])]).item() == pytest.approx(2**0.5 * 1e19)
    assert l2norm([torch.tensor([1e-30])]).item() == pytest.approx(1e-30)
    assert l2norm([torch.tensor([float("inf")]), torch.ones(3)]).item() == float("inf")
    assert l2norm([torch.ones(3), torch.tensor([float("nan"), float("inf")])]).isnan()
