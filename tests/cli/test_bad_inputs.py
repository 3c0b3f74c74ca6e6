"""Every bad input ends with one clear line, its exit code, no files and no processes.

Commands run in this process; trainings in forked ones, and in interpreters of their own what a fork cannot show.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from mindspeed_lite import cli, error_exit
from mindspeed_lite.cli import migrate
from mindspeed_lite.parallel.balance import record
from tests.harness import document_data
from tests.harness.commands import command, python, without
from tests.harness.endings import Ending, endings
from tests.harness.processes import forked

GPT = "x.py --num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --bf16 --vocab-size 255"
PLANNED = "plan --devices 8 --memory 40 --device a100"
THIS = "plan --this --device h100"
LAYOUT = f"{GPT} --global-batch-size 16"
TRAIN = f"{LAYOUT} --micro-batch-size 1"
FOUR = f"torchrun --nproc-per-node 4 {TRAIN} --pipeline-model-parallel-size 4"
BENCH = "bench --out out"
# What is typed, and words of the line.
COMMANDS: list[tuple[str, ...]] = [
    ("benhc", "no command 'benhc'", "did you mean bench"),
    ("features use_flash_atn", "did you mean use_flash_attn"),
    ("features quant_states --swap-attention", "one feature at a time"),
    ("features --diff", "--diff wants the name"),
    ("features quant_states --against empty", "no megatron/core"),
    ("bench", "no command to read"),
    ("bench torchrun --nproc-per-node 2 x.py", "write it after `--`"),
    ("plan x.py", "plan -- torchrun"),
    (f"{BENCH} -- torchrnu", "no program 'torchrnu'"),
    (f"{BENCH} --repeats 0 -- true", "--repeats", "at least 1, not '0'"),
    (f"{BENCH} --features rmsnorm -- true", "no feature 'rmsnorm'"),
    (f"{BENCH} --each --all -- true", "--all", "not allowed with"),
    ("bench --out file/out -- true", "--out", "file/out"),
    ("bench-ops --device npu", "--device"),
    (f"schedule -- torchrun --nproc-per-node gpu {GPT}", "--nproc-per-node", "--world-size N"),
    (f"{THIS} -- torchrun --nproc-per-node gpu {GPT}", "--nproc-per-node", "--devices N"),
    (f"{THIS} -- torchrun --nproc-per-node=3 {TRAIN} --tensor-model-parallel-size 2", "3 ranks"),
    (f"{THIS} -- x.py --seq-length 4", "--num-layers, --hidden-size", "--micro-batch-size are not in the command"),
    (f"{THIS} -- x.py --num-layers many", "--num-layers", "many"),
    (f"{THIS} -- {GPT} --fp8-format e4m3", "--fp8-format e4m3", "not predicted"),
    (f"memory -- {TRAIN}", "plan --this", "dryrun"),
    ("doctor now", "unrecognized arguments: now"),
    ("doctor -- python none.py", "there is no script none.py"),
    ("dryrun -- python none.py", "there is no script none.py"),
    ("doctor -- echo hello", "starts no torchrun", "hello"),
    ("doctor --selftest -- python none.py", "takes no command"),
    ("doctor --quick", "--quick belongs to --selftest"),
    ("doctor --selftest --quick --out none/x.json", "none/x.json: there is no such folder"),
    (f"{PLANNED.replace('a100', 'abacus')} -- {LAYOUT}", "--device abacus", "h100-sxm"),
    (f"{PLANNED} --why QQ2 -- {LAYOUT}", "--why", "'QQ2'"),
    (f"plan --devices 2 --memory 1 --calibration none.json -- {LAYOUT}", "there is no file none.json", "calibrate"),
    (f"{PLANNED} --reserve 40 -- {LAYOUT}", "--reserve 40.0 GB", "less than that"),
    (f"{PLANNED} --devices 11 -- {LAYOUT}", "no layout of 11 devices", "change --devices"),
    (f"{PLANNED} --plot picture -- {LAYOUT}", "--plot picture", ".png"),
    (f"{PLANNED} -- {GPT}", "--global-batch-size is not in the command"),
    (f"{PLANNED} --links none.json -- {LAYOUT}", "--links none.json: cannot be read"),
    (f"plan --devices 8 --device h100 --links file -- {LAYOUT}", "--links file: is not JSON"),
    ("links", "there is one: torchrun"),
    ("links --plot none/x.png", "--plot", "none/x.png"),
    ("run --rank-order", "--rank-order needs a value"),
    ("run --rank-order none.json file", "start the training with torchrun"),
    ("calibrate --processes 5000", "--processes"),
    ("calibrate --out /proc/x", "--out", "/proc/x", "cannot be written"),
    (f"schedule --order zigzag -- {FOUR}", "'zigzag'", "zb-h1"),
    (f"schedule --order dualpipev -- {FOUR} --global-batch-size 4", "at least 7 micro-batches, not 4"),
    (f"schedule --order nowhere.py:f -- {FOUR}", "nowhere.py"),
    (f"schedule --times 1,x,2 -- {FOUR}", "--times", "F,B,W"),
    (f"schedule --trace none -- {FOUR}", "none", "cannot be read"),
    (f"schedule --order interleaved+recompute-in-advance -- {FOUR}", "--recompute-granularity full"),
    (f"schedule -- {FOUR} --num-layers 6", "--num-layers 6"),
    (f"schedule -- {FOUR} --pipeline-schedule", "--pipeline-schedule has no value"),
    (f"schedule -- {FOUR} --pipeline-schedule zb-auto --pipeline-schedule-max-live x", "--pipeline-schedule-max-live"),
    ("balance", "FILE"),
    ("balance none", "none: cannot be read: No such file"),
    ("balance loss.jsonl", "want the header"),
    ("balance loss.jsonl --seq-length 8", "--seq-length is about sequence lengths"),
    ("balance load.jsonl --ranks 3", "3 ranks cannot hold 4 experts"),
    ("balance data.idx", "is no index of a Megatron data set"),
    ("balance data.idx --last 3", "--last is about loads of experts"),
    ("balance set.idx --ranks 5", "48 samples are no micro-batches of 1 for each of 5 ranks"),
    ("migrate", "no script given"),
    ("migrate none.sh", "none.sh cannot be read: No such file or directory"),
    ("migrate --shim x file", "--shim takes a folder and nothing else"),
    ("migrate script.sh -o none/out.sh", "-o none/out.sh: cannot be written: No such file or directory"),
]
# Arguments of a training that no model has.
ABSURD = [
    ("--num-layers 1000000000", "--num-layers 1000000000: more than 1,000"),
    ("--seq-length 99999999999999999999", "--seq-length 99999999999999999999: more than 1,000,000,000,000"),
    (f"--hidden-size {'9' * 5000}", "--hidden-size is a number, not '9999"),
    ("--hidden-dropout nan", "--hidden-dropout is at least 0, not nan"),
    ("--num-experts 4 --moe-aux-loss-coeff some", "--moe-aux-loss-coeff is a number, not 'some'"),
    ("--num-experts 4 --moe-layer-freq [1]*99999999999", "--moe-layer-freq is a number or a list"),
    (f"--num-experts 4 --moe-layer-freq {'(' * 500}1{')' * 500}", "--moe-layer-freq is a number or a list"),
    ("--moe-zero-memory some", "--moe-zero-memory some: it is one of disable, level0, level1"),
    ("--normalization X", "--normalization X: it is one of LayerNorm, RMSNorm"),
    ("--group-query-attention --num-query-groups 3", "--num-attention-heads 4 cannot be divided by"),
    ("--num-attention-heads 7", "--hidden-size 64 cannot be divided by --num-attention-heads 7"),
    ("--num-experts 4 --moe-router-topk 5", "--moe-router-topk 5 of --num-experts 4"),
]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(migrate, "_flags_of_megatron", lambda: None)
    (tmp_path / "empty").mkdir()
    (tmp_path / "loss.jsonl").write_text('{"loss": 1}\n')
    header = record.LoadHeader(experts=4, topk=1, expert_parallel=2, replicas=1, decoder_layers=1, layers=(1,))
    record.append(tmp_path / "load.jsonl", [record.LoadStep(1, [4], [[1] * 4], [[2, 2]])], header)
    document_data.write(tmp_path / "set", 9, document_data.GeneratedLengths())
    for name in ("file", "data.idx", "script.sh"):
        (tmp_path / name).write_text("")
    return tmp_path


def _refused(typed: str, words: Iterable[str], work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in work.rglob("*")}
    code = cli.main(shlex.split(typed))
    printed = capsys.readouterr()
    assert code == 2 and printed.out == "" and printed.err.count("\n") == 1, (typed, printed)
    assert printed.err.startswith("mindspeed-lite") and len(printed.err) < 1500, printed.err
    assert all(word.lower() in printed.err.lower() for word in words), (typed, printed.err)
    assert {path: path.stat().st_mtime_ns for path in work.rglob("*")} == before


@pytest.mark.parametrize("given", COMMANDS, ids=lambda each: each[0][:60])
def test_a_command(given: tuple[str, ...], work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed, *words = given
    _refused(typed, words, work, capsys)


def test_an_absurd_training(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, word in ABSURD:
        _refused(f"{PLANNED} -- {TRAIN} {flags}", [word], work, capsys)


@pytest.mark.parametrize(
    ("typed", "name", "value"),
    [(f"{BENCH} -- true", "MINDSPEED_LITE_DISABLE", "1"), (f"schedule -- {GPT}", "WORLD_SIZE", "many")],
)
def test_a_variable(
    typed: str, name: str, value: str, work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    _refused(typed, [name], work, capsys)


MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 1 --bf16 --tokenizer-type NullTokenizer --vocab-size 255 "
    "--train-iters 1 --lr 1e-3 --normalization RMSNorm"
).split()
# Refused after parsing, in one process.
TRAININGS = [
    ("--data-path a --context-parallel-size 2", ["--context-parallel-size 2: needs 2 processes", "no a.idx"]),
    ("--data-path none/text", ["--data-path none/text", "no none/text.idx"]),
    ("--data-path half", ["no half.bin"]),
    ("--data-args-path none.txt", ["--data-args-path none.txt", "no such file"]),
    ("--mock-data --transformer-impl transformer_engine", ["transformer_engine needs"]),
    ("--mock-data --mindspeed-lite-report none/r.json", ["cannot be written there"]),
    ("--mock-data --use-fused-layernorm --mindspeed-lite-strict", ["use_fused_layernorm"]),
]
# Refused by the parser, of which every rank has one: two ranks under a launcher's store.
PARSED = [
    ("--no-such-thing", ["unrecognized argument --no-such-thing"]),
    ("--virtual-optimizer much", ["takes all, or a number of GiB", "not 'much'"]),
    ("--yaml-cfg none.yaml", ["--yaml-cfg", "no file none.yaml"]),
    ("--auto-settings", ["--auto-settings (done", "Instead: "]),
]

# Removed by the process that made it, not by the forks.
_SCRATCH = tempfile.TemporaryDirectory(prefix="bad-inputs-")


def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="bad-input-", dir=_SCRATCH.name)) / "work"
    (folder / "empty").mkdir(parents=True)
    for name in ("file", "data.idx", "data.bin", "half.idx"):
        (folder / name).write_text("")
    return folder


def _check(ending: Ending, words: list[str], code: int = 2) -> None:
    last = ending.err[-1] if ending.err else ""
    assert ending.code == code, "\n".join([*ending.out[-5:], *ending.err[-15:]])
    assert all(word.lower() in last.lower() for word in words), last
    assert "Traceback" not in "\n".join(ending.err)
    assert ending.files == set() and ending.processes == []


def _arguments(given: str) -> None:
    """What an unmodified script with the import line does first."""
    from megatron.training.arguments import parse_args, validate_args

    import mindspeed_lite.megatron_adaptor  # noqa: F401

    sys.argv[:] = ["script.py", *MODEL, *given.split()]
    validate_args(parse_args(), {})


@forked("megatron")
def test_every_training() -> None:
    importlib.import_module("mindspeed_lite.runtime").catalogue()  # before the forks
    for given, words in TRAININGS:
        _check(endings(lambda rank, given=given: _arguments(given), _folder())[0], words)
    (ending,) = endings(
        lambda rank: _arguments("--mock-data --mindspeed-lite-verify -1"), _folder(), {"MINDSPEED_LITE_TRACEBACK": "1"}
    )
    assert ending.code == 2 and "Traceback (most recent call last):" in ending.err
    assert ending.err[-1].startswith("mindspeed_lite.engine.errors.OptionError: --mindspeed-lite-verify")


@forked("megatron")
def test_every_command_line_that_the_parser_rejects_is_one_line_of_all_ranks() -> None:
    importlib.import_module("mindspeed_lite.runtime").catalogue()  # before the forks
    for given, words in PARSED:

        def body(rank: int, given: str = given) -> None:
            os.environ["RANK"] = str(rank)
            _arguments(f"--mock-data {given}")

        first, second = endings(body, _folder(), {"WORLD_SIZE": "2"}, ranks=2)
        _check(first, ["script.py: error: ", *words])
        assert second.code == 2 and second.out == second.err == [], second.err


def _ranks(kinds: dict[int, str], then: str = "") -> list[Ending]:
    """Two ranks that raise after the process group is made: torch.distributed has its own hook around ours then."""

    def body(rank: int) -> None:
        import torch
        import torch.distributed as dist

        import mindspeed_lite.megatron_adaptor
        from mindspeed_lite.engine import FallbackError

        os.environ["RANK"] = str(rank)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        if then == "undone":
            mindspeed_lite.disable()
        if rank in kinds:
            raise {"ours": FallbackError, "theirs": ValueError}[kinds[rank]]("feature `x` fell back.")
        dist.all_reduce(torch.ones(1))

    folder = _folder()
    store = folder.parent / "store"
    return endings(body, folder, {"WORLD_SIZE": "2"}, ranks=2)


@pytest.mark.parametrize("rank", [0, 1])
@forked("megatron")
def test_an_error_of_one_rank_is_printed_once_and_the_other_ends_quietly(rank: int) -> None:
    found = _ranks({rank: "ours"})
    where = f" on rank {rank}" if rank else ""
    assert found[rank].err[-1] == f"mindspeed_lite: error{where}: feature `x` fell back."
    assert [each.code for each in found] == [2, 2]
    assert not any("Traceback" in line for each in found for line in each.err), found[1 - rank].err


@forked("megatron")
def test_what_is_not_ours_keeps_its_traceback() -> None:
    first, _ = _ranks({0: "theirs", 1: "theirs"})
    assert first.code == 1 and first.err[-1].endswith("ValueError: feature `x` fell back.")
    first, _ = _ranks({0: "ours", 1: "ours"}, then="undone")
    assert first.code == 1 and any("Traceback" in line for line in first.err), "undo takes the hook back"


@forked("megatron")
def test_a_hook_that_was_there_is_called_and_comes_back() -> None:
    from mindspeed_lite.engine import EngineError

    seen: list[str] = []
    before = sys.excepthook = lambda kind, error, trace: seen.append(str(error))
    error_exit.install()
    error_exit.install()
    for error in (EngineError("ours"), KeyError("theirs")):
        try:
            sys.excepthook(type(error), error, None)
        except SystemExit as ending:
            assert ending.code == 2 and seen == ["ours"]
    assert seen == ["ours", "'theirs'"]
    error_exit.remove()
    assert sys.excepthook is before


@forked("megatron")
def test_an_interrupt_of_bench() -> None:
    folder = _folder()
    begun = folder / "out" / "runs" / "01-off" / "plan"
    what = [*BENCH.split(), "--", "sleep", "500"]  # longer than what outlives it is given
    (ending,) = endings(lambda rank: cli.main(what), folder, interrupt_when=begun.exists)
    _check(ending, ["ended before the first run was finished"], 130)

    def while_it_imports(rank: int) -> int:
        def import_module(name: str) -> None:
            raise KeyboardInterrupt

        importlib.import_module = import_module  # type: ignore[assignment]
        return cli.main(["bench", "--", "true"])

    _check(endings(while_it_imports, _folder())[0], ["mindspeed-lite bench: error: interrupted"], 130)


# Interpreters of their own, for what a fork cannot show.


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("torch", "PyTorch is not installed: pip install torch"),
        ("megatron", "megatron.core cannot be found"),
    ],
)
def test_a_missing_dependency_of_a_script_with_the_import_line(tmp_path: Path, missing: str, words: str) -> None:
    (tmp_path / "script.py").write_text("import mindspeed_lite.megatron_adaptor\nimport megatron.core")
    keywords = without(tmp_path, missing)
    run = python("script.py", cwd=tmp_path, MINDSPEED_LITE_DEVICE="cpu", **keywords)
    assert run.returncode == 2 and words in run.stderr.splitlines()[-1] and "Traceback" not in run.stderr, run.stderr


@pytest.mark.parametrize("what", [["bench-ops"], ["doctor", "--selftest"]])
def test_a_missing_torch_of_a_command(tmp_path: Path, what: list[str]) -> None:
    run = command(*what, cwd=tmp_path, **without(tmp_path, "torch"))
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and "torch" in run.stderr, run.stderr


TOGETHER = """\
import mindspeed_lite.megatron_adaptor
import torch
import torch.distributed as dist
from mindspeed_lite.engine import FallbackError
dist.init_process_group("gloo")
raise FallbackError("feature `x` fell back.")
"""


def test_under_torchrun_one_line_is_the_last_of_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TOGETHER)
    run = python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "mindspeed_lite", "run", "script.py"),
        cwd=tmp_path,
        MINDSPEED_LITE_DEVICE="cpu",
        OMP_NUM_THREADS="1",
    )
    # torchrun's own lines and its summary follow.
    lines = re.split(r"^[EW]\d{4} ", run.stderr, maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    assert lines[-1] == "mindspeed_lite: error: feature `x` fell back." and "Traceback" not in "".join(lines), (
        run.stderr
    )
    assert run.stderr.count("fell back") == 1 and "exitcode  : 2" in run.stderr
