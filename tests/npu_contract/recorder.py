"""Records every call of a torch_npu operator at the dispatcher, with the names its schema gives the arguments.

    with Recorder() as recorder:
        ...
    recorder.calls

A call is plain data (`Call`), so that it can leave the process as JSON, be compared and be changed by a test.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

NAMESPACE = "npu"
# Operators of torch's own that a backend of ours calls because torch_npu brings a kernel for them.
OF_TORCH = ("_fused_adamw_",)
TRIANGLE = (2048, 2048)
# Masks and lists larger than this are recorded without their content, except for the triangle.
_CONTENT = 20_000


@dataclass(frozen=True)
class Tensor:
    """What is known of a tensor. `content`: the values of a small bool or integer tensor that has any.

    Fake tensors have no values, and those of a stub device mean nothing: there `content` is None. Of a tensor
    as large as the compressed causal mask it is "triangle" (True above the diagonal) or "other".
    """

    dtype: str
    shape: tuple[int, ...]
    device: str
    contiguous: bool = True
    content: Any = None

    @property
    def dim(self) -> int:
        return len(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Call:
    """One call. `arguments` has every argument of the schema, defaults included.

    named: the arguments that the Python call site passed by name; None if the call did not come from Python.
    results: what came back; None if the operator raised.
    """

    operator: str
    arguments: Mapping[str, Any]
    named: tuple[str, ...] | None = None
    results: tuple[Any, ...] | None = None

    def changed(self, **arguments: Any) -> Call:
        """The same call with other arguments."""
        unknown = set(arguments) - set(self.arguments)
        if unknown:
            raise KeyError(f"{self.operator} has no argument {', '.join(sorted(unknown))}")
        return replace(self, arguments={**self.arguments, **arguments})


class Recorder(TorchDispatchMode):
    """Collects the calls made inside its block, those of autograd's threads included.

    on_meta: answer each torch_npu operator with zeros in the shapes of its meta kernel instead of running it.
        With it the operators accept CPU tensors, and masks and lists are recorded with their content.
    """

    def __init__(self, on_meta: bool = False) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._on_meta = on_meta
        self._spelling = _Spelling()

    def __enter__(self) -> Recorder:
        self._spelling.__enter__()
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._spelling.__exit__(kind, error, traceback)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if func.namespace != NAMESPACE and name not in OF_TORCH:
            return func(*args, **kwargs)
        named = self._spelling.last.pop(name, None)
        self.calls.append(Call(name, bind(func._schema, args, kwargs), named))
        position = len(self.calls) - 1
        results = _on_meta(func, args, kwargs) if self._on_meta else func(*args, **kwargs)
        listed = results if isinstance(results, (tuple, list)) else (results,)
        self.calls[position] = replace(self.calls[position], results=tuple(tree_map(describe, list(listed))))
        return results


class _Spelling(TorchFunctionMode):
    """Which arguments the Python caller named: the dispatcher no longer tells."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, tuple[str, ...]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name.partition(".")[0].startswith(("npu_", "_npu_", *OF_TORCH)):
            self.last[name.partition(".")[0]] = tuple(kwargs or {})
        return func(*args, **(kwargs or {}))


def bind(schema: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument of a dispatched call by its name in `schema`, tensors described."""
    bound = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(args) and not argument.kwarg_only:
            value = args[position]
        else:
            value = kwargs.get(argument.name, argument.default_value)
        bound[argument.name] = tree_map(describe, value)
    return bound


def describe(value: Any) -> Any:
    """A tensor as `Tensor`, anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return str(value) if isinstance(value, (torch.dtype, torch.device)) else value
    dtype = str(value.dtype).removeprefix("torch.")
    return Tensor(dtype, tuple(value.shape), value.device.type, value.is_contiguous(), _content(value))


def _content(value: torch.Tensor) -> Any:
    if type(value) is not torch.Tensor or value.device.type != "cpu" or value.is_floating_point():
        return None
    if tuple(value.shape) == TRIANGLE:
        return "triangle" if torch.equal(value.bool(), _triangle()) else "other"
    return value.int().tolist() if value.numel() <= _CONTENT else None


@functools.cache
def _triangle() -> torch.Tensor:
    return torch.ones(TRIANGLE, dtype=torch.bool).triu(1)


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
    return tree_map_only(torch.Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype), func(*args, **kwargs))


def to_json(value: Any) -> Any:
    """Calls and tensors as dictionaries, tuples as lists."""
    if isinstance(value, Tensor):
        return {"tensor": [value.dtype, list(value.shape), value.device, value.contiguous, value.content]}
    if isinstance(value, Call):
        named = None if value.named is None else list(value.named)
        return {"call": [value.operator, to_json(value.arguments), named, to_json(value.results)]}
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return value


def from_json(value: Any) -> Any:
    """The inverse of `to_json`; results and shapes are tuples again."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"tensor"}:
        dtype, shape, device, contiguous, content = value["tensor"]
        return Tensor(dtype, tuple(shape), device, contiguous, content)
    if set(value) == {"call"}:
        operator, arguments, named, results = value["call"]
        results = None if results is None else tuple(from_json(results))
        return Call(operator, from_json(arguments), None if named is None else tuple(named), results)
    return {key: from_json(item) for key, item in value.items()}
