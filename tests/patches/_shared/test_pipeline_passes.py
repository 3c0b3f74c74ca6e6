"""Megatron's functions as the executor calls them, in each release."""

from __future__ import annotations

import torch

from mindspeed_lite.patches._shared.pipeline_passes import QUEUE, DelayedWgrads
from mindspeed_lite.pipeline.wgrad import WgradQueue


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
