"""Counts bytes of weights, gradients, optimizer states and activations in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from mindspeed_lite.memory.saved_tensors import Tracker


class MemoryProbe:
    """Tracks saved tensors of a step; counts_fake: for dry runs, whose tensors have no addresses."""

    def __init__(self, counts_fake: bool = False, module: Callable[[], str] = str) -> None:
        self.counted: dict[str, Any] = {}
        self.tracker = Tracker(lambda address: False, counts_fake, module)

    def around(self, model: list[Any], optimizer: Any, step: Callable[[], Any]) -> Any:
        others = {tensor.untyped_storage()._cdata for tensor in (*weights(model), *gradients(model))}
        self.tracker.is_excluded = others.__contains__
        with self.tracker:
            result = step()
        own_weights, own_gradients = list(weights(model)), list(gradients(model))
        addressed, away = in_host_memory(optimizer)
        self.counted = {
            "parameters": sum(each.numel() for each in own_weights),
            "weights": size(own_weights),
            "gradients": size(own_gradients, own_weights),
            "optimizer": size(states(optimizer), [*own_weights, *own_gradients]) - addressed,
            "host": addressed + away,
            "activations": self.tracker.peak,
            "kept": [asdict(each) for each in self.tracker.at_peak],
        }
        return result


def size(tensors: Iterable[torch.Tensor], besides: Iterable[torch.Tensor] = ()) -> int:
    """Total bytes of the distinct storages, without those in `besides`."""
    others = {each.untyped_storage()._cdata for each in besides}
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
    return sum(storage.nbytes() for key, storage in storages.items() if key not in others)


def weights(model: list[Any]) -> Iterator[torch.Tensor]:
    for chunk in model:
        yield from chunk.parameters()


def gradients(model: list[Any]) -> Iterator[torch.Tensor]:
    for chunk in model:
        # Megatron's data-parallel wrapper has a list here, a plain module a method.
        if not callable(own := getattr(chunk, "buffers", ())):
            yield from (buffer.grad_data for buffer in (*own, *chunk.expert_parallel_buffers))
        for parameter in chunk.parameters():
            found = (getattr(parameter, "main_grad", None), parameter.grad)
            yield from (each for each in found if isinstance(each, torch.Tensor))


def states(optimizer: Any) -> Iterator[torch.Tensor]:
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            yield from group["params"]
        moments = getattr(inner, "quantized_moments", None)
        for parameter, state in inner.state.items():
            yield from (each for each in state.values() if isinstance(each, torch.Tensor))
            yield from (moments.blocks(parameter) or ()) if moments is not None else ()
        if split := getattr(inner, "split_params", None):
            yield from (low for _, low in split.halves().values())


def in_host_memory(optimizer: Any) -> tuple[int, int]:
    """Bytes of states in host memory, with or without tensors."""
    found = [getattr(each, "placement", None) for each in inner_optimizers(optimizer)]
    placements = {id(each): each for each in found if each is not None}.values()
    own, left = (sum(each.nbytes for each in placements if each.device_addressable is there) for there in (True, False))
    return own, left


def inner_optimizers(optimizer: Any) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    found = [getattr(each, "optimizer", None) for each in chained]
    return [each for each in found if isinstance(each, torch.optim.Optimizer)]
