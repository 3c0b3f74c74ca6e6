"""Translates MindSpeed's flags in shell scripts and Python files.

All flags of a file form one command line. Everything else stays.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from .translate import TranslatedFlag, Translation, translate

_ASSIGNMENT = re.compile(r"^[ \t]*(?:export[ \t]+|local[ \t]+)?(\w+)=(\"[^\"$`\n]*\"|'[^'\n]*'|[^\s\"'();|&#]*)", re.M)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_HOLDS_FLAGS = re.compile(r"(?:^|\s)--[A-Za-z]")
_FLAG = re.compile(r"--[A-Za-z][\w-]*")
_BLANK = ("", " ", "\t", "\n", "\\", ")")
_IMPORT = re.compile(r"^(\s*)(import mindspeed\.|from mindspeed import )(?=megatron_adaptor\b)", re.M)


@dataclass(frozen=True)
class _Word:
    """Word at `text[start:stop]`; `place`: "command", "array" or "text" (in quotes)."""

    text: str
    start: int
    stop: int
    place: str


@dataclass(frozen=True)
class Script:
    """A script, the outcome of each flag, and the translated text.

    imports: number of changed import lines. others: unknown flags, in order.
    """

    text: str
    translation: Translation
    imports: int
    others: tuple[str, ...]


def read_script(text: str, is_python: bool = False) -> Script:
    """Translate a launch script, or the import line of a Python file."""
    if is_python:
        text, count = _IMPORT.subn(lambda m: m[1] + m[2].replace("mindspeed", "mindspeed_lite"), text)
        return Script(text, Translation((), ()), count, ())
    reader = _Reader(text)
    reader.read("command", 0, len(text))
    words, variables = reader.words, {name: value.strip("\"'") for name, value in _ASSIGNMENT.findall(text)}

    def resolved(word: str) -> str:
        is_quoted = len(word) > 1 and word[0] == word[-1] and word[0] in "\"'"
        found = word[1:-1] if is_quoted else word
        for _ in range(4):  # variables in values of variables
            found = _VARIABLE.sub(lambda m: str(variables.get(m[1] or m[2], m[0] if m[3] is None else m[3])), found)
        return found

    found = translate([word.text for word in words], resolve=resolved, ends=reader.ends)
    in_table = {step.use.start for step in found.steps}
    others = dict.fromkeys(
        word.text.partition("=")[0]
        for place, word in enumerate(words)
        if place not in in_table and re.match(r"--[A-Za-z]", word.text)
    )
    return Script(_edited(text, words, found.steps), found, 0, tuple(others))


class _Reader:
    """Words of a script; `ends`: places of those that end quotes or a command."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.words: list[_Word] = []
        self.ends: set[int] = set()

    def _add(self, begin: int, end: int, place: str) -> None:
        if end > begin:
            self.words.append(_Word(self._text[begin:end], begin, end, place))

    def _end(self, begin: int, end: int, place: str) -> None:
        self._add(begin, end, place)
        self.ends.add(len(self.words) - 1)

    def read(self, place: str, start: int, stop: int) -> None:
        text, begin, at = self._text, start, start
        while at < stop:
            char = text[at]
            if text.startswith("\\\n", at):
                self._add(begin, at, place)
                at = begin = at + 2
            elif char == "\\":
                at += 2
            elif char in " \t\r" or (char == "\n" and place != "command"):
                self._add(begin, at, place)
                at = begin = at + 1
            elif char == "#" and at == begin and place != "text":
                end = text.find("\n", at)
                at = begin = stop if end < 0 else end
            elif char in "\"'" and place != "text":
                end = _closing(text, at, stop)
                if at == begin and _FLAG.fullmatch(text, at + 1, end) and text[end + 1 : end + 2] in _BLANK:
                    self.words.append(_Word(text[at + 1 : end], at, end + 1, place))
                    begin = end + 1
                elif _HOLDS_FLAGS.search(text[at + 1 : end].replace("\\\n", " ")):
                    self._end(begin, at, place)
                    self.read("text", at + 1, end)
                    begin = end + 1
                at = end + 1
            elif text.startswith(("$(", "${", "`"), at):
                at = _after_substitution(text, at, stop)
            elif char in "()" and place == ("command" if char == "(" and text[at - 1 : at] == "=" else "array"):
                self._end(begin, at, place)
                place = "array" if char == "(" else "command"
                at = begin = at + 1
            elif char in "\n;|&<>()" and place == "command":
                self._end(begin, at, place)
                at = begin = at + 1
            else:
                at += 1
        self._end(begin, min(at, stop), place)


def _closing(text: str, at: int, stop: int) -> int:
    end = at + 1
    while end < stop and text[end] != text[at]:
        end += 2 if text[end] == "\\" and text[at] == '"' else 1
    return min(end, stop)


def _after_substitution(text: str, at: int, stop: int) -> int:
    """Position after `$(...)`, `${...}` or backquotes."""
    if text[at] == "`":
        end = text.find("`", at + 1)
        return stop if end < 0 else end + 1
    opening = text[at + 1]
    closing, depth = {"(": ")", "{": "}"}[opening], 0
    for place in range(at + 1, stop):
        depth += (text[place] == opening) - (text[place] == closing)
        if depth == 0:
            return place + 1
    return stop


def _edited(text: str, words: list[_Word], steps: tuple[TranslatedFlag, ...]) -> str:
    for step in reversed(steps):
        use = step.use
        first, last = words[use.start], words[use.stop - 1]
        raw = tuple(word.text for word in words[use.start : use.stop])
        if step.words == raw:
            continue
        if step.words:
            written = " ".join(_quoted(word, raw, first.place) for word in step.words)
            text = text[: first.start] + written + text[last.stop :]
        else:
            text = _without(text, first.start, last.stop, first.place)
    return text


def _quoted(word: str, raw: tuple[str, ...], place: str) -> str:
    known = word in raw or place == "text" or word.startswith("--")
    return word if known or word == shlex.quote(word) or "$" in word else f'"{word}"'


def _without(text: str, start: int, stop: int, place: str) -> str:
    line_start = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", stop)
    line_end = len(text) if line_end < 0 else line_end
    before, after = text[line_start:start], text[stop:line_end]
    if before.strip() or after.strip() not in ("", "\\"):
        if not after.strip():
            before = before.rstrip()
        return text[:line_start] + before + (after.lstrip(" \t") if not before.strip() or before.endswith((" ", "\t"))
                                             else after) + text[line_end:]  # fmt: skip
    head, tail = text[:line_start], text[line_end + 1 :]
    if place == "command" and after.strip() != "\\" and head.endswith("\\\n"):
        head = head[:-2].rstrip(" \t") + "\n"
    return head + tail
