"""A training command as `plan` and `schedule` read it: its ranks, MindSpeed's flags, words that are not known."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from mindspeed_lite import cli, planner
from mindspeed_lite.cli import terminal, training_command
from mindspeed_lite.planner import traces
from tests.harness.checkouts import ROOT

MODEL = (
    "--num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --micro-batch-size 2 --global-batch-size 4 --bf16 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 "
    "--attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 2047"
).split()
LARGE = (
    "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 8 --seq-length 8192 --micro-batch-size 1 --global-batch-size 1024 --bf16 --swiglu "
    "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope --vocab-size 128256 "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --tensor-model-parallel-size 8 "
    "--pipeline-model-parallel-size 8 --sequence-parallel --use-distributed-optimizer --use-flash-attn"
).split()
THIS = ["plan", "--this", "--device", "h100"]


def test_the_command_that_went_names_those_that_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["memory", "--explain", "--", "python", *MODEL]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "plan --this --device h100 -- COMMAND" in error and "dryrun -- COMMAND" in error


def test_a_flag_that_looks_misspelt_is_told_and_the_rest_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*THIS, "--", "python", *MODEL, "--use-flash-atn"]) == 0
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--use-flash-atn" in error and "--use-flash-attn" in error


def test_progress_while_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(terminal, "progress", lambda what: nullcontext(shown.append(what)))
    monkeypatch.setattr(planner, "changes", lambda training: ())
    assert cli.main([*THIS, "--", "python", "x.py", *MODEL, "--mindspeed-lite-auto", "--global-batch-size", "2"]) == 0
    assert shown == ["reading the declarations of features", "tracing Megatron's layers"]


def test_mindspeeds_flags_are_translated_first_and_what_is_not_counted_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "changes", lambda training: ())
    predicted = []
    for flags in ("--moe-intermediate-size 64", "--moe-ffn-hidden-size 64 --post-norm --made-up x --log-timers 1"):
        command = ["python", "x.py", *MODEL, "--num-experts", "8", *flags.split()]
        assert cli.main([*THIS, "--json", str(tmp_path / "x.json"), "--", *command]) == 0
        predicted.append((tmp_path / "x.json").read_text())
    assert predicted[0] == predicted[1]
    assert capsys.readouterr().err == (
        "mindspeed-lite: not counted: Megatron does not build Gemma 2 (soft-capping, norms after each block, windows "
        "in every second layer): --post-norm\nmindspeed-lite: not known here, not counted: --made-up\n"
    )


def test_flags_that_no_trace_has_are_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "refused", {"--attention-output-gate": "it needs a GPU"})
    monkeypatch.setattr(planner, "changes", lambda training: ())
    line = "--attention-output-gate: not in the predicted memory, as Megatron does not build it here: it needs a GPU"
    for command in (THIS, ["schedule", "--world-size", "1"]):
        assert cli.main([*command, "--", "python", "x.py", *MODEL]) == 0
        assert line in " ".join(capsys.readouterr().out.split()), command


@pytest.mark.parametrize(
    ("words", "environment", "ranks"),
    [
        (["torchrun", "--nproc-per-node", "4", "--nnodes", "2"], {}, 8),
        (["torchrun", "--nproc_per_node=4"], {}, 4),
        (["python"], {"WORLD_SIZE": "16"}, 16),
        (["python"], {}, 1),
    ],
)
def test_how_many_ranks_there_are(words, environment, ranks, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert training_command.world_size(words) == ranks


def test_a_large_model_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*THIS, "--devices", "1024", "--json", str(tmp_path / "x.json"), "--", "python", *LARGE]) == 0
    output = capsys.readouterr().out
    assert "TP8 PP8 MBS1 on 1024 devices" in output
    rows = [line.split() for line in output.splitlines()]
    assert [row[0] for row in rows if row and "-" in row[0] and row[0][0].isdigit()][:2] == ["0-127", "128-255"]
    assert any(row[:2] == ["--use-flash-attn", "on"] for row in rows)
    assert any(row[:2] == ["--use-fused-rmsnorm", "off"] for row in rows) is False  # on CUDA it changes nothing
    report = json.loads((tmp_path / "x.json").read_text())
    first = report["stages"][0]
    assert first["ranks"] == [0, 127] and first["kept"] == 8
    assert sum(line["bytes"] for line in first["lines"]) == report["memory_parts"]["activations"]
    assert "--use-flash-attn" in {each["flag"] for each in report["features"]}


def test_without_megatron_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setenv("MINDSPEED_LITE_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(bare))
    for options in (["--this"], []):
        traces._server.cache_clear()
        words = [*MODEL, "--seq-length", "96", "--global-batch-size", "4", "--use-flash-attn"]
        assert cli.main(["plan", *options, "--devices", "2", "--device", "h100", "--", "python", *words]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "No module named" in error and "install torch and megatron-core" in error
    traces._server.cache_clear()


def test_alike_stages_share_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split("--pipeline-model-parallel-size 4 --global-batch-size 2 --num-layers 8")
    assert cli.main([*THIS, "--devices", "4", "--", *MODEL, *words]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line.split()[:2] for line in lines if line[:1].isdigit() and "-" in line.split()[0]] == [["1-2", "1-2"]]
