"""Declares an operator's test and benchmark shapes, inputs, work and compared implementations.

`ops/<op>/cases.py` defines `CASES`, read by tests, fuzzing, the self-test, the NPU contract and `bench-ops`.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

OURS, TORCH, COMPILED = "mindspeed_lite", "torch", "torch.compile"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Work:
    """Minimum memory traffic in bytes, and floating-point operations."""

    bytes: int
    flops: int

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True)
class OwnLayout:
    """A library function that needs another layout, or overwrites its inputs.

    arrange: inputs -> copies in its layout, untimed. call: timed. restore: result -> output, untimed. note: for the
    report.
    """

    arrange: Callable[..., tuple[Tensor, ...]]
    call: Callable[..., Any]
    note: str
    restore: Callable[[Any], Tensor] = lambda output: output

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self.restore(self.call(*self.arrange(*inputs)))


@dataclass(frozen=True)
class Peer:
    """Another implementation. make: shape -> function of the inputs, or `OwnLayout`; takes: whether it supports it."""

    make: Callable[[Any], Function]
    takes: Callable[[Any], bool] = lambda shape: True


@dataclass(frozen=True)
class Contender:
    """A named implementation; an error of `load` is reported instead of a time."""

    name: str
    load: Callable[[], Function]


@dataclass(frozen=True)
class Problem:
    """One shape and dtype of an operator.

    make: the same inputs at every call. contenders: `OURS` first, then `TORCH`. both: forward plus backward; None
    without gradients. is_random: results are not compared.
    """

    operator: str
    name: str
    device: str
    dtype: torch.dtype
    make: Callable[[], tuple[Tensor, ...]]
    contenders: tuple[Contender, ...]
    forward: Work
    both: Work | None
    is_random: bool = False

    def only(self, *names: str) -> Problem:
        return replace(self, contenders=tuple(each for each in self.contenders if each.name in names))


class Draw:
    """Draws seeded inputs in a problem's dtype, on the GPU if there is one.

    options: `generator` and `device` for torch's random functions.
    """

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        where = torch.device("cuda" if device == "cuda" else "cpu")
        self.device, self.dtype = device, dtype
        self.options: dict[str, Any] = {"generator": torch.Generator(where).manual_seed(1), "device": where}

    def __call__(
        self, *shape: int, scale: float = 1.0, offset: float = 0.0, wide: bool = False, gradient: bool = True
    ) -> Tensor:
        """Normally distributed values; wide: at least fp32."""
        values = torch.randn(shape, **self.options).mul_(scale).add_(offset)
        return self.of(values, wide=wide, gradient=gradient)

    def integers(self, end: int, *shape: int) -> Tensor:
        """int64 in [0, end)."""
        return torch.randint(end, shape, **self.options).to(self.device)

    def of(self, values: Tensor, *, wide: bool = False, gradient: bool = True) -> Tensor:
        dtype = torch.promote_types(self.dtype, torch.float32) if wide else self.dtype
        return values.to(self.device, dtype).requires_grad_(gradient)


class Shape(Protocol):
    """One shape of an operator: a frozen dataclass of int, bool, float and Literal fields.

    `__post_init__` raises ValueError. `make` draws the inputs. `ours` and `reference` (what a user without the
    operator runs) map them to the output. `work`: forward and backward, for values of `size` bytes.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def make(self, draw: Draw) -> Sequence[Tensor]: ...

    def ours(self, *inputs: Any, **options: Any) -> Tensor: ...

    def reference(self, *inputs: Any, **options: Any) -> Tensor: ...

    def work(self, size: int) -> tuple[Work, Work | None]: ...


