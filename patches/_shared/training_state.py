"""Finds all tensors that training keeps of a parameter: itself, its main parameter or shard, its optimizer states.

In every form of optimizer: Megatron's three, and states that are split, quantized or in host memory between steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mindspeed_lite.optim.fused_adam import FusedAdam, FusedAdamW

# Parameter of the model -> the inner optimizer, and what that updates in the parameter's place.
MainParams = Mapping[torch.Tensor, tuple[Any, torch.Tensor]]
# A class of Megatron's optimizers by an attribute of it: (parameters of the model, what is updated in their place).
_GROUPS = (
    ("fp32_from_float16_groups", (("float16_groups", "fp32_from_float16_groups"), ("fp32_from_fp32_groups",) * 2)),
    (
        "shard_fp32_from_float16_groups",
        (("model_float16_groups", "shard_fp32_from_float16_groups"), ("model_fp32_groups", "shard_fp32_groups")),
    ),
)


def leaves(optimizer: Any) -> list[Any]:
    """The optimizers of a chain, and of chains in it, that have parameters."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        return [leaf for each in chained for leaf in leaves(each)]
    return [] if optimizer.optimizer is None or getattr(optimizer, "is_stub_optimizer", False) else [optimizer]


def main_params(optimizers: Sequence[Any]) -> dict[torch.Tensor, tuple[Any, torch.Tensor]]:
    """What is updated in the place of each parameter: a copy in fp32, a shard of it, or the parameter."""
    found = {}
    for each in optimizers:
        tables = next((tables for name, tables in _GROUPS if hasattr(each, name)), None)
        if tables is None:
            pairs = [(main, main) for group in each.optimizer.param_groups for main in group["params"]]
        else:
            groups = [pair for names in tables for pair in zip(*(getattr(each, name) for name in names), strict=True)]
            pairs = [pair for models, mains in groups for pair in zip(models, mains, strict=True)]
        found.update({model: (each.optimizer, main) for model, main in pairs if main is not None})
    return found


@contextlib.contextmanager
def training_state(parameters: Sequence[torch.Tensor], mains: MainParams) -> Iterator[list[torch.Tensor]]:
    """Inside, every tensor of the parameters, states in fp32; what is written to them stays."""
    held = [(each, *mains[each]) for each in parameters if each in mains]
    with contextlib.ExitStack() as stack:
        for inner in {id(inner): inner for _, inner, _ in held}.values():
            if isinstance(inner, (FusedAdam, FusedAdamW)):
                stack.enter_context(inner.materialized([main for _, its, main in held if its is inner]))
        found = list(parameters)
        for parameter, inner, main in held:
            # A piece of the parameter's own storage is no tensor of its own.
            if main.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
                found.append(main)
            state = inner.state.get(main, {})
            found += [
                state[name]
                for name in sorted(state)
                if isinstance(state[name], torch.Tensor) and state[name].dim() and state[name].shape == main.shape
            ]
        yield found


def finish_gathers(optimizers: Sequence[Any]) -> None:
    """Wait for gathers of experts' parameters under way (--overlap-param-gather), without starting the next one."""
    for model in {id(model): model for each in optimizers for model in getattr(each, "model_chunks", ())}.values():
        for group in model.expert_parallel_bucket_groups:
            if getattr(group, "param_gather_handle", None) is not None:
                group.finish_param_sync(skip_next_bucket_dispatch=True)
