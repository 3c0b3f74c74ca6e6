"""rms_norm: its reference against the formula, and every other path against the reference in float64."""

from __future__ import annotations

import pytest
import torch

from mindspeed_lite.ops.rms_norm import Case, cuda, reference, rms_norm
from tests.harness.compare import error, forward_backward
from tests.harness.reasons import why_not_of

why_not = why_not_of(rms_norm)


def make(
    shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype | None = None, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).to(dtype)
    w = (1 + 0.2 * torch.randn(shape[-1], generator=generator)).to(weight_dtype or dtype)
    return x, w, torch.randn(shape, generator=generator).to(dtype)


def test_reference_is_the_formula() -> None:
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    w = torch.tensor([2.0, -1.0], dtype=torch.float64)
    rms = (12.5 + 0.5) ** 0.5
    torch.testing.assert_close(reference.rms_norm(x, w, 0.5), torch.tensor([[6 / rms, -4 / rms]], dtype=torch.float64))
    torch.testing.assert_close(
        reference.rms_norm(x, w, 0.5, zero_centered=True), torch.tensor([[9 / rms, 0.0]], dtype=torch.float64)
    )


def test_weight_in_fp32_is_not_rounded_to_bf16() -> None:
    x, w, dy = make((64, 128), torch.bfloat16, torch.float32)
    exact = forward_backward(reference.rms_norm, (x, w), dy, torch.float64)
    y, dx, dw = forward_backward(rms_norm, (x, w), dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert error(dw, exact[2]) < 1e-6
    assert torch.equal(y, exact[0].to(torch.bfloat16)) or error(y, exact[0]) <= 2**-8 / 3


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="rms_norm"):
        rms_norm(torch.zeros(2, 8), torch.zeros(4))
    with pytest.raises(ValueError, match="rms_norm"):
        rms_norm(torch.zeros(2, 8), torch.zeros(2, 8))


def test_integers_fall_back_with_a_reason() -> None:
    x = torch.zeros(2, 8, dtype=torch.int32)
    assert why_not(x, torch.ones(8)) == ["dtype torch.int32"]
    assert why_not(x.float(), torch.ones(8)) == []


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (dict(dtype=torch.float64, weight_dtype=torch.float32, zero_centered=False), "one dtype"),
        (dict(dtype=torch.int32, weight_dtype=torch.int32, zero_centered=False), "dtype torch.int32"),
    ],
)
def test_cuda_says_what_it_does_not_take(case: dict[str, object], words: str) -> None:
    assert any(words in reason for reason in cuda.supported(Case("cuda", **case)))  # type: ignore[arg-type]
    assert cuda.supported(Case("cuda", torch.bfloat16, torch.float32, True)) == []
