"""A calibration: undisturbed times, short trainings forked from one process, and what is left beside operators."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import predicted_time
from mindspeed_lite.bench.calibration import probe, run, trainings, turns, worker
from mindspeed_lite.bench.calibration.operators import Case
from mindspeed_lite.bench.calibration.run import CalibrationError
from mindspeed_lite.bench.calibration.samples import undisturbed
from mindspeed_lite.bench.calibration.trainings import Training
from mindspeed_lite.bench.calibration.turns import ForkedRank
from mindspeed_lite.planner import arguments, calibrated, step_time
from mindspeed_lite.planner.step_time import Pricer

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "pretrain_gpt.py")
# Of a real machine.
MEASURED = json.loads((ROOT / "docs" / "benchmarks" / "predicted-time.json").read_text())["calibration"]
BESIDE = {
    "layer": 4e-3, "microbatch": 3e-3, "step": 1e-2, "slack": {"1": 1.15, "2": 1.4},
    "split": {
        "tensor parallel": 3e-3, "tensor parallel, reduced": 2e-3, "context parallel": 2.5e-3, "expert parallel": 5e-3,
    },
}  # fmt: skip


def test_a_disturbed_call_is_not_counted() -> None:
    assert undisturbed([5.0, 1.0, 1.1, 9.0]) == 1.1
    assert undisturbed([2.0]) == 2.0


def test_each_case_is_timed_in_every_pass_over_all_of_them() -> None:
    called: list[str] = []

    def cases() -> Iterator[Case]:
        for name in "ab":
            yield Case((name,), (1.0,), 2.0, lambda name=name: called.append(name))  # type: ignore[misc]

    found = worker.timed(cases, 1e-6)
    assert [(each["key"], each["shape"], each["work"]) for each in found] == [
        (("a",), (1.0,), 2.0),
        (("b",), (1.0,), 2.0),
    ]
    assert all(each["seconds"] > 0 for each in found)
    order = [name for place, name in enumerate(called) if not place or called[place - 1] != name]
    # Once untimed.
    assert order == ["a", "b"] * (1 + worker.PASSES)


def test_trainings_take_turns_and_one_that_fails_says_why(tmp_path: Path) -> None:
    few = probe._words(64, 1, 2)
    given = [Training((*few, "--no-such-flag")), Training(few), Training(few, 2)]
    wrong, *right = trainings.measured_steps(SCRIPT, given, tmp_path / "folder", 2, warmup=1)
    assert isinstance(wrong, str) and "--no-such-flag" in wrong and "\n" not in wrong
    ended = []
    for number, each in enumerate(right, 1):
        assert not isinstance(each, str) and len(each) == 2 * turns.STEPS and min(each) > 0
        (file,) = (tmp_path / "folder" / str(number)).glob("rank0-*")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        ended += [(line["time"], number) for line in lines if line["kind"] == "step" and line["measured"]]
        # The adaptor's features are on: its flags would be unknown otherwise, and the report lists what was replaced.
        (run,) = [line for line in lines if line["kind"] == "run"]
        assert "use_fused_rmsnorm" in run["given"] and run["report"]["entries"]
    assert [number for _, number in sorted(ended)] == ([1] * turns.STEPS + [2] * turns.STEPS) * 2


def started(command: str, folder: Path) -> tuple[ForkedRank, socket.socket]:
    ours, theirs = socket.socketpair()
    # `subprocess` would reap them: it polls children whose handle is gone.
    words = command.split()
    return ForkedRank(os.posix_spawnp(words[0], words, os.environ), ours, folder / "rank.log"), theirs


def test_ranks_end_with_the_first_that_fails_with_their_time_and_with_the_parent(tmp_path: Path) -> None:
    (tmp_path / "rank.log").write_text("it cannot go on\n\n")
    here = os.getppid()
    segv = "sh -c kill${IFS}-SEGV${IFS}$$"
    for others, timeout, parent, why in (
        (["false"], 60.0, here, "it cannot go on"),
        # The others fail for want of it.
        (["false", segv], 60.0, here, "SIGSEGV ended a rank"),
        ([segv], 60.0, here, "SIGSEGV ended a rank"),
        ([], 0.1, here, "a rank has not answered for 0 s"),
        ([], 60.0, -1, "not answered"),
    ):
        ranks = [started(each, tmp_path) for each in ["sleep 60", *others]]
        began = time.monotonic()
        assert not turns.arrived([each for each, _ in ranks], timeout, parent)
        assert time.monotonic() - began < 20
        assert why in (tmp_path / trainings.WHY).read_text()
        assert why in str(trainings._outcome(tmp_path, Training(()), 1))
        for rank, _ in ranks:
            with pytest.raises(ProcessLookupError):
                os.kill(rank.process, 0)


def test_ranks_that_wait_for_their_turn_live_and_ranks_that_are_done_do_not(tmp_path: Path) -> None:
    ranks = [started("sleep 60", tmp_path), started("sleep 60", tmp_path)]
    for _, theirs in ranks:
        theirs.send(b".")
    assert turns.arrived([each for each, _ in ranks], 60.0, os.getppid())
    for rank, _ in ranks:
        os.kill(rank.process, signal.SIGKILL)
        os.waitpid(rank.process, 0)
    done = [started("true", tmp_path), started("true", tmp_path)]
    assert not turns.arrived([each for each, _ in done], 60.0, os.getppid())


def test_a_rank_ends_with_the_process_that_gives_turns() -> None:
    ours, theirs = socket.socketpair()
    process = os.fork()
    if not process:
        ours.close()
        turns._Turns(0, theirs, None).around(lambda: None, None)()
        os._exit(0)
    theirs.close()
    assert ours.recv(1)
    ours.close()
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1


def test_neighbours_start_together_as_far_as_there_is_room() -> None:
    jobs = [(number, Training((), ranks)) for number, ranks in enumerate((1, 1, 1, 2, 4, 1))]
    for most, expected in ((2, [[0, 1], [2], [3], [4], [5]]), (5, [[0, 1, 2, 3], [4, 5]])):
        assert [[number for number, _ in batch] for batch in turns._batches(jobs, most)] == expected


def test_a_script_that_does_not_run_says_so_before_operators_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*given: Any) -> Any:
        raise CalibrationError("it ended")

    def unwanted(*given: Any) -> Any:
        raise AssertionError("timed")

    monkeypatch.setattr(probe, "run_trainings", failing)
    monkeypatch.setattr(run, "measure", unwanted)
    with pytest.raises(CalibrationError, match="it ended"):
        probe.measure(2, 1.0, SCRIPT)


def test_a_calibration_holds_what_its_trainings_took(monkeypatch: pytest.MonkeyPatch) -> None:
    took = {each: 1.0 + place for place, each in enumerate(probe.whole(True)[2])}
    monkeypatch.setattr(probe, "run_trainings", lambda *_: took)
    monkeypatch.setattr(run, "measure", lambda *_: {"cores": 2})
    monkeypatch.setattr(probe, "overheads", lambda *_: {"step": 1.0})
    found = json.loads(json.dumps(probe.measure(2, 1.0, SCRIPT)))
    assert predicted_time.steps_then(found) == took and found["overheads"]["step"] == 1.0


def test_what_trainings_take_beside_operators_is_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps that were made from known overheads give these overheads."""
    measured = {name: each for name, each in MEASURED.items() if name != "overheads"}
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({**measured, "overheads": BESIDE}))

    def steps(script: str, given: Sequence[Training], folder: Path, count: int) -> list[list[float] | str]:
        found: list[list[float] | str] = []
        for each in given:
            pricer = Pricer(calibrated.read(file, each.ranks), measured["overlap"])
            seconds = step_time.step(arguments.read(each.words, each.ranks, "cpu"), pricer).seconds
            found.append([seconds, 3 * seconds, 3 * seconds, seconds])
        return found

    monkeypatch.setattr(probe, "measured_steps", steps)
    found = probe.overheads(measured, probe.run_trainings(SCRIPT, True))
    # A tiny training's own operators are a small part of it.
    for name in ("layer", "microbatch", "step"):
        assert found[name] == pytest.approx(BESIDE[name], rel=0.1, abs=1e-4), name
    assert found["slack"] == pytest.approx(BESIDE["slack"], rel=0.02)
    assert found["split"] == pytest.approx(BESIDE["split"], rel=0.1)
    alone = probe.overheads(measured, probe.run_trainings(SCRIPT, False))
    assert [*alone["slack"]] == ["1"] and alone["split"] == {}
    monkeypatch.setattr(probe, "measured_steps", lambda *_: ["it ended"] * 5)
    with pytest.raises(CalibrationError, match="it ended"):
        probe.run_trainings(SCRIPT, False)
