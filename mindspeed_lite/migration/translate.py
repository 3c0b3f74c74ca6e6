"""Translates a MindSpeed command for Megatron's parser, with explanations."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from . import layer_rules, rules
from .command_line import CommandLine, FlagUse, Refusal, UnknownValue
from .table import CLASSES, FlagRow

_CLASS_OF_REFUSED = CLASSES | {
    "planned": "planned, not in this release",
    "another product": "not a matter of mindspeed_lite",
    "megatron": "Megatron has no exact counterpart",
    "alias": "only in part served",
    "not needed": "left to Megatron",
    "same": "served in part",
}


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
    """Result for a command line.

    words: to be read; refused flags stay. accepted: without those.
    """

    words: tuple[str, ...]
    steps: tuple[TranslatedFlag, ...]
    accepted: tuple[str, ...] = ()

    @property
    def notices(self) -> list[str]:
        return list(dict.fromkeys(each.line for each in self.steps if each.line and each.outcome != "refused"))

    @property
    def refusals(self) -> list[str]:
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
    """Translate MindSpeed's flags in `words`; refused flags and the rest stay.

    known: flags of the parser that reads the result, which are kept. None: any. Others: see CommandLine.
    """
    line = CommandLine(words, known, device, transformer_engine, resolve, ends)
    steps = []
    result: list[str] = []
    accepted: list[str] = []
    place = 0
    for use in line.uses:
        raw = tuple(line.words[use.start : use.stop])
        try:
            outcome, given, text = _outcome(use, raw, line)
        except rules.Skipped as skipped:
            outcome, given, text = "skipped", (), f"{use.flag} is left out: {skipped}"
        except Refusal as refusal:
            outcome, given, text = "refused", raw, str(refusal)
        except UnknownValue as unknown:
            text = f"{use.flag} stays as it is: only the shell knows {unknown}; it is translated when the script runs"
            outcome, given = "unknown value", raw
        if outcome == "skipped" and line.has("--mindspeed-lite-strict"):
            outcome, given, text = "refused", raw, f"{text} (--mindspeed-lite-strict)"
        steps.append(TranslatedFlag(use, outcome, given, text))
        between = line.words[place : use.start]
        result += [*between, *given]
        accepted += [*between, *(given if outcome != "refused" else ())]
        place = use.stop
    return Translation((*result, *line.words[place:]), tuple(steps), (*accepted, *line.words[place:]))


def _outcome(use: FlagUse, raw: tuple[str, ...], line: CommandLine) -> tuple[str, tuple[str, ...], str]:
    row, flag = use.row, use.flag
    is_known = line.known is not None and flag in line.known
    if row.outcome == "keep":
        if line.known is not None and not is_known:
            raise Refusal(f"{flag}: this release of Megatron-core does not have it ({row.note})")
        _check_value(use, line)
    # Second case: a feature's or the script's own flag.
    if row.outcome == "keep" or (is_known and "shared" not in row.idle):
        return "kept", raw, ""
    if row.outcome == "launcher" and line.known is None:
        return "kept", raw, ""
    if row.outcome in ("drop", "launcher"):
        return "not needed", (), f"{flag} is left out: {row.note}"
    if row.outcome in ("rule", "choose", "built-in"):
        function = {"rule": rules.RULES.get(flag), "choose": _chosen, "built-in": _built_in}[row.outcome]
        assert function is not None
        found = function(use, line)
        if found is None:
            return "kept", raw, ""
        if isinstance(found, str):
            return "not needed", (), f"{' '.join(raw)} is left out: {found}"
        words = tuple(found[0].split()) if isinstance(found[0], str) else found[0]
        return _translated(raw, words, found[1], row, line)
    idle = _idle(use, line)
    if idle:
        return "not needed", (), f"{flag} is left out: {idle}"
    if row.outcome in ("skip", "refuse"):
        parts = [f"{flag} ({_CLASS_OF_REFUSED[row.kind]}): {row.note}"]
        parts += ["The training goes on without it"] if row.outcome == "skip" else []
        parts += [f"Instead: {row.instead}"] if row.instead else ["Leave it out"] if row.outcome == "refuse" else []
        if row.outcome == "refuse":
            raise Refusal(". ".join(parts))
        return "skipped", (), ". ".join(parts)
    words = tuple(row.words.split())
    if row.outcome == "rename":
        line.values_of(use) if not use.values else None
        if line.has(words[0]):
            given = [[line.resolved(each) for each in values] for values in (line.raw(words[0]), use.values)]
            if given[0] != given[1]:
                raise Refusal(f"{flag} and {words[0]} are one flag and have different values: give one of them")
            return "not needed", (), f"{flag} is left out: {words[0]} says the same"
        words += use.values
    return _translated(raw, words, row.note, row, line)


def _translated(
    raw: tuple[str, ...], words: tuple[str, ...], why: str, row: FlagRow, line: CommandLine
) -> tuple[str, tuple[str, ...], str]:
    missing = [each for each in words if line.known is not None and each.startswith("--") and each not in line.known]
    if missing:
        raise Refusal(f"{row.flag} is {' '.join(words)}, and this release of Megatron-core has no {missing[0]}")
    return "translated", words, f"{' '.join(raw)} is read as {' '.join(words)}: {why}"


def _chosen(use: FlagUse, line: CommandLine) -> rules.Result:
    value = line.values_of(use)[0]
    table = dict(each.split(">") for each in use.row.words.split("|"))
    if value in table and value != "*":
        is_own = table[value].startswith(f"{use.flag} ")
        return (
            (table[value], use.row.note if is_own else "our flag for it")
            if table[value]
            else (f"{value} asks for nothing")
        )
    if "*" in table:
        raise Refusal(f"{use.flag} {value}: {table['*']}")
    return None


def _built_in(use: FlagUse, line: CommandLine) -> rules.Result:
    """A value that is fixed in latent attention."""
    value, built_in = line.values_of(use)[0], use.row.words
    if not rules.has_latent_attention(line):
        raise Refusal(f"{use.flag}: {rules.NO_YARN}")
    if not _is_equal(value, built_in):
        raise Refusal(f"{use.flag} {value}: latent attention in Megatron has {built_in} built in: leave it out")
    return f"{built_in} is built into Megatron's latent attention"


def _check_value(use: FlagUse, line: CommandLine) -> None:
    """Refuse values unknown to Megatron; -1 for all ranks needs MindSpeed's flags."""
    refused = use.row.words[1:].split("|") if use.row.words else []
    for each in use.values if refused else ():
        if line.resolved(each) in refused and (line.is_mindspeed or refused != ["-1"]):
            instead = f". Instead: {use.row.instead}" if use.row.instead else ""
            raise Refusal(f"{use.flag} {each}: {use.row.note}{instead}")


def _idle(use: FlagUse, line: CommandLine) -> str:
    sizes = {"cp=1": "--context-parallel-size", "pp=1": "--pipeline-model-parallel-size"}
    for condition in use.row.idle:
        name, _, value = condition.partition(":")
        if name == "no" and not line.has(value):
            return f"it does nothing without {value}"
        if name == "value" and use.values and _is_equal(line.resolved(use.values[0]), value):
            return f"{value} is what there is without it"
        if condition in sizes and line.number(sizes[condition], 1) == 1:
            return f"there is nothing to do with {sizes[condition]} 1"
        if condition == "vpp=1" and layer_rules.virtual_stages(line) == 1:
            return "there is nothing to do without virtual pipeline stages"
        if condition == "dense" and not line.has("--num-experts"):
            return "there is nothing to do without --num-experts"
    return ""


def _is_equal(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other
