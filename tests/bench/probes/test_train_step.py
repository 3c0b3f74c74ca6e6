"""A benchmark's hook in Megatron's training step: there while it is wanted, gone after, seeing what Megatron logs."""

from __future__ import annotations

import torch

from mindspeed_lite.bench.probes import train_step
from tests.harness.processes import forked
from tests.harness.swapped import is_swapped


@forked("megatron")
def test_it_is_taken_back_exactly_and_sees_the_losses():
    from megatron.training import training

    before = training.train_step
    seen = []

    def step(run):
        result = run()
        seen.append(train_step.read(result))
        return result

    remove = train_step.install(step)
    assert training.train_step is before and is_swapped(before)
    results = iter(
        [
            ({"lm loss": torch.tensor(2.5), "pair": torch.tensor([6.0, 2.0])}, 0, False, False, 0, 0.5, None, None),
            ({}, True, False, False, 0, None, None, None),
        ]
    )
    training.train_step.__wrapped__  # noqa: B018  (how a user finds Megatron's own)
    remove()
    assert training.train_step is before and not is_swapped(before)
    training.train_step = lambda *args, **kwargs: next(results)
    replaced = training.train_step
    remove = train_step.install(step)
    training.train_step(1, 2, iteration=3)
    training.train_step(1)
    remove()
    assert seen == [({"lm loss": 2.5, "pair": 3.0}, 0.5), ({}, None)]
    assert training.train_step is replaced
