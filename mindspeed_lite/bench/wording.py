"""How the numbers and verdicts of a report are put in words: the terminal, Markdown and HTML say the same."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .statistics import TOO_FEW

Json = Mapping[str, Any]

UNKNOWN = "-"
INCOMPLETE = (
    "This report is incomplete: it was interrupted, or a run failed. What is here was measured; not all that was "
    "asked for is here."
)
ONE_PAIR = "There is only one pair of runs: no interval, and a difference cannot be told from noise."
STATUSES = ("ok", "crashed", "hung", "no steps", "interrupted")

# Escape sequences of terminals, then every other control character but tab and newline.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
_BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
_PREFIXES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))


def dig(data: object, *keys: str) -> Any:
    """The value at this path of objects; None where anything on the way is absent."""
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def items(data: object, *keys: str) -> list[Json]:
    """The objects of the list at this path; empty where there is none."""
    found = dig(data, *keys)
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, Sequence) else []


def texts(data: object, *keys: str) -> list[str]:
    """The values of the list at this path as plain text; a lone text counts as a list of one."""
    found = dig(data, *keys)
    if isinstance(found, str):
        found = [found]
    return [plain(each) for each in found] if isinstance(found, Sequence) else []


def plain(value: object) -> str:
    """Text without anything that steers a terminal; nothing for None."""
    return "" if value is None else _CONTROL.sub("", str(value))


def number(value: object) -> float | None:
    """A number of the report, also one that is not finite; None for whatever is no number."""
    if isinstance(value, str):
        return float(value) if value in ("nan", "inf", "-inf") else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def significant(value: float, digits: int = 3) -> str:
    """A number without exponent, to so many digits, thousands apart."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    return f"{rounded:,.{max(0, digits - 1 - math.floor(math.log10(abs(rounded))))}f}"


def _scaled(value: object, units: Sequence[tuple[str, float]], digits: int, suffix: str = "") -> str:
    """The number in the largest of the units that it reaches, or in the smallest."""
    found = number(value)
    if found is None:
        return UNKNOWN
    if not math.isfinite(found):
        return str(found)
    if found == 0:
        return f"0 {units[0][0] if units is _SECONDS else units[-1][0]}{suffix}".rstrip()
    unit, scale = next((each for each in units if float(f"{abs(found) / each[1]:.{digits - 1}e}") >= 1), units[-1])
    return f"{significant(found / scale, digits)} {unit}{suffix}".rstrip()


def seconds(value: object) -> str:
    """A time: `1.234 s`, `12.34 ms`."""
    return _scaled(value, _SECONDS, 4)


def size(value: object) -> str:
    """Bytes in decimal units: `812 MB`, `1.52 GB`."""
    return _scaled(value, _BYTES, 3)


def rate(value: object, unit: str) -> str:
    """So many per second: `812 TFLOP/s`, `3.35 TB/s`."""
    return _scaled(value, _PREFIXES, 3, f"{unit}/s")


def count(value: object) -> str:
    """A whole number, thousands apart."""
    found = number(value)
    if found is None:
        return UNKNOWN
    return f"{found:,.0f}" if math.isfinite(found) else str(found)


def tokens(value: object) -> str:
    """Tokens per second, whole from 100 on."""
    found = number(value)
    if found is None:
        return UNKNOWN
    return f"{count(found) if abs(found) >= 100 else significant(found)} tokens/s"


def percent(value: object) -> str:
    """A share of 1: `41.2 %`."""
    found = number(value)
    return UNKNOWN if found is None else f"{significant(found * 100)} %"


def difference(value: object) -> str:
    """A difference of losses, which may be very small."""
    found = number(value)
    if found is None:
        return UNKNOWN
    return "0" if found == 0 else f"{found:.2e}"


def level(confidence: object) -> str:
    """The name of an interval: `95 % interval`."""
    found = number(confidence)
    return "interval" if found is None else f"{found * 100:g} % interval"


def factor(*values: object) -> list[str]:
    """Ratios to the same number of places: three where they are near 1 or each other, so that the third matters."""
    found = [number(value) for value in values]
    known = [value for value in found if value is not None]
    near = any(abs(value - 1) < 0.02 for value in known) or 0 < max(known, default=0) - min(known, default=0) < 0.02
    return [UNKNOWN if value is None else f"{value:,.{3 if near else 2}f}" for value in found]


def times(measure: object) -> str:
    """A measure's ratio: `1.24x`."""
    text = factor(*(dig(measure, key) for key in ("ratio", "low", "high")))[0]
    return text if text == UNKNOWN else f"{text}x"


def spread(measure: object) -> str:
    """The interval of a measure's ratio, to as many places as the ratio: `1.20 to 1.28`; none that says nothing."""
    if dig(measure, "verdict") == TOO_FEW:
        return UNKNOWN
    _, low, high = factor(*(dig(measure, key) for key in ("ratio", "low", "high")))
    return UNKNOWN if UNKNOWN in (low, high) else f"{low} to {high}"


def between(low: object, high: object) -> str:
    """The range of two times, the unit named once where it is the same."""
    first, last = seconds(low), seconds(high)
    if UNKNOWN in (first, last):
        return UNKNOWN
    start, _, unit = first.partition(" ")
    return f"{start if unit == last.partition(' ')[2] else first} to {last}"


