"""A rank of the real script that is killed: the others end within seconds, with one line that says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import checkouts, matrix
from tests.harness.script_trainings import NO_DROPOUT, train
from tests.harness.training import Trainer

# Ranks, flags, where rank 1 is lost, what the line names.
LOSSES = {
    "ring": (2, "--context-parallel-size 2 --context-parallel-algo megatron_cp_algo", "in_a_ring", "context.ring:"),
    "data parallel": (2, "--use-distributed-optimizer", "before_a_step", "in megatron."),
    "tensor parallel": (2, "--tensor-model-parallel-size 2", "before_a_step", "in megatron."),
    "pipeline": (2, "--pipeline-model-parallel-size 2", "before_a_step", "in megatron."),
}
_EXPERTS = (
    "--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-permute-fusion "
    "--gradient-accumulation-fusion --moe-shared-expert-intermediate-size 64 --moe-token-dispatcher-type"
)
EXCHANGES = {
    "alltoall": (f"{_EXPERTS} alltoall --moe-alltoall-overlap-comm", "in_an_exchange"),
    "released": (f"{_EXPERTS} alltoall --moe-zero-memory level1", "in_an_exchange"),
    "two levels": (f"{_EXPERTS} alltoall --moe-hierarchical-alltoallv --moe-node-size 1", "in_an_exchange"),
    "combined schedule": (f"{_EXPERTS} alltoall --moe-fb-overlap", "in_an_exchange"),
    "copies": (f"{_EXPERTS} alltoall --balanced-moe-experts --balanced-moe-break-even 0", "in_an_exchange"),
    "allgather": (f"{_EXPERTS} allgather --moe-allgather-overlap-comm", "in_a_gather"),
}
LOSSES |= {name: (2, flags, where, "in m") for name, (flags, where) in EXCHANGES.items()}


@pytest.mark.parametrize(
    ("release", "name"),
    matrix.only(
        [(checkouts.ALL[-1], "ring"), (checkouts.ALL[-1], "alltoall")],
        [(release, name) for release in checkouts.WITH_TRAINING for name in LOSSES],
    ),
)
def test_the_others_end_with_one_line(trainer: Callable[[str], Trainer], release: str, name: str) -> None:
    ranks, flags, where, place = LOSSES[name]
    shared = set(Path("/dev/shm").glob("*"))
    before = f"tests.harness.lost_rank:{where}"
    # The others have no message to wait for; a machine that has more to do lets them wait for a processor.
    result = train(trainer(release), "adaptor", ranks, [*NO_DROPOUT, *flags.split()], before=before, grace=120)
    assert result.codes == [2, -9], result.log()[-2000:]
    log = result.log().splitlines()
    (line,) = [each for each in log if "another rank has ended" in each]
    assert line.startswith("mindspeed_lite: error on rank 0: another rank has ended or does not answer: "), line
    assert place in line and "failed (" in line and "MINDSPEED_LITE_TRACEBACK=1 shows the traceback" in line
    assert not any("Traceback" in each for each in log)
    assert set(Path("/dev/shm").glob("*")) <= shared
