"""`--pipeline-schedule`: when it applies, what it says, and what is swapped; training is in tests/training."""

from __future__ import annotations

import pytest

import mindspeed_lite
from mindspeed_lite.engine import Context, Settings
from mindspeed_lite.patches.pipeline_schedule import FEATURE
from tests.harness.process_groups import start
from tests.harness.processes import forked
from tests.harness.swapped import is_swapped, reasons

TARGET = "megatron.core.pipeline_parallel.schedules:get_forward_backward_func"
MODEL = {"pipeline_model_parallel_size": 2, "transformer_impl": "local"}
OFF = {
    "pipeline_schedule": None,
    "pipeline_schedule_max_live": None,
    "pipeline_schedule_trace": None,
    "schedules_method": None,
    "use_gradient_accumulation_fusion": True,
}


def context(settings, **args):
    return Context(Settings({**OFF, **settings}), "cpu", {}, {**MODEL, **args})


def test_dualpipev_needs_the_fusion_where_it_puts_weight_gradients_aside():
    off = {"use_gradient_accumulation_fusion": False, "schedules_method": "dualpipev"}
    assert reasons(FEATURE, context(off)) == []
    detached = reasons(FEATURE, context({**off, "dualpipev_dw_detach": True}))
    assert "--gradient-accumulation-fusion is off" in detached[0]


@forked("megatron")
def test_undo_restores_the_target_and_what_a_loop_holds():
    from megatron.core.pipeline_parallel import get_forward_backward_func, schedules

    assert not is_swapped(TARGET)
    mindspeed_lite.enable(pipeline_schedule="1f1b")
    assert is_swapped(TARGET)
    own = schedules.forward_backward_pipelining_without_interleaving
    held = get_forward_backward_func(pp_size=2, vp_size=None)
    assert held is not own and held.__wrapped__ is own
    assert get_forward_backward_func(pp_size=1, vp_size=None) is schedules.forward_backward_no_pipelining
    assert mindspeed_lite.disable() == [] and not is_swapped(TARGET)
    assert get_forward_backward_func(pp_size=2, vp_size=None) is own
    with pytest.raises(TypeError, match="forward_backward_pipelining_without_interleaving"):
        held()


@forked("megatron")
def test_a_call_that_no_order_describes_is_megatrons_and_says_so():
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig

    start()
    mindspeed_lite.enable(pipeline_schedule="1f1b")
    model = torch.nn.Linear(1, 1)
    model.config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, overlap_p2p_comm=True)
    function = get_forward_backward_func(pp_size=2, vp_size=None)
    with pytest.raises(ValueError, match="does not support overlapping p2p"):
        function(
            forward_step_func=None, data_iterator=None, model=model, num_microbatches=1, seq_length=1,
            micro_batch_size=1, adjust_tensor_shapes_fn=lambda receive, send: (receive, send),
        )  # fmt: skip
    (fallback,) = mindspeed_lite.report().fallbacks
    assert "adjust_tensor_shapes_fn" in fallback.reason
