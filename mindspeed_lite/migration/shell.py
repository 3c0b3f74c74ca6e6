"""Translates MindSpeed's flags in shell scripts and Python files.

All flags of a file form one command line. Everything else stays.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
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
    is_last: bool


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
    words = list(_words(text))
    variables = {name: value.strip("\"'") for name, value in _ASSIGNMENT.findall(text)}
    ends = {number for number, word in enumerate(words) if word.is_last}
    found = translate([word.text for word in words], resolve=lambda word: _resolved(word, variables), ends=ends)
    in_table = {step.use.start for step in found.steps}
    others = (
        word.text.partition("=")[0]
        for number, word in enumerate(words)
        if number not in in_table and re.match(r"--[A-Za-z]", word.text)
    )
    return Script(_edited(text, words, found.steps), found, 0, tuple(dict.fromkeys(others)))


def _resolved(word: str, variables: dict[str, str]) -> str:
    text = word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "\"'" else word
    for _ in range(4):
        text = _VARIABLE.sub(
            lambda m: variables.get(m[1] or m[2], m[3] if m[3] is not None else m[0]),
            text,
        )
    return text


def _words(text: str, place: str = "command", start: int = 0, stop: int | None = None) -> Iterator[_Word]:
    stop = len(text) if stop is None else stop
    begin = at = start
    pending: list[_Word] = []

    def word(end: int, is_last: bool) -> Iterator[_Word]:
        if end > begin:
            pending.append(_Word(text[begin:end], begin, end, place, False))
        while pending and (is_last or len(pending) > 1):
            first = pending.pop(0)
            yield _Word(first.text, first.start, first.stop, first.place, is_last and not pending)

    while at < stop:
        char = text[at]
        if text.startswith("\\\n", at):
            yield from word(at, False)
            at = begin = at + 2
        elif char == "\\":
            at += 2
        elif char in " \t\r" or (char == "\n" and place != "command"):
            yield from word(at, False)
            at = begin = at + 1
        elif char == "#" and at == begin and place != "text":
            end = text.find("\n", at)
            at = begin = stop if end < 0 else end
        elif char in "\"'" and place != "text":
            end = _closing(text, at, stop)
            if at == begin and _FLAG.fullmatch(text, at + 1, end) and text[end + 1 : end + 2] in _BLANK:
                pending.append(_Word(text[at + 1 : end], at, end + 1, place, False))
                at = begin = end + 1
                continue
            if _HOLDS_FLAGS.search(text[at + 1 : end].replace("\\\n", " ")):
                yield from word(at, True)
                yield from _words(text, "text", at + 1, end)
                begin = end + 1
            at = end + 1
        elif text.startswith(("$(", "${", "`"), at):
            at = _after_substitution(text, at, stop)
        elif char == "(" and place == "command" and text[at - 1 : at] == "=":
            yield from word(at, True)
            place, at = "array", at + 1
            begin = at
        elif char == ")" and place == "array":
            yield from word(at, True)
            place, at = "command", at + 1
            begin = at
        elif char in "\n;|&<>()" and place == "command":
            yield from word(at, True)
            at = begin = at + 1
        else:
            at += 1
    yield from word(min(at, stop), True)


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
