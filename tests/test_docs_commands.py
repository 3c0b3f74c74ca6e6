"""Every command on every page is run: here where it takes seconds, else by what COVERED names.

A page's commands are the lines of its `sh` blocks. What follows the name of a training script is read by Megatron's
parser with ours in it, whatever becomes of the rest of the command.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import re
import shlex
import subprocess
from pathlib import Path

from tests.harness import traces
from tests.harness.processes import forked

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
MODEL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --train-iters 1 --lr 1e-3 --bf16 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 255"
)
# What a page leaves to the reader.
FILLED = {
    " ...": f" {MODEL}",
    "-- COMMAND": f"-- torchrun --nproc-per-node 1 pretrain_gpt.py {MODEL}",
    "features NAME": "features use_fused_rmsnorm",
    "SCRIPT.sh": "pretrain.sh",
}

# Run in this process, as they stand on the page. Beginnings of commands.
RUN_HERE = (
    "mindspeed-lite features",
    "mindspeed-lite plan --this --device h100 -- ",
    "mindspeed-lite migrate ",
    "mindspeed-lite schedule ",
)
# Read by Megatron's parser; trained with by the tests of training, patches and verify.
PARSED = re.compile(r"^(?:PYTHONPATH=\S+ )?(?:torchrun|mindspeed-lite (?:run|bench)) .*?pretrain_gpt\.py |^(?=--[a-z])")

# Pattern -> what runs it: "file" or "file::test".
COVERED = {
    r"mindspeed-lite balance .*": "tests/cli/test_balance.py",
    r"mindspeed-lite dryrun .*": "tests/cli/test_dryrun.py",
    r"python -m tools\.new_release .*": "tests/test_new_release.py",
    r"python -m tools\.matrix .*": "tools/matrix.py",
    r"mindspeed-lite (plan|calibrate)( .*)?": "tests/cli/test_plan.py",
    r"python -m benchmarks\.published_times.*": "tests/planner/test_published.py",
    r"python -m benchmarks\.balanced_lengths.*": "tests/bench/test_benchmarks.py",
    r"python -m benchmarks\.expert_balance.*": "tests/bench/test_benchmarks.py",
    r"make demo": "tests/demo/test_run.py::test_a_small_demo_passes",
    r"make test": ".ci/run",
    r"make fuzz": "tests/ops/test_fuzz.py",
    r"make pairs": "tests/test_pairs.py",
    r"make format": "Makefile",
    r"make fingerprints": "tests/engine/test_fingerprints.py",
    r"make test-npu": "tests/npu_contract/test_calls.py",
    r"make bench-gpu.*": "tests/bench/test_gpu_campaign.py",
    r"python -m benchmarks\.gpu\.wheels .*": "tests/bench/test_gpu_campaign.py",
    r"pip install -e .*": "Makefile",
    r"pytest tests/test_architecture\.py --update": "tests/test_architecture.py",
    r"python docs/generate\.py": "Makefile",
    r"python templates/new\.py .*": "tests/test_templates.py",
    r"python -m tools\.fingerprints .*": "tests/test_templates.py",
    r"export DATA_PATH=.*|examples/llama3_8b\.sh.*": "tests/training/test_examples.py::test_small_sizes_train",
    r"examples/long_context\.sh.*": "tests/bench/test_predicted.py",
    r"eval \"mindspeed-lite plan .* \$\(examples/deepseek_v3\.sh --print\)\"": (
        "tests/planner/test_parameters.py::test_deepseek_v3_has_as_many_as_were_published"
    ),
    r"mindspeed-lite doctor": "tests/cli/test_doctor.py::test_here_it_says_something_about_everything",
    r"mindspeed-lite doctor -- .*": "tests/cli/test_doctor.py::test_a_command_is_judged_by_what_it_would_import",
    r"mindspeed-lite doctor --selftest": "tests/bench/test_selftest.py",
    r"mindspeed-lite doctor --npu-selftest --out selftest\.json": "tests/cli/test_npu_doctor.py",
    r"mindspeed-lite bench-ops.*": "tests/bench/test_ops.py",
    r"mindspeed-lite bench -- .*": "tests/bench/test_training.py",
    r"mindspeed-lite (features|run pretrain_gpt\.py .*)-?-?torch-cross-entropy.*":
        "tests/test_docs.py::test_the_example_patch_works_in_megatron",
    r"\.venv/bin/python -c .*": "tests/npu_contract/test_environment.py",
    r"\.venv/bin/python -m tests\.npu_contract\.support_table": "tests/npu_contract/test_support_table.py",
    r"\.venv/bin/python -m tests\.npu_contract\.model_run.*": "tests/npu_contract/test_model.py",
}  # fmt: skip


def commands(page: Path) -> list[str]:
    """The commands of a page, each in one line, without comments and without what a here-document holds."""
    found = []
    for indent, block in re.findall(r"^( *)```sh\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.M | re.S):
        lines = iter(re.sub(rf"^{indent}", "", block, flags=re.M).replace("\\\n", " ").splitlines())
        for line in lines:
            while line.count('"') % 2:  # goes on in the next line
                line += "\n" + next(lines)
            if here := re.search(r"<<'(\w+)'", line):
                while next(lines) != here[1]:
                    pass
            line = re.sub(r"\s+#.*", "", line)
            if line.strip():
                found.append(line if "\n" in line else " ".join(line.split()))
    return found


ALL = [(page, command) for page in PAGES for command in commands(page)]


def filled(command: str) -> str:
    for left, given in FILLED.items():
        command = command.replace(left, given)
    return command


def covering(command: str) -> list[str]:
    return [pattern for pattern in COVERED if re.fullmatch(pattern, command, re.DOTALL)]


def test_commands_stand_in_blocks_that_are_read() -> None:
    for page in PAGES:
        for language in re.findall(r"^ *```(\w+)$", page.read_text(encoding="utf-8"), re.M):
            assert language in ("sh", "python", "text"), f"{page.name}: write commands in `sh`, not in `{language}`"
    assert len(ALL) > 80


def test_every_command_is_run_by_something() -> None:
    for page, command in ALL:
        known = command.startswith(RUN_HERE) or PARSED.match(filled(command)) or covering(command)
        assert known, f"{page.name}: `{command}` is run by no test: add it to RUN_HERE, or what runs it to COVERED"


def test_what_is_said_to_run_a_command_is_there() -> None:
    for pattern, where in COVERED.items():
        file, _, name = where.partition("::")
        assert (ROOT / file).is_file() and f"def {name}" * bool(name) in (ROOT / file).read_text(), where
        assert any(pattern in covering(command) for _, command in ALL), f"{pattern}: no page has such a command"


def test_every_target_of_make_exists() -> None:
    targets = sorted({command for _, command in ALL if command.startswith("make ")})
    for command in targets:
        run = subprocess.run([*shlex.split(command), "-n"], cwd=ROOT, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr


@forked("megatron")
def test_every_flag_of_a_training_is_read_by_its_parser() -> None:
    import mindspeed_lite.megatron_adaptor  # noqa: F401, I001
    from megatron.training import arguments

    # Building Megatron's parser takes a second, reading by it none.
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser = arguments.add_megatron_arguments(parser)

    def rejected(text: str) -> str:
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            try:
                parser.parse_args([*shlex.split(MODEL), *shlex.split(text)])
            except SystemExit:
                return errors.getvalue()
        return ""

    assert "--use-flas-attn" in rejected("--use-flas-attn")
    read, failed = set(), []
    for page, command in ALL:
        text = filled(command)
        # The example patch of writing-a-patch.md is not there.
        if not (found := PARSED.match(text)) or "--torch-cross-entropy" in text or (text in read):
            continue
        read.add(text)
        if reason := rejected(text[found.end() :]):
            failed.append(f"{page.name}: `{command}`: {reason}")
    assert not failed, "\n".join(failed)
    assert len(read) > 40


@forked("megatron")
def test_commands_that_take_no_time() -> None:
    import os
    import tempfile

    from mindspeed_lite import cli
    from mindspeed_lite.cli import migrate

    traces.load()
    migrate._flags_of_megatron = functools.cache(migrate._flags_of_megatron)
    failed, done = [], set()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name in ("pretrain.sh", "pretrain_qwen3_30b.sh"):
            Path(name).write_text(f"torchrun pretrain_gpt.py {MODEL} --use-mc2\n")
        Path("pretrain_gpt.py").write_text("from mindspeed import megatron_adaptor\n")
        example = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/pipeline.md").read_text(), re.M | re.S)[0]
        Path("orders.py").write_text(example)
        for page, command in ALL:
            text = filled(command)
            if not text.startswith(RUN_HERE) or "torch-cross-entropy" in text or text in done:
                continue
            done.add(text)
            with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
                try:
                    code = cli.main(shlex.split(text)[1:])
                except SystemExit as ending:
                    code = int(ending.code or 0)
            if code != 0:
                failed.append(f"{page.name}: `{command}`: {code}: {errors.getvalue()[-300:]}")
        os.chdir("/")
    assert not failed, "\n".join(failed)
    assert len(done) >= len(RUN_HERE)
