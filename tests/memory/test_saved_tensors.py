"""What is counted of the tensors that autograd keeps."""

from __future__ import annotations

import torch

from mindspeed_lite.memory.saved_tensors import Tracker


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
    with Tracker({weight.untyped_storage().data_ptr()}.__contains__) as tracker:
        (torch.ones(2, 8) @ weight.t()).sum().backward()
    assert tracker.peak == 2 * 8 * 4


def test_a_checkpoint_keeps_its_input_and_then_what_comes_back() -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(100, requires_grad=True)
    with Tracker(nothing) as tracker:
        y = checkpoint(lambda y: y.sin().sin().sin(), x * 1, use_reentrant=True)
        assert tracker.bytes() == 400
        y.sum().backward()
    # The inputs of three sines, of which the first is the checkpoint's own.
    assert tracker.peak == 3 * 400
