"""Every bad input ends with one clear line, its exit code, and nothing left behind; real processes, forked.

A case: what is run, words of the last line, and the exit code.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from mindspeed_lite import error_exit
from tests.harness import matrix
from tests.harness.commands import command, environment, python, without
from tests.harness.endings import Ending, endings
from tests.harness.processes import forked

NO_COMMAND = "no command to"
BENCH = ["bench", "--out", "out"]
SELFTEST = ["doctor", "--selftest", "--quick"]
COMMANDS: list[tuple[str, list[str], list[str]]] = [
    ("an unknown command", ["benhc"], ["no command 'benhc'", "did you mean bench"]),
    ("an unknown option", ["--verbose"], ["no option '--verbose'"]),
    ("run: nothing", ["run"], ["no script given"]),
    ("run: a script that is not there", ["run", "train.py"], ["no script 'train.py'"]),
    ("run: an option that it has not", ["run", "--fast", "script.py"], ["no option '--fast'"]),
    ("run: -m without a module", ["run", "-m"], ["-m needs a module"]),
    ("run: a module that is not there", ["run", "-m", "no_such.module"], ["no module 'no_such.module'"]),
    ("run: --allocator without a value", ["run", "--allocator"], ["needs a value"]),
    ("run: an unknown allocator", ["run", "--allocator", "jemalloc", "script.py"], ["jemalloc", "keep or system"]),
    ("run: a folder without a program", ["run", "empty"], ["no __main__.py"]),
    ("features: an unknown name", ["features", "use_flash_atn"], ["did you mean use_flash_attn"]),
    ("features: an unknown flag", ["features", "--use-flash-atn"], ["did you mean use_flash_attn"]),
    ("features: two", ["features", "quant_states", "--swap-attention"], ["one feature at a time"]),
    ("features: --diff of nothing", ["features", "--diff"], ["--diff wants the name"]),
    ("features: a folder without Megatron", ["features", "quant_states", "--against", "empty"], ["no megatron/core"]),
    ("bench: no command", ["bench"], [NO_COMMAND]),
    ("bench: nothing after --", ["bench", "--each", "--"], [NO_COMMAND]),
    ("bench: a program that is not there", [*BENCH, "--", "torchrnu"], ["no program 'torchrnu'"]),
    ("bench: no repeats", [*BENCH, "--repeats", "0", "--", "true"], ["--repeats is at least 1"]),
    ("bench: text for a number", [*BENCH, "--repeats", "two", "--", "true"], ["--repeats", "'two'"]),
    ("bench: negative warm-up", [*BENCH, "--warmup", "-1", "--", "true"], ["--warmup is at least 0"]),
    ("bench: one step", [*BENCH, "--steps", "1", "--", "true"], ["--steps is at least 2"]),
    ("bench: no time", [*BENCH, "--timeout", "0", "--", "true"], ["--timeout", "above 0"]),
    ("bench: an unknown feature", [*BENCH, "--features", "rmsnorm", "--", "true"], ["no feature 'rmsnorm'"]),
    ("bench: an unknown feature beside", [*BENCH, "--beside", "flash", "--", "true"], ["no feature 'flash'"]),
    ("bench: two modes", [*BENCH, "--each", "--all", "--", "true"], ["--all", "not allowed with"]),
    ("bench: an unknown option", [*BENCH, "--fast", "--", "true"], ["--fast"]),
    ("bench: a folder that cannot be made", ["bench", "--out", "file/out", "--", "true"], ["--out", "file/out"]),
    ("bench: an unknown allocator", [*BENCH, "--allocator", "x", "--", "true"], ["--allocator", "'x'"]),
    ("bench-ops: an unknown operator", ["bench-ops", "--op", "rmsnorm"], ["--op", "did you mean rms_norm"]),
    ("bench-ops: whose shape", ["bench-ops", "--shapes", "32x16"], ["--shapes", "add --op"]),
    ("bench-ops: not its shape", ["bench-ops", "--op", "rms_norm", "--shapes", "axb"], ["'axb' is no shape"]),
    ("bench-ops: another's shape", ["bench-ops", "--op", "rms_norm", "--shapes", "rope:1"], ["not among the --op"]),
    ("bench-ops: an unknown dtype", ["bench-ops", "--dtype", "int8"], ["--dtype", "int8"]),
    ("bench-ops: a device that is not there", ["bench-ops", "--device", "npu"], ["--device"]),
    ("bench-ops: no earlier report", ["bench-ops", "--op", "l2norm", "--compare", "none.json"], ["--compare"]),
    ("bench-ops: no report", ["bench-ops", "--op", "l2norm", "--compare", "file"], ["--compare"]),
    ("bench-ops: a place that cannot be written", ["bench-ops", "--op", "l2norm", "--out", "file"], ["--out"]),
    ("memory: no command", ["memory"], [NO_COMMAND]),
    ("memory: no such folder", ["memory", "--json", "none/x.json", "--", "python"], ["--json", "no such folder"]),
    ("memory: a folder", ["memory", "--json", "empty", "--", "python"], ["--json empty", "it is a folder"]),
    ("memory: not writable", ["memory", "--json", "/proc/x.json", "--", "python"], ["cannot be written"]),
    ("memory: no ranks", ["memory", "--world-size", "0", "--", "python"], ["--world-size is at least 1"]),
    ("memory: as many as there are", ["memory", "--", "torchrun", "--nproc-per-node", "gpu", "x"], ["--world-size N"]),
    ("memory: an unknown device", ["memory", "--device", "tpu", "--", "python"], ["--device", "tpu"]),
    ("memory: no layers", ["memory", "--", "python", "x.py"], ["--num-layers"]),
    ("memory: text for a number", ["memory", "--", "python", "x.py", "--num-layers", "many"], ["--num-layers", "many"]),
    ("doctor: an option of the self-test", ["doctor", "--quick"], ["--quick belongs to --selftest"]),
    ("doctor: both tests", ["doctor", "--selftest", "--npu-selftest"], ["not allowed with"]),
    ("doctor: no time", ["doctor", "--timeout", "0"], ["number of seconds"]),
    ("doctor: a report in no folder", [*SELFTEST, "--out", "none/x.json"], ["--out none/x.json", "no such folder"]),
    ("doctor: a report that cannot be written", [*SELFTEST, "--out", "/proc/x"], ["/proc/x", "cannot be written"]),
]  # fmt: skip
VARIABLES: list[tuple[str, list[str], dict[str, str], list[str]]] = [
    ("an unknown device", ["run", "script.py"], {"MINDSPEED_LITE_DEVICE": "tpu"}, ["MINDSPEED_LITE_DEVICE", "tpu"]),
    ("an unknown allocator", ["run", "script.py"], {"MINDSPEED_LITE_ALLOCATOR": "x"}, ["MINDSPEED_LITE_ALLOCATOR=x"]),
    ("bench of what is disabled", [*BENCH, "--", "true"], {"MINDSPEED_LITE_DISABLE": "1"}, ["MINDSPEED_LITE_DISABLE"]),
    ("an unknown matmul", ["run", "script.py"], {"MINDSPEED_LITE_CPU_MATMUL": "x"}, ["MINDSPEED_LITE_CPU_MATMUL=x"]),
]

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 1 --bf16 --tokenizer-type NullTokenizer --vocab-size 255 "
    "--train-iters 1 --lr 1e-3 --normalization RMSNorm"
).split()
MOCK = ["--mock-data"]
TRAININGS: list[tuple[str, list[str], list[str]]] = [
    ("too few processes", [*MOCK, "--context-parallel-size", "2"], ["--context-parallel-size 2: needs 2 processes"]),
    ("data that is not there", ["--data-path", "none/text"], ["--data-path none/text", "no none/text.idx"]),
    ("the second of a blend", ["--data-path", "0.5", "data", "0.5", "none"], ["--data-path none", "none.idx"]),
    ("half a data set", ["--data-path", "half"], ["no half.bin"]),
    ("data for training alone", ["--train-data-path", "none"], ["--train-data-path none"]),
    ("a list of data", ["--data-args-path", "none.txt"], ["--data-args-path none.txt", "no such file"]),
    ("Transformer Engine", [*MOCK, "--transformer-impl", "transformer_engine"], ["transformer_engine needs"]),
    ("a report in no folder", [*MOCK, "--mindspeed-lite-report", "none/r.json"], ["cannot be written there"]),
    ("a report over a folder", [*MOCK, "--mindspeed-lite-report", "empty"], ["--mindspeed-lite-report empty"]),
    ("fewer than no calls", [*MOCK, "--mindspeed-lite-verify", "-1"], ["--mindspeed-lite-verify", "not -1"]),
    ("an unknown form of the moments", [*MOCK, "--quant-states", "int4"], ["--quant-states", "int4"]),
    ("what does not apply", [*MOCK, "--use-fused-layernorm", "--mindspeed-lite-strict"], ["use_fused_layernorm"]),
    ("one memory", [*MOCK, "--swap-attention", "--mindspeed-lite-strict"], ["swap_attention", "one memory"]),
]  # fmt: skip


# Removed by the process that made it, not by the forks.
_SCRATCH = tempfile.TemporaryDirectory(prefix="bad-inputs-")


def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="bad-input-", dir=_SCRATCH.name)) / "work"
    (folder / "empty").mkdir(parents=True)
    (folder / "script.py").write_text("print('started')\n")
    for name in ("file", "data.idx", "data.bin", "half.idx"):
        (folder / name).write_text("")
    return folder


def _check(ending: Ending, words: list[str], code: int = 2, started: bool = False) -> None:
    last = ending.err[-1] if ending.err else ""
    assert ending.code == code, "\n".join([*ending.out[-5:], *ending.err[-15:]])
    assert all(word.lower() in last.lower() for word in words), last
    assert "Traceback" not in "\n".join(ending.err)
    assert started or (ending.out == [] and len(ending.err) == 1), [*ending.out, *ending.err]
    assert ending.files == set() and ending.processes == []


def _check_all(cases: Iterable[tuple[str, Callable[[], None]]]) -> None:
    failed = []
    for name, check in cases:
        try:
            check()
        except AssertionError as error:
            failed.append(f"{name}: {error}")
    assert not failed, "\n\n".join(failed)


def _import_what_commands_need() -> None:
    """Before the forks, each of which would do it again."""
    from mindspeed_lite import runtime
    from mindspeed_lite.cli import COMMANDS as there

    for name in there:
        importlib.import_module(f"mindspeed_lite.cli.{name.replace('-', '_')}")
    runtime.catalogue()
    runtime.fingerprints()


@forked("megatron")
def test_every_command_and_every_variable() -> None:
    from mindspeed_lite import cli

    _import_what_commands_need()

    def checked(what: list[str], words: list[str], variables: dict[str, str]) -> Callable[[], None]:
        return lambda: _check(endings(lambda rank: cli.main(what), _folder(), variables)[0], words)

    cases = [(name, what, {}, words) for name, what, words in COMMANDS]
    _check_all((name, checked(what, words, variables)) for name, what, variables, words in [*cases, *VARIABLES])


def _arguments(given: list[str]) -> None:
    """What an unmodified script with the import line does first."""
    from megatron.training.arguments import parse_args, validate_args

    import mindspeed_lite.megatron_adaptor  # noqa: F401

    sys.argv[:] = ["script.py", *MODEL, *given]
    validate_args(parse_args(), {})


@forked("megatron")
def test_every_training() -> None:
    _import_what_commands_need()

    def checked(given: list[str], words: list[str]) -> Callable[[], None]:
        return lambda: _check(endings(lambda rank: _arguments(given), _folder())[0], words, started=True)

    _check_all((name, checked(given, words)) for name, given, words in TRAININGS)


# Rejected by the parser, of which every rank has one: two ranks under a launcher's store.
PARSED: list[tuple[str, list[str], list[str]]] = [
    ("an unknown flag", ["--no-such-thing"], ["unrecognized argument --no-such-thing"]),
    ("an algorithm of MindSpeed's that is not here", ["--context-parallel-algo", "adaptive_cp_algo"], ["one of the"]),
    ("an unknown algorithm", ["--context-parallel-algo", "x"], ["takes one of megatron_cp_algo", "not 'x'"]),
    ("text for a size", ["--virtual-optimizer", "much"], ["takes all, or a number of GiB", "not 'much'"]),
    ("a YAML file that is not there", ["--yaml-cfg", "none.yaml"], ["--yaml-cfg", "no file none.yaml"]),
    ("a flag that resembles one", ["--use-flas-attn"], ["did you mean --use-flash-attn?"]),
    ("a value for no flag", ["--bf16", "7"], ["unrecognized argument"]),
    ("a value that no flag takes", ["--train-iters", "many"], ["--train-iters", "'many'"]),
    ("a flag of MindSpeed's that is not served", ["--auto-settings"], ["--auto-settings (served in", "Instead: "]),
    ("a value of MindSpeed's that is not served", ["--quant-states", "hif8"], ["--quant-states hif8: "]),
]  # fmt: skip


@forked("megatron")
def test_every_command_line_that_the_parser_rejects_is_one_line_of_all_ranks() -> None:
    from datetime import timedelta

    from torch.distributed import TCPStore

    _import_what_commands_need()
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=250))
    launched = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }

    def checked(given: list[str], words: list[str]) -> Callable[[], None]:
        def body(rank: int) -> None:
            os.environ["RANK"] = str(rank)
            os.environ["TORCHELASTIC_RUN_ID"] = "-".join(given)
            _arguments([*MOCK, *given])

        def check() -> None:
            first, second = endings(body, _folder(), launched, ranks=2)
            _check(first, ["script.py: error: ", *words])
            assert second.code == 2 and second.out == second.err == [], second.err

        return check

    _check_all((name, checked(given, words)) for name, given, words in PARSED)


def test_there_are_enough_of_them() -> None:
    assert len(COMMANDS) + len(VARIABLES) + len(TRAININGS) + len(PARSED) >= 60


@forked("megatron")
def test_a_traceback_for_developers() -> None:
    given = [*MOCK, "--mindspeed-lite-verify", "-1"]
    (ending,) = endings(lambda rank: _arguments(given), _folder(), {"MINDSPEED_LITE_TRACEBACK": "1"})
    assert ending.code == 2 and "Traceback (most recent call last):" in ending.err
    assert ending.err[-1].startswith("mindspeed_lite.engine.errors.OptionError: --mindspeed-lite-verify")


# In every rank after the process group is made: torch.distributed has its own hook around ours then.


def _ranks(kinds: dict[int, str], then: str = "", **variables: str) -> list[Ending]:
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
    return endings(body, folder, {"WORLD_SIZE": "2", **variables}, ranks=2)


@forked("megatron")
def test_all_ranks_fail_alike_and_rank_0_says_it_once() -> None:
    first, second = _ranks({0: "ours", 1: "ours"})
    assert first.err[-1] == "mindspeed_lite: error: feature `x` fell back." and first.code == second.code == 2
    assert not any("fell back" in line or "Traceback" in line for line in [*second.err, *first.err[:-1]])


@pytest.mark.parametrize("rank", [0, 1])
@forked("megatron")
def test_an_error_of_one_rank_is_printed_with_the_rank_and_the_other_ends_quietly(rank: int) -> None:
    # The other one never has this error: to wait for it less changes nothing.
    error_exit._PATIENCE = 1.0
    found = _ranks({rank: "ours"})
    assert found[rank].err[-1] == f"mindspeed_lite: error on rank {rank}: feature `x` fell back."
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
    from mindspeed_lite import error_exit
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


# Ctrl-C


@forked("megatron")
def test_an_interrupt_of_the_first_run_of_bench() -> None:
    from mindspeed_lite import cli

    folder = _folder()
    begun = folder / "out" / "runs" / "01-off" / "plan.json"
    what = [*BENCH, "--", "sleep", "50"]
    (ending,) = endings(lambda rank: cli.main(what), folder, interrupt_when=begun.exists)
    _check(ending, ["ended before the first run was finished"], 130, started=True)


@forked("megatron")
def test_an_interrupt_while_a_command_imports() -> None:
    import importlib

    from mindspeed_lite import cli

    def body(rank: int) -> int:
        def import_module(name: str) -> None:
            raise KeyboardInterrupt

        importlib.import_module = import_module  # type: ignore[assignment]
        return cli.main(["bench", "--", "true"])

    _check(endings(body, _folder())[0], ["mindspeed-lite bench: error: interrupted"], 130)


# Interpreters of their own, for what a fork cannot show.


@pytest.mark.parametrize(
    ("missing", "script", "words"),
    [
        ("torch", "import mindspeed_lite.megatron_adaptor", "PyTorch is not installed: pip install torch"),
        ("wrapt", "import mindspeed_lite.megatron_adaptor", "wrapt is not installed"),
        ("megatron", "import mindspeed_lite.megatron_adaptor\nimport megatron.core", "megatron.core cannot be found"),
    ],
)
def test_a_missing_dependency_of_a_script_with_the_import_line(
    tmp_path: Path, missing: str, script: str, words: str
) -> None:
    (tmp_path / "script.py").write_text(script)
    keywords = without(tmp_path, missing)
    run = python("script.py", cwd=tmp_path, MINDSPEED_LITE_DEVICE="cpu", **keywords)
    assert run.returncode == 2 and words in run.stderr.splitlines()[-1] and "Traceback" not in run.stderr, run.stderr


BROKEN = {
    "ImportError": "raise ImportError('libcudnn.so.9: cannot open shared object file')",
    "OSError": "import ctypes\nctypes.CDLL('libcudnn.so.9: cannot open shared object file')",
    "RuntimeError": "try:\n    import libcudnn\nexcept ImportError as e:\n    raise RuntimeError('autoload') from e",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_torch_that_cannot_be_loaded(tmp_path: Path, kind: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(BROKEN[kind])
    (tmp_path / "script.py").write_text("import mindspeed_lite.megatron_adaptor")
    runs = [python("script.py", cwd=tmp_path, path=[tmp_path])]
    words = ["bench", "--", "true"] if kind == "OSError" else ["run", "script.py"]
    runs.append(command(*words, cwd=tmp_path, path=[tmp_path]))
    for run in runs:
        assert run.returncode == 2 and run.stdout == "" and run.stderr.count("\n") == 1, run.stderr
        for word in ("PyTorch is installed but cannot be loaded: ", "libcudnn", "pip install --force-reinstall torch"):
            assert word in run.stderr


@pytest.mark.parametrize("what", [["bench-ops"], ["bench", "--", "true"], ["doctor", "--selftest"]])
def test_a_missing_torch_of_a_command(tmp_path: Path, what: list[str]) -> None:
    run = command(*what, cwd=tmp_path, **without(tmp_path, "torch"))
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and "torch" in run.stderr, run.stderr


TOGETHER = """\
import mindspeed_lite.megatron_adaptor
import os, sys
import torch
import torch.distributed as dist
from mindspeed_lite.engine import FallbackError
dist.init_process_group("gloo")
print("started")
if os.environ["RANK"] in sys.argv[1]:
    raise FallbackError("feature `x` fell back.")
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize(
    ("ranks", "line"),
    matrix.only(
        [("01", "mindspeed_lite: error: ")],
        [("01", "mindspeed_lite: error: "), ("1", "mindspeed_lite: error on rank 1: ")],
    ),
)
def test_under_torchrun_one_line_is_the_last_of_the_ranks(tmp_path: Path, ranks: str, line: str) -> None:
    (tmp_path / "script.py").write_text(TOGETHER)
    run = python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "mindspeed_lite", "run", "script.py", ranks),
        cwd=tmp_path,
        MINDSPEED_LITE_DEVICE="cpu",
        OMP_NUM_THREADS="1",
    )
    # torchrun's own lines and its summary follow.
    of_ranks = run.stderr[: re.search(r"^[EW]\d{4} ", run.stderr, re.MULTILINE).start()]  # type: ignore[union-attr]
    assert of_ranks.splitlines()[-1] == f"{line}feature `x` fell back." and "Traceback" not in of_ranks, run.stderr
    assert run.stderr.count("fell back") == 1
    assert "exitcode  : 2" in run.stderr


def test_a_single_process_needs_no_launcher(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', rank=0, world_size=1)\n"
        "print(dist.get_rank())\n"
    )
    assert not [name for name in environment() if name.startswith("MASTER_")], "the test runs without a launcher"
    run = command("run", "script.py", cwd=tmp_path, MINDSPEED_LITE_DEVICE="cpu")
    assert run.stdout == "0\n", run.stderr
