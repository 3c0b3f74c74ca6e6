"""l2norm: every path against float64, whatever the shapes, and on CPU Megatron's own bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mindspeed_lite.ops.dispatch import selected
from mindspeed_lite.ops.l2norm import l2norm, reference
from tests.harness.reasons import why_not_of

why_not = why_not_of(l2norm)

PATHS: dict[str, Callable[..., torch.Tensor]] = {
    "dispatched": l2norm,
    "reference": reference.l2norm,
}


def megatrons(tensors: list[torch.Tensor]) -> torch.Tensor:
    """What it stands in for."""
    return torch.norm(torch.tensor([torch.norm(tensor) for tensor in tensors]))


@pytest.mark.parametrize("path", PATHS)
def test_it_is_the_norm_of_all_elements_together(path: str) -> None:
    found = PATHS[path]([torch.tensor([[3.0, 0.0]]), torch.tensor([4.0]), torch.zeros(0), torch.tensor(12.0)])
    assert found.shape == () and found.dtype == torch.float32 and found.item() == 13.0


def test_on_cpu_the_bits_are_megatrons() -> None:
    for sizes in ((300_001, 5, 90_000), (1,), (17, 0, 4096, 3), (1_000_003,) * 3):
        tensors = [torch.randn(size, generator=torch.Generator().manual_seed(size)) * 0.01 for size in sizes]
        assert torch.equal(l2norm(tensors), megatrons(tensors))
        assert torch.equal(l2norm(tensors), reference.l2norm(tensors))


def test_extreme_values() -> None:
    assert l2norm([torch.tensor([1e19, 1e19])]).item() == pytest.approx(2**0.5 * 1e19)
    assert l2norm([torch.tensor([1e-30])]).item() == pytest.approx(1e-30)
    for path in PATHS.values():
        assert path([torch.tensor([float("inf")]), torch.ones(3)]).item() == float("inf")
        assert path([torch.ones(3), torch.tensor([float("nan"), float("inf")])]).isnan()
        assert path([torch.zeros(0)]).item() == 0.0


def test_errors_and_reasons() -> None:
    assert selected("l2norm", "cpu") == ("reference", ()) and why_not([torch.ones(2)]) == []
    assert l2norm([torch.ones(2, dtype=torch.float64)]).dtype == torch.float64
    with pytest.raises(ValueError, match="at least one"):
        l2norm([])
