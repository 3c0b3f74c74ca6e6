"""Reads a training command: training, number of ranks, device."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence

from mindspeed_lite import migration, planner
from mindspeed_lite.planner import layer_flags, traces
from mindspeed_lite.planner.arguments import misspelt
from mindspeed_lite.planner.flags import LARGEST

from . import terminal
from .terminal import Parser, bounded, option, output_file, say

AUTO = "--mindspeed-lite-auto"
# Megatron's release, if none is installed.
NEWEST = "0.19.2"


# Flags without effect on memory or time, by their first words.
_NO_WORK = re.compile(
    "--(?:no-)?(?:ckpt|clip|dist|eval|exit|finetune|init|load|log|lr|manual-gc|mock|num-workers|save|seed|split|"
    "tensorboard|timing|tokenizer|wandb|weight-decay|(?:train|valid|test|per-split)?-?data)"
)
_UNITS = {"": 10**9, "GIB": 1 << 30, "GB": 10**9, "G": 10**9, "TB": 10**12, "MB": 10**6, "MIB": 1 << 20}


def memory_size(text: str) -> float:
    """Bytes of 80GB, 80GiB or 80, which are GB."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d*)?) *([a-zA-Z]*)", text.strip())
    if not found or found[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f"takes a size such as 80GB or 80GiB, not {text[:40]!r}")
    return float(found[1]) * _UNITS[found[2].upper()]


def add_command(parser: Parser) -> None:
    """Let a training command follow `--`, with options of every command that predicts one."""
    parser.reads_command = True
    parser.usage = "%(prog)s [options] -- COMMAND ..."
    option(parser, "--vocabulary N", "words before padding, where a tokenizer in COMMAND decides",
           bounded(int, 0, LARGEST), 0)  # fmt: skip
    option(parser, "--json FILE", "write everything as JSON", output_file)


def read(options: argparse.Namespace, words: Sequence[str]) -> planner.TrainingConfig:
    """The training of a command; warns about flags that are not counted. Raises ArgumentError."""
    words = translated(words)
    device = options.device or os.environ.get("MINDSPEED_LITE_DEVICE", "auto")
    if device not in ("cpu", "cuda", "npu"):
        device = "npu" if os.path.exists("/dev/davinci_manager") else "cuda"
    number = options.world_size or world_size(words)
    return planner.read(with_auto(words, number, device, options.vocabulary), number, device, options.vocabulary)


def with_auto(words: Sequence[str], ranks: int, device: str, vocabulary: int = 0) -> list[str]:
    """The flags of features that `--mindspeed-lite-auto` turns on, in its place."""
    found = [word for word in words if word != AUTO]
    if len(found) == len(words):
        return found
    # Judging features imports torch.
    with terminal.progress("reading the declarations of features"):
        from mindspeed_lite import runtime
        from mindspeed_lite.engine import Context, Settings, make_plan

        options = (*runtime.GENERAL, *runtime.catalogue().options())
    training = planner.read(found, ranks, device, vocabulary)
    asked = {option.dest: True for option in options if option.default is False and option.flag in found}
    versions = runtime.versions()
    version = versions["megatron-core"].replace("not found", NEWEST)
    # As without Transformer Engine, which auto's features are for.
    host = training.replace(transformer_impl=training.transformer_impl or "local")
    context = Context(Settings.of(options, asked), device, versions, host)
    plan = make_plan(runtime.catalogue(), context, host_version=version, fingerprints=None, auto=True)
    return [*found, *(each.feature.flag for each in plan.applied if each.feature.flag not in found)]


def translated(words: Sequence[str]) -> Sequence[str]:
    """The words with MindSpeed's flags translated; warns about flags that are not counted."""
    found = migration.translate(words)
    for line in found.refusals:
        print(f"mindspeed-lite: not counted: {line}", file=sys.stderr)
    typos = dict(misspelt(found.accepted))
    for word, meant in typos.items():
        print(f"mindspeed-lite: {word} is not known here; if {meant} is meant, it is not counted", file=sys.stderr)
    script = next((place for place, word in enumerate(words) if word.endswith(".py")), 0)
    given = [word.partition("=")[0] for word in words[script:] if word.startswith("--")]
    tables = [table for table in vars(planner.flags).values() if isinstance(table, (dict, tuple, frozenset))]
    known = set(migration.flags()).union(typos, *tables)
    known.update(filter(layer_flags.is_of_layers, given))
    if unknown := [flag for flag in dict.fromkeys(given) if flag not in known and not _NO_WORK.match(flag)]:
        with terminal.progress("reading the declarations of features"):
            from mindspeed_lite import runtime  # imports torch

            ours = {option.flag for option in (*runtime.GENERAL, *runtime.catalogue().options())}
        if left := [flag for flag in unknown if flag not in ours]:
            print(f"mindspeed-lite: not known here, not counted: {' '.join(left)}", file=sys.stderr)
    return found.accepted


def world_size(command: Sequence[str], flag: str = "--world-size") -> int:
    """Number of ranks from the launcher's options or WORLD_SIZE; flag: named in errors."""
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
        raise planner.ArgumentError(f"{source} not say how many ranks there will be: add {flag} N before the `--`")
    return int(per_node) * int(nodes)


def show_untraced() -> None:
    """Name flags of Megatron's layers without which memory was predicted."""
    for words, reason in traces.refused.items():
        say(f"\n{words}: not in the predicted memory, as Megatron does not build it here: {reason}")
