"""`--use-ascend-mc2`: when it applies; its calls are tests/npu_contract/test_mc2.py's, its sums tests/parallel/'s."""

from __future__ import annotations

import sys

import torch.distributed as dist

import mindspeed_lite
from mindspeed_lite.parallel import mc2
from mindspeed_lite.patches import use_ascend_mc2 as patch
from tests.harness.fused_collectives import HcclGroup, mc2_operators
from tests.harness.processes import forked
from tests.patches.linear_layers import config_of, on_tensor_ranks

FEATURE = patch.FEATURE


@forked("megatron")
def test_megatrons_layers_go_through_the_operators():
    """With a twin of CANN's two operators over gloo in place of torch_npu: what reaches them, and the same bits."""
    import torch

    def body(rank):
        from megatron.core import tensor_parallel

        config = config_of(False, tensor_model_parallel_size=2, sequence_parallel=True)
        common = {"config": config, "init_method": torch.nn.init.normal_, "bias": False, "skip_bias_add": True}
        up = tensor_parallel.ColumnParallelLinear(256, 512, gather_output=False, **common)
        down = tensor_parallel.RowParallelLinear(512, 256, input_is_parallel=True, **common)

        def step():
            for layer in (up, down):
                layer.zero_grad()
            x = torch.full((3, 1, 256), 0.5 + rank).bfloat16().requires_grad_()
            y = down(up(x)[0])[0]
            y.sum().backward()
            return y.detach(), x.grad, up.weight.grad, down.weight.grad

        off = step()
        named, found = HcclGroup(dist.group.WORLD), mc2.communicator
        sys.modules["torch_npu"] = mc2_operators(dist.group.WORLD)
        mc2.communicator = lambda _, device: found(named, device)
        # The plan would say that there is no NPU.
        object.__setattr__(FEATURE, "condition", None)
        with mindspeed_lite.enabled(use_ascend_mc2=True, strict=True):
            on = step()
        assert all(map(torch.equal, on, off)) and len(named.asked) == 4

    on_tensor_ranks(2, body)
