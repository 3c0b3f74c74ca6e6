"""Memory that is released between the passes: what autograd reads afterwards, and what is taken until then."""

from __future__ import annotations

import pytest
import torch

from mindspeed_lite.memory.saved_tensors import ReleasedTensor, Tracker


def product(x, w):
    """A product that keeps x, and a view of x that a second one keeps."""
    return (x @ w).sum() + (x[1:] ** 2).sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gradients_are_those_of_what_it_is_filled_with(dtype):
    torch.manual_seed(0)
    start, w = torch.randn(5, 3, dtype=dtype), torch.randn(3, 2, dtype=dtype, requires_grad=True)
    found = []
    for factor in (None, 1, 2):
        leaf = start.clone().requires_grad_()
        x = leaf * 1
        with Tracker(lambda address: False) as tracker:
            y = product(x, w)
            kept = tracker.bytes()
            if factor is not None:
                values = x.detach().clone() * factor
                released = ReleasedTensor(x)
                assert x.untyped_storage().nbytes() == 0
                assert kept - tracker.bytes() == values.untyped_storage().nbytes()
                released.fill(values)
            found.append(torch.autograd.grad(y, (leaf, w)))
    kept, same, other = found
    assert all(map(torch.equal, kept, same))
    assert not torch.equal(kept[0], other[0]) and torch.equal(other[1], 2 * kept[1])


def test_a_part_of_a_storage_and_none():
    whole = torch.arange(6.0)
    part = whole[2:4]
    released = ReleasedTensor(part)
    released.fill(torch.tensor([7.0, 8.0]))
    assert part.tolist() == [7.0, 8.0] and whole.untyped_storage().nbytes() == 24
    nothing = torch.empty(0, 3)
    ReleasedTensor(nothing).fill(torch.empty(0, 3))
    assert nothing.shape == (0, 3)
