"""my_op: its definition, and every backend against it in float64."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from torch.autograd import gradcheck

from mindspeed_lite.ops.dispatch import force, selected
from mindspeed_lite.ops.my_op import my_op, reference
from tests.harness.compare import error, forward_backward
from tests.harness.reasons import why_not_of

from . import twin


def test_the_definition_on_numbers_one_can_check_by_hand() -> None:
    x = torch.tensor([0.0, 1.0, -1.0])
    assert reference.my_op(x).tolist() == pytest.approx([0.0, 1 / (1 + math.exp(-1.702)), -1 / (1 + math.exp(1.702))])


def test_gradients_are_those_of_the_formula() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    assert gradcheck(my_op, (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (0, 4), (7,), (5, 16), (1, 1, 1, 1, 1, 1, 1, 2, 8)])
def test_on_an_npu(npu_twin: list[twin.Call], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    exact = forward_backward(reference.my_op, [x], dy, torch.float64)
    with force("my_op", "npu"):
        got = forward_backward(my_op, [x], dy)
    assert [call.function for call in npu_twin] == ["npu_fast_gelu"]
    for name, ours, truth in zip(("y", "dx"), got, exact, strict=True):
        assert error(ours, truth) <= torch.finfo(dtype).eps, name


@pytest.mark.usefixtures("npu_twin")
def test_the_emulation_refuses_what_is_not_documented() -> None:
    with pytest.raises(ValueError, match="float64"):
        importlib.import_module("torch_npu").npu_fast_gelu(torch.zeros(2, dtype=torch.float64))


@pytest.mark.usefixtures("npu_twin")
def test_errors_and_reasons() -> None:
    assert selected("my_op", "npu") == ("npu", ()) and selected("my_op", "cpu") == ("reference", ())
    with pytest.raises(ValueError, match="floating point"):
        my_op(torch.zeros(2, dtype=torch.int32))
    with force("my_op", "npu"):
        assert "float64" in why_not_of(my_op)(torch.zeros(2, dtype=torch.float64))[0]
