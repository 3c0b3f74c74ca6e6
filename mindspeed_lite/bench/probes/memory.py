"""Hands the model, the optimizer and their tensors of a training step to a memory measurement.

Reaches `megatron.training.training:train_step`, whose first parameters have the same names in every supported release;
what it is given passes through untouched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mindspeed_lite.engine import Session

from .train_step import around_steps


def install(run: Callable[[Any, Any, Callable[[], Any]], Any]) -> Callable[[], None]:
    """Let `run(model, optimizer, step)` run every training step; returns an undo callable."""

    def around(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
        signature = inspect.signature(wrapped)

        def train_step(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            return run(given["model"], given["optimizer"], lambda: wrapped(*args, **kwargs))

        return train_step

    return around_steps("memory", "a measurement counts bytes", around)


def weights(model: list[Any]) -> Iterator[torch.Tensor]:
    """The parameters of every chunk of the model."""
    for chunk in model:
        yield from chunk.parameters()


def gradients(model: list[Any]) -> Iterator[torch.Tensor]:
    """The buffers that gradients are summed in, with their padding, and gradients that stand alone."""
    for chunk in model:
        # Of Megatron's wrapper for data parallelism; of a plain module `buffers` is a method.
        own = getattr(chunk, "buffers", ())
        for buffer in () if callable(own) else (*own, *chunk.expert_parallel_buffers):
            yield buffer.grad_data
    for parameter in weights(model):
        for gradient in (getattr(parameter, "main_grad", None), parameter.grad):
            if isinstance(gradient, torch.Tensor):
                yield gradient


def states(optimizer: Any) -> Iterator[torch.Tensor]:
    """Main parameters and moments in whatever form a feature keeps them, those in host memory too."""
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            yield from group["params"]
        for parameter, state in inner.state.items():
            yield from (each for each in state.values() if isinstance(each, torch.Tensor))
            moments = getattr(inner, "quantized_moments", None)
            yield from (moments.blocks(parameter) or ()) if moments is not None else ()
        split = getattr(inner, "split_params", None)
        if split is not None:
            yield from (low for _, low in split.halves().values())


def in_host_memory(optimizer: Any) -> tuple[int, int]:
    """Bytes of states that are not in the device's own memory: tensors of `states`, and what has left its tensor."""
    found = [getattr(each, "placement", None) for each in inner_optimizers(optimizer)]
    placements = {id(each): each for each in found if each is not None}.values()
    own, left = (sum(each.nbytes for each in placements if each.device_addressable is there) for there in (True, False))
    return own, left


def inner_optimizers(optimizer: Any) -> list[Any]:
    """torch's optimizers within Megatron's."""
    chained = getattr(optimizer, "chained_optimizers", None)
    found = [getattr(each, "optimizer", None) for each in ([optimizer] if chained is None else chained)]
    return [each for each in found if isinstance(each, torch.optim.Optimizer)]


__all__ = ["gradients", "in_host_memory", "inner_optimizers", "install", "states", "weights"]
