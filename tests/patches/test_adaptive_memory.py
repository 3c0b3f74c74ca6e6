"""`--adaptive-memory`: recorded, chosen, measured, chosen again; or explained; and when it does not apply."""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch

import mindspeed_lite
from mindspeed_lite import platform
from mindspeed_lite.engine import Context, OptionError, Settings
from mindspeed_lite.patches.adaptive_memory import FEATURE
from tests.harness import simulated
from tests.harness.process_groups import joined, start
from tests.harness.processes import forked, on_ranks

pytest.importorskip("scipy")
MIB = 2.0**-10
LOW = 0.5


def training(**flags):
    """A model in a session of its own, which the caller ends."""
    from tests.harness import core_loop

    platform.activate()
    if not torch.distributed.is_initialized():
        start()
    mindspeed_lite.enable(**flags)
    return core_loop.Training({"layers": 4})


def on(budget, **flags):
    return training(adaptive_memory=True, memory_budget=budget * MIB, **flags)


def measured():
    """MiB of each step that was measured."""
    found = [re.search(r"measured (\S+) MiB; the budget is", each) for each in mindspeed_lite.report().notices]
    return [float(each.group(1)) for each in found if each]


def losses(trained, steps=5):
    return [each for _ in range(steps) for each in trained.step()]


def measure_more(*sizes):
    """Let as many of the steps that are measured seem to take more bytes."""
    from mindspeed_lite.patches import adaptive_memory

    more = list(sizes)

    class Larger(adaptive_memory.Tracker):
        def __exit__(self, *given):
            super().__exit__(*given)
            self.peak += more.pop(0) if more else 0

    adaptive_memory.Tracker = Larger


def said(text):
    return sum(text in each for each in mindspeed_lite.report().notices)


@forked("megatron")
def test_a_training_within_the_budget_is_the_same():
    off = losses(training())
    mindspeed_lite.disable()
    assert losses(on(LOW)) == off
    assert len(measured()) == 1 and measured()[0] <= LOW * 1.03
    (table,) = [each for each in mindspeed_lite.report().notices if "computed again" in each]
    assert "the budget is 0.50 MiB" in table and ("proven" in table or "above the least" in table)
    assert "nothing is moved to the host: cpu has one memory: what leaves it is no smaller there" in table


@forked("megatron")
def test_a_choice_that_takes_more_than_predicted_is_made_again_with_less():
    trained = on(LOW)
    measure_more(200_000)
    found = losses(trained)
    assert len(measured()) == 2 and measured()[0] > LOW >= measured()[1] + 0.15
    mindspeed_lite.disable()
    # Where nothing takes less, the training goes on with what takes least.
    measure_more(5_000_000, 6_000_000, 7_000_000)
    assert losses(on(LOW)) == found and said("runs with the least possible") == 1 and len(measured()) == 3
    mindspeed_lite.disable()
    assert losses(training()) == found


@forked("megatron")
def test_a_stage_without_layers_takes_part(tmp_path):
    def body(rank):
        from tests.harness import core_loop

        platform.activate()
        joined(rank, 2, tmp_path)
        # The embedding counts as a layer, and is alone on the first stage.
        options = {"pp": 2, "layers": 1, "config": {"account_for_embedding_in_pipeline_split": True}}
        off = losses(core_loop.Training(options), 4)
        with mindspeed_lite.enabled(adaptive_memory=True, memory_budget=LOW * MIB, strict=True):
            trained = core_loop.Training(options)
            assert len(trained.models[0].module.module.decoder.layers) == rank
            assert losses(trained, 4) == off and said("measured") == 1 and said("computed again") == 2

    on_ranks(2, body)


@forked("megatron")
def test_a_model_that_was_built_before_is_left_alone_and_it_says_so():
    trained = training()
    mindspeed_lite.disable()
    mindspeed_lite.enable(adaptive_memory=True, memory_budget=LOW * MIB)
    losses(trained, 2)
    (found,) = mindspeed_lite.report().fallbacks
    assert "before the model is built" in found.reason


@forked("megatron")
def test_a_budget_that_cannot_be_met_says_the_least():
    trained = on(0.05)
    trained.step()
    with pytest.raises(OptionError, match=r"within 0.05 MiB: the least possible is 0.\d+ MiB.*raise --memory-budget"):
        trained.step()


@forked("megatron")
def test_explained_it_ends_before_a_weight_has_changed():
    trained = on(LOW, mindspeed_lite_explain_memory=True)
    before = [each.detach().clone() for each in trained.models[0].parameters()]
    with pytest.raises(SystemExit) as end:
        trained.step()
    assert end.value.code == 0
    assert all(torch.equal(a, b) for a, b in zip(before, trained.models[0].parameters(), strict=True))
    assert any("computed again" in each for each in mindspeed_lite.report().notices)


@forked("megatron")
def test_evaluation_is_left_alone():
    trained = on(LOW)
    trained.evaluate()
    losses(trained)
    assert len(measured()) == 1
    trained.evaluate()


def table_of_choice():
    (table,) = [each for each in mindspeed_lite.report().notices if "computed again" in each]
    return table


def moved(table):
    """MiB that the layers move in each micro-batch, by the lines of a table."""
    return [float(each) for each in re.findall(r"MiB +(\S+) MiB +\S+ ms", table)]


@forked("megatron")
def test_on_a_device_what_overlaps_with_compute_is_moved():
    off = losses(training())
    mindspeed_lite.disable()
    simulated.swap_attention(1e12)
    assert losses(on(LOW)) == off
    table = table_of_choice()
    assert max(moved(table)) > 0 and moved(table)[-1] == 0 and "0.00 ms do not overlap" in table
    assert "nothing is moved" not in table and measured() and measured()[-1] <= LOW * 1.03
    mindspeed_lite.disable()
    # Behind a slow link recomputation is faster.
    simulated.swap_attention(1e5)
    assert losses(on(LOW)) == off and not any(moved(table_of_choice())) and measured()[0] <= LOW * 1.03


@forked("megatron")
def test_a_host_without_room_moves_nothing():
    from mindspeed_lite.patches import swap_attention
    from tests.harness.lanes import Lanes

    simulated.swap_attention()
    swap_attention.CopyEngine = lambda device: Lanes(fail_at=0)
    off = losses(training())
    mindspeed_lite.disable()
    assert losses(on(LOW)) == off and said("no copy to the host was made: no more pinned memory")
    assert not any(moved(table_of_choice())) and measured()[-1] <= LOW * 1.03
    mindspeed_lite.disable()
    # Room for the copies that are timed and for nothing else.
    swap_attention.CopyEngine = lambda device: Lanes(fail_at=1)
    assert losses(on(LOW)) == off
    (found,) = mindspeed_lite.report().fallbacks
    assert "no more pinned memory" in found.reason


def test_without_a_solver_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"scipy.*pip install mindspeed-lite\[adaptive\]"):
        FEATURE.condition(Context(Settings({"adaptive_memory": True, "memory_budget": 1.0}), "cpu", {}, {}))
