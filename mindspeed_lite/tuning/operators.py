"""Which module an operator belongs to, and whether it starts something on a device."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

# Operators that start nothing on a device although they return a tensor of its own.
FREE = {
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh", "resize_", "set_"),
    *("_unsafe_view", "_reshape_alias", "resolve_conj", "resolve_neg", "_local_scalar_dense"),
}


def moves_nothing(overload: Any) -> bool:
    """Whether an overload of `torch.ops` returns views, nothing, or memory that it does not fill."""
    returned = overload._schema.returns
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in returned)
    return is_view or not returned or overload.overloadpacket.__name__ in FREE


def module_paths(model: Sequence[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, str]]:
    """Modules with their paths, as `decoder.layers.*.mlp`, without wrappers."""
    for chunk in model:
        for name, module in chunk.named_modules():
            path = ".".join(word for word in name.split(".") if word != "module")
            yield module, re.sub(r"\b\d+\b", "*", path)


class NodeModules:
    """The module whose forward made an autograd node, by the node's sequence number."""

    def __init__(self) -> None:
        # Nodes from `_firsts[i]` to the next belong to `_modules[i]`.
        self._firsts: list[int] = []
        self._modules: list[str] = []

    def mark(self, module: str) -> None:
        """Nodes that are made from now on belong to `module`."""
        self._firsts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._modules.append(module)

    def of(self, number: int) -> str:
        return self._modules[max(0, bisect.bisect_right(self._firsts, number) - 1)]
