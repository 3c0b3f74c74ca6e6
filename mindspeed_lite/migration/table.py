"""Known flags of MindSpeed and MindSpeed-LLM, and their outcomes, from `flags.tsv`."""

from __future__ import annotations

import csv
import functools
from pathlib import Path
from typing import NamedTuple

CLASSES = {
    "same": "ours, under the same name",
    "megatron": "served by Megatron",
    "alias": "ours, under another name",
    "not needed": "nothing has to be asked for",
    "replaced": "served in another way",
    "planned": "not in this release",
    "another product": "not a matter of mindspeed_lite",
    "dead": "gone from MindSpeed itself",
}


class FlagRow(NamedTuple):
    """One flag.

    Attributes:
        values: number of words: "0", "1" or "+" (up to the next flag).
        kind: one of CLASSES.
        outcome: keep, rename, write (other words), drop, launcher (torchrun's), skip, refuse, choose (by value), rule.
        words: `rename`, `write`: replacement. `keep`: after "!", refused values, separated by "|". `choose`:
            "PATTERN>WORDS", separated by "|"; "*>REASON" refuses others. "{}": the flag's value.
        idle: conditions; the first that holds makes it a no-op: "cp=1", "pp=1", "vpp=1", "value:x", "no:--other" (flag
            absent), "with:--other" or "with:--other=x" (flag given); "not:--other" refuses both. "shared": also a flag
            of Megatron or this package; translated only in MindSpeed commands.
        instead: alternative; empty if in the note.
        note: meaning, or outcome.
    """

    flag: str
    values: str
    kind: str
    outcome: str
    words: str
    idle: tuple[str, ...]
    instead: str
    note: str


@functools.cache
def flags() -> dict[str, FlagRow]:
    with (Path(__file__).parent / "flags.tsv").open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    found = {}
    for flag, values, kind, outcome, words, idle, instead, note in rows:
        found[flag] = FlagRow(flag, values, kind, outcome, words, tuple(idle.split()), instead, note)
    return found
