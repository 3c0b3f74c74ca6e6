"""Reads a training command: training, number of ranks, device."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from mindspeed_lite import planner
from mindspeed_lite.planner.arguments import misspelt
from mindspeed_lite.planner.flags import LARGEST

from .terminal import Parser, bounded, option, output_file


def add_options(parser: Parser) -> None:
    """Options of `memory` and `schedule`."""
    parser.add_argument("--device", choices=("cpu", "cuda", "npu"),
        help="for which device (default: MINDSPEED_LITE_DEVICE, an NPU that is here, else cuda)")  # fmt: skip
    option(parser, "--world-size N", "ranks of the training (default: torchrun's in COMMAND, else WORLD_SIZE, "
           "else 1)", bounded(int, 1))  # fmt: skip
    add_command(parser)


def add_command(parser: Parser, usage: str = "") -> None:
    """Let a training command follow `--`, with options of every command that predicts one."""
    parser.reads_command = True
    parser.usage = f"%(prog)s {usage}[options] -- COMMAND ..."
    option(parser, "--vocabulary N", "words before padding, where a tokenizer in COMMAND decides",
           bounded(int, 0, LARGEST), 0)  # fmt: skip
    option(parser, "--json FILE", "write everything as JSON", output_file)


def read(options: argparse.Namespace, words: Sequence[str], launched: int = 0) -> planner.TrainingConfig:
    """The training of a command; warns about likely typos. Raises ArgumentError.

    launched: ranks, if its layers are traced.
    """
    for word, meant in misspelt(words):
        print(f"mindspeed-lite: {word} is not known here; if {meant} is meant, it is not counted", file=sys.stderr)
    device = options.device or os.environ.get("MINDSPEED_LITE_DEVICE", "auto")
    if device not in ("cpu", "cuda", "npu"):
        device = "npu" if os.path.exists("/dev/davinci_manager") else "cuda"
    ranks = options.world_size or launched or world_size(words)
    return planner.read(words, ranks, device, options.vocabulary, is_traced=launched > 0)


def world_size(command: Sequence[str]) -> int:
    launcher = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    launcher.add_argument("--nproc-per-node", "--nproc_per_node", nargs="?")
    launcher.add_argument("--nnodes", nargs="?", default="1")
    launched = launcher.parse_known_args(list(command))[0]
    per_node, nodes = launched.nproc_per_node, launched.nnodes
    source = "--nproc-per-node and --nnodes do"
    if per_node is None:
        per_node, nodes = os.environ.get("WORLD_SIZE", "1"), "1"
        source = f"WORLD_SIZE={per_node[:40]} does"
    if not (per_node.isdecimal() and (nodes or "").isdecimal() and int(per_node) * int(nodes)):
        raise planner.ArgumentError(
            f"{source} not say how many ranks there will be: add --world-size N before the `--`"
        )
    return int(per_node) * int(nodes)
