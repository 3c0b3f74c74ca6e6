"""The steps of `--adaptive-memory`: recorded, chosen, measured, chosen again, kept for the next run; or explained."""

from __future__ import annotations

import re

import pytest
import torch

import mindspeed_lite
from mindspeed_lite import platform
from mindspeed_lite.engine import OptionError
from tests.harness import simulated
from tests.harness.process_groups import joined, start
from tests.harness.processes import forked, on_ranks

pytest.importorskip("scipy")
MIB = 2.0**-10
LOW = 0.5


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path)


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


def kept_in(folder):
    """Let choices of this process be kept there and nowhere else."""
    import os
    import pathlib

    from mindspeed_lite.platform import cache

    os.environ[cache.CACHE_VARIABLE] = str(folder)
    cache.folder.cache_clear()
    return lambda: list(pathlib.Path(folder).glob("memory-*.json"))


def measure_more(*sizes):
    """Let as many of the steps that are measured seem to take more bytes."""
    from mindspeed_lite.patches._shared import memory_choice

    more = list(sizes)

    class Larger(memory_choice.Tracker):
        def __exit__(self, *given):
            super().__exit__(*given)
            self.peak += more.pop(0) if more else 0

    memory_choice.Tracker = Larger


def said(text):
    return sum(text in each for each in mindspeed_lite.report().notices)


@forked("megatron")
def test_a_training_within_the_budget_is_the_same(folder):
    files = kept_in(folder)
    off = losses(training())
    mindspeed_lite.disable()
    trained = on(LOW)
    assert not files()
    assert losses(trained) == off
    assert len(measured()) == 1 and measured()[0] <= LOW * 1.03
    (table,) = [each for each in mindspeed_lite.report().notices if "computed again" in each]
    assert "the budget is 0.50 MiB" in table and ("proven" in table or "above the least" in table)
    assert "nothing is moved to the host: cpu has one memory: what leaves it is no smaller there" in table
    assert len(files()) == 1
    mindspeed_lite.disable()
    # The next run of the same training begins with what was chosen, and one with another budget does not.
    again = on(LOW)
    assert losses(again) == off and len(measured()) == 1
    assert any("as an earlier run chose" in each for each in mindspeed_lite.report().notices)
    mindspeed_lite.disable()
    other = on(0.7)
    assert losses(other) == off and len(files()) == 2
    assert not said("as an earlier run chose")
    mindspeed_lite.disable()
    # Another configuration is another training, in what is no number either.
    from megatron.core.transformer.enums import AttnBackend

    changed = on(LOW)
    changed.config.attention_backend = AttnBackend.unfused
    changed.step()
    assert not said("as an earlier run chose")
    mindspeed_lite.disable()
    # What cannot be read is recorded anew, and one line says so.
    for text in ("{", '{"layers": 5}', '{"layers": {"0": [["mlp"]]}}', "[" * 100_000):
        for file in files():
            file.write_text(text)
        found = losses(on(LOW), 1)
        assert found == off[: len(found)] and not said("as an earlier run chose")
        (line,) = [
            each for each in mindspeed_lite.report().notices if "recorded again" in each and str(512 << 10) in each
        ]
        assert "\n" not in line
        mindspeed_lite.disable()
    for file in files():
        file.write_text('{"layers": {"0": [[["a part"], []]]}}')
    assert losses(on(LOW)) == off and measured()[0] <= LOW * 1.03 and said("is of other layers") == 1


@forked("megatron")
def test_a_choice_that_takes_more_than_predicted_is_made_again_with_less(folder):
    files = kept_in(folder)
    trained = on(LOW)
    measure_more(200_000)
    found = losses(trained)
    assert len(measured()) == 2 and measured()[0] > LOW >= measured()[1] + 0.15
    mindspeed_lite.disable()
    # A choice of an earlier run that takes more than it did is made again, once.
    measure_more(5_000_000)
    assert losses(on(LOW)) == found and said("as an earlier run chose") == said("computed again") == 1
    assert len(measured()) == 2 and measured()[0] > LOW >= measured()[1]
    mindspeed_lite.disable()
    for file in files():
        file.unlink()
    # Where nothing takes less, the training goes on with what takes least.
    measure_more(5_000_000, 6_000_000, 7_000_000)
    assert losses(on(LOW)) == found and said("runs with the least possible") == 1 and len(measured()) == 3
    assert not files()
    mindspeed_lite.disable()
    assert losses(training()) == found


