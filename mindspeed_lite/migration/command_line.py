"""Splits a command into flags and values, by the table's arities."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field

from .table import FlagRow, flags

_FLAG = re.compile(r"--[A-Za-z]")


class UnknownValue(Exception):
    """Only the shell knows the value, as `$(nproc)`; `args[0]`: the word."""


class Refusal(Exception):
    """Unsupported flag or value; `args[0]`: what, and the alternative."""


class Skipped(Exception):
    """Training continues without the flag; `args[0]`: which, and why."""


@dataclass(frozen=True)
class FlagUse:
    row: FlagRow
    values: tuple[str, ...]
    start: int
    stop: int

    @property
    def flag(self) -> str:
        return self.row.flag.partition("=")[0]


@dataclass
class CommandLine:
    """Words of a command.

    Attributes:
        words: from the shell, or raw words of a script.
        known: flags of the parser that reads the result, or None for any.
        device: training device, or "".
        resolve: value of a raw word; may leave a `$`.
        ends: places that end a flag's values: end of quotes or command.
    """

    words: Sequence[str]
    known: Container[str] | None = None
    device: str = ""
    transformer_engine: bool = False
    resolve: Callable[[str], str] = str
    ends: Container[int] = ()
    uses: list[FlagUse] = field(init=False)

    def __post_init__(self) -> None:
        self._given: dict[str, tuple[str, ...]] = {}
        self.uses = list(self._read())

    def _read(self) -> Iterator[FlagUse]:
        place = 0
        while place < len(self.words) and self.words[place] != "--":
            start, word = place, self.words[place]
            place += 1
            if not _FLAG.match(word):
                continue
            flag, has_value, value = word.partition("=")
            row = flags().get(flag)
            values = [value] if has_value else []
            most = 0 if has_value else {"0": 0, "1": 1}.get(row.values if row else "", len(self.words))
            while len(values) < most and place < len(self.words) and place - 1 not in self.ends:
                if self.words[place].startswith("--"):
                    break
                values.append(self.words[place])
                place += 1
            self._given[flag] = tuple(values)
            if row:
                of_value = flags().get(f"{flag}={self.resolve(values[0])}", row) if values else row
                yield FlagUse(of_value, tuple(values), start, place)

    @property
    def is_mindspeed(self) -> bool:
        """Whether a flag is only MindSpeed's, which identifies a MindSpeed command."""
        if self.known is not None:
            return any(use.flag not in self.known for use in self.uses)
        return any(use.row.outcome not in ("keep", "launcher") and "shared" not in use.row.idle for use in self.uses)

    def has(self, *flags: str) -> bool:
        return any(flag in self._given for flag in flags)

    def is_foreign(self, flag: str) -> bool:
        """Whether the flag is given and unknown to the parser."""
        return self.has(flag) and (self.known is None or flag not in self.known)

    def values(self, flag: str) -> list[str]:
        """Last values of a flag, [] without it. Raises UnknownValue."""
        return [self.resolved(each) for each in self._given.get(flag, ())]

    def value(self, flag: str, default: str = "") -> str:
        return next(iter(self.values(flag)[:1]), default)

    def number(self, flag: str, default: int) -> int:
        """First value as an integer; raises Refusal if it is none, or UnknownValue."""
        text = self.value(flag, str(default))
        try:
            return int(text)
        except ValueError:
            raise Refusal(f"{flag} takes a whole number, not {text!r}") from None

    def values_of(self, use: FlagUse) -> list[str]:
        if not use.values:
            raise Refusal(f"{use.flag} needs a value")
        return [self.resolved(each) for each in use.values]

    def resolved(self, word: str) -> str:
        text = self.resolve(word)
        if "$" in text or "`" in text:
            raise UnknownValue(word)
        return text
