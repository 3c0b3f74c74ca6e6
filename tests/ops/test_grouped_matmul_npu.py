"""grouped_matmul on NPUs: our calls of torch_npu, on the emulation of its documentation (see twin)."""

from __future__ import annotations

import pytest
import torch

from mindspeed_lite.ops.dispatch import force
from mindspeed_lite.ops.grouped_matmul import accumulate_weight_gradients, weight_gradients
from tests.harness.compare import error
from tests.ops.experts import COUNTS, DTYPES, SLACK, Problem, on

from . import twin


def test_npu_weights_are_not_copied(npu_twin: list[twin.Call]) -> None:
    problem = Problem([3, 0, 5], 12, 20, torch.bfloat16)
    addresses = [each.data_ptr() for each in problem.weights]
    on("npu")(problem.x, problem.weights, problem.counts)
    assert [each.data_ptr() for each in npu_twin[0].args[1]] == addresses


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
