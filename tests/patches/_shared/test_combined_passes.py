"""Megatron's combined plan as the executor calls it; what it computes is in tests/training/test_schedules_method.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.harness.processes import forked


def test_the_configuration_asks_for_plans():
    from mindspeed_lite.patches._shared.combined_passes import is_asked_for

    assert is_asked_for(SimpleNamespace(overlap_moe_expert_parallel_comm=True))
    assert not is_asked_for(SimpleNamespace(overlap_moe_expert_parallel_comm=False))
    assert not is_asked_for(SimpleNamespace())


@pytest.mark.parametrize(("ahead", "back"), [(0, 1), (0, None), (None, 1)])
@forked("megatron")
def test_each_pass_is_given_its_own_model_and_micro_batch(ahead, back):
    import inspect

    import torch
    from megatron.core.pipeline_parallel import combined_1f1b, schedules

    from mindspeed_lite import platform
    from mindspeed_lite.patches._shared.combined_passes import CombinedPasses
    from mindspeed_lite.patches._shared.data_parallel_sync import sync_plan
    from mindspeed_lite.patches._shared.pipeline_passes import TrainingStep
    from mindspeed_lite.pipeline import orders
    from mindspeed_lite.pipeline.orders import PipelineShape

    platform.activate()
    schedule = orders.build("dualpipev-whole", PipelineShape(2, 3, 2))
    config = SimpleNamespace(deallocate_pipeline_outputs=False, calculate_per_token_loss=True, timers=None)
    models = [SimpleNamespace(), SimpleNamespace()]
    total = torch.zeros([], dtype=torch.int)
    this = TrainingStep(None, ["a", "b"], models, config, 3, 1, False, False, None, num_tokens=total)
    schedules.get_model_type = lambda model: None
    passes = CombinedPasses(schedules, this, schedule, 0, sync_plan(list(schedule.steps(0)), 2, 0))
    signature = inspect.signature(combined_1f1b.combined_forward_backward_step)
    calls = []

    def step(*args, **kwargs):
        calls.append(signature.bind(*args, **kwargs).arguments)
        return "output", torch.tensor(5), "gradient"

    passes._step = step
    if back is None:
        assert passes.forward(ahead)(2, "received") == "output"
    elif ahead is None:
        assert passes.backward(back)(1, "input", "made", "given") == "gradient"
    else:
        assert passes.pair(ahead, back)(2, "received", 1, "input", "made", "given") == ("output", "gradient")
    (call,) = calls
    assert call["f_model"] is (None if ahead is None else models[ahead])
    assert call["b_model"] is (None if back is None else models[back])
    assert call["data_iterator"] == (None if ahead is None else "a")
    assert (call["current_microbatch"], call["input_tensor"]) == ((None, None) if ahead is None else (2, "received"))
    if back is not None:
        assert [call[f"b_{name}"] for name in ("input_tensor", "output_tensor", "output_tensor_grad")] == [
            "input", "made", "given"
        ]  # fmt: skip
    assert total.item() == (0 if ahead is None else 5)
