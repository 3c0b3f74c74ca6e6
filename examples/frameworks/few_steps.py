"""A few steps of training on random tokens, by Megatron-core's schedule and optimizer, for a model of a framework's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

import mindspeed_lite

VOCABULARY, SEQUENCE, MICRO_BATCH, MICRO_BATCHES = 512, 64, 2, 2


def start() -> None:
    """Process group and Megatron's; with the device layer of `mindspeed_lite.megatron_adaptor`, on a CPU, too."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(42)


def reduced(models: list[Any], config: Any) -> list[Any]:
    """The models within Megatron's data parallelism."""
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return [DistributedDataParallel(config, ddp, model) for model in models]


def _batches() -> Iterator[dict[str, torch.Tensor]]:
    torch.manual_seed(7 + dist.get_rank())
    positions = torch.arange(SEQUENCE).repeat(MICRO_BATCH, 1).cuda()
    while True:
        tokens = torch.randint(0, VOCABULARY, (MICRO_BATCH, SEQUENCE + 1)).cuda()
        yield {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "position_ids": positions}


def _loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}


def _forward(batches: Any, model: Any) -> Any:
    return model(attention_mask=None, **next(batches)), _loss


def train(models: list[Any], config: Any, steps: int = 2) -> None:
    """Train; print losses, kinds of linear layers and features in force as JSON."""
    given = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(given, models)
    config.finalize_model_grads_func = finalize_model_grads
    batches, losses = _batches(), []
    for _ in range(steps):
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=batches,
            model=models,
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        optimizer.step()
        losses.append(float(sum(each["loss"] for each in found) / len(found)))
    kinds = {type(each).__name__ for model in models for each in model.modules()}
    said: dict[str, Any] = {"losses": losses, "layers": sorted(each for each in kinds if "Linear" in each)}
    report = mindspeed_lite.report()
    if report is not None:
        said["features"] = [entry.feature for entry in report.entries if entry.status == "applied"]
    print(json.dumps(said), flush=True)
    dist.destroy_process_group()
