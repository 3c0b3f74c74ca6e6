"""What the rules for flags share: what they are given, what they return, and the values of a flag."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .command_line import CommandLine, FlagUse, Refusal


class Found(NamedTuple):
    """Outcome of a TranslatedFlag, words in the flag's place, and why."""

    outcome: str
    words: tuple[str, ...]
    why: str


class CommandContext(NamedTuple):
    """The whole command; whether it has a flag that is MindSpeed's alone; the device; whether TE is there."""

    line: CommandLine
    foreign: bool
    device: str
    transformer_engine: bool


Rule = Callable[[FlagUse, CommandLine], "Found | None"]

# Flags that Megatron's parser or ours has too; the rules look for what only MindSpeed means by them.
SHARED_NAMES = frozenset(
    "--rope-scaling-factor --moe-layer-freq --num-layers --moe-router-load-balancing-type --transformer-impl --spec "
    "--moe-token-dispatcher-type --tokenizer-type --no-gradient-accumulation-fusion --muon-nesterov "
    "--coc-fused-kernel --num-layers-per-virtual-pipeline-stage".split()
)


def values_of(use: FlagUse, line: CommandLine) -> list[str]:
    """The values of a flag that takes at least one."""
    if not use.values:
        raise Refusal(f"{use.flag} needs a value")
    return [line.resolved(each) for each in use.values]


def value_of(use: FlagUse, line: CommandLine) -> str:
    return values_of(use, line)[0]


def left_out(why: str) -> Found:
    return Found("not needed", (), why)
