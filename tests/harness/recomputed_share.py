"""Run by `training_server` on two ranks: the layers that each virtual stage of a rank recomputes, on and off again."""

from __future__ import annotations

import torch.distributed as dist

import mindspeed_lite
from tests.harness import core_loop, live_undo

LAYOUT = "recomputed"


def main() -> None:
    dist.init_process_group("nccl")
    mindspeed_lite.enable(host_args=live_undo.host_args(LAYOUT), strict=True, enable_recompute_layers_per_pp_rank=True)
    training = core_loop.Training(live_undo.TRAINED_ALONE[LAYOUT][1])
    blocks = [chunk.module.module.decoder for chunk in training.models]
    # Three of a rank.
    assert [block.config.recompute_num_layers for block in blocks] == [2, 1]
    training.step()
    assert mindspeed_lite.disable() == []
    assert [block.config.recompute_num_layers for block in blocks] == [3, 3]


if __name__ == "__main__":
    main()
