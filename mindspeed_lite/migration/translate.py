"""Translates a MindSpeed command for Megatron's parser, with explanations."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from . import layer_rules, rules
from .command_line import CommandLine, FlagUse, Refusal, Skipped, UnknownValue
from .rules import Result
from .table import CLASSES

_SIZES = {"cp=1": "--context-parallel-size", "pp=1": "--pipeline-model-parallel-size"}


@dataclass(frozen=True)
class TranslatedFlag:
    """Outcome of one flag.

    Attributes:
        outcome: "kept", "translated", "not needed", "skipped", "refused", or "unknown value" (only the shell knows it;
            kept).
        line: for the user; empty if kept.
    """

    use: FlagUse
    outcome: str
    words: tuple[str, ...]
    line: str


@dataclass(frozen=True)
class Translation:
    """Result for a command line; `accepted`: its words without refused flags."""

    accepted: tuple[str, ...]
    steps: tuple[TranslatedFlag, ...]

    @property
    def notices(self) -> list[str]:
        return list(dict.fromkeys(each.line for each in self.steps if each.line and each.outcome != "refused"))

    @property
    def refusals(self) -> list[str]:
        return list(dict.fromkeys(each.line for each in self.steps if each.outcome == "refused"))


def translate(words: Sequence[str], known: Container[str] | None = None, **options: Any) -> Translation:
    """Translate MindSpeed's flags in `words`; see CommandLine for the arguments."""
    line = CommandLine(words, known, **options)
    steps: list[TranslatedFlag] = []
    accepted: list[str] = []
    place = 0
    for use in line.uses:
        step = _translated(use, tuple(line.words[use.start : use.stop]), line)
        steps.append(step)
        accepted += [*line.words[place : use.start], *(step.words if step.outcome != "refused" else ())]
        place = use.stop
    return Translation((*accepted, *line.words[place:]), tuple(steps))


def _translated(use: FlagUse, raw: tuple[str, ...], line: CommandLine) -> TranslatedFlag:
    try:
        result = _result(use, line)
        if result is None:
            return TranslatedFlag(use, "kept", raw, "")
        if isinstance(result, str):
            return TranslatedFlag(use, "not needed", (), f"{' '.join(raw)} is left out: {result}")
        words = tuple(result[0].split()) if isinstance(result[0], str) else result[0]
        for each in words:
            if line.known is not None and each.startswith("--") and each not in line.known:
                raise Refusal(f"{use.flag} is {' '.join(words)}, and this release of Megatron-core has no {each}")
        return TranslatedFlag(use, "translated", words, f"{' '.join(raw)} is read as {' '.join(words)}: {result[1]}")
    except Skipped as skipped:
        if line.has("--mindspeed-lite-strict"):
            return TranslatedFlag(use, "refused", raw, f"{skipped} (--mindspeed-lite-strict)")
        return TranslatedFlag(use, "skipped", (), str(skipped))
    except Refusal as refusal:
        return TranslatedFlag(use, "refused", raw, str(refusal))
    except UnknownValue as unknown:
        text = f"{use.flag} stays as it is: only the shell knows {unknown}; it is translated when the script runs"
        return TranslatedFlag(use, "unknown value", raw, text)


def _result(use: FlagUse, line: CommandLine) -> Result:
    row, flag = use.row, use.flag
    is_known = line.known is not None and flag in line.known
    if row.outcome == "keep" and line.known is not None and not is_known:
        raise Refusal(f"{flag}: this release of Megatron-core does not have it ({row.note})")
    # Second case: a feature's or the script's own flag.
    if (row.outcome == "launcher" and line.known is None) or (is_known and "shared" not in row.idle):
        return None
    if reason := _idle(use, line):
        return reason
    if row.outcome == "keep":
        return None
    if row.outcome in ("drop", "launcher"):
        return row.note
    if row.outcome == "rule":
        return rules.RULES[row.flag](use, line)
    if row.outcome == "rename":
        return _renamed(use, line)
    if row.outcome == "write":
        return row.words.replace("{}", line.values_of(use)[0]) if "{}" in row.words else row.words, row.note
    if row.kind == "model":
        names = dict.fromkeys(each.row.flag.replace("=", " ") for each in line.uses if each.row.note == row.note)
        raise Refusal(f"Megatron does not build {row.note}: {' '.join(names)}")
    text = f"{row.flag.replace('=', ' ')} ({CLASSES[row.kind]}): {row.note}"
    instead = f". Instead: {row.instead}" if row.instead else ""
    if row.outcome == "skip":
        raise Skipped(f"{text}. The training goes on without it{instead}")
    raise Refusal(text + (instead or ". Leave it out"))


def _renamed(use: FlagUse, line: CommandLine) -> Result:
    name = use.row.words
    if not line.has(name):
        if not use.values:
            line.values_of(use)
        return (name, *use.values), use.row.note
    if line.values(name) != [line.resolved(each) for each in use.values]:
        raise Refusal(f"{use.flag} and {name} are one flag and have different values: give one of them")
    return f"{name} says the same"


def _idle(use: FlagUse, line: CommandLine) -> str:
    """Why the flag has no effect, by the first condition that holds; Refusal for `not:`."""
    for condition in use.row.idle:
        name, _, text = condition.partition(":")
        flag, _, value = text.partition("=")
        is_given = value in line.values(flag) if value else line.has(flag)
        if name == "no" and not is_given:
            return f"it has no effect without {text}"
        if name == "with" and is_given:
            return f"it has no effect with {text.replace('=', ' ')}"
        if name == "not" and is_given:
            raise Refusal(f"{use.flag} with {flag}: {use.row.note}. Instead: {use.row.instead}")
        if name == "value" and use.values and rules.is_equal(line.resolved(use.values[0]), text):
            return f"{text} is the default"
        if condition in _SIZES and line.number(_SIZES[condition], 1) == 1:
            return f"it has no effect with {_SIZES[condition]} 1"
        if condition == "vpp=1" and layer_rules.virtual_stages(line) == 1:
            return "it has no effect without virtual pipeline stages"
    return ""
