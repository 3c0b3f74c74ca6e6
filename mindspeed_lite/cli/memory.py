"""`mindspeed-lite memory`: what a training command takes on each rank, predicted, and on request measured."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_lite import planner
from mindspeed_lite.planner import flags
from mindspeed_lite.planner.arguments import misspelt

from . import memory_text, terminal, training_command
from .terminal import fail

if TYPE_CHECKING:
    from mindspeed_lite.bench import memory_run

PROGRAM = "mindspeed-lite memory"

DESCRIPTION = """\
Predicts from the arguments of COMMAND alone, without running it, the bytes that each rank takes for weights,
gradients, optimizer states and activations, and what each feature would give or take. It needs neither a device nor
as many ranks as the command is about. With --measure it also runs COMMAND for two training steps, counts the same, and
shows both."""

EPILOG = """\
examples:
  mindspeed-lite memory -- torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 ...
  mindspeed-lite memory --world-size 1024 --explain -- python pretrain_gpt.py --num-layers 80 --use-flash-attn ...
  mindspeed-lite memory --measure -- torchrun --nproc-per-node 2 pretrain_gpt.py ...

exit code: 0; 1 where with --measure the run fails, or a category of a rank over 1 MB is more than 5 % from its
prediction; 2 for bad input; 130 after Ctrl-C."""


def main(arguments: Sequence[str]) -> int:
    """Predict, and measure where that is asked for; returns the exit code."""
    given = list(arguments)
    place = given.index("--") if "--" in given else len(given)
    options, command = _parser().parse_args(given[:place]), given[place + 1 :]
    if not command:
        return fail(
            PROGRAM, f"no command to predict; write it after `--`: {PROGRAM} -- torchrun ... pretrain_gpt.py ..."
        )
    for word, meant in misspelt(command):
        print(f"{PROGRAM}: {word} is not known here; if {meant} is meant, it is not counted", file=sys.stderr)
    if options.json and (problem := terminal.why_not_writable(options.json)):
        return fail(PROGRAM, f"--json {options.json}: {problem}")
    try:
        world_size = training_command.world_size(options.world_size, command)
        if options.vocabulary is not None and not 1 <= options.vocabulary <= flags.LARGEST:
            raise planner.ArgumentError(f"--vocabulary {options.vocabulary}: want how many words there are, at least 1")
        training = planner.read(
            command, world_size, options.device or training_command.device(), options.vocabulary or 0
        )
        training = training.replace(expert_load=_load(options, training))
        planner.ranks(training)
    except planner.ArgumentError as error:
        return fail(PROGRAM, error)
    measured = None
    if options.measure:
        if shutil.which(command[0]) is None:
            return fail(PROGRAM, f"there is no program {command[0]!r} to run")
        code, measured = _measure(options, command)
        if measured is None:
            return code
        if measured.world_size != world_size:
            return fail(
                PROGRAM,
                f"the command ran with {measured.world_size} ranks and was predicted for {world_size}: leave out "
                "--world-size, or start as many",
            )
        training = training.replace(device=options.device or measured.device)
    return _show(options, training, measured)


def _show(options: argparse.Namespace, training: planner.TrainingConfig, measured: memory_run.Run | None) -> int:
    ranks, changes = planner.ranks(training), list(planner.changes(training))
    width, color = terminal.width(), terminal.has_color()
    lines = memory_text.prediction(training, ranks, width, color)
    if options.explain:
        lines += ["", *memory_text.explanation(training, ranks, width, color)]
    if changes:
        lines += ["", *memory_text.changes(changes, width, color)]
    comparisons: list[memory_run.Comparison] = []
    if measured is not None:
        from mindspeed_lite.bench import memory_run

        comparisons = memory_run.compare(ranks, measured.processes)
        lines += ["", *memory_text.comparison(comparisons, measured, width, color)]
    print("\n".join(lines))
    if options.json:
        report = memory_text.report(training, ranks, changes, comparisons, measured)
        try:
            Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
        except OSError as error:  # the disk has become full
            return fail(PROGRAM, f"--json {options.json}: cannot be written: {error.strerror or error}")
    return 1 if any(each.is_off for each in comparisons) else 0


def _measure(options: argparse.Namespace, command: Sequence[str]) -> tuple[int, memory_run.Run | None]:
    """The exit code, and what was counted if it was."""
    try:
        from mindspeed_lite.bench import memory_run
    except ImportError as error:
        return fail(PROGRAM, f"{error}; `mindspeed-lite doctor` says what is missing"), None
    folder = Path(tempfile.mkdtemp(prefix="mindspeed-lite-memory-"))
    print(f"two steps of the command are run and counted; log: {folder}", file=sys.stderr)
    try:
        found = memory_run.run(command, folder, options.timeout)
    except KeyboardInterrupt:
        return 130, None
    except memory_run.MeasureError as error:
        if error.log_tail:
            print("\n".join(["--- the end of the log", *error.log_tail, "---"]), file=sys.stderr)
        return fail(PROGRAM, error, 1), None
    shutil.rmtree(folder, ignore_errors=True)
    return 0, found


def _load(options: argparse.Namespace, training: planner.TrainingConfig) -> float:
    """What `--expert-imbalance` says; ArgumentError for what no routing is."""
    load = float(options.expert_imbalance)
    if not 1 <= load < float("inf"):
        raise planner.ArgumentError(
            f"--expert-imbalance {load:g}: the fullest rank has at least an even share: 1 or more"
        )
    if load > 1 and not training.num_experts:
        raise planner.ArgumentError("--expert-imbalance: the command has no --num-experts: leave it out")
    return load


def _parser() -> argparse.ArgumentParser:
    parser = terminal.Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [options] -- COMMAND ...",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument(
        "--world-size", type=int, metavar="N",
        help="ranks of the training (default: as torchrun in COMMAND is told, else WORLD_SIZE, else 1)",
    )  # fmt: skip
    parser.add_argument(
        "--device", choices=("cpu", "cuda", "npu"),
        help="for which device (default: MINDSPEED_LITE_DEVICE, an NPU that is here, else cuda; with --measure the "
        "one it ran on)",
    )  # fmt: skip
    parser.add_argument(
        "--vocabulary", type=int, metavar="N", help="words before padding, where a tokenizer in COMMAND decides"
    )
    parser.add_argument(
        "--expert-imbalance", type=float, default=1.0, metavar="FACTOR",
        help="tokens of the rank whose experts get most, over an even share (default %(default)g: even)",
    )  # fmt: skip
    parser.add_argument("--explain", action="store_true", help="show which tensors make up the activations")
    parser.add_argument("--measure", action="store_true", help="run two steps of COMMAND and show both")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S",
        help="seconds without a step after which a measured run has hung (default %(default)g)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON, with the tensors")
    return parser
