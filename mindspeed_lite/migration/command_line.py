"""Splits a command into flags and values, by the table's arities."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

from .table import FlagRow, flags

_FLAG = re.compile(r"--[A-Za-z]")


class UnknownValue(Exception):
    """Only the shell knows the value, as `$(nproc)`; `args[0]`: the word."""


class Refusal(Exception):
    """Unsupported flag or value; `args[0]`: what, and the alternative."""


@dataclass(frozen=True)
class FlagUse:
    row: FlagRow
    values: tuple[str, ...]
    start: int
    stop: int

    @property
    def flag(self) -> str:
        return self.row.flag


class CommandLine:
    """Words of a command.

    Args:
        words: from the shell, or raw words of a script.
        known: flags of the parser, or None.
        device: training device, or "".
        resolve: value of a raw word; may leave a `$`.
        ends: places that end a flag's values: end of quotes or command.
    """

    def __init__(
        self,
        words: Sequence[str],
        known: Container[str] | None = None,
        device: str = "",
        transformer_engine: bool = False,
        resolve: Callable[[str], str] = str,
        ends: Container[int] = (),
    ) -> None:
        self.words = list(words)
        self.known, self.device, self.transformer_engine = known, device, transformer_engine
        self._resolve = resolve
        self._ends = ends
        self._given: dict[str, tuple[str, ...]] = {}
        self.uses = list(self._read())

    def _read(self) -> Iterator[FlagUse]:
        table = flags()
        place = 0
        while place < len(self.words) and self.words[place] != "--":
            start, word = place, self.words[place]
            place += 1
            if not _FLAG.match(word):
                continue
            flag, has_value, value = word.partition("=")
            row = table.get(flag)
            values = [value] if has_value else []
            most = 0 if has_value or (row and row.values == "0") else 1 if row and row.values == "1" else None
            while most is None or len(values) < most:
                if place >= len(self.words) or place - 1 in self._ends or self.words[place].startswith("--"):
                    break
                values.append(self.words[place])
                place += 1
            self._given[flag] = tuple(values)
            if row:
                yield FlagUse(row, tuple(values), start, place)

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
        return self.has(flag) and (flag not in self.known if self.known is not None else True)

    def raw(self, flag: str) -> tuple[str, ...]:
        return self._given.get(flag, ())

    def value(self, flag: str, default: str = "") -> str:
        """Last value of a flag.

        Raises:
            UnknownValue: only the shell knows it.
        """
        return self.resolved(self._given[flag][0]) if self._given.get(flag) else default

    def number(self, flag: str, default: int) -> int:
        """Last value as an integer.

        Raises:
            Refusal: it is none.
        """
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
        text = self._resolve(word)
        if "$" in text or "`" in text:
            raise UnknownValue(word)
        return text
