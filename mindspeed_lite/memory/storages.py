"""Finds the storages of a model and its optimizer on a device, by part."""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from mindspeed_lite.memory.copy_engine import Buffer, PinnedPiece

WEIGHTS, OPTIMIZER, GRADIENTS = "weights", "optimizer", "gradients"
PARTS = (WEIGHTS, OPTIMIZER, GRADIENTS)
#: Storages that cannot be resized: host memory that a device addresses, mapped files, arrays of NumPy.
FIXED = "fixed"
# Attributes that hold gradients.
_GRADIENT_NAMES = {"grad", "main_grad", "grad_data", "decoupled_grad"}
_LEAVES = (str, bytes, int, float, type, types.ModuleType, types.FunctionType, types.MethodType, functools.partial)
_MAPPINGS = (dict, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, WeakIdKeyDictionary)
_SEQUENCES = (list, tuple, set, frozenset, deque, weakref.WeakSet)


def storages_by_part(chunks: Sequence[Any], optimizer: Any, device: torch.device) -> dict[str, list[UntypedStorage]]:
    """Storages of each part and `FIXED` on `device`, each once."""
    found: dict[int, tuple[str, UntypedStorage]] = {}

    def add(part: str, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.device == device and not is_traceable_wrapper_subclass(tensor):
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage.data_ptr():
                    found.setdefault(storage._cdata, (part if storage.resizable() else FIXED, storage))

    # The first part that claims a storage has it: a main parameter may be a view of a weight.
    for chunk in chunks:
        # Megatron's DDP has an attribute `buffers`.
        weights = [*chunk.parameters(), *torch.nn.Module.buffers(chunk)]
        add(WEIGHTS, (each for _, each in _tensors(weights, deep=False)))
    for one in optimizers(optimizer):
        states = [vars(one).get(name) for name in ("param_groups", "state")]
        add(OPTIMIZER, (each for _, each in _tensors(states, deep=False)))
    others = {WEIGHTS: [*_tensors(chunks)], OPTIMIZER: [*_tensors([optimizer])]}
    for pairs in others.values():
        add(GRADIENTS, (each for name, each in pairs if name in _GRADIENT_NAMES))
        add(GRADIENTS, (each.grad for _, each in pairs if each.is_leaf and each.grad is not None))
    for part, pairs in others.items():
        add(part, (each for _, each in pairs))
    return {part: [storage for its, storage in found.values() if its == part] for part in (*PARTS, FIXED)}


def optimizers(optimizer: Any) -> Iterator[Any]:
    """The optimizer and those that it wraps."""
    if optimizer is not None:
        yield optimizer
        for each in (*vars(optimizer).get("chained_optimizers", ()), vars(optimizer).get("optimizer")):
            yield from optimizers(each)


def drop_gradients(chunks: Sequence[Any], optimizer: Any) -> None:
    groups = [group["params"] for one in optimizers(optimizer) for group in vars(one).get("param_groups", ())]
    for each in (one for parameters in (*(chunk.parameters() for chunk in chunks), *groups) for one in parameters):
        each.grad = None


def _tensors(roots: Sequence[Any], deep: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Tensors in containers, each with the name of its attribute; not those of host buffers.

    deep: also in attributes of objects.
    """
    stack: list[tuple[str, Any]] = [("", each) for each in roots]
    # Keeps the objects: ids are reused.
    seen: dict[int, Any] = {}
    while stack:
        name, each = stack.pop()
        if each is None or isinstance(each, (*_LEAVES, Buffer, PinnedPiece)) or id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, Tensor):
            yield name, each
            if is_traceable_wrapper_subclass(each):
                stack += [(name, getattr(each, inner)) for inner in each.__tensor_flatten__()[0]]
        elif isinstance(each, _MAPPINGS):
            stack += [(name, one) for pair in each.items() for one in pair]
        elif isinstance(each, _SEQUENCES):
            stack += [(name, one) for one in each]
        if deep and hasattr(each, "__dict__"):
            stack += [*vars(each).items()]
