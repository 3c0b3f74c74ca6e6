"""A rank of a dry run takes what the real rank takes, and sends what it sends."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from mindspeed_lite.dryrun import match, rank
from mindspeed_lite.dryrun.launch import Launch
from tests.bench.test_predicted import TRAININGS
from tests.harness import checkouts, matrix, recorded_script

RECORDED = str(Path(recorded_script.__file__))
CATEGORIES = ("parameters", "weights", "gradients", "optimizer", "host", "activations")
KEPT = ("dense, gives up", "tp2 pp2 ep2, on", "cp2, an algorithm each", "pp2 vpp2, on")


def words(name):
    nproc, batch, flags = TRAININGS[name]
    return nproc, [*flags.split(), "--global-batch-size", str(batch), "--disable-jit-fuser"]


def of_group(messages, has_sizes):
    """What must be equal: a real router spreads tokens unevenly."""
    left_out = {"where"} if has_sizes else {"where", "size", "sent", "received"}
    return [{key: value for key, value in each.items() if key not in left_out} for each in messages]


@pytest.mark.parametrize("name", matrix.only(KEPT, TRAININGS))
def test_memory_and_messages_are_those_of_the_real_rank(trainer, tmp_path, name):
    nproc, argv = words(name)
    environment = {"RECORDED": str(tmp_path), "MINDSPEED_LITE_DEVICE": "cpu", "TORCH_COMPILE_DISABLE": "1"}
    trainer(checkouts.WITH_TRAINING[-1]).run(
        entry="script", arm="adaptor", nproc=nproc, argv=[RECORDED, *argv], env=environment
    ).check()
    launch = Launch((str(recorded_script.SCRIPT), *argv), str(tmp_path), dict(os.environ), nproc, 8)
    ranks = rank.run(launch, 600, 1)
    assert [each.error for each in ranks] == [""] * nproc, ranks[0].log_tail
    assert not match.problems({each.number: each.messages for each in ranks})
    for dry in ranks:
        real = json.loads((tmp_path / f"rank{dry.number}.json").read_text())
        for category in CATEGORIES:
            assert abs(dry.memory[category] - real["memory"][category]) <= 0.05 * real["memory"][category], category
        own = json.loads(json.dumps([asdict(each) for each in dry.messages[: dry.in_step]]))
        even = "--num-experts" not in argv
        assert of_group(own, even) == of_group(real["messages"], even)
