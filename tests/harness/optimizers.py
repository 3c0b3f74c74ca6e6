"""Megatron's optimizers over a small model: trained with given gradients, saved, loaded and compared."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from mindspeed_lite import platform

# What Megatron's configuration can make of it.
KINDS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True},
    "bf16, distributed": {"bf16": True, "use_distributed_optimizer": True},
    "fp16": {"fp16": True, "initial_loss_scale": 1024.0, "loss_scale_window": 3},
    "fp16, distributed": {"fp16": True, "initial_loss_scale": 1024.0, "use_distributed_optimizer": True},
    "fp32": {},
    "L2": {"bf16": True, "decoupled_weight_decay": False},
    "no clipping": {"bf16": True, "clip_grad": 0.0},
    "constant loss scale": {"bf16": True, "loss_scale": 16.0},
    "constant loss scale, distributed": {"bf16": True, "loss_scale": 16.0, "use_distributed_optimizer": True},
}


class Model(torch.nn.Module):
    """A matrix, an embedding with a rate of its own, a bias without decay, and a router that stays in fp32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def parameter(*shape: int, dtype: torch.dtype = dtype) -> torch.nn.Parameter:
            return torch.nn.Parameter((torch.randn(shape, generator=generator) * 0.1).to(dtype))

        self.embedding, self.weight, self.bias = parameter(32, 8), parameter(24, 40), parameter(24)
        self.router = parameter(6, 8, dtype=torch.float32)
        self.embedding.is_embedding_or_output_parameter = True


def start(store: Path) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    platform.activate()
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)


def optimizer_of(**options: Any) -> tuple[Any, Any]:
    """(model in Megatron's DDP, its optimizer)."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    dtype = torch.bfloat16 if options.get("bf16") else torch.float16 if options.get("fp16") else torch.float32
    distributed = options.get("use_distributed_optimizer", False)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    transformer = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    model = DistributedDataParallel(transformer, ddp, Model(dtype))
    fields = {"optimizer": "adam", "lr": 1e-2, "decoupled_lr": 3e-2, "clip_grad": 0.5, "params_dtype": dtype}
    return model, get_megatron_optimizer(OptimizerConfig(**{**fields, **options}), [model])


def gradients(model: Any, step: int, scale: float = 1.0) -> None:
    """Gradients as a backward pass and its reduction leave them; some steps are clipped and some are not."""
    generator = torch.Generator().manual_seed(100 + step)
    size = scale * (0.3 if step % 2 else 1e-3)
    for parameter in model.parameters():
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator) * size)


def inner(optimizer: Any) -> Any:
    return optimizer.chained_optimizers[0].optimizer


def train(options: dict[str, Any], steps: int = 6, overflow: int | None = None) -> dict[str, Any]:
    """The history and what it left: model, main parameters, moments."""
    model, optimizer = optimizer_of(**options)
    history = []
    for step in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        gradients(model, step, float(optimizer.get_loss_scale()))
        if step == overflow:
            next(model.parameters()).main_grad.view(-1)[3] = float("inf")
        history.append(optimizer.step())
    own = inner(optimizer)
    with getattr(own, "materialized", contextlib.nullcontext)():
        return {
            "history": history,
            "model": {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
            "main": [parameter.detach().clone() for parameter in optimizer.get_parameters()],
            "state": copy.deepcopy(own.state_dict()),
            "kind": type(own),
            "scale": float(optimizer.get_loss_scale()),
        }


def live_bytes(model: Any, optimizer: Any) -> int:
    """Of every storage that parameters, gradients and the optimizer hold, each counted once."""
    tensors = [
        *model.parameters(),
        *(parameter.main_grad for parameter in model.parameters()),
        *optimizer.get_parameters(),
        *(parameter.grad for parameter in optimizer.get_parameters()),
        *(each for state in inner(optimizer).state.values() for name, each in state.items() if name != "step"),
    ]
    shared = inner(optimizer).split_params
    if shared is not None:
        tensors += [low for _, low in shared.halves().values()]
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors if each is not None}
    return sum(storage.nbytes() for storage in storages.values())


class Narrow(Model):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        del self.router


def saved(model: Any, optimizer: Any) -> Any:
    """What a checkpoint has; of the distributed optimizer what all its formats are made of."""
    chained = optimizer.chained_optimizers[0]
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if hasattr(chained, "model_param_group_index_map"):
        places = chained.model_param_group_index_map
        state["states"] = [chained._get_main_param_and_optimizer_states(each) for each in places]
    return tree_map(lambda each: each.detach().clone() if isinstance(each, torch.Tensor) else each, state)


def steps(options: dict[str, Any], first: int, loaded: Any) -> Any:
    """Three steps, after those of `loaded` if given, and what a checkpoint would have of them."""
    model, optimizer = optimizer_of(**options)
    chained = optimizer.chained_optimizers[0]
    if loaded is not None:
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        places = getattr(chained, "model_param_group_index_map", ())
        for parameter, tensors in zip(places, loaded.get("states", ()), strict=True):
            with torch.no_grad():
                chained._set_main_param_and_optimizer_states(parameter, tensors)
    for step in range(first, first + 3):
        gradients(model, step)
        optimizer.step()
    return saved(model, optimizer)


def assert_equal(one: Any, other: Any, where: str = "") -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for place, pair in enumerate(zip(one, other, strict=True)):
            assert_equal(*pair, f"{where}/{place}")
    else:
        assert one == other, where
