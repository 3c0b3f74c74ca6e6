"""layer_norm: its reference against the formula, and every other path against the reference in float64."""

from __future__ import annotations

import pytest
import torch

from mindspeed_lite.ops.layer_norm import Case, cuda, layer_norm, reference
from tests.harness.compare import error, forward_backward
from tests.harness.errors import bound
from tests.harness.reasons import why_not_of

why_not = why_not_of(layer_norm)

EPS = 1e-5


def torch_layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, w.shape, w, b, EPS)


def make(
    shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype | None = None, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = (0.5 + torch.randn(shape, generator=generator)).to(dtype)
    w = (1 + 0.2 * torch.randn(shape[-1], generator=generator)).to(weight_dtype or dtype)
    b = torch.randn(shape[-1], generator=generator).to(weight_dtype or dtype)
    return x, w, b, torch.randn(shape, generator=generator).to(dtype)


def test_reference_is_the_formula() -> None:
    x = torch.tensor([[1.0, 5.0]], dtype=torch.float64)  # mean 3, variance 4
    w, b = torch.tensor([2.0, -1.0], dtype=torch.float64), torch.tensor([0.5, 1.0], dtype=torch.float64)
    unit = 2 / 4.5**0.5
    torch.testing.assert_close(
        reference.layer_norm(x, w, b, 0.5), torch.tensor([[0.5 - 2 * unit, 1 - unit]], dtype=torch.float64)
    )
    torch.testing.assert_close(
        reference.layer_norm(x, w, b, 0.5, zero_centered=True),
        torch.tensor([[0.5 - 3 * unit, 1.0]], dtype=torch.float64),
    )


def test_gradients_of_parameters_do_not_lose_precision_with_the_number_of_rows() -> None:
    """PyTorch's CPU kernel adds them up in bf16."""
    x, w, b, dy = make((8192, 48), torch.bfloat16)
    exact = forward_backward(reference.layer_norm, (x, w, b), dy, torch.float64)
    got = forward_backward(layer_norm, (x, w, b), dy)
    again = forward_backward(layer_norm, (x, w, b), dy)
    for ours, same, truth in zip(got, again, exact, strict=True):
        assert error(ours, truth) < 2**-8 and torch.equal(ours, same)
    assert error(forward_backward(torch_layer_norm, (x, w, b), dy)[2], exact[2]) > 2**-7


def test_rows_of_one_number_are_the_bias() -> None:
    x, w, b, dy = make((5, 1), torch.bfloat16)
    y, dx, _, db = forward_backward(layer_norm, (x, w, b), dy)
    assert torch.equal(y, b.expand(5, 1)) and error(db, dy.double().sum(0)) < bound(db.dtype, 5, roundings=3)
    assert dx.abs().max() < 1e-3  # zero, but for the rounding of 1 / sqrt(eps) times the sums


def test_large_means_do_not_cancel() -> None:
    x, w, b, dy = make((64, 256), torch.float32)
    x = x + 1000
    exact = forward_backward(reference.layer_norm, (x, w, b), dy, torch.float64)
    # An fp32 mean of 1000 is half a unit of 2^-14 off, beside deviations of 1.
    for ours, truth in zip(forward_backward(layer_norm, (x, w, b), dy), exact, strict=True):
        assert error(ours, truth) < 2**-13


def test_wrong_arguments_are_refused() -> None:
    x, w = torch.zeros(2, 8), torch.zeros(8)
    for wrong in ((x, torch.zeros(4), w), (x, w, torch.zeros(4)), (x, torch.zeros(2, 8), w)):
        with pytest.raises(ValueError, match="layer_norm: want x"):
            layer_norm(*wrong)
    with pytest.raises(ValueError, match="of one dtype"):
        layer_norm(x, w, w.bfloat16())
    assert why_not(x.int(), w, w) == ["dtype torch.int32"]
    assert any("one dtype" in each for each in cuda.supported(Case("cuda", torch.float64, torch.float32, False)))
    assert cuda.supported(Case("cuda", torch.float16, torch.float32, True)) == []
