"""What a pipeline schedule recomputes: whose state it is, and random numbers; training is in tests/training."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_lite.engine import Context, OptionError, Report, Session, Settings
from mindspeed_lite.patches._shared import recomputed_units
from tests.harness.process_groups import start
from tests.harness.processes import forked


def session(**flags):
    settings = Settings({"recompute_in_bubble": False, "recompute_in_advance": False, **flags})
    return Session(settings, Context(settings, "cpu", {}), Report({}, "cpu"))


def test_a_step_records_where_a_flag_says_so_into_what_the_checkpoints_read():
    full = SimpleNamespace(recompute_granularity="full")
    assert recomputed_units.for_step(session(), full, frozenset()) is None
    here = session(recompute_in_advance=True)
    # The feature was skipped: nothing has been patched.
    assert recomputed_units.for_step(here, full, frozenset()) is None
    made = recomputed_units.of(here)
    found = recomputed_units.for_step(here, full, frozenset({(0, 1)}))
    assert found is made and found is not recomputed_units.of(session())


def test_a_model_that_recomputes_nothing_is_one_line():
    here = session(recompute_in_bubble=True)
    recomputed_units.of(here)
    with pytest.raises(OptionError, match="set recompute_granularity to 'full'") as error:
        recomputed_units.for_step(here, SimpleNamespace(recompute_granularity=None), frozenset())
    assert "\n" not in str(error.value)


@forked("megatron")
def test_random_numbers_are_restored_and_megatron_is_told_of_a_checkpoint():
    import torch
    from megatron.core.tensor_parallel import random

    start()
    torch.manual_seed(5)
    restored = recomputed_units._snapshot()
    with random.get_cuda_rng_tracker().fork():
        tracked = torch.randn(2)
    first = torch.randn(3)
    assert not torch.equal(torch.randn(3), first)
    with restored():
        assert random.is_checkpointing()
        with random.get_cuda_rng_tracker().fork():
            assert torch.equal(torch.randn(2), tracked)
        assert torch.equal(torch.randn(3), first)
    assert not random.is_checkpointing()
