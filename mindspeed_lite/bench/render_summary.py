"""What a reader must know first: the headline, and what is wrong with the measurement or with an arm."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from .statistics import TOO_FEW
from .wording import (
    INCOMPLETE,
    ONE_PAIR,
    Json,
    dig,
    growth_words,
    interval_words,
    items,
    list_words,
    loss_words,
    memory_words,
    number,
    percent,
    plain,
    speed_words,
    texts,
    times,
    too_few_words,
)

OURS = "mindspeed_lite"
SEVERITIES = ("failure", "warning", "note")


@dataclass(frozen=True)
class Headline:
    """The answer in one sentence, then label and text; `tone`: `good`, `neutral` or `bad`."""

    title: str
    lines: tuple[tuple[str, str], ...] = ()
    tone: str = "neutral"


@dataclass(frozen=True)
class Finding:
    severity: str
    arm: str
    text: str


def headline(report: Json) -> Headline:
    """The best arm and what it costs, or plainly that there is none."""
    if dig(report, "kind") == "bench-ops":
        return _operators_headline(report)
    compared = [each for each in items(report, "comparisons") if number(dig(each, "speed", "ratio")) is not None]
    if not compared:
        return Headline("Nothing could be compared: no arm finished next to off.", tone="bad")
    sound = [each for each in compared if dig(each, "loss", "verdict") != "differs"]
    best = max(sound or compared, key=_rank)
    name, against = _names(best)
    speed, verdict = dig(best, "speed"), dig(best, "speed", "verdict")
    ratio = times(speed)
    certain = interval_words(speed, dig(report, "settings", "confidence"))
    tone = "neutral"
    if not sound:
        title, tone = f"Every arm that was compared trains differently from {against}.", "bad"
    elif verdict == "faster":
        title, tone = f"{name} is {ratio} as fast as {against} ({certain}).", "good"
    elif number(dig(speed, "low")) is None:
        title = f"{name} was {ratio} as fast as {against} in its only pair: no interval, so this may be noise."
    elif verdict == "slower":
        everyone = "No arm is faster" if len(sound) > 1 else f"{name} is slower"
        nearest = f"the nearest, {name}, is" if len(sound) > 1 else "it is"
        title, tone = f"{everyone} than {against}: {nearest} {ratio} as fast ({certain}).", "bad"
    elif verdict == TOO_FEW:
        title = f"Too few runs to tell whether {name} is faster than {against}: {too_few_words(speed)}."
    else:
        everyone = "No arm is faster than" if len(sound) > 1 else f"{name} does not differ in speed from"
        title = f"{everyone} {against} outside the noise: {name} is {ratio} as fast ({certain})."
    lines = _lines(report, best)
    # The title says how fast it is, unless it has something graver to say.
    return Headline(title, tuple(lines[1:] if sound else [(f"speed of {name}", lines[0][1]), *lines[1:]]), tone)


def _rank(comparison: Json) -> tuple[bool, float]:
    """A proven gain goes before any larger one that may be noise."""
    ratio = number(dig(comparison, "speed", "ratio"))
    return dig(comparison, "speed", "verdict") == "faster", 0.0 if ratio is None or ratio != ratio else ratio


def _names(comparison: Json) -> tuple[str, str]:
    return plain(dig(comparison, "arm")) or "?", plain(dig(comparison, "against")) or "off"


def _lines(report: Json, comparison: Json) -> list[tuple[str, str]]:
    confidence = dig(report, "settings", "confidence")
    against = _names(comparison)[1]
    return [
        ("speed", speed_words(dig(comparison, "speed"), against, confidence)),
        ("memory", memory_words(dig(comparison, "memory"), against, confidence)),
        ("loss", loss_words(dig(comparison, "loss"), against)),
    ]


def details(report: Json) -> list[tuple[str, list[tuple[str, str]]]]:
    """For every compared arm its sentences on speed, memory and loss, and what was not applied."""
    found = []
    for comparison in items(report, "comparisons"):
        confidence = dig(report, "settings", "confidence")
        name, against = _names(comparison)
        lines = [
            *_lines(report, comparison),
            ("first step", speed_words(dig(comparison, "first_step"), against, confidence)),
            ("growth of memory", growth_words(dig(comparison, "growth"))),
        ]
        found.append((name, lines))
    return found


def skipped(report: Json) -> list[tuple[str, str, str]]:
    """Arm, feature and why it was not applied there."""
    return [
        (plain(dig(arm, "name")), plain(feature), "; ".join(texts(reasons, feature)) or "no reason given")
        for arm in items(report, "arms")
        if hasattr(reasons := dig(arm, "skipped"), "items")
        for feature in reasons
    ]


def failed_runs(report: Json) -> list[tuple[str, Json]]:
    """Arm and run, for every run that did not end well."""
    return [
        (plain(dig(arm, "name")), run)
        for arm in items(report, "arms")
        for run in items(arm, "runs")
        if dig(run, "status") != "ok"
    ]


def run_words(run: Json) -> str:
    """`run 2 crashed (exit code 1): reason`."""
    return f"run {_repeat(run)} {_end(run)}"


def _repeat(run: Json) -> str:
    return plain(dig(run, "repeat")) or "?"


def _end(run: Json) -> str:
    code = number(dig(run, "exit_code"))
    ended = f" (exit code {code:.0f})" if code else ""
    reason = plain(dig(run, "reason")).strip()
    state = plain(dig(run, "status")) or "ended in an unknown way"
    state = {"ok": "finished", "interrupted": "was interrupted", "no steps": "made no steps"}.get(state, state)
    return state + ended + (f": {reason}" if reason else "")


def findings(report: Json) -> list[Finding]:
    """The report's own findings and those that its numbers imply, the gravest first."""
    own = [
        Finding(plain(dig(each, "severity")) or "note", plain(dig(each, "arm")), plain(dig(each, "text")))
        for each in items(report, "findings")
    ]
    failing = {each.arm for each in own if each.severity == "failure"}
    said = "\n".join(each.text for each in own)
    implied = []
    if dig(report, "complete") is False:
        implied.append(Finding("warning", "", INCOMPLETE))
    ends: dict[tuple[str, str, str], list[str]] = {}
    for arm, run in failed_runs(report):
        status = plain(dig(run, "status"))
        if arm not in failing and not any(each.arm == arm and status in each.text for each in own):
            severity = "warning" if dig(run, "status") == "interrupted" else "failure"
            ends.setdefault((severity, arm, _end(run)), []).append(_repeat(run))
    for (severity, arm, end), repeats in ends.items():
        implied.append(Finding(severity, arm, f"run{'s' * (len(repeats) > 1)} {list_words(repeats)} {end}."))
    alone = False
    for comparison in items(report, "comparisons"):
        name, against = _names(comparison)
        if dig(comparison, "loss", "verdict") == "differs" and name not in failing:
            implied.append(Finding("failure", name, f"The loss {loss_words(dig(comparison, 'loss'), against)}"))
        speed = dig(comparison, "speed")
        alone |= number(dig(speed, "ratio")) is not None and number(dig(speed, "low")) is None
    if alone and "one pair" not in said.lower():
        implied.append(Finding("warning", "", ONE_PAIR))
    for text in texts(report, "environment", "differences"):
        if text not in said:
            implied.append(Finding("warning", "", f"Not the same in all runs: {text}"))
    implied += [each for each in _operator_findings(report) if each.text not in said]
    ranks = {severity: rank for rank, severity in enumerate(SEVERITIES)}
    return sorted([*implied, *own], key=lambda each: ranks.get(each.severity, len(ranks)))


