"""Counts what a rank computes: launches, floating-point operations and bytes, by module and pass."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from mindspeed_lite.ops import traced
from mindspeed_lite.planner.work import Product, Scores
from mindspeed_lite.tuning.host import MASK, NUMBER, OUTSIDE
from mindspeed_lite.tuning.operators import NodeModules, module_paths, moves_nothing
from mindspeed_lite.tuning.synchronizations import SynchronizationRecorder

from . import prices
from .clock import Clock
from .fake_tensors import StoragelessMode

_READ = torch.ops.aten._local_scalar_dense.default


class WorkRecorder:
    """Counts within `recording`. A backward belongs to the module whose forward made its autograd node.

    clock: of a device whose time is predicted.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock
        self._is_hidden: Callable[[], bool] = lambda: False
        self.synchronizations = SynchronizationRecorder(True, lambda: self._is_hidden())
        # Calls of modules in a forward pass.
        self.calls: Counter[str] = Counter()
        # Launches, operations and bytes by module and pass.
        self.counts: dict[tuple[str, str], list[int]] = {}
        self._during = ""
        # Kernels around what runs, and what they do until now.
        self._kernels = self._operations = 0
        self._products: list[Product] = []
        self._scores: tuple[Scores, bool] | None = None
        self._names: dict[int, str] = {}
        self._stack: list[str] = [""]
        self._nodes = NodeModules()

    @contextmanager
    def recording(self, mode: StoragelessMode, model: Sequence[torch.nn.Module]) -> Iterator[None]:
        for module, path in module_paths(model):
            self._names[id(module)] = path
            self._names |= {id(each): path for each in module.parameters(recurse=False)}
        # Until the first module runs.
        self._during = "preparation" if model else ""
        hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        self._nodes.mark(self._stack[-1])
        mode.observe, traced.observer = self._operator, self._kernel
        self._is_hidden = lambda: mode.is_within
        try:
            with self.synchronizations:
                yield
        finally:
            mode.observe = traced.observer = None
            for each in hooks:
                each.remove()

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """What runs within is a pass of this name."""
        self._during = name
        yield
        self._during = ""

    def counted(self) -> list[dict[str, Any]]:
        """By module and pass, most operations first, then most bytes."""
        counts = sorted(self.counts.items(), key=lambda each: each[1][1:], reverse=True)
        return [
            {"module": module, "pass": during, "launches": launches, "flops": flops, "bytes": size}
            for (module, during), (launches, flops, size) in counts
        ]

    def host(self) -> dict[str, Any]:
        """Calls that wait for the device by place, and calls of modules."""
        waits = [[call, place, count] for (call, place), count in self.synchronizations.counts.items()]
        return {"synchronizations": waits, "calls": {**self.calls}}

    def place(self) -> tuple[str, str]:
        """Module and pass of what runs now; layers are `*`."""
        if self._during:
            return "", self._during
        node = torch._C._current_autograd_node()
        if node is None:
            return self._stack[-1], "forward"
        if len(self._stack) > 1 or torch.is_grad_enabled():
            return self._stack[-1] or self._module_of(node), "recompute"
        return self._module_of(node), "backward"

    def module(self) -> str:
        return self.place()[0]

    def _operator(self, func: Any, args: Sequence[Any], options: Mapping[str, Any], result: Any) -> None:
        if read := self._read_within(func, args):
            self.synchronizations.counts[read, self.module() or OUTSIDE] += 1
        if _moves_nothing(func):
            if self.clock is not None and not self._kernels:
                if func is _READ:
                    self.clock.read_by_host()
                elif func.is_view and self.place()[1] != "backward":
                    # A backward's are autograd's own, of which a split's has one for each part.
                    self.clock.view()
            return
        count, name = _counter(func), _name(func)
        operations = 0 if count is None else int(count(*args, **options, out_val=result))
        products = prices.products(name, args)
        if self._kernels:
            self._operations += operations
            self._products += products
        else:
            self._add(name, operations, _bytes(args) + _bytes(result), products, None, (args, result))

    def _read_within(self, func: Any, args: Sequence[Any]) -> str:
        """A read that no call of torch's makes in Python."""
        if self._kernels or self.synchronizations.is_within:
            return ""
        if func is _READ:
            return "" if self.synchronizations.is_copy(args[0]) else NUMBER
        if _name(func) not in ("index", "index_put", "_index_put_impl"):
            return ""
        # One value at a mask is filled in, without counting.
        is_filled = len(args) > 2 and args[2].numel() == 1 and not (len(args) > 3 and args[3])
        is_mask = any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
        return MASK if is_mask and not is_filled else ""

    def _kernel(self, run: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """Runs a kernel of this package: one launch, with the operations of those within."""
        before = self._operations
        self._kernels += 1
        try:
            result = run(*given, **options)
        finally:
            self._kernels -= 1
        if run.__module__ == "mindspeed_lite.ops.attention.cpu":
            self._scores = _attention(run.__name__, given), run.__name__ != "forward"
            self._operations = before + _operations(*self._scores)
        if not self._kernels:
            # A kernel saves some of its inputs.
            size = _bytes((given, result))
            self._add(run.__module__, self._operations - before, size, self._products, self._scores, (given, result))
            self._products, self._scores = [], None
        return result

    def _add(
        self, name: str, operations: int, size: int, products: Sequence[Product], scores: tuple[Scores, bool] | None,
        operands: Any,
    ) -> None:  # fmt: skip
        """operands: whose narrowest floating-point dtype sets the rate of products."""
        place = self.place()
        count = self.counts.setdefault(place, [0, 0, 0])
        count[0] += 1
        count[1] += operations
        count[2] += size
        if self.clock is not None:
            width = min((each.itemsize for each in tree_iter(operands) if _is_floating(each)), default=2)
            priced = prices.operator(self.clock.device, name, products, scores, size, width)
            self.clock.operator(place[1], *priced)

    def _enter(self, module: torch.nn.Module, *_: Any) -> None:
        if self._during == "preparation":
            self._during = ""
        name = self._names.get(id(module))
        if name is not None and self.place()[1] == "forward":
            self.calls[name] += 1
        self._stack.append(self._stack[-1] if name is None else name)
        self._nodes.mark(self._stack[-1])

    def _leave(self, module: torch.nn.Module, *_: Any) -> None:
        self._stack.pop()
        self._nodes.mark(self._stack[-1])

    def _module_of(self, node: Any) -> str:
        if hasattr(node, "variable"):
            return self._names.get(id(node.variable), "")
        return self._nodes.of(node._sequence_nr())


def _is_floating(each: Any) -> bool:
    return isinstance(each, torch.Tensor) and each.is_floating_point()


@functools.cache
def _moves_nothing(func: Any) -> bool:
    return func.namespace != "aten" or moves_nothing(func)


@functools.cache
def _name(func: Any) -> str:
    """Of an operator, in place and on a CPU too."""
    return str(func.overloadpacket.__name__.removesuffix("_").replace("_for_cpu", ""))


@functools.cache
def _counter(func: Any) -> Callable[..., Any] | None:
    """torch's count of an operator's operations; None if it has none."""
    return flop_registry.get(getattr(torch.ops.aten, _name(func), None))


def _bytes(given: Any) -> int:
    tensors = {id(each): each for each in tree_iter(given) if isinstance(each, torch.Tensor)}
    return sum(each.numel() * each.itemsize for each in tensors.values())


def _attention(function: str, given: Sequence[Any]) -> Scores:
    """Of a pass of `ops.attention`."""
    q, k, v = given[:3] if function == "forward" else given[1:4]
    (rows, batch, heads, query), (keys, value) = q.shape, (k.shape[0], v.shape[3])
    share = _visible(rows, keys, given[-1].positions) / (rows * keys)
    return Scores(batch, rows, keys, heads, query, value, share, True)


def _operations(work: Scores, is_backward: bool) -> int:
    """A backward computes the scores again, and four gradients."""
    pairs = round(work.batch * work.heads * work.rows * work.keys * work.share)
    query, value = work.query_size, work.value_size
    return int(2 * pairs * (3 * query + 2 * value if is_backward else query + value))


@functools.cache
def _visible(rows: int, keys: int, band: tuple[int, int] | None) -> int:
    """Pairs of a query and a key it sees; band: most before and after a query's own position, -1 for all."""
    before, after = (keys if each < 0 else each for each in band or (-1, -1))
    ends = ((max(0, own - before), min(keys - 1, own + after)) for own in range(keys - rows, keys))
    return sum(max(0, last - first + 1) for first, last in ends)
