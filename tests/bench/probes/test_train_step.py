"""A benchmark's hook in Megatron's training step: there while it is wanted, gone after, seeing what Megatron logs."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from mindspeed_lite.bench.probes import train_step
from tests.harness.processes import forked
from tests.harness.swapped import is_swapped


@forked("megatron")
def test_it_is_taken_back_exactly():
    from megatron.training import training

    before = training.train_step
    remove = train_step.install(lambda model, optimizer, run: run())
    assert training.train_step is before and is_swapped(before)
    training.train_step.__wrapped__  # noqa: B018  (how a user finds Megatron's own)
    remove()
    assert training.train_step is before and not is_swapped(before)


def test_a_step_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Model and optimizer are handed over by name, and everything is as it was afterwards."""
    training = ModuleType(train_step.TRAINING)

    def step_of_megatron(forward_step_func: Any, data_iterator: Any, model: Any, optimizer: Any) -> Any:
        return forward_step_func, data_iterator, model, optimizer

    training.train_step = step_of_megatron  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, train_step.TRAINING, training)
    seen = []

    def step(model: Any, optimizer: Any, run: Any) -> Any:
        seen.append((model, optimizer))
        return run()

    remove = train_step.install(step)
    assert training.train_step(1, 2, [3], optimizer=4) == (1, 2, [3], 4)
    assert seen == [([3], 4)]
    remove()
    assert training.train_step is step_of_megatron


def test_losses_of_a_step_and_of_a_skipped_one() -> None:
    result = ({"lm loss": torch.tensor(2.5), "pair": torch.tensor([6.0, 2.0])}, 0, False, False, 0, 0.5, None, None)
    assert train_step.read(result) == ({"lm loss": 2.5, "pair": 3.0}, 0.5)
    assert train_step.read(({}, True, False, False, 0, None, None, None)) == ({}, None)
