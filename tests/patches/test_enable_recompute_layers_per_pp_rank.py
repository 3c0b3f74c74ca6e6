"""`--enable-recompute-layers-per-pp-rank`: how many layers of each virtual stage are recomputed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import mindspeed_lite
from mindspeed_lite.patches.enable_recompute_layers_per_pp_rank import layers_of_chunk
from tests.harness import checkouts, matrix
from tests.harness.processes import forked
from tests.harness.training import Trainer


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("number", range(8))
def test_the_chunks_take_layers_in_turns(number, chunks):
    """MindSpeed: layer l of chunk c is recomputed if l * chunks + c < number."""
    for chunk in range(chunks):
        expected = sum(layer * chunks + chunk < number for layer in range(10))
        assert layers_of_chunk(number, chunks, chunk) == expected
    assert sum(layers_of_chunk(number, chunks, chunk) for chunk in range(chunks)) == number


@forked("megatron")
def test_a_block_recomputes_its_share_with_the_same_bits():
    import torch
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlock

    from tests.harness import gpt_block

    calls = []
    own = tensor_parallel.checkpoint
    tensor_parallel.checkpoint = lambda *args: calls.append(args) or own(*args)
    fields = {"num_layers": 4, "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3}
    model = gpt_block.model_of(**fields)
    config, spec = model.config, get_gpt_layer_local_spec(normalization="RMSNorm")
    model(torch.ones(4, 1, gpt_block.HIDDEN).bfloat16().requires_grad_(), attention_mask=None)
    assert len(calls) == 3
    config.virtual_pipeline_model_parallel_size = 2
    mindspeed_lite.enable(enable_recompute_layers_per_pp_rank=True)
    found = []
    for chunk, share in enumerate((2, 1)):
        block = TransformerBlock(config=config, spec=spec, post_layer_norm=False, vp_stage=chunk).bfloat16()
        block.load_state_dict(model.state_dict())
        assert block.config.recompute_num_layers == share and block.config.num_layers == 4
        calls.clear()
        x = torch.linspace(-1, 1, 4 * gpt_block.HIDDEN).view(4, 1, -1).bfloat16().requires_grad_()
        block(x, attention_mask=None).sum().backward()
        assert len(calls) == share
        found.append([x.grad, *(weight.grad for weight in block.parameters())])
    assert all(map(torch.equal, *found)) and all(each.abs().sum() > 0 for each in found[0])
    assert mindspeed_lite.disable() == [] and block.config is config


# A chunk learns its number from the process in 0.12, and from an argument since.
@pytest.mark.parametrize("release", matrix.only(["0.12.1"], checkouts.EVERY))
def test_virtual_stages_of_a_rank_take_layers_in_turns(trainer: Callable[[str], Trainer], release: str) -> None:
    trainer(release).run(entry="script", arm="device", nproc=2, argv=[__file__]).check()


def main() -> None:
    """On two ranks: the layers that each virtual stage of a rank recomputes, on and off again."""
    import torch.distributed as dist

    from tests.harness import core_loop
    from tests.harness.feature_layouts import LAYOUTS, host_args
    from tests.harness.rows import options_of

    dist.init_process_group("nccl")
    mindspeed_lite.enable(host_args=host_args("recomputed"), strict=True, enable_recompute_layers_per_pp_rank=True)
    training = core_loop.Training(options_of(LAYOUTS["recomputed"]))
    blocks = [chunk.module.module.decoder for chunk in training.models]
    # Three of a rank.
    assert [block.config.recompute_num_layers for block in blocks] == [2, 1]
    training.step()
    assert mindspeed_lite.disable() == []
    assert [block.config.recompute_num_layers for block in blocks] == [3, 3]


if __name__ == "__main__":
    main()
