"""Trainings that cannot go on: a rank that is killed ends the others with one line, and what cannot run is refused."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import checkouts, matrix, rows
from tests.harness.rows import NEW
from tests.harness.training import LAYOUTS, NO_DROPOUT, Trainer

EXPERTS = (
    f"{LAYOUTS['ep2'][1]} --moe-grouped-gemm --moe-permute-fusion --gradient-accumulation-fusion "
    "--moe-shared-expert-intermediate-size 64 --moe-token-dispatcher-type"
)
# Of a ring between two hops; of a layer of experts, one exchange or gathering has been sent and another has not.
HOP, EXCHANGE, GATHER = "batch_isend_irecv 2", "all_to_all_single 4", "all_gather_into_tensor 4"
# Flags, the call before which rank 1 is lost, or "" for before a step, and what the line names.
LOSSES = {
    "ring": ("--context-parallel-size 2 --context-parallel-algo megatron_cp_algo", HOP, "context.ring:"),
    "data parallel": ("--use-distributed-optimizer", "", "in megatron."),
    "tensor parallel": ("--tensor-model-parallel-size 2", "", "in megatron."),
    "pipeline": ("--pipeline-model-parallel-size 2", "", "in megatron."),
    "alltoall": (f"{EXPERTS} alltoall --moe-alltoall-overlap-comm", EXCHANGE, "in m"),
    "released": (f"{EXPERTS} alltoall --moe-zero-memory level1", EXCHANGE, "in m"),
    "two levels": (f"{EXPERTS} alltoall --moe-hierarchical-alltoallv --moe-node-size 1", EXCHANGE, "in m"),
    "combined schedule": (f"{EXPERTS} alltoall --moe-fb-overlap", EXCHANGE, "in m"),
    "copies": (
        f"{EXPERTS} alltoall --balanced-moe-experts --balanced-moe-break-even 0", EXCHANGE, "in m"
    ),
    "allgather": (f"{EXPERTS} allgather --moe-allgather-overlap-comm", GATHER, "in m"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("release", "name"),
    matrix.only(
        [(NEW, "ring"), (NEW, "alltoall")], [(release, name) for release in checkouts.WITH_TRAINING for name in LOSSES]
    ),
)
def test_the_others_end_with_one_line(trainer: Callable[[str], Trainer], release: str, name: str) -> None:
    flags, where, place = LOSSES[name]
    shared = set(Path("/dev/shm").glob("*"))
    # The others have no message to wait for; a machine that has more to do lets them wait for a processor.
    job = {"before": "killed", "env": {"KILLED": where}, "grace": 120}
    result = trainer(release).script(2, [*NO_DROPOUT, *flags.split()], **job)
    assert result.codes == [2, -9], result.log()[-2000:]
    log = result.log().splitlines()
    (line,) = [each for each in log if "another rank has ended" in each]
    assert line.startswith("mindspeed_lite: error on rank 0: another rank has ended or does not answer: "), line
    assert place in line and "failed (" in line and "MINDSPEED_LITE_TRACEBACK=1 shows the traceback" in line
    assert not any("Traceback" in each for each in log)
    deadline = time.monotonic() + 30  # What other processes of this machine have there goes.
    while (left := set(Path("/dev/shm").glob("*")) - shared) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left


def test_a_killed_rank_ends_the_others_between_slices(trainer: Callable[[str], Trainer]) -> None:
    """The other one says that its peer is gone, long before the timeout."""
    flags = {"strict": True, **rows.flags_of("use_ascend_coc coc_parallel_num=4")}
    job = {"entry": "core", "arm": "features", "nproc": 2, "flags": flags, "before": "die", "grace": 120}
    result = trainer(NEW).run(options={"tp": 2, "sp": True, "steps": 500}, **job)
    assert 0 not in result.codes
    assert re.search("connection closed|connection reset|socket closed|broken pipe", result.log(0), re.IGNORECASE)


BACKWARDS_FIRST = """
from mindspeed_lite.pipeline.steps import backward, forward

def order(rank, shape):
    for microbatch in range(shape.microbatches):
        yield backward(0, microbatch)
        yield forward(0, microbatch)
"""


@pytest.mark.parametrize(
    ("layout", "flags", "words"),
    [
        # What only our norms take.
        ("qk_norm zero_centred", "", "zero_centered"),
        ("pp2", "recompute_in_bubble", "set recompute_granularity to 'full'"),
        ("pp2 wgrad", f"{rows.WGRAD} pipeline_schedule={{folder}}/own.py:order", "its steps are B F: want"),
    ],
)
def test_what_cannot_run_is_refused(
    trainer: Callable[[str], Trainer], layout: str, flags: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(BACKWARDS_FIRST)
    options = rows.options_of(layout)
    arm = {"arm": "features", "flags": rows.flags_of(flags.format(folder=tmp_path))} if flags else {}
    result = trainer(NEW).run(entry="core", nproc=rows.ranks_of(options), options={**options, "steps": 1}, **arm)
    assert 0 not in result.codes and words in result.log()
