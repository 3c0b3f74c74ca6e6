"""Process groups on gloo, for one rank or several, with Megatron's or without."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist


def joined(rank: int, ranks: int, folder: Path) -> dist.ProcessGroup:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def start(world=1, rank=0, tp=1, store=None):
    """Megatron's groups on gloo, and its random state."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from mindspeed_lite import platform

    platform.activate()
    torch.distributed.init_process_group(
        "gloo", store=store or torch.distributed.HashStore(), rank=rank, world_size=world
    )
    parallel_state.initialize_model_parallel(tp)
    model_parallel_cuda_manual_seed(7)
