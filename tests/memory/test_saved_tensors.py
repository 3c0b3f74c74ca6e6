"""What is counted of the tensors that autograd keeps."""

from __future__ import annotations

import pytest
import torch

from mindspeed_lite.memory.saved_tensors import ReleasedTensor, Tracker


def nothing(address: int) -> bool:
    return False


def test_a_storage_counts_once_and_as_a_whole() -> None:
    x = torch.ones(64, 4, requires_grad=True)
    with Tracker(nothing) as tracker:
        y = x * 1  # keeps nothing of x
        left, right = y.split(2, dim=1)
        loss = (left * right).sum() + y.sin().sum()
        assert tracker.bytes() == 64 * 4 * 4
        loss.backward()
    assert tracker.peak == 64 * 4 * 4 and tracker.bytes() == 0
    assert [(each.count, each.bytes, each.shape) for each in tracker.at_peak] == [(1, 1024, (64, 2))]
    assert tracker.at_peak[0].where[0] == f"{__name__}:test_a_storage_counts_once_and_as_a_whole"


def test_the_peak_is_before_the_first_release() -> None:
    x = torch.ones(100, requires_grad=True)
    with Tracker(nothing) as tracker:
        for size in (3, 7, 2):
            y = x * 1
            for _ in range(size):
                y = y.sin()
            y.sum().backward()
    assert tracker.peak == 7 * 400


def test_what_is_given_up_counts_when_it_is_back() -> None:
    x = torch.ones(100, requires_grad=True)
    with Tracker(nothing) as tracker:
        y = (x * 1).exp()  # keeps its result
        z = y.sin()
        y.untyped_storage().resize_(0)
        assert tracker.bytes() == 0

        def restore(gradient: torch.Tensor) -> None:
            y.untyped_storage().resize_(400)
            with torch.no_grad():
                y.fill_(torch.e)

        z.register_hook(restore)
        z.sum().backward()
    assert tracker.peak == 400
    torch.testing.assert_close(x.grad, torch.full((100,), torch.e * torch.tensor(torch.e).cos().item()))


def test_others_are_left_out() -> None:
    weight = torch.nn.Parameter(torch.ones(8, 8))
    with Tracker({weight.untyped_storage()._cdata}.__contains__) as tracker:
        (torch.ones(2, 8) @ weight.t()).sum().backward()
    assert tracker.peak == 2 * 8 * 4


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