@dataclass(frozen=True)
class OperatorCases:
    """All shapes of an operator as texts: sizes joined by x, then options, such as `4096x64,k=6`.

    correctness: small shapes, one per code path. not_on_npu: refused by the NPU backend. cpu, accelerator: timed.
    """

    operator: str
    shape: type[Shape]
    correctness: tuple[str, ...]
    cpu: tuple[str, ...]
    accelerator: tuple[str, ...]
    not_on_npu: tuple[str, ...] = ()
    peers: Mapping[str, Peer] = field(default_factory=dict)
    is_random: Callable[[Any], bool] = lambda shape: False

    def checked(self, device: str) -> tuple[str, ...]:
        """Shapes compared with float64."""
        return self.correctness if device == "npu" else self.correctness + self.not_on_npu

    def timed(self, device: str, quick: bool) -> tuple[str, ...]:
        """Shapes that `bench-ops` times; quick: a small one."""
        if quick:
            return self.correctness[:1]
        return self.cpu if device == "cpu" else self.accelerator

    @property
    def syntax(self) -> str:
        """`ROWSxHIDDEN[,zero_centered=0|1]`."""
        fields, hints = dataclasses.fields(self.shape), typing.get_type_hints(self.shape)
        required = "x".join(each.name.upper() for each in fields if each.default is dataclasses.MISSING)
        return required + "".join(
            f"[,{each.name}={'|'.join(_choices(hints[each.name])) or each.default}]"
            for each in fields
            if each.default is not dataclasses.MISSING
        )

    def parse(self, text: str) -> Any:
        """Parses a shape; raises ValueError."""
        try:
            return _parse(self.shape, text)
        except ValueError as error:
            raise ValueError(f"{error}; want {self.syntax}, for example {self.cpu[0]}") from None

    def problem(self, text: str, device: str, dtype: torch.dtype) -> Problem:
        return self.of(self.parse(text), f"{text} {dtype_name(dtype)}", device, dtype)

    def of(self, shape: Any, name: str, device: str, dtype: torch.dtype) -> Problem:
        forward, backward = shape.work(dtype.itemsize)
        return Problem(
            operator=self.operator,
            name=name,
            device=device,
            dtype=dtype,
            make=lambda: tuple(shape.make(Draw(device, dtype))),
            contenders=(
                Contender(OURS, lambda: shape.ours),
                Contender(TORCH, lambda: shape.reference),
                Contender(COMPILED, lambda: _compile(shape.reference)),
                *(
                    Contender(name, functools.partial(peer.make, shape))
                    for name, peer in self.peers.items()
                    if peer.takes(shape)
                ),
            ),
            forward=forward,
            both=None if backward is None else forward + backward,
            is_random=self.is_random(shape),
        )


def dtype_name(dtype: torch.dtype) -> str:
    """`bf16` for torch.bfloat16, as in --dtype."""
    return next((name for name, each in DTYPES.items() if each == dtype), str(dtype).removeprefix("torch."))


def _parse(shape: type[Any], text: str) -> Any:
    fields, hints = {each.name: each for each in dataclasses.fields(shape)}, typing.get_type_hints(shape)
    required = [name for name, each in fields.items() if each.default is dataclasses.MISSING]
    first, *options = text.split(",")
    if "=" in first:
        options = [first, *options]
    else:
        sizes = first.lower().split("x")
        if len(sizes) > len(required):
            raise ValueError(f"{len(sizes)} sizes")
        options = [f"{name}={size}" for name, size in zip(required, sizes, strict=False)] + options
    given: dict[str, Any] = {}
    for option in options:
        name, _, value = option.strip().partition("=")
        if name not in fields:
            raise ValueError(f"{name!r} is none of {', '.join(fields)}")
        if name in given:
            raise ValueError(f"{name} is given twice")
        given[name] = _value(name, value, hints[name], fields[name].default)
    missing = [name for name in required if name not in given]
    if missing:
        raise ValueError(f"{' and '.join(missing)} missing")
    return shape(**given)


def _value(name: str, text: str, kind: Any, default: Any) -> Any:
    choices = _choices(kind)
    if choices:
        if text not in choices:
            raise ValueError(f"{name} is one of {', '.join(choices)}, not {text!r}")
        return text == "1" if kind is bool else text
    if kind is float:
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"{name} is no number: {text!r}") from None
    least = 1 if default is dataclasses.MISSING or default > 0 else 0
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{name} is a whole number of at least {least}, not {text!r}")
    return int(text)


def _choices(kind: Any) -> tuple[str, ...]:
    return ("0", "1") if kind is bool else typing.get_args(kind)


def _compile(function: Function) -> Function:
    """Compiles for one static shape: torch would make the second shape dynamic."""
    torch.compiler.reset()
    compiled: Function = torch.compile(function, dynamic=False)
    return compiled
