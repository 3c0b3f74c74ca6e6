"""What a case as a whole must have done, over the record that runner.py made of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tests.npu_contract.cases import Case
from tests.npu_contract.contracts import violations
from tests.npu_contract.recorder import Call, Tensor

Record = Mapping[str, Any]

# Forward argument -> the backward operator's name for it, where the two differ.
RENAMED = {"scale": "scale_value"}
# Argument of the backward -> the result of the forward that it must be; nothing for an operator that saves inputs only.
SAVED = {
    "npu_fusion_attention": {
        "attention_in": 0, "softmax_max": 1, "softmax_sum": 2, "softmax_in": 3, "seed": 4, "offset": 5, "numels": 6,
    },
    "npu_rms_norm": {"rstd": 1},
}  # fmt: skip


def problems(case: Case, record: Record) -> list[str]:
    """Everything that is wrong with a case's run; empty when the call is right."""
    return list(_problems(case, record))


def _problems(case: Case, record: Record) -> Iterator[str]:
    yield from record["why_not"]
    if record["error"]:
        yield record["error"]
    called = [call.operator for call in record.get("forward", ())]
    if called != [case.forward]:
        yield f"forward called {called}: want {[case.forward]}"
        return
    forward = record["forward"][0]
    if forward.named is None:
        yield f"{case.forward}: how the arguments were passed was not seen"
    yield from violations(forward)
    yield from _arguments(case, forward)
    if record["error"]:
        return
    want = case.result()
    if not _alike(record["out"], want) or (want.contiguous and not record["out"].contiguous):
        yield f"the output is {record['out']}: want {want}{', contiguous' if want.contiguous else ''}"
    if record["pass"] == "content":
        yield from case.effect(forward)
        return
    yield from _backward(case, record, forward)


def _arguments(case: Case, forward: Call) -> Iterator[str]:
    for name, want in case.arguments().items():
        # Releases differ in the optional arguments they have.
        have = forward.arguments.get(name)
        same = math.isclose(have, want) if isinstance(want, float) and isinstance(have, float) else _alike(have, want)
        if not same:
            yield f"{name} is {have}: want {want}"


def _backward(case: Case, record: Record, forward: Call) -> Iterator[str]:
    if [call.operator for call in record["backward"]] != [case.backward]:
        yield f"backward called {[call.operator for call in record['backward']]}: want {[case.backward]}"
        return
    backward = record["backward"][0]
    yield from violations(backward)
    given = {RENAMED.get(name, name): value for name, value in forward.arguments.items()}
    results = forward.results or ()
    given.update({name: results[position] for name, position in SAVED.get(case.forward, {}).items()})
    for name, value in given.items():
        if name in backward.arguments and not _alike(backward.arguments[name], value):
            yield f"{name} is {backward.arguments[name]} in the backward, {value} in the forward"
    for name, leaf in record["leaves"].items():
        gradient = record["gradients"][name]
        if not isinstance(gradient, Tensor) or (gradient.dtype, gradient.shape) != (leaf.dtype, leaf.shape):
            yield f"the gradient of {name} is {gradient}: want {leaf}"


def _alike(have: Any, want: Any) -> bool:
    """Equal; tensors by dtype and shape."""
    if isinstance(have, Tensor) and isinstance(want, Tensor):
        return (have.dtype, have.shape) == (want.dtype, want.shape)
    return bool(have == want)


def same_call(one: Call, other: Call) -> list[str]:
    """How two calls differ: tensors by dtype and shape, everything else by value."""
    names = [*one.arguments, *(name for name in other.arguments if name not in one.arguments)]
    pairs = [(name, one.arguments.get(name), other.arguments.get(name)) for name in names]
    return [f"{name}: {a} and {b}" for name, a, b in pairs if not _alike(a, b)]
