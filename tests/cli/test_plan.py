"""`mindspeed-lite plan` and `calibrate`: what they print, write and refuse."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from mindspeed_lite import cli, planner
from mindspeed_lite.planner import candidates

COMMAND = (
    "pretrain_gpt.py --num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
    "--micro-batch-size 4 --global-batch-size 16 --bf16 --swiglu --vocab-size 32000 --use-flash-attn "
    "--untie-embeddings-and-output-weights"
).split()


def run(*options: str, command: list[str] = COMMAND) -> int:
    return cli.main(["plan", "--devices", "8", "--memory", "40", "--device", "a100", *options, "--", *command])


def test_the_best_are_shown_and_their_flags_are_a_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert run("--count", "3", "--json", str(file), "--plot", str(tmp_path / "front.png"), "--why", "PP8") == 0
    output = capsys.readouterr().out
    assert "by published figures" in output and "why not PP8" in output and "times as long" in output
    found = json.loads(file.read_text())
    assert len(found["best"]) == 3 and found["why"]["asked"] == "PP8"
    assert (tmp_path / "front.png").stat().st_size > 1000
    for each in found["best"]:
        assert each["seconds"] == pytest.approx(sum(each["parts"].values()))
        assert shlex.join(each["flags"]) in output
        # In place of the command's own they are read, and take what was said but the reserve.
        words = candidates.without_chosen(COMMAND)
        ranks = planner.ranks(planner.read([*words, *each["flags"]], 8, "cuda"))
        assert max(rank.total for rank in ranks) == each["bytes"] - (4 * 2**30)
        assert cli.main(["memory", "--world-size", "8", "--device", "cuda", "--", *words, *each["flags"]]) == 0


def test_too_little_memory_says_the_least(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--devices", "1", "--memory", "1", "--device", "a100", "--", *COMMAND]) == 1
    assert "nothing fits: the least that" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--device", "abacus"), ("--device abacus", "h100-sxm")),
        (("--why", "QQ2"), ("--why", "'QQ2'")),
        (("--device", "here", "--calibration", "/nowhere.json"), ("there is no file /nowhere.json", "calibrate")),
        (("--json", "/nowhere/x.json"), ("--json /nowhere/x.json", "no such folder")),
        (("--count", "0"), ("--count 0", "at least 1")),
        (("--reserve", "nan"), ("--reserve nan", "--memory 40")),
        (("--reserve", "40"), ("--reserve 40", "less than that")),
        (("--expert-imbalance", "0.5"), ("--expert-imbalance 0.5", "1 or more")),
        (("--vocabulary", "-3"), ("--vocabulary -3", "at least 1")),
        (("--devices", "99999999999"), ("--devices", "at most 10,000,000 devices")),
        (("--memory", "nan"), ("--memory", "above 0")),
        (("--memory", "1e308"), ("--memory", "1,000,000 GiB")),
        (("--devices", "11"), ("no layout of 11 devices", "change --devices")),
        (("--plot", "/dev/full"), ("--plot /dev/full", ".png")),
        (("--json", "/dev/full"), ("a file cannot be written", "No space left")),
    ],
)
def test_what_is_wrong_is_one_line(
    options: tuple[str, ...], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*options) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in words)


def test_a_command_without_a_batch_size(capsys: pytest.CaptureFixture[str]) -> None:
    place = COMMAND.index("--global-batch-size")
    assert run(command=[*COMMAND[:place], *COMMAND[place + 2 :]]) == 2
    assert "--global-batch-size is not in the command" in capsys.readouterr().err


def test_a_feature_whose_time_is_not_predicted_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--count", "1", command=[*COMMAND, "--moe-hierarchical-alltoallv"]) == 0
    assert "--moe-hierarchical-alltoallv is not in the predicted time" in " ".join(capsys.readouterr().out.split())


def test_a_machine_is_calibrated_and_planned_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    assert cli.main(["calibrate", "--out", str(file), "--seconds", "0.5", "--processes", "2"]) == 0
    found = json.loads(file.read_text())
    assert set(found["operators"]) == {"1", "2"} and found["versions"]["torch"] and found["date"]
    small = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --global-batch-size 4 --bf16"
    words = ["pretrain_gpt.py", *small.split(), *"--micro-batch-size 1 --vocab-size 512 --use-flash-attn".split()]
    options = ["--devices", "2", "--memory", "1", "--device", "here", "--calibration", str(file)]
    assert cli.main(["plan", *options, "--", *words]) == 0
    assert "by what was measured" in capsys.readouterr().out


@pytest.mark.parametrize("subcommand", ["plan", "memory"])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--num-layers 1000000000", "--num-layers 1000000000: more than 1,000"),
        ("--seq-length 99999999999999999999", "--seq-length 99999999999999999999: more than 1,000,000,000,000"),
        (f"--hidden-size {'9' * 5000}", "--hidden-size is a number, not '9999"),
        ("--hidden-dropout nan", "--hidden-dropout is at least 0, not nan"),
        ("--num-experts 4 --moe-aux-loss-coeff some", "--moe-aux-loss-coeff is numbers, not 'some'"),
        ("--num-experts 4 --moe-layer-freq [1]*99999999999", "--moe-layer-freq is a number or a list"),
        (f"--num-experts 4 --moe-layer-freq {'(' * 500}1{')' * 500}", "--moe-layer-freq is a number or a list"),
        ("--moe-zero-memory some", "--moe-zero-memory some: it is one of disable, level0, level1"),
        ("--normalization X", "--normalization X: it is one of LayerNorm, RMSNorm"),
        ("--group-query-attention --num-query-groups 3", "--num-attention-heads 16 cannot be divided by"),
        ("--num-attention-heads 7", "--hidden-size 2048 cannot be divided by --num-attention-heads 7"),
        ("--num-experts 4 --moe-router-topk 5", "--moe-router-topk 5 of --num-experts 4"),
        ("--noop-layers 0,7", "--noop-layers 0,7: it is MindSpeed's"),
    ],
    ids=[
        "layers",
        "sequence",
        "digits",
        "nan",
        "coefficient",
        "entries",
        "parentheses",
        "level",
        "norm",
        "groups",
        "heads",
        "topk",
        "noop",
    ],
)
def test_absurd_arguments_of_a_command_are_one_line(
    subcommand: str, words: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--devices", "8", "--memory", "40", "--device", "a100"] if subcommand == "plan" else []
    assert cli.main([subcommand, *options, "--", *COMMAND, *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and expected in error and len(error) < 400


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": 1}', '{"format": 2, "operators": {}}', '{"format": 2, "operators": {"x": 1}}',
     '{"format": 2, "operators": {"1": [{"key": ["product"], "shape": [0], "work": 1, "seconds": 0}]}}', "[" * 100_000],
    ids=["empty", "list", "nothing", "format", "operators", "ranks", "zeros", "depth"],
)  # fmt: skip
def test_a_damaged_calibration_is_one_line(text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(text)
    assert run("--device", "here", "--calibration", str(file)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(file) in error and "calibration" in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--seconds", "nan"), ("--seconds",)),
        (("--seconds", "inf"), ("--seconds", "at most 500")),
        (("--processes", "0"), ("--processes is 1 to",)),
        (("--processes", "5000"), ("--processes is 1 to",)),
        (("--out", "/proc/x"), ("--out /proc/x", "cannot be written")),
    ],
)
def test_what_cannot_be_calibrated_is_one_line_at_once(
    options: tuple[str, ...], words: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["calibrate", "--out", str(tmp_path / "x.json"), *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in words)


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "many"), ("WORLD_SIZE", "0"), ("WORLD_SIZE", "-2")])
def test_an_environment_that_says_no_number_of_ranks(
    name: str, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert cli.main(["memory", "--", *COMMAND]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"WORLD_SIZE={value}" in error and "--world-size N" in error
