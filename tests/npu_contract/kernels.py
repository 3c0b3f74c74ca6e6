"""Reads the trace of the stub libraries: which CANN kernels would be launched, and on what."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# aclDataType
DTYPES = {
    0: "float32", 1: "float16", 2: "int8", 3: "int32", 4: "uint8", 6: "int16", 9: "int64", 11: "float64", 12: "bool",
    27: "bfloat16",
}  # fmt: skip


class Launch(NamedTuple):
    """One call: its tensors and integer lists in the order of its arguments."""

    kernel: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    ints: tuple[tuple[int, ...], ...]


def launches(trace: Iterable[str]) -> list[Launch]:
    """The launches of a trace, in order."""
    found: list[Launch] = []
    tensors: list[tuple[str, tuple[int, ...]]] = []
    ints: list[tuple[int, ...]] = []
    for line in trace:
        kind, _, rest = line.partition(" ")
        if kind == "tensor":
            dtype, _, sizes = rest.partition(" ")
            tensors.append((DTYPES.get(int(dtype), f"aclDataType {dtype}"), _numbers(sizes)))
        elif kind == "ints":
            ints.append(_numbers(rest))
        else:
            # The wheel's compiler evaluates the arguments of a call from the last to the first.
            found.append(Launch(rest, tuple(reversed(tensors)), tuple(reversed(ints))))
            tensors, ints = [], []
    return found


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)
