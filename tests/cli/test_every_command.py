"""Every command without arguments, with `--help`, a missing file and work: piped, without colour, at two widths."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mindspeed_lite import cli
from mindspeed_lite.bench import calibration, report
from mindspeed_lite.cli import bench_ops, migrate
from mindspeed_lite.parallel.balance import record

GPT = (
    "torchrun --nproc-per-node 4 pretrain_gpt.py --num-layers 8 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 64 --bf16 --vocab-size 255 --global-batch-size 16 --micro-batch-size 1 --use-flash-attn "
    "--pipeline-model-parallel-size 4"
)
# What is typed after a command: a file that is not there, and work; commands whose work is long are stubbed.
MISSING = {
    "run": "none.py",
    "features": "none --diff --against none",
    "bench": "-- ./none.sh",
    "bench-ops": "--op none",
    "dryrun": "-- ./none.sh",
    "plan": f"--devices 8 --memory 40 --calibration none -- {GPT}",
    "links": "--json none/there",
    "calibrate": "--out none/there",
    "schedule": f"--trace none -- {GPT}",
    "balance": "none",
    "migrate": "none.sh",
    "doctor": "--selftest --out none/there",
}
WORK = {
    "run": "--help",
    "features": "quant_states",
    "bench": "--help",
    "bench-ops": "--list",
    "dryrun": "--help",
    "plan": f"--devices 8 --memory 40 --device a100 --count 3 --why PP8 -- {GPT}",
    "links": "--help",
    "calibrate": "--seconds 1",
    "schedule": f"--order all -- {GPT}",
    "balance": "load.jsonl",
    "migrate": "script.sh",
    "doctor": "--quick",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("work")
    (path / "none").write_text("")  # a file where a folder is wanted
    (path / "script.sh").write_text("torchrun pretrain_gpt.py --use-fused-swiglu --swap-attention --no-flag 3\n")
    header = record.LoadHeader(experts=4, topk=1, expert_parallel=2, replicas=1, decoder_layers=1, layers=(1,))
    record.append(path / "load.jsonl", [record.LoadStep(1, [4], [[1] * 4], [[2, 2]])], header)
    return path


@pytest.fixture
def work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("MINDSPEED_LITE_CACHE", str(folder))
    measured = {"operators": {"1": []}, "collectives": [], "device": "cpu", "seconds": 1.0}
    monkeypatch.setattr(calibration, "measure", lambda *given: measured)
    monkeypatch.setattr(bench_ops, "_measure", lambda *given: {"complete": False})
    monkeypatch.setattr(migrate, "_flags_of_megatron", lambda: ["--num-layers"])
    monkeypatch.setattr(report, "text", lambda *given: "its text: tests/bench/test_report.py\n")


# Wide screens by what was typed.
WIDE: dict[str, str] = {}


def shown(typed: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Standard output and error of a command; checks its lines."""
    monkeypatch.setenv("COLUMNS", str(columns))
    code = cli.main(shlex.split(typed))
    printed = capsys.readouterr()
    text = re.sub(r"\d\.\d(?=\s+s\b)", "0", printed.out + printed.err)  # what the search took
    assert code in (0, 1, 2, 130) and text and "Traceback" not in text and "\x1b" not in text
    logged = "mindspeed-lite run: error: "  # one line in a log, as of every training
    lines = [line for line in text.splitlines() if not line.endswith(" \\") and "|" not in line]
    lines = [line for line in lines if not line.startswith(logged)]
    assert not [line for line in lines if len(line) > columns], text
    return text


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("given", ["nothing", "help", "missing", "work", "wrong"])
@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_is_readable(
    name: str, given: str, columns: int, work: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = {"nothing": "", "help": "--help", "missing": MISSING[name], "work": WORK[name], "wrong": "--no-such-flag"}
    line = f"{name} {typed[given]}"
    narrow = shown(line, columns, monkeypatch, capsys).splitlines()
    words = [each for row in narrow if not row.startswith("rank ") for each in row.split()]  # not the drawing
    wide = WIDE[line] = WIDE.get(line) or shown(line, 200, monkeypatch, capsys)
    if given == "help":
        assert wide.startswith(f"usage: mindspeed-lite {name} ") and "\noptions:\n" in wide and "None" not in wide
    # A word of the narrow screen is one of the wide screen, or a part of one that is longer than half a line.
    known, long = set(wide.split()), [each for each in wide.split() if len(each) > columns // 2]
    broken = [each for each in words if each not in known and each != "\\" and not any(each in one for one in long)]
    assert not broken, (broken, wide)
