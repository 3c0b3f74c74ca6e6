"""Records what a dry run computes, moves and sends: operators and messages by module and pass."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from mindspeed_lite.memory.saved_tensors import Tracker
from mindspeed_lite.planner.traced import Pass, TracedMessage, TracedOperation
from mindspeed_lite.planner.work import Product, Scores

from .world import GroupCall


class WorkRecorder:
    """Records within `recording`. Backward belongs to the module whose forward made the autograd node.

    begins: operations and messages before the forward of each micro-batch. last_layer: whose forward has ended.
    """

    def __init__(self) -> None:
        self.operations: list[TracedOperation] = []
        self.messages: list[TracedMessage] = []
        self.begins: list[tuple[int, int]] = []
        self.last_layer = ""
        self._is_on = False
        self._within = 0
        self._names: dict[int, str] = {}
        self._stack: list[str] = []
        # Autograd nodes from `_firsts[i]` to the next belong to `_modules[i]`.
        self._firsts: list[int] = []
        self._modules: list[str] = []

    @contextmanager
    def recording(self, model: Sequence[torch.nn.Module]) -> Iterator[None]:
        for chunk in model:
            for name, module in chunk.named_modules():
                path = ".".join(word for word in name.split(".") if word != "module")
                self._names[id(module)] = path
                self._names |= {id(each): path for each in module.parameters(recurse=False)}
        hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        self._mark("")
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False
            for each in hooks:
                each.remove()

    def place(self) -> tuple[str, Pass]:
        """Module and pass of what runs now."""
        node = torch._C._current_autograd_node()
        if node is None:
            return (self._stack[-1] if self._stack else ""), "forward"
        if self._stack or torch.is_grad_enabled():
            return (self._stack[-1] if self._stack else self._module_of(node)), "recompute"
        return self._module_of(node), "backward"

    def last_micro_batch(self) -> tuple[list[TracedOperation], list[TracedMessage]]:
        """Operations and messages from its forward to the end of its backward."""
        operation, message = self.begins[-1]
        return _until_backward(self.operations[operation:]), _until_backward(self.messages[message:])

    def observe(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Called for each of torch's operators."""
        if self._is_on and not self._within and not _moves_nothing(func):
            work = _work(func, args)
            self._add(func.overloadpacket.__name__, work, 0.0 if work is None else work.flops, _bytes(args, result))

    def kernel(self, run: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """Called in place of this package's kernels; operators within are part of it."""
        self._within += 1
        try:
            result = run(*given, **options)
        finally:
            self._within -= 1
        if self._is_on and not self._within:
            name = run.__module__.removeprefix("mindspeed_lite.ops.")
            work, flops = _kernel_work(name, run.__name__, given)
            self._add(name, work, flops, _bytes(given, result))
        return result

    def message(self, call: GroupCall) -> None:
        if self._is_on and len(call.group) > 1:
            width = getattr(torch, call.dtype).itemsize if call.dtype else 0
            self.messages.append(
                TracedMessage(*self.place(), call.kind, call.size * width, call.group, call.is_async, width)
            )

    def _add(self, name: str, work: Product | Scores | None, flops: float, size: int) -> None:
        self.operations.append(TracedOperation(*self.place(), name, work, flops, size))

    def _enter(self, module: torch.nn.Module, *_: Any) -> None:
        if not self._stack and torch._C._current_autograd_node() is None:
            self.begins.append((len(self.operations), len(self.messages)))
        self._stack.append(self._names.get(id(module), self._stack[-1] if self._stack else ""))
        self._mark(self._stack[-1])

    def _leave(self, module: torch.nn.Module, *_: Any) -> None:
        left = self._stack.pop()
        if left.rpartition(".")[2].isdecimal():
            self.last_layer = left
        self._mark(self._stack[-1] if self._stack else "")

    def _mark(self, path: str) -> None:
        self._firsts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._modules.append(path)

    def _module_of(self, node: Any) -> str:
        if hasattr(node, "variable"):
            return self._names.get(id(node.variable), "")
        return self._modules[max(0, bisect.bisect_right(self._firsts, node._sequence_nr()) - 1)]


def _until_backward(entries: list[Any]) -> list[Any]:
    """Without what follows the last backward."""
    last = max((place for place, each in enumerate(entries) if each.during != "forward"), default=-1)
    return entries[: last + 1]


class SavedRecorder(Tracker):
    """Counts saved storages by module, after each forward and at the peak of each module's backward.

    peaks: bytes by module.
    """

    def __init__(self, recorder: WorkRecorder, is_excluded: Callable[[int], bool]) -> None:
        super().__init__(is_excluded, counts_fake=True)
        self.peaks: dict[str, int] = {}
        # Of each micro-batch: what it holds when its backward begins.
        self.after_forward: list[list[tuple[Any, str, int]]] = []
        self._recorder = recorder
        self._modules: dict[int, str] = {}
        self._was_forward = False

    def hold(self, storage: torch.UntypedStorage, shape: tuple[int, ...], dtype: str) -> int:
        module, during = self._recorder.place()
        layer = self._recorder.last_layer
        if module and module == layer.rpartition(".layers.")[0]:
            # Checkpoints save a layer's input after the layer.
            module = layer
        self._was_forward |= during == "forward"
        if storage._cdata not in self._live:
            self._modules[storage._cdata] = module
        return super().hold(storage, shape, dtype)

    def unpack(self, packed: Any) -> torch.Tensor:
        if self._was_forward:
            self._was_forward = False
            held = [(each, self._modules[key], each.storage.nbytes()) for key, each in self._live.items()]
            self.after_forward.append(held)
        # Kernels refill storages unseen.
        self._has_grown = True
        return super().unpack(packed)

    def update_peak(self) -> None:
        self._has_grown = False
        module, _ = self._recorder.place()
        self.peaks[module] = max(self.peaks.get(module, 0), self.bytes())


# Operators that start nothing on a device although they return a tensor of its own.
_FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh", "resize_", "set_"}
_PRODUCTS = {"mm": 0, "addmm": 1, "addmm_": 1, "bmm": 0, "baddbmm": 1, "baddbmm_": 1}


@functools.cache
def _moves_nothing(func: Any) -> bool:
    returned = func._schema.returns
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in returned)
    return is_view or not returned or func.overloadpacket.__name__ in _FREE or func.namespace != "aten"


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for each in given:
            yield from _tensors(each)


