"""`mindspeed-lite memory`: usage, the table, JSON, and with a real run predicted and measured."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_lite import cli
from mindspeed_lite.bench.harness import Process
from mindspeed_lite.bench.memory_run import compare
from mindspeed_lite.cli import memory, training_command
from mindspeed_lite.planner import ranks, read
from tests.harness import matrix
from tests.harness.checkouts import ROOT
from tests.harness.commands import command, python

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


def test_a_flag_that_looks_misspelt_is_told_and_the_rest_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["memory", "--", "python", *MODEL, "--use-flash-atn"]) == 0
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--use-flash-atn" in error and "--use-flash-attn" in error


def test_mindspeeds_flags_are_translated_first_and_what_is_not_counted_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predicted = []
    for flags in ("--moe-intermediate-size 64", "--moe-ffn-hidden-size 64 --post-norm --softmax-type x --log-timers 1"):
        command = ["python", "x.py", *MODEL, "--num-experts", "8", *flags.split()]
        assert cli.main(["memory", "--json", str(tmp_path / "x.json"), "--", *command]) == 0
        predicted.append((tmp_path / "x.json").read_text())
    assert predicted[0] == predicted[1]
    assert capsys.readouterr().err == (
        "mindspeed-lite: not counted: Megatron does not build Gemma 2 (soft-capping, norms after each block, windows "
        "in every second layer): --post-norm\nmindspeed-lite: not known here, not counted: --softmax-type\n"
    )


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


def test_a_large_model_is_predicted_without_torch(tmp_path: Path) -> None:
    words = ["memory", "--world-size", "1024", "--explain", "--json", str(tmp_path / "x.json"), "--", "python", *LARGE]
    code = (
        "import sys\nfrom mindspeed_lite.cli import main\n"
        f"code = main({words!r})\n"
        "assert not {'torch', 'numpy', 'megatron'} & set(sys.modules)\nsys.exit(code)"
    )
    run = python("-c", code, COLUMNS="120")
    assert run.returncode == 0, run.stderr
    assert "1024 ranks, TP 8 x PP 8 x DP 16, sequence parallel" in run.stdout
    rows = [line.split() for line in run.stdout.splitlines()]
    assert [row[0] for row in rows if row and "-" in row[0] and row[0][0].isdigit()][:2] == ["0-127", "128-255"]
    assert any(row[:2] == ["--use-flash-attn", "on"] for row in rows)
    assert any(row[:2] == ["--use-fused-rmsnorm", "off"] for row in rows) is False  # on CUDA it changes nothing
    report = json.loads((tmp_path / "x.json").read_text())
    first = report["stages"][0]
    assert first["ranks"] == [0, 127] and first["micro_batches_kept"] == 8
    # A stage of ten layers in eight parts, and an eighth of the embedding.
    layer = 8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672
    assert first["parameters"]["total"] == 10 * (layer // 8 + 2 * 8192) + 129024 // 8 * 8192
    assert first["bytes"]["activations"] == sum(line["bytes"] for line in first["activations"])


def test_alike_stages_share_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--pipeline-model-parallel-size 4 --global-batch-size 2 --num-layers 8".split()
    assert cli.main(["memory", "--world-size", "4", "--", *MODEL, *words]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line.split()[:2] for line in lines if line[:1].isdigit() and "-" in line.split()[0]] == [["1-2", "1-2"]]


@pytest.mark.parametrize(("factor", "off"), [(0.96, False), (0.94, True), (1.06, True)])
def test_more_than_five_percent_of_more_than_a_megabyte_is_off(
    factor: float, off: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    predicted = ranks(read(MODEL, 1, "cpu"))
    counted = {**predicted[0].categories, "host": 0}
    counted["activations"] = int(counted["activations"] / factor)
    steps = [{"peak_memory_bytes": 10**9}]
    process = Process(0, {"memory_kind": "the process"}, steps, end={"memory": counted})
    compared = compare(predicted, [process])
    assert [each.category for each in compared if each.is_off] == (["activations"] if off else [])
    assert not replace(compared[0], predicted=500_000, measured=900_000).is_off
    memory.show_comparison(compared, [process])
    text = capsys.readouterr().out
    assert ("1 of 4 categories" in text) == off and ("all within 5 %" in text) == (not off)


@matrix.whole
def test_a_command_is_measured_in_processes_of_its_own(tmp_path: Path) -> None:
    """The user's whole way: torchrun, two ranks, features by flag, a table and an exit code."""
    report = tmp_path / "report.json"
    words = [
        "--lr", "1e-3", "--mock-data", "--log-interval", "1", "--eval-iters", "0", "--eval-interval", "1000",
        "--train-iters", "10", "--tensor-model-parallel-size", "2", "--sequence-parallel", "--use-flash-attn",
        "--use-fused-rmsnorm", "--disable-jit-fuser",
    ]  # fmt: skip
    run = command(
        "memory", "--measure", "--json", report, "--", sys.executable, "-m", "torch.distributed.run",
        "--nproc-per-node", "2", ROOT / "examples" / "pretrain_gpt.py", *MODEL, *words,
        timeout=400, OMP_NUM_THREADS="1", MINDSPEED_LITE_DEVICE="cpu",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:] + run.stdout
    assert "all within 5 %" in run.stdout
    compared = json.loads(report.read_text())["compared"]
    assert {each["rank"] for each in compared} == {0, 1}
    assert all(abs(each["deviation"]) < 0.01 for each in compared)


@matrix.whole
def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import megatron.core\nraise SystemExit('no data here')\n")
    run = command("memory", "--measure", "--", sys.executable, script, *MODEL)
    assert run.returncode == 1 and "no data here" in run.stderr
    assert run.stderr.splitlines()[-1].startswith("mindspeed-lite memory: error: ")
