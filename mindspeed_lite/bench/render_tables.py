"""The tables of a report as plain cells; the renderers only lay them out."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .wording import (
    UNKNOWN,
    Json,
    between,
    count,
    dig,
    growth_words,
    items,
    level,
    number,
    percent,
    plain,
    rate,
    runs_words,
    seconds,
    size,
    spread,
    texts,
    times,
    tokens,
    verdict_cell,
)

_RATIO = {"ratio": "ratio", "low": "ratio_low", "high": "ratio_high"}


@dataclass(frozen=True)
class Table:
    """Headers and cells; `left`: columns of words, the others are numbers."""

    title: str
    headers: list[str]
    rows: list[list[str]]
    left: frozenset[int] = field(default=frozenset({0}))
    note: str = ""


def command(report: Json) -> str:
    """The user's command as a shell would take it."""
    return shlex.join(texts(report, "command"))


def comparison_table(report: Json) -> Table | None:
    """Every arm against off, a verdict in each cell."""
    rows = [
        [
            plain(dig(each, "arm")) or "?",
            verdict_cell(dig(each, "speed")),
            spread(dig(each, "speed")),
            verdict_cell(dig(each, "memory")),
            verdict_cell(dig(each, "first_step")),
            plain(dig(each, "loss", "verdict")) or UNKNOWN,
            growth_words(dig(each, "growth")).partition(" (")[0],
        ]
        for each in items(report, "comparisons")
    ]
    against = list(dict.fromkeys(plain(dig(each, "against")) or "off" for each in items(report, "comparisons")))
    interval = level(dig(report, "settings", "confidence"))
    note = "Speed and first step: above 1 is faster. Peak memory: below 1 is smaller."
    headers = ["arm", "speed", interval, "peak memory", "first step", "loss", "growth"]
    title = f"Compared with {' and '.join(against)}"
    return Table(title, headers, rows, frozenset({0, 1, 3, 4, 5, 6}), note) if rows else None


def arm_table(report: Json) -> Table | None:
    """What each arm measured, in absolute numbers."""
    rows = []
    kinds: list[str] = []
    for arm in items(report, "arms"):
        summary = dig(arm, "summary")
        kinds += texts(summary, "memory_kind")
        rows.append(
            [
                plain(dig(arm, "name")) or "?",
                seconds(dig(summary, "step_seconds")),
                between(dig(summary, "step_seconds_p10"), dig(summary, "step_seconds_p90")),
                tokens(dig(summary, "tokens_per_second")),
                rate(dig(summary, "flops_per_second"), "FLOP"),
                percent(dig(summary, "utilisation")),
                size(dig(summary, "peak_memory_bytes")),
                seconds(dig(summary, "first_step_seconds")),
                plain(dig(arm, "numerics")) or UNKNOWN,
                runs_words(arm),
            ]
        )
    note = "Step: median of the measured steps. FLOP/s and peak memory: of one process."
    if kinds:
        note += f" Memory: {', '.join(dict.fromkeys(kinds))}."
    headers = ["arm", "step", "10 % to 90 %", "throughput", "compute", "of ceiling", "peak memory", "first step"]
    return Table("Every arm", [*headers, "numerics", "runs"], rows, frozenset({0, 8, 9}), note) if rows else None