def _bytes(given: Any, result: Any) -> int:
    read, written = ({id(each): each.numel() * each.itemsize for each in _tensors(some)} for some in (given, result))
    return sum(read.values()) + sum(written.values())


def _work(func: Any, args: Sequence[Any]) -> Product | Scores | None:
    name = func.overloadpacket.__name__
    if name in _PRODUCTS:
        left, right = args[_PRODUCTS[name]], args[_PRODUCTS[name] + 1]
        count = left.shape[0] if left.dim() == 3 else 0
        return Product(left.shape[-2] * max(1, count), left.shape[-1], right.shape[-1], count)
    if name.startswith("_scaled_dot_product") and not name.endswith("backward"):
        (batch, heads, rows, size), keys, value = args[0].shape, args[1].shape[2], args[2].shape[3]
        is_causal = next((each for each in args if isinstance(each, bool)), False)
        share = _visible(rows, keys, (-1, 0) if is_causal else None)
        return Scores(batch, rows, keys, heads, size, value, share, True)
    return None


def _kernel_work(name: str, function: str, given: Sequence[Any]) -> tuple[Product | Scores | None, float]:
    """What a pass of `ops.attention` or `ops.grouped_matmul` computes, and its flops."""
    if name in ("attention.cpu", "attention.blocked"):
        q, k, v = given[:3] if function == "forward" else given[1:4]
        (rows, batch, heads, size), keys = q.shape, k.shape[0]
        share = _visible(rows, keys, given[-1].positions)
        scores = Scores(batch, rows, keys, heads, size, v.shape[3], share, True)
        # Backward computes the scores again, and four gradients.
        pairs = 2.0 * batch * rows * keys * heads * share
        return scores, scores.flops if function == "forward" else pairs * (3 * size + 2 * v.shape[3])
    if name == "grouped_matmul.cpu":
        if function == "grouped_matmul":
            x, weights, transposed = given[0], given[1], given[4]
            columns = weights[0].shape[0 if transposed else 1]
        else:
            weights, (columns, x) = given[-1], (given[-3].shape[1], given[-2])
        product = Product(x.shape[0], x.shape[1], columns, len(weights))
        return product, product.flops
    return None, 0.0


@functools.cache
def _visible(rows: int, keys: int, band: tuple[int, int] | None) -> float:
    """Share of keys that queries see; band: most before and after a query's own position, -1 for all."""
    before, after = (keys if each < 0 else each for each in band or (-1, -1))
    ends = ((max(0, own - before), min(keys - 1, own + after)) for own in range(keys - rows, keys))
    return sum(max(0, last - first + 1) for first, last in ends) / (rows * keys)
