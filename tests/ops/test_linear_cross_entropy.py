"""linear_cross_entropy: chunks against the whole in float64, what is in memory, where the weight's gradient goes."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from mindspeed_lite.ops.cross_entropy import cpu as passes
from mindspeed_lite.ops.cross_entropy import cross_entropy
from mindspeed_lite.ops.dispatch import force
from mindspeed_lite.ops.linear_cross_entropy import (
    Accumulate,
    Case,
    chunks,
    cpu,
    linear_cross_entropy,
    reference,
)
from tests.harness.compare import Sizes, assert_not_worse, error, forward_backward, one_thread
from tests.harness.errors import assert_within, bound
from tests.harness.reasons import why_not_of

why_not = why_not_of(linear_cross_entropy)

cuda = pytest.importorskip("mindspeed_lite.ops.linear_cross_entropy.cuda")

NAMES = ("loss", "dhidden", "dweight")
compiled = pytest.mark.skipif(passes.library.unusable() is not None, reason=str(passes.library.unusable()))


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 entries of the vocabulary at a time, none of whose logits are kept."""
    monkeypatch.setattr(chunks, "_NARROWEST", 64)
    monkeypatch.setattr(chunks, "KEPT_BYTES", 0)
    for module, size in ((cpu, "CHUNK"), (cuda, "COLUMNS"), (reference, "CHUNK")):
        monkeypatch.setattr(module, size, 1)


