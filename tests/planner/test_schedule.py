"""How many micro-batches are kept, against what is known of 1F1B and Megatron's own tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_lite.planner import ArgumentError, read, schedule
from mindspeed_lite.planner.training import TrainingConfig

BASE = "--num-layers 24 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1".split()


def training(stages: int, microbatches: int, chunks: int = 1, group: int = 0) -> TrainingConfig:
    words = [*BASE, "--pipeline-model-parallel-size", str(stages), "--global-batch-size", str(microbatches)]
    words += ["--num-virtual-stages-per-pipeline-rank", str(chunks)] if chunks > 1 else []
    words += ["--microbatch-group-size-per-virtual-pipeline-stage", str(group)] if group else []
    return read(words, stages)


@given(st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(1, 40))
def test_a_stage_keeps_as_many_as_there_are_stages_from_it_on(stages: int, microbatches: int) -> None:
    for stage in range(stages):
        kept = [sum(each.kept) for each in schedule.moments(training(stages, microbatches), stage)]
        assert max(kept) == min(stages - stage, microbatches)


@pytest.mark.parametrize(("stage", "kept"), [(0, 5), (1, 3)])
def test_interleaved_more_are_kept(stage: int, kept: int) -> None:
    """Two stages with two chunks: ahead by a group and twice the stages behind, and the one that is run."""
    assert max(sum(each.kept) for each in schedule.moments(training(2, 8, 2), stage)) == kept


def test_orders_by_name_and_what_is_not_predicted() -> None:
    words = [*BASE, "--pipeline-model-parallel-size", "4", "--global-batch-size", "8"]
    named = read([*words, "--pipeline-schedule", "1f1b"], 4)
    for stage in range(4):
        assert list(schedule.moments(named, stage)) == list(schedule.moments(training(4, 8), stage))
    # Both ends are on the first rank; no rank holds more than 2P + 1 chunks.
    both = read([*words, "--schedules-method", "dualpipev"], 4)
    kept = [
        max(sum(each.kept) + (each.forward is not None) for each in schedule.moments(both, rank)) for rank in range(4)
    ]
    assert max(kept) <= 9
    for name, problem in (
        ("zb-h1", "not predicted"),
        ("forward-only", "not predicted"),
        ("none", "--pipeline-schedule"),
    ):
        with pytest.raises(ArgumentError, match=problem):
            list(schedule.moments(read([*words, "--pipeline-schedule", name], 4), 3))
