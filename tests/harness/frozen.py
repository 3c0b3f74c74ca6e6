"""Models of which a part is frozen, as fine-tuning has them: `core_loop` freezes them, `on_and_off` trains them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

RANK = 4
_LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
# What is trained, by a parameter's name, in which a layer has its number among all; of LoRA nothing but the adapters of
# these linear layers, which drop a share of their input.
_TRAINED: dict[str, Callable[[str], bool]] = {
    "frozen embedding": lambda name: not name.startswith("embedding."),
    "frozen first layer": lambda name: not name.startswith(("embedding.", "decoder.layers.1.")),
    "only linear_fc2": lambda name: name.endswith("linear_fc2.weight"),
    "only MLPs": lambda name: ".linear_fc" in name,
    "only norms": lambda name: name.split(".")[-2].endswith("norm"),
    "only output layer": lambda name: name.startswith("output_layer."),
}
_ADAPTED: dict[str, tuple[tuple[str, ...], float]] = {
    "LoRA": (_LINEARS, 0.0),
    "LoRA on qkv": (("linear_qkv",), 0.0),
    "LoRA with dropout": (_LINEARS, 0.1),
}
# What `on_and_off` trains with every feature.
KINDS = (*(each for each in _TRAINED if each != "only output layer"), *_ADAPTED)
# Schedules that run micro-batches in another order draw other values for each.
DRAWING = "LoRA with dropout"


class Adapter(torch.nn.Module):
    """A linear layer of Megatron's with a product of low rank in parallel, as Megatron-Bridge puts it in its place."""

    def __init__(self, linear: Any, name: str, dropout: float) -> None:
        super().__init__()
        self.to_wrap, self.dropout = linear, dropout
        self.is_column = type(linear).__name__.startswith("Column")
        self.sequence_parallel = linear.sequence_parallel and not linear.is_expert
        self.is_alone = linear.is_expert or linear.config.tensor_model_parallel_size == 1
        weight = linear.weight
        self.down, self.up = (
            self._parameter(f"{name}.{which}", shape, which == ("down" if self.is_column else "up"))
            for which, shape in (("down", (RANK, weight.shape[1])), ("up", (weight.shape[0], RANK)))
        )

    def _parameter(self, name: str, shape: tuple[int, int], is_shared: bool) -> torch.nn.Parameter:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        weight = self.to_wrap.weight
        found = torch.nn.Parameter((torch.randn(shape, generator=generator) * 0.1).to(weight))
        found.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]
        found.sequence_parallel = is_shared and self.sequence_parallel  # type: ignore[attr-defined]
        return found

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        out, bias = self.to_wrap(x, *args, **kwargs)
        middle = torch.nn.functional.linear(torch.nn.functional.dropout(x, self.dropout), self.down)
        return out + torch.nn.functional.linear(self._told(middle), self.up), bias

    def _told(self, middle: torch.Tensor) -> torch.Tensor:
        """What lies between the two products, as the other ranks of the layer need it."""
        from megatron.core.tensor_parallel import mappings

        if self.is_alone:
            return middle
        if self.is_column:
            gather = mappings.gather_from_sequence_parallel_region
            copy = mappings.copy_to_tensor_model_parallel_region
            found: torch.Tensor = gather(middle) if self.sequence_parallel else copy(middle)
            return found
        scatter = mappings.reduce_scatter_to_sequence_parallel_region
        found = (scatter if self.sequence_parallel else mappings.reduce_from_tensor_model_parallel_region)(middle)
        return found


def freeze(model: Any, kind: str) -> None:
    """Freeze what a model of this kind does not train, and give it the adapters that it does."""
    is_trained = _TRAINED.get(kind, lambda name: False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(global_name(model, name)))
    names, dropout = _ADAPTED.get(kind, ((), 0.0))
    for parent, name, linear in [*_linears(model, names)]:
        setattr(parent, name.rpartition(".")[2], Adapter(linear, global_name(model, name), dropout))


def global_name(model: Any, name: str) -> str:
    """The name of a parameter or module with its layer's number among all, whatever stage it is on."""
    start, layers, rest = name.partition("decoder.layers.")
    place, dot, rest = rest.partition(".")
    return f"{start}{layers}{model.decoder.layers[int(place)].layer_number}{dot}{rest}" if layers else name


def _linears(model: Any, names: tuple[str, ...]) -> Iterator[tuple[Any, str, Any]]:
    for path, module in model.named_modules():
        for name, child in module.named_children():
            if name in names:
                yield module, f"{path}.{name}", child