def verdict_cell(measure: object) -> str:
    """A ratio and its verdict for a table: `1.24x, faster`."""
    value = times(measure)
    verdict = plain(dig(measure, "verdict")).partition(":")[0]
    if verdict == TOO_FEW:
        return verdict
    return ", ".join(part for part in (value, verdict) if part and part != UNKNOWN) or UNKNOWN


def interval_words(measure: object, confidence: object) -> str:
    """What stands in the brackets behind a ratio: the interval, or why there is none."""
    pairs = dig(measure, "pairs")
    many = len(pairs) if isinstance(pairs, Sequence) and not isinstance(pairs, str) else 0
    counted = f", {many} pairs" if many > 1 else ""
    limits = spread(measure)
    if limits != UNKNOWN:
        return f"{level(confidence)} {limits}{counted}"
    return "only one pair: no interval" if many <= 1 else f"no interval{counted}"


def too_few_words(measure: object) -> str:
    """What was seen all the same, and what to do: `0.91x to 5.20x in 2 pairs; raise --repeats`."""
    pairs = sorted(found for each in dig(measure, "pairs") or () if (found := number(each)) is not None)
    if not pairs:
        return "raise --repeats"
    low, high = factor(pairs[0], pairs[-1])
    return f"{low}x to {high}x in {len(pairs)} pairs; raise --repeats"


def _judged(measure: object, confidence: object, tail: str, marks: Mapping[str, str]) -> str:
    value = times(measure)
    if value == UNKNOWN:
        return "not known"
    verdict = plain(dig(measure, "verdict"))
    sentence = f"{value} {tail} ({interval_words(measure, confidence)})"
    if verdict == TOO_FEW:
        return f"{verdict}: {too_few_words(measure)}"
    if verdict == "inside the noise":
        return f"no difference outside the noise: {sentence}"
    if spread(measure) == UNKNOWN:
        return f"{sentence}, so this may be noise"
    return f"{marks[verdict]}: {sentence}" if verdict in marks else sentence


def speed_words(measure: object, against: str, confidence: object) -> str:
    """How fast against the other arm, with how far that is certain."""
    return _judged(measure, confidence, f"as fast as {against}", {"slower": "slower"})


def memory_words(measure: object, against: str, confidence: object) -> str:
    """How much memory against the other arm, with how far that is certain."""
    return _judged(measure, confidence, f"the peak memory of {against}", {"smaller": "smaller", "larger": "larger"})


def loss_words(loss: object, against: str) -> str:
    """Whether the training is still the same one, and by what measure."""
    verdict = plain(dig(loss, "verdict"))
    heads = {
        "identical": f"identical to that of {against}",
        "agrees": f"agrees with that of {against}",
        "differs": f"differs from that of {against}",
        "documented deviation": f"deviates from that of {against}, as documented",
        "not judged": "not judged",
    }
    if not verdict:
        return "not known"
    parts = []
    largest = number(dig(loss, "largest_difference"))
    if largest is not None and verdict != "identical":
        step = dig(loss, "step")
        parts.append(f"largest difference {difference(largest)}" + (f" at iteration {count(step)}" if step else ""))
    multiple = number(dig(loss, "times_rounding_baseline"))
    if multiple is not None and math.isfinite(multiple) and verdict != "identical":
        kind = plain(dig(loss, "rounding_baseline", "kind"))
        parts.append(f"{significant(multiple)} times that of the rounding baseline" + (f" ({kind})" if kind else ""))
    gradient = number(dig(loss, "grad_norm_difference"))
    if gradient is not None and verdict != "identical":
        parts.append(f"gradient norm within {difference(gradient)} (relative)")
    sentence = "; ".join([heads.get(verdict, verdict), *parts])
    # Where all is well the figures above say it.
    reason = "" if verdict in ("agrees", "identical") else plain(dig(loss, "reason")).strip()
    return f"{sentence}. {reason}" if reason else sentence


def growth_words(growth: object) -> str:
    """Whether memory grows from step to step."""
    verdict = plain(dig(growth, "verdict"))
    if verdict == "grows":
        on, off = (size(dig(growth, f"bytes_per_step_{side}")) for side in ("on", "off"))
        return f"grows by {on} a step (off: {off})"
    return verdict or UNKNOWN


def runs_words(arm: object) -> str:
    """How the runs of an arm ended: `3 of 3 ok`, `1 of 3 ok, 1 crashed, 1 hung`."""
    states = [plain(dig(run, "status")) or "unknown" for run in items(arm, "runs")]
    if not states:
        return "no run"
    failed = [state for state in dict.fromkeys([*STATUSES[1:], *states]) if state != "ok" and state in states]
    return ", ".join(
        [f"{states.count('ok')} of {len(states)} ok", *(f"{states.count(state)} {state}" for state in failed)]
    )


def list_words(values: Sequence[str], last: str = "and") -> str:
    """`a, b and c`."""
    return f" {last} ".join(filter(None, (", ".join(values[:-1]), *values[-1:])))
