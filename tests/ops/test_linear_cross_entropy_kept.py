"""linear_cross_entropy: logits that are kept for the backward pass, as many as a budget allows."""

from __future__ import annotations

import pytest
import torch

from mindspeed_lite.ops.cross_entropy import cross_entropy
from mindspeed_lite.ops.linear_cross_entropy import Accumulate, chunks, cpu, linear_cross_entropy, reference
from tests.harness.compare import Sizes, assert_not_worse, forward_backward
from tests.harness.errors import bound

NAMES = ("loss", "dhidden", "dweight")
ROWS, HIDDEN, WIDTH = 90, 48, 1000


def make(dtype: torch.dtype, hidden: int = HIDDEN) -> tuple[torch.Tensor, ...]:
    """hidden [T, H], weight [V, H], target [T], dloss [T]."""
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(ROWS, hidden, generator=generator).to(dtype),
        torch.randn(WIDTH, hidden, generator=generator).mul(2 / hidden**0.5).to(dtype),
        torch.randint(0, WIDTH, (ROWS,), generator=generator),
        torch.rand(ROWS, generator=generator) + 0.5,
    )


def separate(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The path it replaces: a linear layer, whose logits are rounded, and the loss of all of them."""
    return cross_entropy(torch.nn.functional.linear(hidden, weight), target)


@pytest.fixture(params=[0, 300, WIDTH], ids=["none kept", "some kept", "all kept"])
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many of the columns' logits the budget is enough for; the others come 64 at a time."""
    monkeypatch.setattr(chunks, "_NARROWEST", 64)
    monkeypatch.setattr(cpu, "CHUNK", 1)
    found: int = request.param
    monkeypatch.setattr(chunks, "KEPT_BYTES", ROWS * found * 2 + 63)
    # Whole tiles, or all of them.
    return found if found == WIDTH else found // 64 * 64


def test_a_second_backward_pass_has_the_same_gradients(columns: int) -> None:
    h, w, target, dloss = make(torch.bfloat16)
    h.requires_grad_(), w.requires_grad_()
    loss = linear_cross_entropy(h, w, target)
    first = torch.autograd.grad(loss, [h, w], dloss, retain_graph=True)
    exact = forward_backward(lambda h, w: reference.definition(h, w, target), [h, w], dloss, torch.float64)
    replaced = forward_backward(lambda h, w: separate(h, w, target), [h, w], dloss)
    for factor in (1.0, -3.0):
        again = torch.autograd.grad(loss, [h, w], dloss * factor, retain_graph=True)
        truth = [exact[0], *(each * factor for each in exact[1:])]
        theirs = [replaced[0], *(each * factor for each in replaced[1:])]
        assert_not_worse([replaced[0], *again], theirs, truth, 1e-4, NAMES)
    assert_not_worse([replaced[0], *first], replaced, exact, 1e-4, NAMES)


def test_the_budget_is_kept_and_nothing_without_gradients(columns: int) -> None:
    h, w, target, _ = make(torch.bfloat16, 8)
    largest = {}
    for grad in (False, True):
        with torch.set_grad_enabled(grad), Sizes() as sizes:
            linear_cross_entropy(h, w.requires_grad_(), target)
        largest[grad] = sizes.largest
    statistics = 3 * 4 * ROWS * (WIDTH // 64 + 1)
    assert largest[False] <= max(2 * 64 * ROWS, w.nbytes, statistics)
    assert largest[True] == (columns * ROWS * 2 or largest[False])


def test_every_part_of_the_weights_gradient_is_added_once(columns: int) -> None:
    h, w, target, dloss = make(torch.bfloat16)
    exact = forward_backward(lambda h, w: reference.definition(h, w, target), [h, w], dloss, torch.float64)
    into, seen = torch.zeros(WIDTH, HIDDEN), torch.zeros(WIDTH, dtype=torch.int64)

    def add(rows: slice, dlogits: torch.Tensor, hidden: torch.Tensor) -> None:
        into[rows] += dlogits.t().float() @ hidden.float()
        seen[rows] += 1

    linear_cross_entropy(h, w.requires_grad_(), target, accumulate=Accumulate(add, lambda: None)).backward(dloss)
    assert w.grad is None and (seen == 1).all()
    assert_not_worse([into], [exact[2].float()], [exact[2]], bound(torch.bfloat16, ROWS), ["dweight"])