def make(rows: int, hidden: int, width: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """hidden [T, H], weight [V, H], target [T], dloss [T]; logits of some size."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, hidden, generator=generator).to(dtype),
        torch.randn(width, hidden, generator=generator).mul(2 / hidden**0.5).to(dtype),
        torch.randint(0, width, (rows,), generator=generator),
        torch.rand(rows, generator=generator) + 0.5,
    )


def separate(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The path it replaces: a linear layer, whose logits are rounded, and the loss of all of them."""
    return cross_entropy(torch.nn.functional.linear(hidden, weight), target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_error_is_not_above_that_of_a_layer_and_a_loss(backend: str, dtype: torch.dtype) -> None:
    # 1000 is 16 chunks of 64, of which the last has 40; 64 is one.
    for rows, hidden, width in ((90, 48, 1000), (3, 8, 64), (1, 5, 131)):
        h, w, target, dloss = make(rows, hidden, width, dtype)

        given = {"target": target}
        whole = functools.partial(reference.definition, **given)
        exact = forward_backward(whole, [h, w], dloss, torch.float64)
        replaced = forward_backward(functools.partial(separate, **given), [h, w], dloss)
        # fp32 sums of the vocabulary's size in another order; a 16-bit result once more or less on the edge.
        slack = 1e-6 + torch.finfo(dtype).eps / 64
        with force("linear_cross_entropy", backend):
            got = forward_backward(functools.partial(linear_cross_entropy, **given), [h, w], dloss)
        assert_not_worse(got, replaced, exact, slack, NAMES)


@settings(max_examples=25)
@given(
    shape=st.lists(st.integers(0, 4), max_size=2),
    hidden=st.integers(1, 20),
    width=st.integers(2, 200),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    backend=st.sampled_from(["cpu", "reference", "triton"]),
    seed=st.integers(0, 1000),
)
def test_every_path_agrees_with_the_definition(
    shape: list[int], hidden: int, width: int, dtype: torch.dtype, backend: str, seed: int
) -> None:
    if backend == "triton" and dtype == torch.float64:
        dtype = torch.float32
    rows = int(torch.tensor(shape).prod()) if shape else 1
    h, w, target, dloss = make(rows, hidden, width, dtype, seed)
    h, target, dloss = h.view(*shape, hidden), target.view(shape), dloss.view(shape)
    before, chunks._NARROWEST = chunks._NARROWEST, 64

    def ours(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if backend == "triton":
            return cuda.linear_cross_entropy(h, w, target, 0, width, None, None)
        with force("linear_cross_entropy", backend):
            return linear_cross_entropy(h, w, target)

    try:
        with one_thread():
            exact = forward_backward(lambda h, w: reference.definition(h, w, target), [h, w], dloss, torch.float64)
            got = forward_backward(ours, [h, w], dloss)
    finally:
        chunks._NARROWEST = before
    # Logits are rounded to their dtype, which moves a probability p by that much of the logit's size, and so the loss,
    # p - 1 and p. Where the target is nearly certain, these are differences of numbers of another size.
    rows_of_h, outer = h.double().reshape(rows, hidden), dloss.double().reshape(-1, 1)
    logits = rows_of_h @ w.double().T
    p = logits.softmax(-1)
    right = torch.nn.functional.one_hot(target.reshape(-1), width)
    spread = (p.square() * logits.square()).sum(-1, keepdim=True)
    moved = p.square() * (logits.square() + spread) + (p - right).square()
    terms = [
        spread + (right * logits.square()).sum(-1, keepdim=True),
        (moved * outer.square()) @ w.double().square(),
        (moved * outer.square()).T @ rows_of_h.square(),
    ]
    # Triton's interpreter cuts off where a GPU rounds.
    allowed = bound(dtype, width + 8, roundings=8 if backend == "triton" else 2)
    for name, a, b, size in zip(NAMES, got, exact, terms, strict=True):
        assert_within(a, b, allowed, size.sum().sqrt().item(), name)


def test_gradcheck() -> None:
    h, w, target, _ = make(3, 4, 70, torch.float64)
    with one_thread():
        assert gradcheck(
            lambda h, w: linear_cross_entropy(h, w, target),
            [h.requires_grad_(), w.requires_grad_()],
        )


@compiled
def test_logits_exist_for_one_chunk_at_a_time_and_are_not_kept() -> None:
    h, w, target, dloss = make(64, 32, 2048, torch.bfloat16)
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        linear_cross_entropy(h.requires_grad_(), w.requires_grad_(), target)
    assert sorted(kept) == sorted([tuple(h.shape), tuple(w.shape), (64,), (2, 64)])
    with Sizes() as sizes:
        linear_cross_entropy(h, w, target).backward(dloss)
    assert sizes.largest == w.numel() * 2, "the gradient of weight and nothing of the logits' size"


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    h, w, target, dloss = make(6, 8, 130, torch.float32)
    exact = forward_backward(lambda h, w: reference.definition(h, w, target), [h, w], dloss, torch.float64)
    (h if frozen == "weight" else w).requires_grad_()
    linear_cross_entropy(h, w, target).backward(dloss)
    got, truth, none = (h.grad, exact[1], w.grad) if frozen == "weight" else (w.grad, exact[2], h.grad)
    assert none is None and got is not None and error(got, truth) <= 1e-6


def test_the_weights_gradient_goes_where_it_is_told() -> None:
    h, w, target, dloss = make(20, 8, 200, torch.bfloat16)
    exact = forward_backward(lambda h, w: reference.definition(h, w, target), [h, w], dloss, torch.float64)
    into = torch.ones(200, 8)
    stand_in = torch.full_like(w, 7.0)
    finished: list[bool] = []

    def add(rows: slice, dlogits: torch.Tensor, hidden: torch.Tensor) -> None:
        assert not finished
        into[rows] += dlogits.t().float() @ hidden.float()

    def done() -> torch.Tensor:
        finished.append(True)
        return stand_in

    h.requires_grad_()
    w.requires_grad_()
    linear_cross_entropy(h, w, target, accumulate=Accumulate(add, done)).backward(dloss)
    assert finished == [True] and w.grad is not None and torch.equal(w.grad, stand_in)
    allowed = bound(torch.bfloat16, 200, roundings=2)
    assert error(into - 1, exact[2]) <= allowed and h.grad is not None and error(h.grad, exact[1]) <= allowed


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_without_hidden_columns_every_token_is_as_likely(backend: str) -> None:
    h, w = torch.zeros(2, 3, 0, requires_grad=True), torch.zeros(5, 0, requires_grad=True)
    with force("linear_cross_entropy", backend):
        loss = linear_cross_entropy(h, w, torch.zeros(2, 3, dtype=torch.int64))
    loss.sum().backward()
    assert loss.flatten().tolist() == pytest.approx([math.log(5)] * 6)
    assert h.grad is not None and h.grad.shape == h.shape and w.grad is not None and w.grad.shape == w.shape


def test_strided_inputs() -> None:
    h, w, target, dloss = make(12, 8, 130, torch.float32)
    views = ((h[::2], w), (h.view(4, 3, 8).transpose(0, 1)[..., :5], w[:, :5]), (h[:6], w.t().contiguous().t()))
    for a, b in views:
        labels, outer = (
            target[: a.shape[:-1].numel()].view(a.shape[:-1]),
            dloss[: a.shape[:-1].numel()].view(a.shape[:-1]),
        )
        exact = forward_backward(lambda h, w: reference.definition(h, w, labels), [a, b], outer, torch.float64)  # noqa: B023
        leaf_a, leaf_b = (t.detach().requires_grad_() for t in (a, b))  # strides kept
        linear_cross_entropy(leaf_a, leaf_b, labels).backward(outer)
        assert leaf_a.grad is not None and error(leaf_a.grad, exact[1]) <= 1e-6
        assert leaf_b.grad is not None and error(leaf_b.grad, exact[2]) <= 1e-6


def test_the_result_is_the_same_every_time() -> None:
    h, w, target, dloss = make(40, 16, 500, torch.bfloat16)
    runs = [forward_backward(lambda h, w: linear_cross_entropy(h, w, target), [h, w], dloss) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_what_does_not_fit_is_one_clear_error() -> None:
    h, w, target, _ = make(4, 8, 10, torch.float32)
    for wrong in ((h[:, :5], w, target), (h, w, target[:2]), (h, w.double(), target), (h, w[0], target)):
        with pytest.raises(ValueError, match=r"want hidden \[..., H\]"):
            linear_cross_entropy(*wrong)
    with pytest.raises(ValueError, match="counts tokens"):
        linear_cross_entropy(h, w, target.float())
    with pytest.raises(ValueError, match="slice of 10"):
        linear_cross_entropy(h, w, target, 5, 30)
    assert cuda.supported(Case("cuda", torch.float64))
    assert why_not(h.double(), w.double(), target) == []
