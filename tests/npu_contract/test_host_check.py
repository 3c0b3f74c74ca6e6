"""The same calls through the wheel's own C++ code, and wrong calls: who notices what."""

from __future__ import annotations

from typing import Any

import pytest

from tests.npu_contract.checks import problems, same_call
from tests.npu_contract.kernels import Launch, launches
from tests.npu_contract.operators import CASES, PROBES, violations
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


@pytest.mark.parametrize("name", PROBES)
def test_who_notices_a_wrong_call(on_npu: Records, on_host: Records, name: str) -> None:
    """The wheel as far as it does, otherwise a contract; when the wheel learns to, this says so."""
    probe = PROBES[name]
    seen = {which: records[name] for which, records in {**on_npu["probes"], **on_host["probes"]}.items()}
    fake, host = seen["fake"], seen["host"]
    assert _noticed(fake, host) == probe.noticed, f"fake: {fake['error']}\nhost: {host['error']}"
    for which, record in seen.items():
        if probe.by_content and which != "content":
            continue
        found = [violation for call in record["calls"] for violation in violations(call)]
        if probe.contract:
            assert any(probe.contract in violation for violation in found), found
        elif probe.noticed == "nobody":
            assert found == []


def _noticed(fake: Any, host: Any) -> str:
    if fake["error"]:
        return "meta" if fake["calls"] else "schema"
    return "host" if host["error"] else "nobody"


def test_a_trace_is_read_from_the_last_argument_to_the_first() -> None:
    lines = ["tensor 27 2,3", "call aclnnFirst", "call HcclSend"]
    lines += ["tensor 0 4", "tensor 12", "ints 5,6", "call aclnnSecond"]
    assert launches(lines) == [
        Launch("aclnnFirst", (("bfloat16", (2, 3)),), ()),
        Launch("HcclSend", (), ()),
        Launch("aclnnSecond", (("bool", ()), ("float32", (4,))), ((5, 6),)),
    ]
