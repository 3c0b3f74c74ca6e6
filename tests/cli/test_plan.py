"""`mindspeed-lite plan` and `calibrate`: what they print and write."""

from __future__ import annotations

import argparse
import json
import shlex
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest

from mindspeed_lite import cli, planner
from mindspeed_lite.cli import terminal, training_command
from mindspeed_lite.dryrun import timing
from mindspeed_lite.planner import candidates, devices
from mindspeed_lite.planner.links import read
from mindspeed_lite.planner.published import PublishedDevice
from mindspeed_lite.planner.work import CollectiveCall, Group
from tests.harness import matrix
from tests.harness.processes import forked

COMMAND = (
    "pretrain_gpt.py --num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024 "
    "--micro-batch-size 4 --global-batch-size 16 --bf16 --swiglu --vocab-size 32000 --use-flash-attn "
    "--untie-embeddings-and-output-weights --moe-hierarchical-alltoallv"
).split()

OWN = [*COMMAND, "--tensor-model-parallel-size", "2", "--sequence-parallel"]


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
        assert max(rank.total for rank in ranks) == each["bytes"] - 4 * 10**9


def test_measured_links_take_the_place_of_the_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = []
    for rate in (5e9, 5e8):
        file, out = tmp_path / "links.json", tmp_path / "plan.json"
        matrix = [[rate] * 8] * 8
        links = {"format": 1, "hosts": [*"aaaabbbb"], "bandwidth": matrix, "latency": [[0.0] * 8] * 8}
        file.write_text(json.dumps({**links, "compute": [1.0] * 8, "order": []}))
        own = ["--this", "--links", str(file), "--json", str(out), "--", *OWN]
        assert cli.main(["plan", "--devices", "8", "--device", "a100", *own]) == 0
        times.append(json.loads(out.read_text())["parts"])
    assert times[1]["gradients"] == pytest.approx(10 * times[0]["gradients"], rel=1e-3)
    assert times[1]["tensor parallel"] > 5 * times[0]["tensor parallel"]
    assert times[0]["products"] == times[1]["products"]
    capsys.readouterr()
    assert run("--links", str(file), "--devices", "4") == 2
    assert "it has 8 ranks, and the training 4" in capsys.readouterr().err
    device = PublishedDevice(*devices.named("a100"), read(str(file)))
    call = CollectiveCall("all_reduce", 1e9, Group(8))
    clock = timing.clock_of(json.loads(json.dumps(asdict(device))))
    assert clock is not None and clock.device.message(call) == device.message(call) > 3


def test_the_search_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int, str]] = []
    monkeypatch.setattr(terminal, "progress", lambda what: nullcontext(lambda *given: told.append(given)))
    assert run("--count", "3") == 0
    shares = [done for done, _, _ in told]
    assert shares == sorted(shares) and shares[-1] <= told[-1][1] and told[-1][2].endswith(" simulated")
    assert shares[-1] > 100 and told[0][2].endswith(" layouts")


def test_a_full_disk_is_one_line_and_too_little_memory_says_the_least(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--count", "1", "--json", "/dev/full") == 2
    assert capsys.readouterr().err == (
        "mindspeed-lite plan: error: --json /dev/full: cannot be written: No space left on device\n"
    )
    assert run("--this", "--why", "PP2") == 2
    assert capsys.readouterr().err.endswith("--why is about the search, which --this leaves out: drop one of them\n")
    assert run("--memory", "0.1") == 1
    assert "nothing fits: the least that" in capsys.readouterr().out


def test_the_command_itself_is_predicted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "this.json"
    options = ["plan", "--this", "--devices", "2x4", "--device", "a100", "--json", str(file)]
    assert cli.main([*options, "--", *OWN]) == 0
    output = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert "TP2 PP1 MBS4 on 8 devices (a100)" in output and "it fits" in output
    assert found["step_s"] == pytest.approx(sum(found["parts"].values())) and found["fits"]
    ranks = planner.ranks(planner.read(OWN, 8, "cuda"))
    assert found["memory_bytes"] == max(rank.total for rank in ranks) == sum(found["memory_parts"].values())
    assert found["budget_bytes"] == 80 * 2**30 and found["reserve_bytes"] == 8 * 2**30
    # Torchrun's options say how many; nodes of two slow tensor parallelism down.
    monkeypatch.setattr(planner, "changes", lambda training: ())
    times = []
    for given in ([], ["--devices", "4x2"]):
        launched = ["torchrun", "--nproc-per-node", "8", *OWN, "--tensor-model-parallel-size", "4"]
        assert cli.main(["plan", "--this", "--device", "h100", *given, "--json", str(file), "--", *launched]) == 0
        times.append(json.loads(file.read_text())["step_s"])
    assert times[1] > 1.05 * times[0]
    capsys.readouterr()
    assert cli.main([*options, "--", *COMMAND, "--num-layers", "7", "--pipeline-model-parallel-size", "2"]) == 2
    assert "7 layers cannot be divided over 2 pipeline stages" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["42.94967296", "40GiB", "42.94967296GB", "0.04294967296 TB"])
def test_sizes_are_read_with_their_unit(size: str) -> None:
    assert training_command.memory_size(size) == pytest.approx(40 * 2**30)


@pytest.mark.parametrize("text", ["", "GB", "40XB", "-1", "nan", "1e9"])
def test_other_sizes_are_not(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="takes a size such as 80GB"):
        training_command.memory_size(text)


def test_the_commands_own_layout_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--devices", "8", "--device", "a100", "--count", "1", "--", *OWN]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if "TP" in line).startswith("own")
    three = [*COMMAND, "--tensor-model-parallel-size", "3"]
    assert cli.main(["plan", "--devices", "8", "--device", "a100", "--count", "1", "--", *three]) == 0
    assert "The command's own layout is not predicted: 8 ranks" in " ".join(capsys.readouterr().out.split())


def test_a_device_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    device, report = tmp_path / "mine.json", tmp_path / "this.json"
    options = ["plan", "--this", "--devices", "8", "--json", str(report)]
    times = {}
    for name, text in (("h100", ""), ("slow", '{"like": "h100-sxm", "flops": 2e13}'), ("same", "{}")):
        device.write_text(text)
        used = str(device) if text else name
        assert cli.main([*options, "--device", used, "--", *OWN]) == 0
        times[name] = json.loads(report.read_text())["step_s"]
    assert times["same"] == times["h100"] < 0.8 * times["slow"]
    for text, message in (('{"flop": 1}', "flop"), ('{"flops": "fast"}', "flops"), ('{"like": "tpu"}', "like")):
        device.write_text(text)
        capsys.readouterr()
        assert cli.main([*options, "--device", str(device), "--", *OWN]) == 2
        assert message in capsys.readouterr().err


@forked()
def test_auto_means_the_features_that_it_turns_on() -> None:
    words = [*OWN, "--mindspeed-lite-auto"]
    on = training_command.with_auto(words, 8, "npu")
    assert {"--use-fused-swiglu", "--use-fused-adamw", "--use-fused-cross-entropy"} <= {*on} and on.count("--bf16") == 1
    assert "--mindspeed-lite-auto" not in on and "--recompute-norm" not in on and on.count("--use-flash-attn") == 1
    assert "--bias-dropout-fusion" not in training_command.with_auto(words, 8, "cuda")


@matrix.whole
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
