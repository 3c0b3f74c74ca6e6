"""What a subprocess does: makes every call, and writes what it recorded as JSON.

    python -m tests.npu_contract.runner OUT fake|host

`fake` runs forward and backward on fake NPU tensors, `host` on eager tensors of the stub device, through the C++ code
of the wheel.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from mindspeed_lite.bench.selftest import numerics
from mindspeed_lite.ops import dispatch
from mindspeed_lite.ops.case import Problem
from tests.npu_contract.definitions import Make, OperatorCall
from tests.npu_contract.operators import CALLS
from tests.npu_contract.recorder import Recorder, describe, to_json

# What was computed, and the tensors of which it is a function.
Computed = tuple[Any, list[torch.Tensor]]


def computed(call: OperatorCall, make: Make) -> Computed:
    return call(make), make.leaves


def declared(device: str) -> Iterator[Problem]:
    """The operators' own cases (`mindspeed_lite/ops/<op>/cases.py`), small, for their NPU backends."""
    problems = numerics.problems(device, True, "npu")
    return (each for each in problems if "npu" in dispatch.operator(each.operator).backends)


def _declared(case: Problem) -> Computed:
    inputs = case.make()
    out = case.contenders[0].load()(*inputs)
    return out, [each for each in inputs if each.requires_grad and case.both is not None]


def _run(operator: str, compute: Callable[[], Computed], which: str) -> dict[str, Any]:
    record: dict[str, Any] = {"error": None, "calls": []}
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(dispatch.force(operator, "npu"))
            if which == "fake":
                stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            recorder = stack.enter_context(Recorder())
            # What was called before an error is part of the record.
            record["calls"] = recorder.calls
            out, leaves = compute()
            record["out"], record["leaves"] = tree_map(describe, out), [*map(describe, leaves)]
            outputs = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor) and each.requires_grad]
            if leaves:
                given = [torch.zeros_like(each) for each in outputs]
                found = torch.autograd.grad(outputs, leaves, given, allow_unused=True)
                record["gradients"] = [*map(describe, found)]
    except Exception as error:  # whatever goes wrong is the call's result
        record["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    return to_json(record)  # type: ignore[no-any-return]


def main() -> None:
    out, which = sys.argv[1:]
    records = {
        name: _run(name.partition("/")[0], lambda call=call: computed(call, Make("npu")), which)  # type: ignore[misc]
        for name, call in CALLS.items()
    }
    for case in declared("npu"):
        records[f"{case.operator}: {case.name}"] = _run(case.operator, lambda case=case: _declared(case), which)  # type: ignore[misc]
    Path(out).write_text(json.dumps(records))


if __name__ == "__main__":
    main()