def breakdown_table(report: Json) -> Table | None:
    """Where a step's time goes: a row per category, a column per arm."""
    arms = [arm for arm in items(report, "arms") if isinstance(dig(arm, "breakdown", "categories"), Mapping)]
    names = list(dict.fromkeys(key for arm in arms for key in dig(arm, "breakdown", "categories")))
    used = [name for name in names if any(number(dig(arm, "breakdown", "categories", name)) for arm in arms)]
    if not used:
        return None

    def cell(arm: Json, *path: str) -> str:
        value, wall = number(dig(arm, "breakdown", *path)), number(dig(arm, "breakdown", "wall_seconds"))
        return seconds(value) + (f" ({value / wall * 100:.0f} %)" if value and wall and wall > 0 else "")

    rows = [[plain(name), *(cell(arm, "categories", name) for arm in arms)] for name in used]
    rows.append(["whole profiled step", *(seconds(dig(arm, "breakdown", "wall_seconds")) for arm in arms)])
    unprofiled = [seconds(dig(arm, "summary", "step_seconds")) for arm in arms]
    if any(each != UNKNOWN for each in unprofiled):
        rows.append(["step without profiler", *unprofiled])
    if any(number(dig(arm, "breakdown", "communication", "hidden_seconds")) for arm in arms):
        rows.append(["hidden communication", *(cell(arm, "communication", "hidden_seconds") for arm in arms)])
    note = (
        "One profiled step, mean of the processes. The profiler adds its cost to every operator call, most to an arm "
        "of many small ones: read shares here, and how much faster an arm is from its steps without the profiler "
        "(median, slowest process). Hidden communication runs behind compute and adds nothing."
    )
    return Table("Where the time goes", ["category", *(plain(dig(arm, "name")) for arm in arms)], rows, note=note)


def experts_table(report: Json) -> Table | None:
    """How long experts' messages were waited for, and what they sent: a row for each arm whose lanes were recorded."""
    rows = []
    for arm in items(report, "arms"):
        found = dig(arm, "experts")
        sent = dig(found, "bytes")
        if not isinstance(sent, list):
            continue
        links = [(number(each) or 0, here, there) for here, row in enumerate(sent) for there, each in enumerate(row)]
        most, here, there = max(links, key=lambda each: each[0])
        rows.append(
            [
                plain(dig(arm, "name")) or "?",
                seconds(dig(found, "exposed_seconds")),
                percent(dig(found, "exposed_share")),
                seconds(dig(found, "in_flight_seconds", "dispatch")),
                seconds(dig(found, "in_flight_seconds", "combine")),
                size(max(sum(number(each) or 0 for each in row) for row in sent)),
                f"{size(most)} ({here} to {there})",
            ]
        )
    note = (
        "The last measured step. Exposed: the rank that waits most, in which it did not compute; the share is of its "
        "step. In flight: mean of the ranks, forward and backward pass. Sent: the rank that sends most; link: the one "
        "from rank to rank that takes most."
    )
    headers = ["arm", "exposed", "of the step", "dispatch in flight", "combine in flight", "sent by a rank", "link"]
    return Table("Experts' exchange", headers, rows, frozenset({0, 6}), note) if rows else None


def operator_tables(report: Json) -> list[Table]:
    """For every operator its cases and contenders."""
    tables = []
    rows = items(report, "rows")
    for operator in dict.fromkeys(plain(dig(row, "operator")) or "?" for row in rows):
        own = [row for row in rows if (plain(dig(row, "operator")) or "?") == operator]
        compare = any(dig(row, "earlier") for row in own)
        cells = [cell for row in own for cell in _case_rows(row, compare)]
        headers = ["case", "contender", "time", "10 % to 90 %", "rate", "of ceiling", "theirs over ours"]
        headers += ["since the earlier run"] if compare else []
        note = "Theirs over ours: above 1, mindspeed_lite is faster."
        tables.append(Table(operator, headers, cells, frozenset({0, 1, 7}), note))
    return tables


def _case_rows(row: Json, compare: bool) -> list[list[str]]:
    """A row for each contender; the case is named in the first only."""
    case = ", ".join(filter(None, (plain(dig(row, "case")), plain(dig(row, "direction"))))) or "?"
    earlier = [f"{verdict_cell(dig(row, 'earlier'))}" if dig(row, "earlier") else UNKNOWN]
    found: list[list[str]] = []
    for contender in items(row, "contenders"):
        name = plain(dig(contender, "name")) or "?"
        if dig(contender, "error"):
            differs = "does not agree" in plain(dig(contender, "error"))
            cells = [name, "results differ" if differs else "did not run", *[UNKNOWN] * 4]
        else:
            cells = [
                name,
                seconds(dig(contender, "seconds")),
                between(dig(contender, "low"), dig(contender, "high")),
                contender_rate(row, contender),
                percent(dig(contender, "of_ceiling")),
                ratio_cell(contender),
            ]
        found.append([case if not found else "", *cells, *((earlier if not found else [""]) if compare else [])])
    return found or [[case, "no contender", *[UNKNOWN] * 5, *(earlier if compare else [])]]


