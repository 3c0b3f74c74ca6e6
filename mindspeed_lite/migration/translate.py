"""The words of a MindSpeed command -> the words that Megatron's parser and ours understand, and what was done."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from . import layer_rules, rules
from .command_line import CommandLine, FlagUse, Refusal, UnknownValue
from .rule_types import SHARED_NAMES, CommandContext
from .table import FlagRow

# What a row's class is called in a line for the user.
_SAID = {
    "replaced": "served in another way",
    "planned": "planned, not in this release",
    "another product": "not a matter of mindspeed_lite",
    "dead": "gone from MindSpeed itself",
    "megatron": "Megatron has no exact counterpart",
    "alias": "only in part served",
    "not needed": "left to Megatron",
    "same": "served in part",
}


@dataclass(frozen=True)
class TranslatedFlag:
    """What became of one flag.

    Attributes:
        outcome: "kept", "translated", "not needed", "skipped", "refused", or "unknown value": left as it is, because
            only the shell knows a value.
        words: what stands in its place.
        line: for the user; empty if it was kept.
    """

    use: FlagUse
    outcome: str
    words: tuple[str, ...]
    line: str


@dataclass(frozen=True)
class Translation:
    """All of a command line.

    words: as it is to be read; flags that are refused stay.
    accepted: the same without those.
    """

    words: tuple[str, ...]
    steps: tuple[TranslatedFlag, ...]
    accepted: tuple[str, ...] = ()

    @property
    def notices(self) -> list[str]:
        """One line for each flag that was translated, left out or skipped."""
        return list(dict.fromkeys(each.line for each in self.steps if each.line and each.outcome != "refused"))

    @property
    def refusals(self) -> list[str]:
        """One line for each flag or value that is not served."""
        return list(dict.fromkeys(each.line for each in self.steps if each.outcome == "refused"))


def translate(
    words: Sequence[str],
    known: Container[str] | None = None,
    *,
    device: str = "",
    transformer_engine: bool = False,
    resolve: Callable[[str], str] = str,
    ends: Container[int] = (),
) -> Translation:
    """Translate every flag of MindSpeed's in `words`; the rest stays as it is, and so do flags that are refused.

    Args:
        words: a command line, or the raw words of a script.
        known: the flags of the parser that will read the result; what it knows, it reads itself. None: any.
        device: the device that trains; empty if it is not known.
        transformer_engine: whether Transformer Engine is there.
        resolve: see CommandLine.
        ends: see CommandLine.
    """
    line = CommandLine(words, known, resolve, ends)
    strict = line.has("--mindspeed-lite-strict")
    foreign = any(_is_foreign(use.row, line) for use in line.uses)
    context = CommandContext(line, foreign, device, transformer_engine)
    steps = []
    for use in line.uses:
        step = _step(use, context)
        if strict and step.outcome == "skipped":
            step = TranslatedFlag(use, "refused", _raw(use, line), f"{step.line} (--mindspeed-lite-strict)")
        steps.append(step)
    result: list[str] = []
    accepted: list[str] = []
    place = 0
    for step in steps:
        result += [*line.words[place : step.use.start], *step.words]
        accepted += [*line.words[place : step.use.start], *(step.words if step.outcome != "refused" else ())]
        place = step.use.stop
    return Translation((*result, *line.words[place:]), tuple(steps), (*accepted, *line.words[place:]))


def _is_foreign(row: FlagRow, line: CommandLine) -> bool:
    """Whether this flag is MindSpeed's alone, which tells a MindSpeed command from one of Megatron's."""
    if line.known is not None:
        return row.flag not in line.known
    return row.outcome not in ("keep", "launcher") and row.flag not in SHARED_NAMES


def _raw(use: FlagUse, line: CommandLine) -> tuple[str, ...]:
    return tuple(line.words[use.start : use.stop])


def _step(use: FlagUse, context: CommandContext) -> TranslatedFlag:
    line, foreign = context.line, context.foreign
    row, raw = use.row, _raw(use, line)
    kept = TranslatedFlag(use, "kept", raw, "")
    try:
        if row.outcome == "keep" and (line.known is None or row.flag in line.known):
            _check_value(use, line, foreign)
            return kept
        if row.outcome == "keep":
            raise Refusal(f"{row.flag}: this release of Megatron-core does not have it ({row.note})")
        if line.known is not None and row.flag in line.known and row.flag not in SHARED_NAMES:
            return kept  # ours by now, or the script's own
        if row.outcome == "rule":
            own = rules.BY_CONTEXT.get(row.flag)
            found = own(use, context) if own else rules.RULES[row.flag](use, line)
            if found is None:
                return kept
            words = _existing(found.words, row, line)
            said = f"{' '.join(raw)} is read as {' '.join(words)}" if words else f"{' '.join(raw)} is left out"
            return TranslatedFlag(use, found.outcome, words, f"{said}: {found.why}")
        if row.outcome == "launcher" and line.known is None:
            return kept
        if row.outcome in ("drop", "launcher"):
            return TranslatedFlag(use, "not needed", (), f"{row.flag} is left out: {row.note}")
        idle = _idle(use, line)
        if idle:
            return TranslatedFlag(use, "not needed", (), f"{row.flag} is left out: {idle}")
        if row.outcome == "skip":
            return TranslatedFlag(use, "skipped", (), _text(row))
        if row.outcome == "refuse":
            raise Refusal(_text(row))
        if row.outcome == "rename" and not use.values:
            raise Refusal(f"{row.flag} needs a value")
        words = (*row.words, *use.values) if row.outcome == "rename" else row.words
        words = _existing(words, row, line)
        if line.has(words[0]) and row.outcome == "rename":
            if [line.resolved(each) for each in line.raw(words[0])] != [line.resolved(each) for each in use.values]:
                raise Refusal(f"{row.flag} and {words[0]} are one flag and have different values: give one of them")
            return TranslatedFlag(use, "not needed", (), f"{row.flag} is left out: {words[0]} says the same")
        return TranslatedFlag(use, "translated", words, f"{' '.join(raw)} is read as {' '.join(words)}: {row.note}")
    except Refusal as refusal:
        return TranslatedFlag(use, "refused", raw, str(refusal))
    except UnknownValue as unknown:
        text = (
            f"{row.flag} stays as it is: only the shell knows {unknown.args[0]}; it is translated when the script runs"
        )
        return TranslatedFlag(use, "unknown value", raw, text)


def _check_value(use: FlagUse, line: CommandLine, foreign: bool) -> None:
    """Refuse values that Megatron's flag of this name does not have; -1 for all ranks only beside MindSpeed's flags."""
    refused = use.row.words[0][1:].split("|") if use.row.words else []
    for each in use.values if refused else ():
        if line.resolved(each) in refused and (foreign or refused != ["-1"]):
            instead = f". Instead: {use.row.instead}" if use.row.instead else ""
            raise Refusal(f"{use.flag} {each}: {use.row.note}{instead}")


def _existing(words: tuple[str, ...], row: FlagRow, line: CommandLine) -> tuple[str, ...]:
    """`words`, whose flags the parser must know."""
    missing = [each for each in words if line.known is not None and each.startswith("--") and each not in line.known]
    if missing:
        raise Refusal(f"{row.flag} is {' '.join(words)}, and this release of Megatron-core has no {missing[0]}")
    return words


def _idle(use: FlagUse, line: CommandLine) -> str:
    """Why the flag asks for nothing here, or an empty text."""
    for condition in use.row.idle:
        name, _, value = condition.partition(":")
        if name == "no" and not line.has(value):
            return f"it does nothing without {value}"
        if name == "value" and use.values and _equal(line.resolved(use.values[0]), value):
            return f"{value} is what there is without it"
        if condition == "cp=1" and line.number("--context-parallel-size", 1) == 1:
            return "there is nothing to do with --context-parallel-size 1"
        if condition == "pp=1" and line.number("--pipeline-model-parallel-size", 1) == 1:
            return "there is nothing to do with --pipeline-model-parallel-size 1"
        if condition == "vpp=1" and layer_rules.virtual_stages(line) == 1:
            return "there is nothing to do without virtual pipeline stages"
        if condition == "dense" and not line.has("--num-experts"):
            return "there is nothing to do without --num-experts"
    return ""


def _equal(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other


def _text(row: FlagRow) -> str:
    """What a flag is and what to do instead."""
    parts = [f"{row.flag} ({_SAID[row.kind]}): {row.note}"]
    if row.outcome == "skip":
        parts.append("The training goes on without it")
    if row.instead:
        parts.append(f"Instead: {row.instead}")
    elif row.outcome == "refuse":
        parts.append("Leave it out")
    return ". ".join(parts)
