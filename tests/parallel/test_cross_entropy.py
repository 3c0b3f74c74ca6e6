"""The vocabulary-parallel losses on gloo processes: every rank has the loss of the whole and its shard's gradient."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mindspeed_lite.parallel.cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from tests.harness import losses
from tests.harness.compare import error, forward_backward
from tests.harness.processes import forked, on_ranks

RANKS, WIDTH, HIDDEN = 2, 48, 16


def joined(rank: int, folder: Path) -> dist.ProcessGroup:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), RANKS), rank=rank, world_size=RANKS)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def problem(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden [s, b, H], weight [K, H], target [s, b], dloss [s, b], the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 2, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(RANKS * WIDTH, HIDDEN, generator=generator).to(dtype)
    target = torch.randint(0, RANKS * WIDTH, (5, 2), generator=generator)
    target[1, 1] = -100
    return hidden, weight, target, torch.rand(5, 2, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@forked("torch")
def test_a_rank_has_the_loss_of_the_whole_and_the_gradient_of_its_slice(dtype):
    folder = Path(tempfile.mkdtemp())

    def body(rank):
        group = joined(rank, folder)
        hidden, weight, target, dloss = problem(dtype)
        logits = (hidden.float() @ weight.float().t()).to(dtype)
        mine = slice(rank * WIDTH, (rank + 1) * WIDTH)
        exact = forward_backward(lambda x: losses.cross_entropy(x, target), [logits], dloss, torch.float64)
        got = forward_backward(lambda x: vocab_parallel_cross_entropy(x, target, group), [logits[..., mine]], dloss)
        rounding = torch.finfo(dtype).eps / 2 + 1e-6
        assert error(got[0], exact[0]) <= 1e-6 and error(got[1], exact[1][..., mine]) <= rounding
        everywhere = [torch.empty_like(got[0]) for _ in range(RANKS)]
        dist.all_gather(everywhere, got[0])
        assert all(torch.equal(got[0], each) for each in everywhere), "ranks disagree"

        def whole(hidden, weight):
            return losses.cross_entropy(hidden @ weight.t(), target)

        exact = forward_backward(whole, [hidden, weight], dloss, torch.float64)
        replaced = forward_backward(whole, [hidden, weight], dloss)
        got = forward_backward(
            lambda h, w: vocab_parallel_linear_cross_entropy(h, w, target, group),
            [hidden, weight[mine]],
            dloss,
        )
        dhidden = got[1].float()
        dist.all_reduce(dhidden)
        slack = torch.finfo(dtype).eps
        for name, ours, theirs, truth in zip(
            ("loss", "dhidden", "dweight"),
            (got[0], dhidden, got[2]),
            (replaced[0], replaced[1], replaced[2][mine]),
            (exact[0], exact[1], exact[2][mine]),
            strict=True,
        ):
            assert error(ours, truth) <= error(theirs, truth) + slack, name

    on_ranks(RANKS, body)


def test_without_a_group_nothing_travels():
    hidden, weight, target, dloss = problem(torch.float32)
    logits = hidden @ weight.t()
    exact = forward_backward(lambda x: losses.cross_entropy(x, target), [logits], dloss, torch.float64)
    got = forward_backward(lambda x: vocab_parallel_cross_entropy(x, target, None), [logits], dloss)
    assert error(got[0], exact[0]) <= 1e-6 and error(got[1], exact[1]) <= 1e-6
    got = forward_backward(
        lambda h, w: vocab_parallel_linear_cross_entropy(h, w, target, None), [hidden, weight], dloss
    )
    assert error(got[0], exact[0]) <= 1e-6
