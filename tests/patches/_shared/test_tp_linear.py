"""The seam in Megatron's linear layers: what goes through it, and what stays Megatron's."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import mindspeed_lite
from tests.harness.linear_layers import HIDDEN, ON, config_of, layer_of, messages, passes, same
from tests.harness.process_groups import start
from tests.harness.processes import forked, on_ranks


@forked("megatron")
def test_experts_and_single_ranks_are_left_alone():
    start()
    layer = layer_of("column", config_of(False))
    x = torch.randn(4, 1, HIDDEN).bfloat16()
    off = passes(layer, x)
    with mindspeed_lite.enabled(**ON):
        on, sent = messages(lambda: passes(layer, x))
        same(on, off)
        row = layer_of("row", config_of(False))
        _, more = messages(lambda: passes(row, torch.randn(4, 1, 24).bfloat16()))
    assert sent == more == []


@forked("megatron")
def test_an_experts_layer_is_left_to_its_dispatcher():
    folder = Path(tempfile.mkdtemp())

    def body(rank):
        start(2, rank, 2, dist.FileStore(str(folder / "store"), 2))
        config = config_of(
            False,
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            num_moe_experts=2,
            moe_token_dispatcher_type="alltoall",
        )
        x = torch.randn(6, 1, HIDDEN).bfloat16()
        with mindspeed_lite.enabled(**ON):
            for kind, width in (("column", HIDDEN), ("row", 12)):
                layer = layer_of(kind, config, is_expert=True, bias=False, skip_bias_add=True)
                assert layer.explicit_expert_comm
                _, sent = messages(lambda layer=layer, width=width: layer(x[..., :width]))
                assert sent == []

    on_ranks(2, body)
