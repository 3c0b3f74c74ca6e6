"""Known flags of MindSpeed and MindSpeed-LLM, and their outcomes, from `flags.tsv`."""

from __future__ import annotations

import csv
import functools
from pathlib import Path
from typing import NamedTuple

CLASSES = {
    "same": "ours, under the same name",
    "megatron": "Megatron has it",
    "alias": "ours, under another name",
    "not needed": "no flag is needed",
    "replaced": "done another way",
    "planned": "not in this release",
    "another product": "outside mindspeed_lite",
    "model": "of a model that Megatron does not build",
    "dead": "no longer in MindSpeed",
}


class FlagRow(NamedTuple):
    """One flag, or `--flag=value` for a value with an outcome of its own.

    Attributes:
        values: number of words: "0", "1" or "+" (up to the next flag).
        kind: one of CLASSES.
        outcome: keep, rename, write (other words), drop, launcher (torchrun's), skip, refuse, rule.
        words: `rename`, `write`: replacement; "{}": the flag's value.
        idle: conditions; the first that holds makes it a no-op: "cp=1", "pp=1", "vpp=1", "value:x", "no:--other" (flag
            absent), "with:--other" or "with:--other=x" (flag given); "not:--other" refuses both. "shared": also a flag
            of Megatron or this package; translated only in MindSpeed commands.
        instead: alternative; empty if in the note.
        note: meaning, or outcome; of the class "model", the model.
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