def contender_rate(row: Json, contender: Json) -> str:
    """The rate that counts against the nearer ceiling."""
    if dig(row, "bound") == "compute":
        return rate(dig(contender, "flops_per_second"), "FLOP")
    return rate(dig(contender, "bytes_per_second"), "B")


def ratio_cell(contender: Json) -> str:
    """`1.24x (1.20 to 1.28)`; nothing for our own operator."""
    if dig(contender, "name") == "mindspeed_lite" or number(dig(contender, "ratio")) is None:
        return UNKNOWN
    measure = {key: dig(contender, name) for key, name in _RATIO.items()}
    limits = spread(measure)
    return times(measure) + (f" ({limits})" if limits != UNKNOWN else "")


def conditions(report: Json) -> list[tuple[str, str]]:
    """Under what conditions all of it was measured: label and text, nothing that is not known."""
    environment, model, settings = (dig(report, key) for key in ("environment", "model", "settings"))
    ceiling = dig(report, "ceiling")
    peak = [
        rate(dig(ceiling, "flops_per_second"), "FLOP") if dig(ceiling, "flops_per_second") else "",
        rate(dig(ceiling, "bytes_per_second"), "B") if dig(ceiling, "bytes_per_second") else "",
    ]
    source = plain(dig(ceiling, "source"))
    affinity = dig(environment, "affinity")
    cores = ["+".join(texts({"cores": each}, "cores")) or plain(each) for each in _sequence(affinity)]
    shape = {key: value for key, value in _mapping(model).items() if not isinstance(value, Mapping)}
    flops = number(shape.pop("flops_per_step", None))
    found = [
        ("device", ", ".join(filter(None, (plain(dig(environment, key)) for key in ("device", "device_type"))))),
        ("processes", plain(dig(environment, "world_size"))),
        ("threads", plain(dig(environment, "threads"))),
        ("cores by process", "; ".join(_ranges(each) for each in cores)),
        ("allocator", plain(dig(environment, "allocator"))),
        ("ceiling of a process", ", ".join(filter(None, peak)) + (f" ({source})" if source else "")),
        ("model", _pairs(shape)),
        ("compute per step", _scaled_flops(flops)),
        ("parallel", _pairs(dig(model, "parallel"))),
        ("settings", _pairs(settings)),
        ("versions", _pairs(dig(environment, "versions"))),
        ("variables", _pairs(dig(environment, "variables"), "=")),
        ("not the same in all runs", "; ".join(texts(environment, "differences"))),
        ("measured", plain(dig(report, "created"))),
    ]
    return [(label, text.strip()) for label, text in found if text.strip()]


def _scaled_flops(flops: float | None) -> str:
    return "" if flops is None else rate(flops, "FLOP").removesuffix("/s")


def _sequence(value: object) -> Sequence[object]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else []


def _mapping(value: object) -> Json:
    return value if isinstance(value, Mapping) else {}


def _pairs(values: object, sign: str = " ") -> str:
    """`name value, name value`, without what is not known."""
    return ", ".join(
        f"{plain(key).replace('_', ' ') if sign == ' ' else plain(key)}{sign}"
        + (count(value) if isinstance(value, int | float) and abs(value) >= 10000 else plain(value))
        for key, value in _mapping(values).items()
        if value is not None
    )


def _ranges(cores: str) -> str:
    """Neighbouring cores as a range: `0+1+2+3` is `0-3`."""
    parts = cores.split("+")
    if not all(part.isdigit() for part in parts):
        return cores
    groups: list[list[int]] = []
    for core in sorted(map(int, parts)):
        if groups and core == groups[-1][-1] + 1:
            groups[-1].append(core)
        else:
            groups.append([core])
    return ",".join(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups)
