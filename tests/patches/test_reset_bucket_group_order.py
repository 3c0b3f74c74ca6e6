"""`--reset-bucket-group-order` over real processes: who is fetched when, and that the parameters are the same."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

import mindspeed_lite
from mindspeed_lite.patches import reset_bucket_group_order as patch
from tests.harness.processes import forked, on_ranks

FEATURE = patch.FEATURE
LAYERS = 4


class Backwards(torch.nn.Module):
    """Layers that are used in the reverse of the order in which they are registered."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False).bfloat16() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


def train(rank: int, store: str, flags: dict[str, Any]) -> tuple[list[list[str]], list[torch.Tensor], list[str]]:
    """(what each step starts and waits for, up to the end of its backward pass, parameters, notices)."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, param_and_grad_buffer
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    events: list[str] = []
    with mindspeed_lite.enabled(**flags):
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
            parallel_state.initialize_model_parallel()
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_param_gather=True, overlap_grad_reduce=True, bucket_size=64 * 64
        )
        model = DistributedDataParallel(config, ddp, Backwards())
        assert len(model.bucket_groups) == LAYERS
        options = {"optimizer": "adam", "lr": 1e-2, "bf16": True, "params_dtype": torch.bfloat16}
        optimizer = get_megatron_optimizer(
            OptimizerConfig(**options, use_distributed_optimizer=True, overlap_param_gather=True), [model]
        )
        number = {id(group): str(place) for place, group in enumerate(reversed(model.bucket_groups))}
        group_class = param_and_grad_buffer._ParamAndGradBucketGroup
        start, finish = group_class.start_param_sync, group_class.finish_param_sync

        def start_param_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
            events.append("start " + number[id(self)])
            return start(self, *args, **kwargs)

        def finish_param_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
            events.append("wait " + number[id(self)])
            return finish(self, *args, **kwargs)

        group_class.start_param_sync, group_class.finish_param_sync = start_param_sync, finish_param_sync
        steps = []
        try:
            for _ in range(4):
                model.zero_grad_buffer()
                optimizer.zero_grad()
                model(torch.ones(2, 64, dtype=torch.bfloat16) / 8).float().square().sum().backward()
                steps.append(list(events))
                # What the step starts is the next one's.
                events.clear()
                model.finish_grad_sync()
                optimizer.step()
        finally:
            group_class.start_param_sync, group_class.finish_param_sync = start, finish
        model.start_param_sync(force_sync=True)
        notices = [text for text in mindspeed_lite.report().notices if FEATURE.name in text] if flags else []
    return steps, [each.detach().clone() for each in model.parameters()], notices


@forked("megatron")
def test_the_order_of_the_first_step_is_that_of_the_next() -> None:
    tmp_path = Path(tempfile.mkdtemp())

    def body(rank: int) -> None:
        off, without, _ = train(rank, str(tmp_path / "store"), {})
        on, with_, notices = train(rank, str(tmp_path / "store"), {FEATURE.name: True, "strict": True})
        assert all(map(torch.equal, with_, without)), "the same parameters reach the same ranks"
        # Megatron's chain is of no use here: each is fetched when it is needed.
        needed = [f"{what} {number}" for number in (3, 2, 1, 0) for what in ("wait", "start")]
        assert off[3] == needed
        # So it is with the feature in the first step; then the first is fetched before the pass, and one beside each.
        assert on[0] == needed
        assert on[1] == on[3] == ["start 3", "wait 3", "start 2", "wait 2", "start 1", "wait 1", "start 0", "wait 0"]
        assert notices == [f"{FEATURE.name}: 4 of 4 bucket groups are used in another place than registered"]

    on_ranks(2, body)