@pytest.mark.parametrize(
    ("value", "plain"),
    [(torch.nn.functional.silu, "silu"), ((4, None), [4, None]), (torch.bfloat16, "torch.bfloat16"), (object(), None)],
)
def test_what_a_configuration_holds_is_told_in_plain_values(value, plain):
    from mindspeed_lite.patches._shared.memory_choice import _plain

    assert _plain(value) == plain


@forked("megatron")
def test_a_stage_without_layers_takes_part(folder):
    def body(rank):
        from pathlib import Path

        from tests.harness import core_loop

        platform.activate()
        kept_in(folder)
        joined(rank, 2, Path(folder))
        # The embedding counts as a layer, and is alone on the first stage.
        options = {"pp": 2, "layers": 1, "config": {"account_for_embedding_in_pipeline_split": True}}
        off = losses(core_loop.Training(options), 4)
        with mindspeed_lite.enabled(adaptive_memory=True, memory_budget=LOW * MIB, strict=True):
            trained = core_loop.Training(options)
            assert len(trained.models[0].module.module.decoder.layers) == rank
            assert losses(trained, 4) == off and said("measured") == 1 and said("computed again") == 2

    on_ranks(2, body)


@forked("megatron")
def test_a_model_that_was_built_before_is_left_alone_and_it_says_so(folder):
    kept_in(folder)
    trained = training()
    mindspeed_lite.disable()
    mindspeed_lite.enable(adaptive_memory=True, memory_budget=LOW * MIB)
    losses(trained, 2)
    (found,) = mindspeed_lite.report().fallbacks
    assert "before the model is built" in found.reason


@forked("megatron")
def test_a_budget_that_cannot_be_met_says_the_least(folder):
    kept_in(folder)
    trained = on(0.05)
    trained.step()
    with pytest.raises(OptionError, match=r"within 0.05 MiB: the least possible is 0.\d+ MiB.*raise --memory-budget"):
        trained.step()


@forked("megatron")
def test_explained_it_ends_before_a_weight_has_changed(folder):
    kept_in(folder)
    trained = on(LOW, mindspeed_lite_explain_memory=True)
    before = [each.detach().clone() for each in trained.models[0].parameters()]
    with pytest.raises(SystemExit) as end:
        trained.step()
    assert end.value.code == 0
    assert all(torch.equal(a, b) for a, b in zip(before, trained.models[0].parameters(), strict=True))
    assert any("computed again" in each for each in mindspeed_lite.report().notices)


@forked("megatron")
def test_evaluation_is_left_alone(folder):
    kept_in(folder)
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
def test_on_a_device_what_overlaps_with_compute_is_moved(folder):
    files = kept_in(folder)
    off = losses(training())
    mindspeed_lite.disable()
    simulated.swap_attention(1e12)
    assert losses(on(LOW)) == off
    table = table_of_choice()
    assert max(moved(table)) > 0 and moved(table)[-1] == 0 and "0.00 ms do not overlap" in table
    assert "nothing is moved" not in table and measured() and measured()[-1] <= LOW * 1.03
    mindspeed_lite.disable()
    # The next run moves the same.
    (file,) = files()
    assert losses(on(LOW)) == off and said("as an earlier run chose") and measured()[0] <= LOW * 1.03
    mindspeed_lite.disable()
    # What was chosen on a device is no choice where nothing moves.
    text = file.read_text()
    assert '"attention"' in text or '"mlp"' in text
    file.unlink()
    # Behind a slow link recomputation is faster.
    simulated.swap_attention(1e5)
    assert losses(on(LOW)) == off and not any(moved(table_of_choice())) and measured()[0] <= LOW * 1.03


@forked("megatron")
def test_a_host_without_room_moves_nothing(folder):
    from mindspeed_lite.patches import swap_attention
    from tests.harness.lanes import Lanes

    files = kept_in(folder)
    simulated.swap_attention()
    swap_attention.CopyEngine = lambda device: Lanes(fail_at=0)
    off = losses(training())
    mindspeed_lite.disable()
    assert losses(on(LOW)) == off and said("no copy to the host was made: no more pinned memory")
    assert not any(moved(table_of_choice())) and measured()[-1] <= LOW * 1.03
    mindspeed_lite.disable()
    for file in files():
        file.unlink()
    # Room for the copies that are timed and for nothing else.
    swap_attention.CopyEngine = lambda device: Lanes(fail_at=1)
    assert losses(on(LOW)) == off
    (found,) = mindspeed_lite.report().fallbacks
    assert "no more pinned memory" in found.reason
