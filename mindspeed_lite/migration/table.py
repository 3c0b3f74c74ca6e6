"""Every flag of MindSpeed and MindSpeed-LLM that is known, and what becomes of it: `flags.tsv` as data."""

from __future__ import annotations

import csv
import functools
from pathlib import Path
from typing import NamedTuple

# What a flag is.
CLASSES = {
    "same": "ours, under the same name",
    "megatron": "served by Megatron",
    "alias": "ours, under another name",
    "not needed": "nothing has to be asked for",
    "replaced": "served in another way",
    "planned": "not in this release",
    "another product": "not a matter of this package",
    "dead": "gone from MindSpeed itself",
}

# What is done with it in a command line.
OUTCOMES = {
    "keep": "stays as it is",
    "rename": "its value goes to another flag",
    "write": "other words take its place",
    "drop": "left out: nothing has to be asked for",
    "launcher": "stays with the launcher; behind the training script it is left out",
    "skip": "left out, with a notice: the same model trains, without what the flag would save",
    "refuse": "one line and exit code 2",
    "choose": "depends on its value",
    "built-in": "one value is built into Megatron and left out",
    "rule": "depends on its value or on other flags",
}


class FlagRow(NamedTuple):
    """One flag.

    Attributes:
        values: how many words follow it: "0", "1" or "+" (all up to the next flag).
        kind: one of CLASSES.
        outcome: one of OUTCOMES.
        words: `rename`, `write`: what takes its place. `keep`: after "!", values that are refused, parted by "|".
            `built-in`: the value. `choose`: "VALUE>WORDS" parted by "|"; "*>REASON" refuses the others.
        idle: conditions under which it asks for nothing, one of which is enough: "cp=1", "pp=1", "vpp=1", "dense"
            (no experts), "no:--other" (without that flag), "value:x". "shared": Megatron's parser or ours has a flag
            of this name too, and only its use in a MindSpeed command is translated.
        instead: what a user writes or does instead; empty if the note says it all.
        note: what it is, or what becomes of it.
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
    """Return the table, by flag."""
    with (Path(__file__).parent / "flags.tsv").open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    found = {}
    for flag, values, kind, outcome, words, idle, instead, note in rows:
        found[flag] = FlagRow(flag, values, kind, outcome, words, tuple(idle.split()), instead, note)
    return found
