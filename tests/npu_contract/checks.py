"""What a case as a whole must have done, over the record that runner.py made of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tests.npu_contract.definitions import ContractCase
from tests.npu_contract.operators import violations
from tests.npu_contract.recorder import Call, Tensor

Record = Mapping[str, Any]


def problems(case: ContractCase, record: Record) -> list[str]:
    """Everything that is wrong with a case's run; empty when the call is right."""
    return list(_problems(case, record))


def _problems(case: ContractCase, record: Record) -> Iterator[str]:
    yield from record["why_not"]
    if record["error"]:
        yield record["error"]
    called = [call.operator for call in record.get("forward", ())]
    if called != [case.forward] * case.calls:
        yield f"forward called {called}: want {[case.forward] * case.calls}"
        return
    for forward in record["forward"]:
        if forward.named is None:
            yield f"{case.forward}: how the arguments were passed was not seen"
        yield from violations(forward)
    yield from _arguments(case, record["forward"][0])
    if record["error"]:
        return
    yield from _outputs(record["out"], case.result())
    if record["pass"] == "content":
        for forward in record["forward"]:
            yield from case.effect(forward)
    elif case.backward:
        yield from _backward(case, record)


def _outputs(have: Any, want: Any) -> Iterator[str]:
    if isinstance(want, (tuple, list)):
        if not isinstance(have, (tuple, list)) or len(have) != len(want):
            yield f"the output is {have}: want {len(want)} of them"
            return
        for one, wanted in zip(have, want, strict=True):
            yield from _outputs(one, wanted)
        return
    contiguous = isinstance(want, Tensor) and want.contiguous
    if not _alike(have, want) or (contiguous and not have.contiguous):
        yield f"the output is {have}: want {want}{', contiguous' if contiguous else ''}"


def _arguments(case: ContractCase, forward: Call) -> Iterator[str]:
    for name, want in case.arguments().items():
        # Releases differ in the optional arguments they have.
        have = forward.arguments.get(name)
        same = math.isclose(have, want) if isinstance(want, float) and isinstance(have, float) else _alike(have, want)
        if not same:
            yield f"{name} is {have}: want {want}"


def _backward(case: ContractCase, record: Record) -> Iterator[str]:
    called = [call.operator for call in record["backward"]]
    if called != [case.backward] * case.calls:
        yield f"backward called {called}: want {[case.backward] * case.calls}"
        return
    # Autograd goes through several calls from the last to the first.
    for forward, backward in zip(record["forward"], reversed(record["backward"]), strict=True):
        yield from violations(backward)
        yield from _carried(case, forward, backward)
    for name, leaf in record["leaves"].items():
        if not leaf.dtype.startswith(("float", "bfloat")):
            continue
        gradient = record["gradients"][name]
        if not isinstance(gradient, Tensor) or (gradient.dtype, gradient.shape) != (leaf.dtype, leaf.shape):
            yield f"the gradient of {name} is {gradient}: want {leaf}"


def _carried(case: ContractCase, forward: Call, backward: Call) -> Iterator[str]:
    given = {case.renamed.get(name, name): value for name, value in forward.arguments.items()}
    results = forward.results or ()
    given.update({name: results[position] for name, position in case.saved.items()})
    for name, value in given.items():
        if name in backward.arguments and not _alike(backward.arguments[name], value):
            yield f"{name} is {backward.arguments[name]} in the backward, {value} in the forward"


def _alike(have: Any, want: Any) -> bool:
    """Equal; tensors, also those in lists, by dtype and shape."""
    if isinstance(have, Tensor) and isinstance(want, Tensor):
        return (have.dtype, have.shape) == (want.dtype, want.shape)
    if isinstance(have, (list, tuple)) and isinstance(want, (list, tuple)):
        return len(have) == len(want) and all(map(_alike, have, want))
    return bool(have == want)


def same_call(one: Call, other: Call) -> list[str]:
    """How two calls differ: tensors by dtype and shape, everything else by value."""
    names = [*one.arguments, *(name for name in other.arguments if name not in one.arguments)]
    pairs = [(name, one.arguments.get(name), other.arguments.get(name)) for name in names]
    return [f"{name}: {a} and {b}" for name, a, b in pairs if not _alike(a, b)]
