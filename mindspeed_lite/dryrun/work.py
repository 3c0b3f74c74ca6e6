"""Counts what a rank computes: launches, floating-point operations and bytes, by module and pass."""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from mindspeed_lite.ops import traced

from .fake_tensors import StoragelessMode

# Operators that start nothing on a device although they return a tensor of its own.
_FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh", "resize_", "set_"}


class WorkRecorder:
    """Counts within `recording`. A backward belongs to the module whose forward made its autograd node."""

    def __init__(self) -> None:
        # Launches, operations and bytes by module and pass.
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._is_in_optimizer = False
        # Kernels around what runs, and operations within kernels until now.
        self._within = self._operations = 0
        self._names: dict[int, str] = {}
        self._stack: list[str] = [""]
        # Autograd nodes from `_firsts[i]` to the next belong to `_modules[i]`.
        self._firsts: list[int] = []
        self._modules: list[str] = []

    @contextmanager
    def recording(self, mode: StoragelessMode, model: Sequence[torch.nn.Module]) -> Iterator[None]:
        for chunk in model:
            for name, module in chunk.named_modules():
                path = _kind(name)
                self._names[id(module)] = path
                self._names |= {id(each): path for each in module.parameters(recurse=False)}
        hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        self._mark()
        mode.observe, traced.observer = self._operator, self._kernel
        try:
            yield
        finally:
            mode.observe = traced.observer = None
            for each in hooks:
                each.remove()

    @contextmanager
    def in_optimizer(self) -> Iterator[None]:
        """What runs within is the pass of the optimizer."""
        self._is_in_optimizer = True
        yield
        self._is_in_optimizer = False

    def counted(self) -> list[dict[str, Any]]:
        """By module and pass, most operations first, then most bytes."""
        counts = sorted(self._counts.items(), key=lambda each: each[1][1:], reverse=True)
        return [
            {"module": module, "pass": during, "launches": launches, "flops": flops, "bytes": size}
            for (module, during), (launches, flops, size) in counts
        ]

    def place(self) -> tuple[str, str]:
        """Module and pass of what runs now; layers are `*`."""
        if self._is_in_optimizer:
            return "", "optimizer"
        node = torch._C._current_autograd_node()
        if node is None:
            return self._stack[-1], "forward"
        if len(self._stack) > 1 or torch.is_grad_enabled():
            return self._stack[-1] or self._module_of(node), "recompute"
        return self._module_of(node), "backward"

    def module(self) -> str:
        return self.place()[0]

    def _operator(self, func: Any, args: Sequence[Any], options: Mapping[str, Any], result: Any) -> None:
        if _moves_nothing(func):
            return
        count = _counter(func)
        operations = 0 if count is None else int(count(*args, **options, out_val=result))
        if self._within:
            self._operations += operations
        else:
            self._add(operations, _bytes(args) + _bytes(result))

    def _kernel(self, run: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """Runs a kernel of this package: one launch, with the operations of those within."""
        before = self._operations
        self._within += 1
        try:
            result = run(*given, **options)
        finally:
            self._within -= 1
        if run.__module__ == "mindspeed_lite.ops.attention.cpu":
            self._operations = before + _attention(run.__name__, given)
        if not self._within:
            # A kernel saves some of its inputs.
            self._add(self._operations - before, _bytes((given, result)))
        return result

    def _add(self, operations: int, size: int) -> None:
        count = self._counts.setdefault(self.place(), [0, 0, 0])
        count[0] += 1
        count[1] += operations
        count[2] += size

    def _enter(self, module: torch.nn.Module, *_: Any) -> None:
        self._stack.append(self._names.get(id(module), self._stack[-1]))
        self._mark()

    def _leave(self, module: torch.nn.Module, *_: Any) -> None:
        self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        self._firsts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._modules.append(self._stack[-1])

    def _module_of(self, node: Any) -> str:
        if hasattr(node, "variable"):
            return self._names.get(id(node.variable), "")
        return self._modules[max(0, bisect.bisect_right(self._firsts, node._sequence_nr()) - 1)]


def _kind(name: str) -> str:
    """`decoder.layers.*.mlp`, without wrappers."""
    path = ".".join(word for word in name.split(".") if word != "module")
    return re.sub(r"\b\d+\b", "*", path)


@functools.cache
def _moves_nothing(func: Any) -> bool:
    returned = func._schema.returns
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in returned)
    return is_view or not returned or func.overloadpacket.__name__ in _FREE or func.namespace != "aten"


@functools.cache
def _counter(func: Any) -> Callable[..., Any] | None:
    """torch's count of an operator's operations, in place and on a CPU too; None if it has none."""
    name = func.overloadpacket.__name__.removesuffix("_").replace("_for_cpu", "")
    return flop_registry.get(getattr(torch.ops.aten, name, None))


def _bytes(given: Any) -> int:
    tensors = {id(each): each for each in tree_iter(given) if isinstance(each, torch.Tensor)}
    return sum(each.numel() * each.itemsize for each in tensors.values())


def _attention(function: str, given: Sequence[Any]) -> int:
    """Operations of a pass of `ops.attention`; its backward computes the scores again, and four gradients."""
    q, k, v = given[:3] if function == "forward" else given[1:4]
    (rows, batch, heads, query), (keys, value) = q.shape, (k.shape[0], v.shape[3])
    pairs = batch * heads * _visible(rows, keys, given[-1].positions)
    return int(2 * pairs * (query + value if function == "forward" else 3 * query + 2 * value))


@functools.cache
def _visible(rows: int, keys: int, band: tuple[int, int] | None) -> int:
    """Pairs of a query and a key it sees; band: most before and after a query's own position, -1 for all."""
    before, after = (keys if each < 0 else each for each in band or (-1, -1))
    ends = ((max(0, own - before), min(keys - 1, own + after)) for own in range(keys - rows, keys))
    return sum(max(0, last - first + 1) for first, last in ends)
