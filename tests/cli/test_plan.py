"""`mindspeed-lite plan` and `calibrate`: what they print and write."""

from __future__ import annotations

import json
import shlex
from contextlib import nullcontext
from pathlib import Path

import pytest

from mindspeed_lite import cli, planner
from mindspeed_lite.cli import terminal
from mindspeed_lite.planner import candidates

COMMAND = (
    "pretrain_gpt.py --num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
    "--micro-batch-size 4 --global-batch-size 16 --bf16 --swiglu --vocab-size 32000 --use-flash-attn "
    "--untie-embeddings-and-output-weights --moe-hierarchical-alltoallv"
).split()


def run(*options: str) -> int:
    return cli.main(["plan", "--devices", "8", "--memory", "40", "--device", "a100", *options, "--", *COMMAND])


def test_the_best_are_shown_and_their_flags_are_a_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, plot = tmp_path / "plan.json", tmp_path / "front.png"
    assert run("--count", "3", "--json", str(file), "--plot", str(plot), "--why", "PP8") == 0
    output = capsys.readouterr().out
    assert "by published figures" in output and "why not PP8" in output and "times as long" in output
    assert "--moe-hierarchical-alltoallv is not in the predicted time" in " ".join(output.split())
    found = json.loads(file.read_text())
    assert len(found["best"]) == 3 and found["why"]["asked"] == "PP8" and plot.stat().st_size > 1000
    for each in found["best"]:
        assert each["seconds"] == pytest.approx(sum(each["parts"].values()))
        assert shlex.join(each["flags"]) in output
        # In place of the command's own they are read, and take the predicted bytes without the reserve.
        words = candidates.without_chosen(COMMAND)
        ranks = planner.ranks(planner.read([*words, *each["flags"]], 8, "cuda"))
        assert max(rank.total for rank in ranks) == each["bytes"] - int(4e9)
        assert cli.main(["memory", "--world-size", "8", "--device", "cuda", "--", *words, *each["flags"]]) == 0


def test_the_search_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int, str]] = []
    monkeypatch.setattr(terminal, "progress", lambda what: nullcontext(lambda *given: told.append(given)))
    assert run("--count", "3") == 0
    shares = [done for done, _, _ in told]
    assert shares == sorted(shares) and shares[-1] == 100 and told[-1][2].endswith("layouts simulated")


def test_a_full_disk_is_one_line_and_too_little_memory_says_the_least(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--count", "1", "--json", "/dev/full") == 2
    assert capsys.readouterr().err == (
        "mindspeed-lite plan: error: --json /dev/full: cannot be written: No space left on device\n"
    )
    assert run("--memory", "0.1") == 1
    assert "nothing fits: the least that" in capsys.readouterr().out


def test_a_machine_is_calibrated_and_planned_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    assert cli.main(["calibrate", "--out", str(file), "--seconds", "0.5", "--processes", "2"]) == 0
    found = json.loads(file.read_text())
    assert set(found["operators"]) == {"1", "2"} and found["versions"]["torch"] and found["date"]
    words = (
        "pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --global-batch-size 4 "
        "--bf16 --micro-batch-size 1 --vocab-size 512 --use-flash-attn"
    ).split()
    assert cli.main(["plan", "--devices", "2", "--memory", "1", "--calibration", str(file), "--", *words]) == 0
    assert "by what was measured" in capsys.readouterr().out
