"""rms_norm and layer_norm: the reference against the formula, and what the cases of all operators do not show."""

from __future__ import annotations

import pytest
import torch

from mindspeed_lite.ops.layer_norm import layer_norm
from mindspeed_lite.ops.norm import reference
from mindspeed_lite.ops.rms_norm import rms_norm
from tests.harness.compare import error, forward_backward
from tests.harness.errors import bound
from tests.harness.reasons import why_not_of


def drawn(
    shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = (0.5 + torch.randn(shape, generator=generator)).to(dtype)
    w = (1 + 0.2 * torch.randn(shape[-1], generator=generator)).to(weight_dtype or dtype)
    b = torch.randn(shape[-1], generator=generator).to(weight_dtype or dtype)
    return x, w, b, torch.randn(shape, generator=generator).to(dtype)


def test_reference_is_the_formula() -> None:
    x = torch.tensor([[1.0, 5.0]], dtype=torch.float64)  # mean 3, variance 4, mean of squares 13
    w, b = torch.tensor([2.0, -1.0], dtype=torch.float64), torch.tensor([0.5, 1.0], dtype=torch.float64)
    unit, rms = 2 / 4.5**0.5, 13.5**0.5
    for bias, zero_centered, want in (
        (b, False, [0.5 - 2 * unit, 1 - unit]),
        (b, True, [0.5 - 3 * unit, 1.0]),
        (None, False, [2 / rms, -5 / rms]),
        (None, True, [3 / rms, 0.0]),
    ):
        got = reference.norm(x, w, bias, 0.5, zero_centered)
        torch.testing.assert_close(got, torch.tensor([want], dtype=torch.float64))


def test_weight_in_fp32_is_not_rounded_to_bf16() -> None:
    x, w, _, dy = drawn((64, 128), torch.bfloat16, torch.float32)
    exact = forward_backward(reference.norm, (x, w), dy, torch.float64)
    y, dx, dw = forward_backward(rms_norm, (x, w), dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert error(dw, exact[2]) < 1e-6 and error(y, exact[0]) < 2**-9


def test_gradients_of_parameters_do_not_lose_precision_with_the_number_of_rows() -> None:
    """PyTorch's CPU kernel adds them up in bf16."""
    x, w, b, dy = drawn((8192, 48), torch.bfloat16)
    exact = forward_backward(reference.norm, (x, w, b), dy, torch.float64)
    for ours, truth in zip(forward_backward(layer_norm, (x, w, b), dy), exact, strict=True):
        assert error(ours, truth) < 2**-8
    torchs = forward_backward(lambda x, w, b: torch.nn.functional.layer_norm(x, w.shape, w, b), (x, w, b), dy)
    assert error(torchs[2], exact[2]) > 2**-7


def test_rows_of_one_number_are_the_bias() -> None:
    x, w, b, dy = drawn((5, 1), torch.bfloat16)
    y, dx, _, db = forward_backward(layer_norm, (x, w, b), dy)
    assert torch.equal(y, b.expand(5, 1)) and error(db, dy.double().sum(0)) < bound(db.dtype, 5, roundings=3)
    assert dx.abs().max() < 1e-3  # zero, but for the rounding of 1 / sqrt(eps) times the sums


def test_large_means_do_not_cancel() -> None:
    x, w, b, dy = drawn((64, 256), torch.float32)
    x = x + 1000
    exact = forward_backward(reference.norm, (x, w, b), dy, torch.float64)
    # An fp32 mean of 1000 is half a unit of 2^-14 off, beside deviations of 1.
    for ours, truth in zip(forward_backward(layer_norm, (x, w, b), dy), exact, strict=True):
        assert error(ours, truth) < 2**-13


def test_wrong_arguments_are_refused() -> None:
    x, w = torch.zeros(2, 8), torch.zeros(8)
    for wrong in (torch.zeros(4), torch.zeros(2, 8)):
        with pytest.raises(ValueError, match="rms_norm: want x"):
            rms_norm(x, wrong)
        for pair in ((wrong, w), (w, wrong)):
            with pytest.raises(ValueError, match="layer_norm: want x"):
                layer_norm(x, *pair)
    with pytest.raises(ValueError, match="of one dtype"):
        layer_norm(x, w, w.bfloat16())
    assert "dtype torch.int32" in why_not_of(rms_norm)(x.int(), w)[0] and why_not_of(rms_norm)(x, w) == []
