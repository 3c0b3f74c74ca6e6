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
_SUBSTITUTION = r"\$\((?:[^()]|\([^()]*\))*\)|\$\{[^}]*\}|`[^`]*`"
_QUOTES = r"\"(?:\\[\s\S]|[^\"\\])*\"|'[^']*'"
# A comment, a word, or a character between words.
_TOKEN = re.compile(
    rf"(?<![^\s;(])#[^\n]*|(?P<word>(?:\\[^\n]|{_SUBSTITUTION}|{_QUOTES}|[^\s;|&<>()\"'`\\])+)|\\\n|[\s\S]"
)
_WORD_OF_TEXT = re.compile(rf"(?:\\[^\n]|{_SUBSTITUTION}|[^\s\\])+")
_QUOTED = re.compile(_QUOTES)
_QUOTED_FLAG = re.compile(r"([\"'])(--[A-Za-z][\w-]*)\1")
_HOLDS_FLAGS = re.compile(r"(?:^|\s|\\\n)--[A-Za-z]")
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
    variables = {name: value.strip("\"'") for name, value in _ASSIGNMENT.findall(text)}
    words: list[_Word] = []
    ends: set[int] = set()
    for each in _words(text):
        if each is None:
            ends.add(len(words) - 1)
        else:
            words.append(each)

    def resolved(word: str) -> str:
        is_quoted = len(word) > 1 and word[0] == word[-1] and word[0] in "\"'"
        found = word[1:-1] if is_quoted else word
        for _ in range(4):  # variables in values of variables
            found = _VARIABLE.sub(lambda m: str(variables.get(m[1] or m[2], m[0] if m[3] is None else m[3])), found)
        return found

    found = translate([word.text for word in words], resolve=resolved, ends=ends)
    in_table = {step.use.start for step in found.steps}
    others = dict.fromkeys(
        word.text.partition("=")[0]
        for place, word in enumerate(words)
        if place not in in_table and re.match(r"--[A-Za-z]", word.text)
    )
    return Script(_edited(text, words, found.steps), found, 0, tuple(others))


def _words(text: str) -> Iterator[_Word | None]:
    """Yield words; None where quotes or a command end."""
    place = "command"
    for found in _TOKEN.finditer(text):
        char = found[0]
        if found["word"]:
            yield from _parts(text, found.start(), found.end(), place)
        elif char == "(" and text[found.start() - 1 : found.start()] == "=":
            place = "array"
            yield None
        elif char == ")" or (char in "\n;|&<>(" and place == "command"):
            place = "command"
            yield None
    yield None


def _parts(text: str, start: int, stop: int, place: str) -> Iterator[_Word | None]:
    """Split a word of the shell into quoted texts that hold flags, and the rest."""
    if flag := _QUOTED_FLAG.fullmatch(text, start, stop):
        yield _Word(flag[2], start, stop, place)
        return
    for quoted in _QUOTED.finditer(text, start, stop):
        if _HOLDS_FLAGS.search(quoted[0][1:-1]):
            if quoted.start() > start:
                yield _Word(text[start : quoted.start()], start, quoted.start(), place)
            yield None
            for word in _WORD_OF_TEXT.finditer(text, quoted.start() + 1, quoted.end() - 1):
                yield _Word(word[0], word.start(), word.end(), "text")
            yield None
            start = quoted.end()
    if stop > start:
        yield _Word(text[start:stop], start, stop, place)


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
