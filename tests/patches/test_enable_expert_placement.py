"""`--enable-expert-placement`: when it applies, and what is refused before training. Trainings: tests/training."""

from __future__ import annotations

import pytest

from mindspeed_lite.engine import Context, OptionError, Settings, automatic_reasons
from mindspeed_lite.patches.enable_expert_placement import BREAK_EVEN, FEATURE, INTERVAL, NAME
from tests.harness.swapped import reasons

MODEL = {"num_experts": 16, "expert_model_parallel_size": 4, "moe_token_dispatcher_type": "alltoall"}


def context(interval=50, break_even=None, on=True, **args):
    settings = Settings({NAME: on, INTERVAL: interval, BREAK_EVEN: break_even})
    return Context(settings, "cpu", {}, {**MODEL, **args})


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"num_experts": None}, "--num-experts"),
        ({"expert_model_parallel_size": 1}, "--expert-model-parallel-size 1"),
        ({"expert_model_parallel_size": 16}, "one expert"),
        ({"moe_token_dispatcher_type": "flex"}, "--moe-token-dispatcher-type flex"),
        ({"transformer_impl": "transformer_engine"}, "transformer_engine"),
        ({"optimizer": "muon"}, "--optimizer muon"),
        ({"ckpt_format": "torch"}, "--ckpt-format torch"),
        ({"use_precision_aware_optimizer": True}, "--use-precision-aware-optimizer"),
        ({"optimizer_cpu_offload": True}, "--optimizer-cpu-offload"),
        ({"overlap_param_gather_with_optimizer_step": True}, "--overlap-param-gather-with-optimizer-step"),
        ({"moe_pad_expert_input_to_capacity": True}, "--moe-pad-expert-input-to-capacity"),
        ({"use_megatron_fsdp": True}, "FSDP"),
        ({"cuda_graph_impl": "local"}, "records"),
    ],
)
def test_when_it_does_not_apply(args, text):
    assert reasons(FEATURE, context()) == []
    assert reasons(FEATURE, context(moe_token_dispatcher_type="allgather")) == []
    (reason,) = reasons(FEATURE, context(**args))
    assert text in reason


def test_numbers_that_make_no_sense_are_refused():
    with pytest.raises(OptionError, match=r"^--expert-placement-freq takes a number of steps, at least 1, not 0"):
        reasons(FEATURE, context(0))
    with pytest.raises(
        OptionError, match=r"^--expert-placement-break-even takes a number of tokens, at least 0, not -1"
    ):
        reasons(FEATURE, context(break_even=-1.0))


@pytest.mark.parametrize(
    ("given", "text"),
    [((5,), "--expert-placement-freq 5"), ((50, 8.0), "--expert-placement-break-even 8"), ((50,), "")],
)
def test_a_number_without_the_feature_is_refused(given, text):
    alone = context(*given, on=False)
    assert FEATURE.is_enabled(alone.settings) is bool(text)
    if text:
        with pytest.raises(OptionError, match=f"^{text} has no effect without --enable-expert-placement: add it$"):
            FEATURE.condition(alone)


def test_auto_leaves_it_off():
    (left_off,) = automatic_reasons([FEATURE], context(on=False))[FEATURE.name]
    assert "measured" in left_off
