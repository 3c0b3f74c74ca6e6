"""linear_cross_entropy: chunks against the whole in float64, what is in memory, where the weight's gradient goes."""

from __future__ import annotations

import math

import pytest
import torch

from mindspeed_lite.ops.cross_entropy import cpu as passes
from mindspeed_lite.ops.cross_entropy import cross_entropy
from mindspeed_lite.ops.dispatch import force
from mindspeed_lite.ops.linear_cross_entropy import (
    Accumulate,
    chunks,
    linear_cross_entropy,
)
from tests.harness import losses
from tests.harness.compare import Sizes, assert_not_worse, error, forward_backward
from tests.harness.errors import bound

compiled = pytest.mark.skipif(passes.LIBRARY.unusable() is not None, reason=str(passes.LIBRARY.unusable()))


def make(rows: int, hidden: int, width: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """hidden [T, H], weight [V, H], target [T], dloss [T]; logits of some size."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, hidden, generator=generator).to(dtype),
        torch.randn(width, hidden, generator=generator).mul(2 / hidden**0.5).to(dtype),
        torch.randint(0, width, (rows,), generator=generator),
        torch.rand(rows, generator=generator) + 0.5,
    )


@compiled
def test_logits_exist_for_one_chunk_at_a_time_and_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "KEPT_BYTES", 0)
    monkeypatch.setattr(chunks, "CHUNK", 64 * 512)
    h, w, target, dloss = make(64, 32, 2048, torch.bfloat16)
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        linear_cross_entropy(h.requires_grad_(), w.requires_grad_(), target)
    assert sorted(kept) == sorted([tuple(h.shape), tuple(w.shape), (64,), (2, 64)])
    with Sizes() as sizes:
        linear_cross_entropy(h, w, target).backward(dloss)
    assert sizes.largest == w.numel() * 2, "the gradient of weight and nothing of the logits' size"


def test_the_weights_gradient_goes_where_it_is_told() -> None:
    h, w, target, dloss = make(20, 8, 200, torch.bfloat16)
    exact = forward_backward(lambda h, w: losses.linear_cross_entropy(h, w, target), [h, w], dloss, torch.float64)
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


def test_what_does_not_fit_is_one_clear_error() -> None:
    h, w, target, _ = make(4, 8, 10, torch.float32)
    for wrong in ((h[:, :5], w, target), (h, w, target[:2]), (h, w.double(), target), (h, w[0], target)):
        with pytest.raises(ValueError, match=r"want hidden \[..., H\]"):
            linear_cross_entropy(*wrong)
    with pytest.raises(ValueError, match="counts tokens"):
        linear_cross_entropy(h, w, target.float())
    with pytest.raises(ValueError, match="slice of 10"):
        linear_cross_entropy(h, w, target, 5, 30)


# Kept logits

NAMES = ("loss", "dhidden", "dweight")
ROWS, HIDDEN, WIDTH = 90, 48, 1000


def separate(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The path it replaces: a linear layer, whose logits are rounded, and the loss of all of them."""
    return cross_entropy(torch.nn.functional.linear(hidden, weight), target)


@pytest.fixture(params=[0, 300, WIDTH], ids=["none kept", "some kept", "all kept"])
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many of the columns' logits the budget is enough for; the others come 64 at a time."""
    monkeypatch.setattr(chunks, "_NARROWEST", 64)
    monkeypatch.setattr(chunks, "CHUNK", 1)
    found: int = request.param
    monkeypatch.setattr(chunks, "KEPT_BYTES", ROWS * found * 2 + 63)
    # Whole tiles, or all of them.
    return found if found == WIDTH else found // 64 * 64


def test_a_second_backward_pass_has_the_same_gradients(columns: int) -> None:
    h, w, target, dloss = make(ROWS, HIDDEN, WIDTH, torch.bfloat16)
    h.requires_grad_(), w.requires_grad_()
    loss = linear_cross_entropy(h, w, target)
    first = torch.autograd.grad(loss, [h, w], dloss, retain_graph=True)
    exact = forward_backward(lambda h, w: losses.linear_cross_entropy(h, w, target), [h, w], dloss, torch.float64)
    replaced = forward_backward(lambda h, w: separate(h, w, target), [h, w], dloss)
    for factor in (1.0, -3.0):
        again = torch.autograd.grad(loss, [h, w], dloss * factor, retain_graph=True)
        truth = [exact[0], *(each * factor for each in exact[1:])]
        theirs = [replaced[0], *(each * factor for each in replaced[1:])]
        assert_not_worse([replaced[0], *again], theirs, truth, 1e-4, NAMES)
    assert_not_worse([replaced[0], *first], replaced, exact, 1e-4, NAMES)


def test_the_budget_is_kept_and_nothing_without_gradients(columns: int) -> None:
    h, w, target, _ = make(ROWS, 8, WIDTH, torch.bfloat16)
    largest = {}
    for grad in (False, True):
        with torch.set_grad_enabled(grad), Sizes() as sizes:
            linear_cross_entropy(h, w.requires_grad_(), target)
        largest[grad] = sizes.largest
    statistics = 3 * 4 * ROWS * (WIDTH // 64 + 1)
    assert largest[False] <= max(2 * 64 * ROWS, w.nbytes, statistics)
    assert largest[True] == (columns * ROWS * 2 or largest[False])


def test_every_part_of_the_weights_gradient_is_added_once(columns: int) -> None:
    h, w, target, dloss = make(ROWS, HIDDEN, WIDTH, torch.bfloat16)
    exact = forward_backward(lambda h, w: losses.linear_cross_entropy(h, w, target), [h, w], dloss, torch.float64)
    into, seen = torch.zeros(WIDTH, HIDDEN), torch.zeros(WIDTH, dtype=torch.int64)

    def add(rows: slice, dlogits: torch.Tensor, hidden: torch.Tensor) -> None:
        into[rows] += dlogits.t().float() @ hidden.float()
        seen[rows] += 1

    linear_cross_entropy(h, w.requires_grad_(), target, accumulate=Accumulate(add, lambda: None)).backward(dloss)
    assert w.grad is None and (seen == 1).all()
    assert_not_worse([into], [exact[2].float()], [exact[2]], bound(torch.bfloat16, ROWS), ["dweight"])