def _operator_findings(report: Json) -> list[Finding]:
    found = []
    for row in items(report, "rows"):
        where = ", ".join(plain(dig(row, key)) for key in ("operator", "case", "direction"))
        if dig(row, "earlier", "verdict") == "regression":
            change = times(dig(row, "earlier"))
            found.append(Finding("failure", "", f"Regression in {where}: {change} of the earlier run."))
        for contender in items(row, "contenders"):
            if dig(contender, "error"):
                name, error = plain(dig(contender, "name")), plain(dig(contender, "error"))
                severity = "failure" if name == OURS else "note"
                found.append(Finding(severity, "", f"{name} did not run in {where}: {error}"))
    return found


def _operators_headline(report: Json) -> Headline:
    rows = items(report, "rows")
    shares, ahead, behind, close, alone = [], 0, 0, 0, 0
    for row in rows:
        contenders = {plain(dig(each, "name")): each for each in items(row, "contenders")}
        share = number(dig(contenders.pop(OURS, None), "of_ceiling"))
        shares += [] if share is None else [share]
        limits = [
            (number(dig(each, "ratio_low") or ratio), number(dig(each, "ratio_high") or ratio))
            for each in contenders.values()
            if (ratio := dig(each, "ratio")) is not None
        ]
        if not limits:
            alone += 1
        elif any(high is not None and high < 1 for _, high in limits):
            behind += 1
        elif all(low is not None and low > 1 for low, _ in limits):
            ahead += 1
        else:
            close += 1
    if not shares:
        return Headline(f"No operator of {OURS} was measured.", tone="bad")
    title = f"{OURS} reaches {percent(statistics.median(shares))} of the ceiling in the median case."
    counted = [
        (ahead, "ahead of every other contender"),
        (behind, "behind at least one"),
        (close, "too close to tell"),
        (alone, "without anything to compare with"),
    ]
    words = list_words([f"{many} {what}" for many, what in counted if many])
    lines = [("cases", f"{len(rows)}: {words}")]
    verdicts = [plain(dig(row, "earlier", "verdict")) for row in rows if dig(row, "earlier")]
    if verdicts:
        told = [f"{verdicts.count(each)} {each}" for each in dict.fromkeys(verdicts)]
        lines.append(("against the earlier run", list_words(told)))
    worse = verdicts.count("regression")
    if worse:
        title = f"{worse} case{'s are' if worse > 1 else ' is'} slower than in the earlier run. {title}"
    return Headline(title, tuple(lines), "bad" if worse else "neutral" if behind else "good")
