"""activation: its reference against the formulas, and every other path against the reference in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mindspeed_lite.ops.activation import KINDS, ActivationSpec, activation, reference
from tests.harness.compare import error, forward_backward


def _unpacked(backend):
    """A backend's function with the operator's signature."""

    def run(x, kind, bias=None, weights=None, linear_offset=0.0, clamp=None):
        return backend(x, bias, weights, ActivationSpec(kind, linear_offset, clamp))

    return run


definition = _unpacked(reference.definition)

cuda = pytest.importorskip("mindspeed_lite.ops.activation.cuda", reason="Triton is not installed")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BACKENDS = {
    "reference": definition,
    "recompute": _unpacked(reference.activation),
    "cpu": activation,
    "triton": _unpacked(cuda.activation),
}
backends = pytest.mark.parametrize("backend", BACKENDS)
kinds = pytest.mark.parametrize("kind", KINDS)


def tensors(
    kind: str, rows: tuple[int, ...], half: int, dtype: torch.dtype, bias: bool, weights: bool, scale: float = 2.0
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """[x, bias, weights] as far as wanted, and the output's gradient."""
    generator = torch.Generator().manual_seed(half + 7 * len(rows))
    width = 2 * half if kind in reference.GATED else half
    inputs = [(scale * torch.randn(*rows, width, generator=generator)).to(dtype)]
    if bias:
        inputs.append(torch.randn(width, generator=generator).to(dtype))
    if weights:
        inputs.append(torch.rand(*rows, 1, generator=generator))
    return inputs, torch.randn(*rows, half, generator=generator).to(dtype)


def call(
    function: Callable[..., torch.Tensor], kind: str, bias: bool, weights: bool, **options: Any
) -> Callable[..., torch.Tensor]:
    """`function` of as many tensors as there are."""

    def run(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        given = iter(rest)
        return function(x, kind, next(given) if bias else None, next(given) if weights else None, **options)

    return run


# ---- what it is ----


def test_the_reference_is_the_formula() -> None:
    x = torch.tensor([[0.5, -2.0, 3.0, 4.0]], dtype=torch.float64)
    bias = torch.tensor([0.5, 1.0, -1.0, 0.0], dtype=torch.float64)
    weights = torch.tensor([[0.5]], dtype=torch.float64)

    def sigmoid(t: float) -> float:
        return 1 / (1 + math.exp(-t))

    def gelu(t: float) -> float:
        return t / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3)))

    # x + bias is 1, -1 | 2, 4
    expected = {
        "swiglu": [sigmoid(1) * 2, -sigmoid(-1) * 4],
        "geglu": [gelu(1) * 2, gelu(-1) * 4],
        "quick_geglu": [sigmoid(1.702) * 2, -sigmoid(-1.702) * 4],
        "gelu": [gelu(1), gelu(-1), gelu(2), gelu(4)],
        "squared_relu": [1.0, 0.0, 4.0, 16.0],
    }
    for kind in KINDS:
        want = torch.tensor([expected[kind]], dtype=torch.float64)
        torch.testing.assert_close(definition(x, kind, bias), want)
        torch.testing.assert_close(definition(x, kind, bias, weights), want / 2)
    limited = definition(x, "swiglu", bias, linear_offset=1.0, clamp=0.5)
    want = torch.tensor([[0.5 * sigmoid(0.5) * 1.5, -sigmoid(-1) * 1.5]], dtype=torch.float64)
    torch.testing.assert_close(limited, want)


# ---- shapes, strides, dtypes ----


@backends
@kinds
def test_limits_and_offset(backend: str, kind: str) -> None:
    if kind not in reference.GATED:
        pytest.skip("of the halves of gated kinds")
    inputs, dy = tensors(kind, (6,), 70, torch.float32, True, True)
    options = {"linear_offset": 1.0, "clamp": 1.5}
    exact = forward_backward(call(definition, kind, True, True, **options), inputs, dy, torch.float64)
    for ours, truth in zip(
        forward_backward(call(BACKENDS[backend], kind, True, True, **options), inputs, dy), exact, strict=True
    ):
        assert error(ours, truth) < 1e-6


# ---- which backend ----


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (((2, 8), "silu"), {}),
        (((2, 7), "swiglu"), {}),
        (((), "squared_relu"), {}),
        (((2, 8), "gelu"), {"clamp": 1.0}),
        (((2, 8), "squared_relu"), {"linear_offset": 1.0}),
        (((2, 8), "swiglu"), {"bias": torch.zeros(4)}),
        (((2, 8), "swiglu"), {"weights": torch.zeros(2)}),
        (((2, 8), "swiglu"), {"weights": torch.zeros(1, 1)}),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[Any, str], options: dict[str, Any]) -> None:
    shape, kind = arguments
    with pytest.raises(ValueError, match="activation: "):
        activation(torch.zeros(shape), kind, **options)


# ---- Triton ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("whole_rows", [False, True])
def test_triton_rows_longer_than_a_piece(dtype: torch.dtype, whole_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_BLOCK", 16)
    inputs, dy = tensors("geglu", (3,), 50, dtype, True, whole_rows)
    exact = forward_backward(call(definition, "geglu", True, whole_rows), inputs, dy, torch.float64)
    for ours, truth in zip(
        forward_backward(call(_unpacked(cuda.activation), "geglu", True, whole_rows), inputs, dy), exact, strict=True
    ):
        # The interpreter cuts to bfloat16 where a GPU rounds.
        assert error(ours, truth) <= torch.finfo(ours.dtype).eps + 4e-7
