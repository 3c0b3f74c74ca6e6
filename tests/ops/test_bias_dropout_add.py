"""bias_dropout_add: every path against float64, and dropout by what it keeps, how often, and that it draws it again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_lite.ops import native
from mindspeed_lite.ops.bias_dropout_add import bias_dropout_add
from mindspeed_lite.ops.dispatch import selected
from tests.harness.compare import assert_not_worse, one_thread
from tests.harness.reasons import why_not_of

why_not = why_not_of(bias_dropout_add)

NAMES = ("y", "gradient of x", "gradient of residual", "gradient of bias")


def inputs(
    shape: list[int], width: int, dtype: torch.dtype, has_bias: bool, seed: int = 0
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """x, residual and, if wanted, bias; and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(*shape, width, generator=generator).to(dtype) for _ in range(3)]
    bias = [torch.randn(width, generator=generator).to(dtype)] if has_bias else []
    return [*made[:2], *bias], made[2]


def run(function: Any, tensors: list[torch.Tensor], dy: torch.Tensor, p: float = 0.0) -> list[torch.Tensor]:
    """The output and the gradients of the tensors."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    y = function(leaves[0], leaves[1], leaves[2] if len(leaves) > 2 else None, p)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@settings(max_examples=40)
@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 70),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    has_bias=st.booleans(),
    p=st.sampled_from([1e-3, 0.1, 0.5, 0.9]),
    seed=st.integers(0, 1000),
)
def test_what_is_kept_is_scaled_and_the_backward_pass_draws_the_same(
    rows: int, width: int, dtype: torch.dtype, has_bias: bool, p: float, seed: int
) -> None:
    tensors, dy = inputs([rows], width, dtype, has_bias, seed)
    torch.manual_seed(seed)
    y, *gradients = run(bias_dropout_add, tensors, dy, p)
    torch.manual_seed(seed)
    ones = [torch.ones(rows, width), torch.zeros(rows, width)]
    kept = run(bias_dropout_add, ones, torch.ones(rows, width), p)[0] != 0

    def masked(x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None, _: float) -> torch.Tensor:
        return residual + (x if bias is None else x + bias) * kept.to(x.dtype) / (1.0 - p)

    steps = run(masked, tensors, dy)
    exact = run(masked, [tensor.double() for tensor in tensors], dy.double())
    assert_not_worse([y, *gradients], steps, exact, 1e-6, NAMES[: len(exact)])


def test_as_much_is_dropped_as_asked_for_and_draws_are_independent() -> None:
    torch.manual_seed(1)
    x, nothing = torch.ones(512, 1024), torch.zeros(512, 1024)
    for p in (0.1, 0.5):
        first, second = (bias_dropout_add(x, nothing, None, p) != 0 for _ in range(2))
        for kept in (first, second):
            # Four standard deviations of as many draws, of a row, of a column.
            for share, count in ((kept.float().mean(), x.numel()), *((s, 1024) for s in kept.float().mean(1)[:50])):
                assert abs(share - (1 - p)) < 5 * (p * (1 - p) / count) ** 0.5
        both = (first & second).float().mean()
        assert abs(both - (1 - p) ** 2) < 0.005, "a call draws anew"
        assert abs((first[:, 1:] & first[:, :-1]).float().mean() - (1 - p) ** 2) < 0.005
        assert abs((first[1:] & first[:-1]).float().mean() - (1 - p) ** 2) < 0.005


def test_the_generator_decides_and_the_number_of_threads_does_not() -> None:
    tensors, dy = inputs([300], 257, torch.bfloat16, True)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = run(bias_dropout_add, tensors, dy, 0.1)
    assert not torch.equal(torch.get_rng_state(), state)
    with one_thread():
        torch.set_rng_state(state)
        again = run(bias_dropout_add, tensors, dy, 0.1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], run(bias_dropout_add, tensors, dy, 0.1)[0])
    state = torch.get_rng_state()
    run(bias_dropout_add, tensors, dy, 0.0)
    assert torch.equal(torch.get_rng_state(), state), "without dropout nothing is drawn"


def test_what_cannot_be_served_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2, 4)
    for wrong, word in (
        ((x, torch.zeros(4, 2)), "residual of its shape"),
        ((x, x.half()), "shape and dtype"),
        ((x, x, torch.zeros(3)), "bias [4]"),
        ((x, x, None, 1.5), "share from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=word.replace("[", r"\[").replace("]", r"\]")):
            bias_dropout_add(*wrong)  # type: ignore[arg-type]
    assert why_not(x, x, torch.zeros(4)) == [] and selected("bias_dropout_add", "cpu") == ("cpu", ())
    monkeypatch.setattr(native.Library, "unusable", lambda self: "no compiler")
    assert why_not(x, x) == ["no compiler"]
