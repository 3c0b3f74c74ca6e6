"""What the files of operators/ are written with: a case, a mutation, and the checks that contracts share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.npu_contract.recorder import Call, Tensor

OPS = Path(__file__).resolve().parents[2] / "mindspeed_lite" / "ops"
# Of backends that operators share.
FOLDERS = {"rms_norm": "norm", "layer_norm": "norm"}
DTYPES = ("float16", "bfloat16", "float32")

Tensors = Mapping[str, torch.Tensor]


class ContractCase:
    """One call of an operator of `mindspeed_lite.ops`: how to make it, and what torch_npu must be handed for it.

    That is said from the public operator's documentation, independently of its implementation.

    operator: its name in mindspeed_lite.ops.
    forward, calls: the operator of torch_npu that it must become, and how many times.
    backward: the operator of torch_npu for its gradient; empty if it has none.
    saved: argument of `backward` -> the result of `forward` that it must be. Arguments of one name must be the same
        anyway.
    renamed: argument of `forward` -> its name in `backward`, where the two differ.
    """

    name: str
    operator: str
    forward: str
    calls: int = 1
    backward: str = ""
    saved: Mapping[str, int] = {}
    renamed: Mapping[str, str] = {}

    def leaves(self, device: str) -> Tensors:
        """Its inputs; those of floating type require a gradient where there is one."""
        raise NotImplementedError

    def run(self, leaves: Tensors) -> Any:
        """Calls the operator; returns a tensor, several, or None."""
        raise NotImplementedError

    def arguments(self) -> Mapping[str, Any]:
        """What the (first) forward call must be handed, as far as it is known whatever the device. Floats are
        compared approximately, tensors by dtype and shape."""
        raise NotImplementedError

    def result(self) -> Any:
        """What `run` returns, each tensor as a `Tensor`: shape, dtype, and whether it must be contiguous."""
        raise NotImplementedError

    def effect(self, call: Call) -> list[str]:
        """What is wrong with a forward call whose masks and lists are known."""
        return []


def source(operator: str) -> str:
    """The text of an operator's NPU backend."""
    return (OPS / FOLDERS.get(operator, operator) / "npu.py").read_text()


@dataclass(frozen=True)
class Mutation:
    """A call site broken on purpose: the text `old`, which stands once in the operator's npu.py, becomes `new`.

    noticed: words of the problem that must appear. No file is edited: runner.py executes the changed text in place
    of the module. A mutation whose text is no longer in the source is an error, not a pass.
    """

    old: str
    new: str
    noticed: str

    def source(self, operator: str) -> str:
        """The changed text; ValueError if `old` is not in the source exactly once."""
        text = source(operator)
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.old!r} stands {text.count(self.old)} times in ops/{operator}/npu.py: the call site has "
                f"changed, so change the mutation in tests/npu_contract/operators/{operator}.py with it"
            )
        return text.replace(self.old, self.new)


# ---- checks over a recorded call, for contracts ----


def by_name(call: Call, *names: str) -> Iterator[str]:
    """Arguments with a default, or that could be taken for another, are to be passed by name."""
    missing = [] if call.named is None else [name for name in names if name not in call.named]
    if missing:
        yield f"{', '.join(missing)} not passed by name"


def is_tensor(what: str, found: object, dtype: str, shape: tuple[int, ...]) -> Iterator[str]:
    if not isinstance(found, Tensor) or found.dtype != dtype or found.shape != tuple(shape):
        yield f"{what} is {found}: want {dtype}{list(shape)}"


def cumulative_ends(name: str, values: Sequence[int] | None, total: int) -> Iterator[str]:
    """Ends of consecutive pieces as Python ints: no leading zero, ascending, the last one is the total."""
    if not isinstance(values, (list, tuple)) or not values or any(type(value) is not int for value in values):
        yield f"{name} is {values!r}: want the cumulative ends as a list of Python ints"
        return
    if values[0] == 0:
        yield f"{name} {list(values)} has a leading zero: it lists ends only"
    if list(values) != sorted(values) or values[-1] != total:
        yield f"{name} {list(values)} is not cumulative to {total}"
