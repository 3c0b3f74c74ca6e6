"""The same calls through the wheel's own C++ code."""

from __future__ import annotations

from typing import Any

import pytest

from tests.npu_contract.checks import problems, same_call
from tests.npu_contract.kernels import Launch, launches
from tests.npu_contract.operators import CASES
from tests.npu_contract.recorder import Tensor

Records = dict[str, Any]


@pytest.mark.parametrize("name", CASES)
def test_the_wheels_own_checks_pass_and_the_contract_holds(on_npu: Records, on_host: Records, name: str) -> None:
    record = on_host["cases"]["host"][name]
    assert problems(CASES[name], record) == []
    fake = on_npu["cases"]["fake"][name]
    for own, other in zip(record["forward"], fake["forward"], strict=True):
        assert same_call(own, other) == []


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_handed_what_the_call_says(on_host: Records, name: str) -> None:
    case, record = CASES[name], on_host["cases"]["host"][name]
    launched = [each for each in launches(record["trace_forward"]) if each.kernel.startswith(case.kernel)]
    assert len(launched) == case.calls
    launch = launched[0]
    call = record["forward"][0]
    given = [call.arguments[name] for name, value in case.arguments().items() if isinstance(value, Tensor)]
    # In the order of the call; a mask that the call site makes itself may stand between them.
    handed = iter(launch.tensors)
    assert all((tensor.dtype, tensor.shape) in handed for tensor in given)
    results = {(result.dtype, result.shape) for result in call.results if hasattr(result, "shape")}
    assert results <= set(launch.tensors)
    if mask := call.arguments.get("atten_mask"):
        assert (mask.dtype, mask.shape) in launch.tensors
    if case.backward:
        backward = [each.kernel for each in launches(record["trace_backward"])]
        wanted = case.backward_kernel or f"{case.kernel}Grad"
        assert [kernel for kernel in backward if kernel.startswith(wanted)], backward


def test_a_trace_is_read_from_the_last_argument_to_the_first() -> None:
    lines = ["tensor 27 2,3", "call aclnnFirst", "call HcclSend"]
    lines += ["tensor 0 4", "tensor 12", "ints 5,6", "call aclnnSecond"]
    assert launches(lines) == [
        Launch("aclnnFirst", (("bfloat16", (2, 3)),), ()),
        Launch("HcclSend", (), ()),
        Launch("aclnnSecond", (("bool", ()), ("float32", (4,))), ((5, 6),)),
    ]
