"""`--param-gather-once` over real processes: the same parameters, from half the gathering."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import mindspeed_lite
from tests.harness.processes import forked, on_ranks


def steps(rank: int, store: str, flags: dict[str, Any]) -> tuple[int, list[torch.Tensor], int]:
    """(bytes gathered by the last step, parameters after it, bytes of them that are gathered at all)."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, param_and_grad_buffer
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    with mindspeed_lite.enabled(**flags):
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
            parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
        torch.manual_seed(1)
        model = torch.nn.Module()
        model.dense = torch.nn.Parameter(torch.randn(24, 16).bfloat16())
        model.expert = torch.nn.Parameter(torch.randn(10, 16).bfloat16())
        model.expert.allreduce = False
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, num_moe_experts=2, expert_model_parallel_size=2
        )
        model = DistributedDataParallel(config, ddp, model)
        options = {"optimizer": "adam", "lr": 1e-2, "bf16": True, "params_dtype": torch.bfloat16}
        optimizer = get_megatron_optimizer(OptimizerConfig(**options, use_distributed_optimizer=True), [model])
        assert len(optimizer.chained_optimizers) == 2
        gathered: list[int] = []
        plain = param_and_grad_buffer.dist_all_gather_func

        def counting(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            gathered.append(output.nbytes)
            return plain(output, *args, **kwargs)

        param_and_grad_buffer.dist_all_gather_func = counting
        try:
            for step in range(3):
                gathered.clear()
                for parameter in model.parameters():
                    generator = torch.Generator().manual_seed(step)
                    parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
                optimizer.step()
        finally:
            param_and_grad_buffer.dist_all_gather_func = plain
        buckets = [each for groups in (model.bucket_groups, model.expert_parallel_bucket_groups) for each in groups]
        whole = sum(bucket.param_data.nbytes for group in buckets for bucket in group.buckets)
        return sum(gathered), [parameter.detach().clone() for parameter in model.parameters()], whole


def check(rank: int, store: str) -> None:
    off, before, whole = steps(rank, store, {})
    on, after, _ = steps(rank, store, {"param_gather_once": True, "strict": True})
    assert off == 2 * whole and on == whole
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    # Every rank has the parameters that the others have updated.
    everyone = [torch.empty_like(after[0]) for _ in range(2)]
    torch.distributed.all_gather(everyone, after[0])
    assert torch.equal(*everyone)


@forked("megatron")
def test_half_is_gathered_and_it_is_the_same(tmp_path: Path) -> None:
    import functools

    on_ranks(2, functools.partial(check, store=str(tmp_path / "store")))
