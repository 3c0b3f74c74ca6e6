"""What a subprocess does: runs cases or mutated call sites, and writes what it recorded as JSON.

    python -m tests.npu_contract.runner OUT records fake|content|host ...
    python -m tests.npu_contract.runner OUT mutations

Passes: `fake` runs forward and backward on fake NPU tensors; `content` the forward on CPU tensors, whose masks
have a content, with every torch_npu operator answered by its meta kernel; `host` both on eager tensors of the stub
device, through the C++ code of the wheel.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from mindspeed_lite.bench.selftest import numerics
from mindspeed_lite.ops import dispatch
from mindspeed_lite.ops.case import Problem
from tests.harness.reasons import why_not_of
from tests.npu_contract.checks import problems
from tests.npu_contract.definitions import ContractCase, source
from tests.npu_contract.operators import CASES, MUTATIONS
from tests.npu_contract.recorder import Recorder, describe, from_json, to_json

DEVICES = {"fake": "npu", "content": "cpu", "host": "npu"}


def run_cases(which: str) -> dict[str, Any]:
    """The record of every case in one pass, by case name."""
    return {name: _run(case, which) for name, case in CASES.items()}


def _run(case: ContractCase, which: str) -> dict[str, Any]:
    record: dict[str, Any] = {"pass": which, "error": None, "why_not": []}
    try:
        with contextlib.ExitStack() as stack:
            if which == "fake":
                stack.enter_context(FakeTensorMode())
            if which == "content":
                stack.enter_context(dispatch.force(case.operator, "npu"))
            leaves = case.leaves(DEVICES[which])
            record["why_not"] = why_not_of(case.run)(leaves)
            _forward_and_backward(case, leaves, which, record)
    except Exception as error:  # whatever goes wrong is the case's result
        record["error"] = _said(error)
    return to_json(record)


def run_declared(which: str) -> dict[str, Any]:
    """The calls that the operators' own cases (`ops/<op>/cases.py`) make in one pass, by operator and case name."""
    found = {}
    for case in numerics.problems(DEVICES[which], True, "npu"):
        if "npu" in dispatch.operator(case.operator).backends:
            found[f"{case.operator} {case.name}"] = _run_declared(case, which)
    return found


def _run_declared(case: Problem, which: str) -> dict[str, Any]:
    record: dict[str, Any] = {"error": None, "calls": []}
    function = case.contenders[0].load()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(dispatch.force(case.operator, "npu"))
            if which == "fake":
                stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            inputs = case.make()
            recorder = stack.enter_context(Recorder(on_meta=which == "content"))
            record["calls"] = recorder.calls
            with torch.set_grad_enabled(which != "content"):
                out = function(*inputs)
            if which != "content" and case.both is not None:
                wanted = [each for each in inputs if each.requires_grad]
                torch.autograd.grad(out, wanted, torch.zeros_like(out))
    except Exception as error:  # whatever goes wrong is the case's result
        record["error"] = _said(error)
    return to_json(record)


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def _forward_and_backward(case: ContractCase, leaves: Any, which: str, record: dict[str, Any]) -> None:
    record["leaves"] = {name: describe(leaf) for name, leaf in leaves.items()}
    with Recorder(on_meta=which == "content") as recorder:
        # What was called before an error is part of the record.
        record["forward"] = recorder.calls
        with torch.set_grad_enabled(which != "content"):
            out = case.run(leaves)
        record["out"] = tree_map(describe, out)
        if which == "content" or not case.backward:
            return
        record["backward"] = recorder.calls = []
        outputs = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor) and each.requires_grad]
        if not outputs:
            raise RuntimeError("the output does not require grad")
        torch.autograd.backward(outputs, [torch.zeros_like(each) for each in outputs])
        record["gradients"] = {
            name: None if leaf.grad is None else describe(leaf.grad) for name, leaf in leaves.items()
        }


@contextlib.contextmanager
def _broken(operator: str, source: str) -> Iterator[None]:
    """Within the block the operator's NPU backend is what `source` says."""
    chosen = dispatch.operator(operator)
    name = chosen.backends["npu"]
    own = importlib.import_module(name)
    module = types.ModuleType(name)
    exec(compile(source, f"<broken {name}>", "exec"), module.__dict__)
    sys.modules[name] = module
    chosen._chosen.clear()
    try:
        yield
    finally:
        sys.modules[name] = own
        chosen._chosen.clear()


def run_mutations() -> dict[str, list[str]]:
    """For each mutation, the problems of its operator's cases, up to the first that says what it should.

    "<operator>/unchanged" has those of a first case whose source was executed in the same way, but as it stands.
    """
    found: dict[str, list[str]] = {}
    for operator in {name.partition("/")[0] for name in MUTATIONS}:
        case = next(case for case in CASES.values() if case.operator == operator)
        with _broken(operator, source(operator)):
            found[f"{operator}/unchanged"] = [
                problem for which in ("fake", "content") for problem in problems(case, from_json(_run(case, which)))
            ]
    for name, mutation in MUTATIONS.items():
        said = found[name] = []
        operator = name.partition("/")[0]
        with _broken(operator, mutation.source(operator)):
            for case, which in itertools.product(CASES.values(), ("fake", "content")):
                if case.operator == operator:
                    said += problems(case, from_json(_run(case, which)))
                if any(mutation.noticed in problem for problem in said):
                    break
    return found


def main() -> None:
    out, what, *passes = sys.argv[1:]
    result: Any
    if what == "mutations":
        result = run_mutations()
    else:
        runs = {"cases": run_cases, "declared": run_declared}
        result = {kind: {which: run(which) for which in passes} for kind, run in runs.items()}
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
