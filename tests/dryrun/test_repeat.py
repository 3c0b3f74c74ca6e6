"""Micro-batches that repeat the second one count what they would if they ran."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mindspeed_lite.dryrun import repeat
from mindspeed_lite.dryrun.calls import GroupCall
from mindspeed_lite.dryrun.clock import Clock
from mindspeed_lite.dryrun.fake_tensors import StoragelessMode
from mindspeed_lite.dryrun.passed_values import PassedValues
from mindspeed_lite.dryrun.work import WorkRecorder
from mindspeed_lite.dryrun.world import World
from mindspeed_lite.memory.saved_tensors import Tracker
from mindspeed_lite.planner import devices
from mindspeed_lite.planner.published import PublishedDevice

# Most is saved within the backward of the third, which is repeated.
ORDER = "FFBBFFFBFBBB"
MICRO_BATCHES = ORDER.count("F")


class Sent(torch.autograd.Function):
    """Sends a message in both passes."""

    @staticmethod
    def forward(ctx, x, world):
        ctx.world = world
        world.messages.append(GroupCall((0, 1), "all_reduce", "float32", x.numel()))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.world.messages.append(GroupCall((0, 1), "all_gather", "float32", gradient.numel()))
        return gradient, None


class Chunk(nn.Module):
    def __init__(self, world, reads=False):
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)
        self.world, self.reads = world, reads
        # Saved by all micro-batches.
        self.scale = torch.ones(16, 32)

    def set_input_tensor(self, given):
        self.given = given[0]

    def forward(self):
        if self.reads:
            self.world.values.next(("objects",))
        hidden = Sent.apply(torch.tanh(self.first(self.given)), self.world)
        hidden = checkpoint(
            lambda x: torch.tanh(x.repeat(1, 8)).view(16, 8, 32).sum(1), hidden * self.scale, use_reentrant=True
        )
        hidden.sum().item()
        return self.second(hidden)


def step(folder, micro_batches=None, reads=False, **given):
    """Passes of a stage in `ORDER`; what it counts, and how often its chunk ran."""
    world = World(2, values=PassedValues(Path(folder), 0, {0}))
    clock = Clock(PublishedDevice(*devices.named("h100")))
    recorder, mode = WorkRecorder(clock), StoragelessMode()
    ran, gradients = [], []
    with mode:
        chunk = Chunk(world, reads)
        chunk.first.register_forward_hook(lambda *_: ran.append(1))
        weights = {each.untyped_storage()._cdata for each in chunk.parameters()}
        tracker = Tracker(weights.__contains__, counts_fake=True, module=recorder.module)
        with recorder.recording(mode, [chunk]), tracker:
            if micro_batches:
                counts = repeat.Counts(world, recorder, tracker)
                repeat.install([chunk], argparse.Namespace(**given), micro_batches, counts)
            waiting = []

            def backward():
                x, output = waiting.pop(0)
                output.sum().backward()
                gradients.append((x.grad.shape, x.grad.dtype))

            for each in ORDER:
                if each == "B":
                    backward()
                else:
                    x = torch.empty(16, 8, requires_grad=True)
                    chunk.set_input_tensor([x])
                    waiting.append((x, chunk()))
    assert not tracker._live and gradients == [((16, 8), torch.float32)] * MICRO_BATCHES
    kept = Counter()
    for each in tracker.at_peak:
        kept[each.module, each.shape] += each.count
    return (tracker.peak, kept, recorder.counted(), recorder.host(), world.messages, clock.seconds), len(ran)


def test_counts_are_those_of_all_micro_batches(tmp_path):
    (*whole, seconds), number = step(tmp_path)
    assert number == MICRO_BATCHES and whole[0] > 0 and len(whole[4]) == 2 * MICRO_BATCHES
    (*repeated, again), number = step(tmp_path, MICRO_BATCHES)
    assert number == 3 and repeated == whole
    assert again == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize(
    ("micro_batches", "given"),
    [(3, {}), (MICRO_BATCHES, {"reads": True}), (MICRO_BATCHES, {"pipeline_schedule": "zb"})],
)
def test_micro_batches_that_differ_all_run(tmp_path, micro_batches, given):
    assert step(tmp_path, micro_batches, **given)[1] == MICRO_BATCHES
