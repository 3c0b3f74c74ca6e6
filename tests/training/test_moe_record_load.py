"""`--moe-record-load` in real training: the counts against what the experts received, and the script's own steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_lite.parallel.balance import record
from tests.harness import checkouts, expert_load, matrix
from tests.harness.script_trainings import LAYOUTS, NO_DROPOUT, train
from tests.harness.training import Trainer


@pytest.mark.parametrize(
    ("release", "layouts"),
    matrix.only(
        [("0.19.2", expert_load.FEW)],
        [("0.19.2", expert_load.FEW), *((release, [*expert_load.LAYOUTS]) for release in checkouts.ALL)],
    ),
)
def test_the_file_holds_what_the_experts_received(
    trainer: Callable[[str], Trainer], release: str, layouts: list[str], tmp_path: Path
) -> None:
    argv = [str(Path(expert_load.__file__)), str(tmp_path), *layouts]
    trainer(release).run(entry="script", arm="device", nproc=2, argv=argv, timeout=300).check()
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == {layout: [] for layout in layouts}


@pytest.mark.parametrize(
    ("release", "resumes"),
    matrix.only([("0.19.2", False)], [("0.19.2", False), *((each, True) for each in checkouts.WITH_TRAINING)]),
)
def test_a_script_writes_its_own_steps_and_goes_on_where_it_resumes(
    trainer: Callable[[str], Trainer], release: str, resumes: bool, tmp_path: Path
) -> None:
    ranks, layout = LAYOUTS["ep2"]
    layout += " --context-parallel-size 2 --context-parallel-algo megatron_cp_algo"
    file, saved = tmp_path / "load.jsonl", str(tmp_path / "saved")
    arguments = [*NO_DROPOUT, *layout.split(), "--mtp-num-layers", "1", "--eval-interval", "2"]
    if resumes:
        arguments += ["--save", saved, "--save-interval", "2", "--override-opt-param-scheduler"]
    flags = ["--moe-record-load", str(file), "--moe-record-load-interval", "2"]
    train(trainer(release), "adaptor", ranks, [*arguments, *flags], iterations=3).check()
    # The odd step was written although no two steps had been counted.
    assert [each.step for each in record.read(file).steps] == [1, 2, 3]
    if resumes:
        train(trainer(release), "adaptor", ranks, [*arguments, *flags, "--load", saved], iterations=4).check()
    read = record.read(file)
    assert [each.step for each in read.steps] == [*range(1, 5 if resumes else 4)]
    assert read.header == record.LoadHeader(4, 2, 2, 1, 2, (1, 2, 3)) and read.label(3) == "mtp 1"
    for step in read.steps:
        assert step.tokens == [8 * 64] * 3
        assert [sum(each) for each in step.experts] == [sum(each) for each in step.ranks] == [2 * 8 * 64] * 3
