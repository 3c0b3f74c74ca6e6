"""Compiled schedules end when the simulated ones do."""

from __future__ import annotations

import random

import pytest

from mindspeed_lite.pipeline.costs import Costs
from mindspeed_lite.pipeline.simulate import simulate
from mindspeed_lite.planner import compiled, read

BASE = "--num-layers 24 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1".split()


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--num-virtual-stages-per-pipeline-rank 3",
        "--num-virtual-stages-per-pipeline-rank 2 --overlap-moe-expert-parallel-comm --num-experts 4",
        "--pipeline-schedule zb-h1",
        "--schedules-method dualpipev",
    ],
)
def test_ranks_end_when_the_simulation_ends_them(flags: str) -> None:
    training = read([*BASE, "--pipeline-model-parallel-size", "4", "--global-batch-size", "12", *flags.split()], 4)
    found = compiled.compiled(training)
    stages, draw = 4 * len(found.schedule.placement[0]), random.Random(7)
    for message in (0.0, 0.3):
        times = [[draw.uniform(0.5, 2) for _ in range(stages)] for _ in range(3)]
        costs = Costs(*times, message=message, pair=0.8)
        assert found.ends(costs) == pytest.approx([rank[-1].end for rank in simulate(found.schedule, costs).ranks])
