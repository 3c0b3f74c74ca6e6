"""`--schedules-method dualpipev`: where chunks stand, and what it cannot be; training is in tests/training."""

from __future__ import annotations

import mindspeed_lite
from mindspeed_lite.patches.schedules_method import FEATURE
from mindspeed_lite.pipeline.steps import v_placement
from tests.harness.processes import forked
from tests.harness.swapped import is_swapped


@forked("megatron")
def test_layers_and_ends_stand_in_a_v():
    from types import SimpleNamespace

    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import utils
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    mindspeed_lite.enable(schedules_method="dualpipev", use_gradient_accumulation_fusion=True)
    ranks, layers = 4, 16
    config = SimpleNamespace(
        pipeline_model_parallel_size=ranks, virtual_pipeline_model_parallel_size=2, num_layers=layers,
        pipeline_model_parallel_layout=None, num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None, account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )  # fmt: skip
    parallel_state.set_pipeline_model_parallel_world_size(ranks)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(2)
    for rank, stages in enumerate(v_placement(ranks)):
        parallel_state.set_pipeline_model_parallel_rank(rank)
        group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: ranks)
        for chunk, stage in enumerate(stages):
            for given in (rank, None):
                assert get_transformer_layer_offset(config, chunk, given) == stage * layers // (2 * ranks)
            is_last = stage == 2 * ranks - 1
            assert parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk) == is_last
            assert (utils.is_vp_last_stage(chunk, 2) and utils.is_pp_last_stage(group)) == is_last
            assert parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk) == (stage == 0)
        # Whom Megatron asks for the losses.
        assert parallel_state.is_pipeline_last_stage() == (rank == ranks - 1)
    assert mindspeed_lite.disable() == []
    assert not any(is_swapped(patch.target) for patch in FEATURE.patches)
    assert get_transformer_layer_offset(config, 1, 0) == 8
