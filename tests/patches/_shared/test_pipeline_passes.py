"""Megatron's functions as the executor calls them, in each release."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed_lite.patches._shared.pipeline_passes import QUEUE, DelayedWgrads
from mindspeed_lite.pipeline.wgrad import WgradQueue
from tests.harness.processes import forked


@pytest.mark.parametrize(("ahead", "back"), [(0, 1), (0, None), (None, 1)])
@forked("megatron")
def test_each_pass_is_given_its_own_model_and_micro_batch(ahead, back):
    import inspect

    import torch
    from megatron.core.pipeline_parallel import combined_1f1b, schedules

    from mindspeed_lite import platform
    from mindspeed_lite.patches._shared.pipeline_passes import CombinedPasses, TrainingStep
    from mindspeed_lite.pipeline import orders
    from mindspeed_lite.pipeline.data_parallel_sync import sync_plan
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


def test_each_backward_pass_is_one_batch_and_reduction_is_told_once():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
    layers = (model[0], model[2])
    log = []
    for number, layer in enumerate(layers):
        queue = WgradQueue()
        queue.call_when_done(lambda number=number: log.append(f"reduce {number}"))
        setattr(layer, QUEUE, queue)
    delayed = DelayedWgrads(model)
    for microbatch in range(3):
        for number, layer in enumerate(layers):
            getattr(layer, QUEUE).put(lambda text=f"{number}:{microbatch}": log.append(text))
            layer.weight.grad = torch.ones(2, 2)
        delayed.seal(is_last=microbatch == 2)
        assert (layers[0].weight.grad is None) == (microbatch < 2)
        if microbatch == 1:
            delayed.run(is_last=False)
    assert log == ["0:0", "1:0"]
    delayed.run(is_last=False)
    delayed.run(is_last=True)
    assert log[2:] == ["0:1", "1:1", "0:2", "reduce 0", "1:2", "reduce 1"]


def test_a_schedule_keeps_gradients_that_megatron_asks_for():
    from mindspeed_lite.patches.delay_wgrad_compute import backward_dw

    model, log = torch.nn.Sequential(torch.nn.Linear(2, 2)), []
    setattr(model[0], QUEUE, WgradQueue())
    getattr(model[0], QUEUE).put(lambda: log.append("computed"))
    with DelayedWgrads(model).kept():
        backward_dw(model[0])
        assert log == []
    backward_dw(model[0])
    assert log == ["computed"] and len(getattr(model[0], QUEUE)) == 0
