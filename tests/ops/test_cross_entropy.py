"""cross_entropy: its definition, every path against it in float64, and the gradient that takes the logits' place."""

from __future__ import annotations

import math

import pytest
import torch

from mindspeed_lite.ops.cross_entropy import cpu, cross_entropy, loss, reference
from mindspeed_lite.ops.dispatch import force
from tests.harness import losses
from tests.harness.compare import Sizes, assert_not_worse, error, forward_backward

cuda = pytest.importorskip("mindspeed_lite.ops.cross_entropy.cuda")

NAMES = ("loss", "dlogits")
compiled = pytest.mark.skipif(cpu.LIBRARY.unusable() is not None, reason=str(cpu.LIBRARY.unusable()))
# fp32 results: as many roundings in another order, and exponentials of two units in the last place.
SLACK = 2 * torch.finfo(torch.float32).eps


def make(
    rows: int, width: int, dtype: torch.dtype, seed: int = 0, size: float = 3.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, width, generator=generator) * size).to(dtype)
    target = torch.randint(0, width, (rows,), generator=generator)
    return logits, target, torch.rand(rows, generator=generator) + 0.5


def on_triton(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return loss.CrossEntropy.apply(logits, target, cuda, loss.Shard(0, logits.shape[-1], None))


def on_cpu(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with force("cross_entropy", "cpu"):
        return cross_entropy(logits, target)


def on_reference(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with force("cross_entropy", "reference"):
        return cross_entropy(logits, target)


PATHS = {"cpu": on_cpu, "reference": on_reference, "triton": on_triton}


def in_slices(count: int, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss as `count` ranks compute it, each from its slice and all slices' statistics; equal on all of them."""
    width = logits.shape[-1] // count
    slices = logits.split(width, dim=-1)
    statistics = [
        reference.statistics(part.detach().reshape(-1, width), target.reshape(-1), rank * width)
        for rank, part in enumerate(slices)
    ]
    found = [
        cross_entropy(part, target, rank * width, logits.shape[-1], lambda _: torch.stack(statistics))
        for rank, part in enumerate(slices)
    ]
    assert all(torch.equal(found[0], each) for each in found)
    # Each slice's gradient is written through its own loss; the value is that of one of them.
    total = sum(found[1:], found[0])
    return total - (total - found[0]).detach()


def test_the_definition_is_the_formula() -> None:
    logits = torch.tensor([[0.0, math.log(2.0), math.log(5.0)]], dtype=torch.float64)
    target = torch.tensor([1])
    assert losses.cross_entropy(logits, target).item() == pytest.approx(math.log(8 / 2))
    # A row without a target: log of the sum relative to the largest.
    assert losses.cross_entropy(logits, torch.tensor([-100])).item() == pytest.approx(math.log(8 / 5))


@pytest.mark.parametrize("path", PATHS)
def test_the_gradient_is_softmax_minus_one_hot(path: str) -> None:
    logits = torch.tensor([[0.0, math.log(2.0), math.log(5.0)]] * 2).requires_grad_()
    PATHS[path](logits, torch.tensor([1, -1])).backward(torch.tensor([8.0, 16.0]))
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.tensor([[1.0, -6.0, 5.0], [2.0, 4.0, 10.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_slices_are_merged_to_the_whole(dtype: torch.dtype) -> None:
    logits, target, dloss = make(33, 96, dtype)
    target[5] = -1
    logits[:, :24] -= 50  # a slice that counts for nothing
    logits[3, 24:48], target[3] = -torch.inf, 70  # a slice without any

    def whole(logits: torch.Tensor) -> torch.Tensor:
        return losses.cross_entropy(logits, target)

    exact = forward_backward(whole, [logits], dloss, torch.float64)
    got = forward_backward(lambda logits: in_slices(4, logits, target), [logits], dloss)
    assert_not_worse(got, forward_backward(whole, [logits], dloss), exact, SLACK, NAMES)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_values(path: str, dtype: torch.dtype) -> None:
    logits = torch.tensor(
        [
            [3e38, -3e38, 0.0],  # no overflow
            [-torch.inf, 1.0, 1.0],  # excluded tokens
            [1e4, 1e4 - 128.0, -1e4],
            [-torch.inf, -torch.inf, 2.0],
            [torch.nan, 0.0, 0.0],
            [torch.inf, 0.0, 0.0],
        ]
    ).to(dtype)
    target = torch.tensor([0, 1, 1, 2, 0, 0])
    logits.requires_grad_()
    found = PATHS[path](logits, target)
    found.sum().backward()
    expected = torch.tensor([0.0, math.log(2.0), 128.0, 0.0, torch.nan, torch.nan])
    torch.testing.assert_close(found.detach(), expected, equal_nan=True)
    assert logits.grad is not None
    gradient = torch.tensor([[0.0, 0.0, 0.0], [0.0, -0.5, 0.5], [1.0, -1.0, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(logits.grad[:4].float(), gradient)
    assert logits.grad[4].isnan().all() and logits.grad[5].isnan().any()


def test_int32_targets_and_expanded_gradients_count_as_well() -> None:
    logits, target, _ = make(6, 50, torch.float32)
    logits.requires_grad_()
    cross_entropy(logits, target.int()).sum().backward()  # the gradient of a sum has no memory of its own
    truth = forward_backward(lambda x: losses.cross_entropy(x, target), [logits], torch.ones(6), torch.float64)
    assert logits.grad is not None and error(logits.grad, truth[1]) <= 1e-6


def gradient_of(keep: bool, view: bool = False, hold_storage: bool = False) -> tuple[bool, torch.Tensor, torch.Tensor]:
    """Whether the gradient lies in the logits' memory; the leaf's gradient; the leaf."""
    leaf = torch.randn(8, 96, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def forward() -> tuple[torch.Tensor, int, object]:
        logits = leaf * 1
        if view:
            logits = logits[:, :]
        where = logits.data_ptr()
        kept: object = logits if keep else logits.untyped_storage() if hold_storage else None
        return cross_entropy(logits, torch.arange(8)), where, kept

    out, where, kept = forward()
    found: list[bool] = []
    assert out.grad_fn is not None
    out.grad_fn.register_hook(lambda inputs, _: found.append(inputs[0].data_ptr() == where))
    out.sum().backward()
    if isinstance(kept, torch.Tensor):
        assert torch.equal(kept, leaf), "the logits that somebody kept have changed"
    assert leaf.grad is not None
    return found[0], leaf.grad, leaf


def test_the_gradient_takes_the_logits_memory_only_if_nobody_else_has_them() -> None:
    loss.unshared_references.cache_clear()  # counted anew: tests before this one run kernels in every context
    alone, gradient, leaf = gradient_of(keep=False)
    kept, same, _ = gradient_of(keep=True)
    viewed, same_again, _ = gradient_of(keep=False, view=True)
    held, and_again, _ = gradient_of(keep=False, hold_storage=True)
    assert alone and not kept and not viewed and not held
    assert torch.equal(gradient, same) and torch.equal(gradient, same_again) and torch.equal(gradient, and_again)
    truth = forward_backward(lambda x: losses.cross_entropy(x, torch.arange(8)), [leaf], torch.ones(8), torch.float64)
    assert error(gradient, truth[1]) <= 1e-6


def test_what_the_first_call_stands_in_does_not_decide_for_the_later_ones() -> None:
    counted = loss.unshared_references
    counted.cache_clear()
    leaf = torch.randn(4, 10, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        cross_entropy(leaf * 1, torch.arange(4)).sum().backward()
    in_the_way = counted()
    counted.cache_clear()
    assert in_the_way == counted()


def test_a_leaf_keeps_its_values() -> None:
    logits, target, _ = make(4, 10, torch.float32)
    before = logits.clone()
    logits.requires_grad_()
    cross_entropy(logits, target).sum().backward()
    assert torch.equal(logits.detach(), before)


def test_another_use_of_the_logits_in_the_graph_keeps_them() -> None:
    leaf = torch.randn(4, 10, requires_grad=True)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        logits = leaf * 1
        return cross_entropy(logits, torch.arange(4)), logits.square().sum()  # whose gradient is 2 logits

    found, other = forward()
    found.sum().backward(retain_graph=True)
    leaf.grad = None
    other.backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, 2 * leaf)


def test_a_second_backward_pass_over_overwritten_logits_is_autograds_error() -> None:
    leaf = torch.randn(4, 10, requires_grad=True)
    found = cross_entropy(leaf * 1, torch.arange(4)).sum()
    found.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.backward()


def test_hooks_on_saved_tensors_and_checkpoints_are_served() -> None:
    leaf = torch.randn(4, 10, requires_grad=True)
    cross_entropy(leaf * 1, torch.arange(4)).sum().backward()
    truth, leaf.grad = leaf.grad, None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        cross_entropy(leaf * 1, torch.arange(4)).sum().backward()
    assert torch.equal(leaf.grad, truth)  # type: ignore[arg-type]
    for reentrant in (False, True):
        leaf.grad = None
        torch.utils.checkpoint.checkpoint(
            lambda x: cross_entropy(x * 1, torch.arange(4)).sum(), leaf, use_reentrant=reentrant
        ).backward()
        assert torch.equal(leaf.grad, truth)  # type: ignore[arg-type]


@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_copy_of_the_logits_and_little_kept(dtype: torch.dtype) -> None:
    logits, target, _ = make(64, 4096, dtype)
    logits.requires_grad_()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        found = on_cpu(logits, target)
    assert len(kept) == 3 and kept[0] == logits.data_ptr(), "logits, target, two numbers per row"
    with Sizes() as sizes:
        out = on_cpu(logits * 1, target).sum()
        out.backward()
    assert sizes.largest == logits.numel() * logits.element_size()
    assert not [name for name in sizes.names if "index_put" in name or "scatter" in name or "index_add" in name]
    assert found.dtype == torch.float32


def test_the_plain_passes_widen_a_block_at_a_time_and_assign_to_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_BLOCK", 8 * 512)
    logits, target, dloss = make(64, 512, torch.bfloat16)
    with Sizes() as sizes:
        got = forward_backward(lambda x: on_reference(x * 1, target), [logits], dloss)
    # Besides the bf16 logits: a block in fp32, of 8 rows, and the temporaries of autograd's multiplication.
    assert sizes.largest == logits.numel() * 2
    assert not [name for name in sizes.names if "index_put" in name or "scatter" in name]
    monkeypatch.undo()
    for a, b in zip(got, forward_backward(lambda x: on_reference(x, target), [logits], dloss), strict=True):
        assert torch.equal(a, b)


def test_what_is_not_cross_entropy_is_one_clear_error() -> None:
    logits, target, _ = make(3, 5, torch.float32)
    with pytest.raises(ValueError, match=r"want logits \[..., V\]"):
        cross_entropy(logits, target[:2])
    with pytest.raises(ValueError, match="counts tokens"):
        cross_entropy(logits, target.float())
    for start, size in ((1, 5), (-1, 8), (0, 4), (3, 9)):
        with pytest.raises(ValueError, match="slice of 5"):
            cross_entropy(logits, target, start, size)
    with pytest.raises(ValueError, match="slice of 0"):
        cross_entropy(logits[:, :0], target)
