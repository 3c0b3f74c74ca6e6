"""Benchmark cases per operator: what the operators' `cases.py` declare, with the code that they name loaded."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mindspeed_lite.ops import case as declared
from mindspeed_lite.ops import discovery
from mindspeed_lite.ops.case import COMPILED, OURS, TORCH, OwnLayout, Work

__all__ = [
    "COMPILED",
    "OURS",
    "TORCH",
    "BoundCase",
    "OwnLayout",
    "Runner",
    "Work",
    "bind",
    "case",
    "dtype_name",
    "variants",
]


@dataclass(frozen=True)
class Runner:
    """A way to compute a case.

    load: returns the function of the case's inputs. It may import a library, and it may raise; what it raises is
    reported in place of a time.
    """

    name: str
    load: Callable[[], Callable[..., torch.Tensor]]


@dataclass(frozen=True)
class BoundCase:
    """A `Case` of an operator's cases.py with its code: fields as there.

    make: the inputs, the same at every call. contenders: `OURS` first, then `TORCH`; of the peers those installed.
    """

    operator: str
    name: str
    device: str
    dtype: torch.dtype
    make: Callable[[], tuple[torch.Tensor, ...]]
    forward: Work
    both: Work | None
    contenders: tuple[Runner, ...]
    is_random: bool = False

    def only(self, *names: str) -> BoundCase:
        """The same with these contenders."""
        return replace(self, contenders=tuple(each for each in self.contenders if each.name in names))


def case(operator: str, text: str, device: str, dtype: torch.dtype, peers: Collection[str] | None = None) -> BoundCase:
    """The case of a text as --shapes takes it; ValueError says what is wrong with the text. peers: as `bind`."""
    return bind(discovery.cases(operator).case(text, device, dtype_name(dtype)), peers)


def variants(operator: str, device: str, dtype: torch.dtype) -> list[BoundCase]:
    """The operator's cases that no text describes."""
    return [bind(each) for each in discovery.cases(operator).variants(device, dtype_name(dtype))]


def bind(found: declared.Case, peers: Collection[str] | None = None) -> BoundCase:
    """The case with the code that it names; nothing is imported yet.

    peers: the names of those to list, wherever they may run; None: on a GPU those that are installed.
    """
    on_gpu = found.device == "cuda"

    def is_listed(each: declared.Contender) -> bool:
        if not each.package:
            return True
        return each.name in peers if peers is not None else on_gpu and _is_installed(each.package)

    listed = [each for each in found.contenders if is_listed(each)]
    return BoundCase(
        operator=found.operator,
        name=found.name,
        device=found.device,
        dtype=found.torch_dtype,
        make=functools.partial(_make, found),
        forward=found.forward,
        both=found.both,
        contenders=tuple(Runner(each.name, functools.partial(_load, each, found)) for each in listed),
        is_random=found.is_random,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as --dtype spells it."""
    name = str(dtype).removeprefix("torch.")
    return next((short for short, (long, _) in declared.DTYPES.items() if long == name), name)


def _make(case: declared.Case) -> tuple[torch.Tensor, ...]:
    if not case.inputs:
        made: Sequence[torch.Tensor] = _named(case.operator, "bench:inputs")(case)
        return tuple(made)
    generator = declared.generator(case)
    return tuple(_tensor(each, case, generator) for each in case.inputs)


def _tensor(given: declared.Input, case: declared.Case, generator: torch.Generator) -> torch.Tensor:
    dtype = torch.promote_types(case.torch_dtype, torch.float32) if given.wide else case.torch_dtype
    if not given.scale:
        return torch.full(given.shape, given.offset, dtype=dtype, device=case.device).requires_grad_(given.gradient)
    draw = torch.rand if given.uniform else torch.randn
    numbers = draw(given.shape, generator=generator, device=generator.device).mul_(given.scale).add_(given.offset)
    return numbers.to(case.device, dtype).requires_grad_(given.gradient)


def _load(contender: declared.Contender, case: declared.Case) -> Callable[..., torch.Tensor]:
    function = _named(case.operator, contender.path)
    if contender.from_case:
        function = function(case)
    elif contender.options:
        function = functools.partial(function, **contender.options)
    return _compile(function) if contender.compiled else function


def _compile(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.compile` of a function, for exactly these shapes."""
    # Otherwise the second shape of a function is compiled for any shape, and the first has an advantage.
    torch.compiler.reset()
    compiled: Callable[..., torch.Tensor] = torch.compile(function, dynamic=False)
    return compiled


def _named(operator: str, path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    module = module if "." in module else f"{discovery.OPERATORS[operator]}.{module}"
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # a parent that is broken, or a stub without a spec
        return False
