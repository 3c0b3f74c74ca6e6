"""grouped_matmul on NPUs: our calls of torch_npu, on the emulation of its documentation (see twin)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed_lite.ops.dispatch import force
from mindspeed_lite.ops.grouped_matmul import Case, accumulate_weight_gradients, weight_gradients
from tests.harness.compare import error
from tests.ops.experts import COUNTS, DTYPES, NAMES, SLACK, Problem, on

from . import twin


def test_npu_weights_are_not_copied(npu_twin: list[twin.Call]) -> None:
    problem = Problem([3, 0, 5], 12, 20, torch.bfloat16)
    addresses = [each.data_ptr() for each in problem.weights]
    on("npu")(problem.x, problem.weights, problem.counts)
    assert [each.data_ptr() for each in npu_twin[0].args[1]] == addresses


@pytest.mark.parametrize("experts", [128, 129])
def test_npu_long_lists_are_stacked(npu_twin: list[twin.Call], experts: int) -> None:
    problem = Problem([number % 3 for number in range(experts)], 4, 5, torch.bfloat16)
    got = problem.run(on("npu"))
    assert len(npu_twin[0].args[1]) == (128 if experts == 128 else 1)
    for name, ours, truth in zip(NAMES, got, problem.exact(), strict=False):
        assert error(ours, truth) <= torch.finfo(torch.bfloat16).eps / 2 + SLACK, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("counts", COUNTS)
def test_npu_accumulates(npu_twin: list[twin.Call], counts: list[int], same: bool, dtype: torch.dtype) -> None:
    problem = Problem(counts, 12, 20, dtype)
    main_dtype = dtype if same else torch.float32
    before = torch.randn(len(counts), 12, 20, generator=torch.Generator().manual_seed(1)).to(main_dtype)
    main_grads = [each.clone() for each in before]
    with force("grouped_matmul", "npu"), force("accumulate_wgrad", "npu"):
        accumulate_weight_gradients(main_grads, problem.dy, problem.x, counts)
    exact = before.double() + problem.exact()[2]
    plain = before + torch.stack(weight_gradients(problem.dy, problem.x, counts))
    got = torch.stack(main_grads)
    assert error(got, exact) <= error(plain, exact) + SLACK
    fused = main_dtype == torch.float32 != dtype and len(counts) == 1
    assert ("npu_grouped_matmul_add_" in [call.function for call in npu_twin]) == fused
    if fused:
        assert error(got, exact) <= SLACK


@pytest.mark.usefixtures("npu_twin")
def test_npu_reasons() -> None:
    from mindspeed_lite.ops.grouped_matmul import npu

    def reasons(**changed: Any) -> list[str]:
        case = Case("npu", torch.bfloat16, 64, 4096, False, True)
        return npu.supported(case._replace(**changed))

    assert reasons() == reasons(biased=True) == reasons(experts=1024, dtype=torch.float32) == []
    assert reasons(biased=True, experts=1, dtype=torch.float32) == []
    assert "1025 experts" in reasons(experts=1025)[0]
    assert "a dimension of 65536" in reasons(widest=65536)[0]
    assert "biases of 129 experts" in reasons(biased=True, experts=129)[0]
    assert "biases of 64 experts in torch.float32" in reasons(biased=True, dtype=torch.float32)[0]
