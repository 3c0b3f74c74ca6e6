"""Translates MindSpeed's flags and imports in shell scripts and Python files.

All flags of a file form one command line, but those of variables that a launch script never reads. Everything else
stays.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from .table import flags
from .translate import TranslatedFlag, Translation, translate

_ASSIGNMENT = re.compile(r"^[ \t]*(?:export[ \t]+|local[ \t]+)?(\w+)=(\"[^\"$`\n]*\"|'[^'\n]*'|[^\s\"'();|&#]*)", re.M)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_VARIABLE_NAME = re.compile(r"\$(?:(\w+)|\{(\w+))")
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
_IMPORT = re.compile(
    r"^(\s*(?:import|from) )mindspeed(?:_llm)?(?=\.megatron_adaptor\b| import megatron_adaptor\b)", re.M
)
_OTHER_IMPORT = re.compile(r"^\s*(?:import|from) (mindspeed(?:_llm)?\b[\w.]*)", re.M)
_LAUNCHER = re.compile(r"(?:\S*/)?torchrun|torch\.distributed\.(?:run|launch)")
_TRAINING_SCRIPT = re.compile(r"[\"']?(?:[^\"']*/)?([\w.-]+)\.py[\"']?")


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

    changed: number of changed import lines, or of commands that start by `mindspeed_lite run`. others: flags that
    neither the table nor the parser has, or modules of MindSpeed, in order.
    """

    text: str
    translation: Translation
    changed: int
    others: tuple[str, ...]


def read_script(text: str, is_python: bool = False, known: Collection[str] | None = None) -> Script:
    """Translate a launch script for a parser with the flags `known`, or the import lines of a Python file."""
    if is_python:
        text, count = _IMPORT.subn(r"\1mindspeed_lite", text)
        return Script(text, Translation((), ()), count, tuple(dict.fromkeys(_OTHER_IMPORT.findall(text))))
    text, started = _started(text)
    variables = {name: value.strip("\"'") for name, value in _ASSIGNMENT.findall(text)}
    read = {each for found in _VARIABLE_NAME.findall(text) for each in found}
    words, ends = _split(text, variables.keys() - read if started else ())

    def resolved(word: str) -> str:
        is_quoted = len(word) > 1 and word[0] == word[-1] and word[0] in "\"'"
        found = word[1:-1] if is_quoted else word
        for _ in range(4):  # variables in values of variables
            found = _VARIABLE.sub(lambda m: str(variables.get(m[1] or m[2], m[0] if m[3] is None else m[3])), found)
        return found

    if known is not None:
        known = {*known, *(flag for flag, row in flags().items() if row.outcome == "launcher")}
    found = translate([word.text for word in words], known, resolve=resolved, ends=ends)
    given = dict.fromkeys(word.text.partition("=")[0] for word in words if re.match(r"--[A-Za-z]", word.text))
    others = tuple(flag for flag in given if flag not in flags() and flag not in (known or ()))
    return Script(_edited(text, words, found.steps), found, started, others)


def _started(text: str) -> tuple[str, int]:
    """Let `mindspeed_lite run` start the scripts that torchrun, or python for `pretrain_*.py`, starts."""
    words, ends = _split(text)
    bounds = [0, *sorted(end + 1 for end in ends)]
    edits = []
    for command in (words[first:stop] for first, stop in itertools.pairwise(bounds)):
        place = next((place for place, word in enumerate(command) if _TRAINING_SCRIPT.fullmatch(word.text)), 0)
        before, script = command[:place], _TRAINING_SCRIPT.fullmatch(command[place].text) if place else None
        launchers = [each for each in before if _LAUNCHER.fullmatch(each.text)]
        is_launched = launchers or ("python" in before[-1].text if before else False)
        if script is None or not is_launched or any(each.text == "mindspeed_lite" for each in before):
            continue
        if launchers or script[1].startswith("pretrain_"):
            edits.append((command[place].start, command[place].start, "-m mindspeed_lite run "))
            # torch.distributed.launch puts --local-rank before `run`.
            edits += [(each.start, each.stop, each.text.replace(".launch", ".run")) for each in launchers]
    for start, stop, written in sorted(edits, reverse=True):
        text = text[:start] + written + text[stop:]
    return text, sum(start == stop for start, stop, _ in edits)


def _split(text: str, unread: Collection[str] = ()) -> tuple[list[_Word], set[int]]:
    """Words of a script without values of variables `unread`, and places that end a command or quotes."""
    words: list[_Word] = []
    ends: set[int] = set()
    for each in _words(text, unread):
        if each is None:
            ends.add(len(words) - 1)
        else:
            words.append(each)
    return words, ends


def _words(text: str, unread: Collection[str]) -> Iterator[_Word | None]:
    """Yield words; None where quotes or a command end."""
    place, is_unread = "command", False
    for found in _TOKEN.finditer(text):
        char = found[0]
        if found["word"]:
            if place == "command":
                is_unread = found["word"].partition("=")[0] in unread
            if not is_unread:
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
    has_flags = False
    for quoted in _QUOTED.finditer(text, start, stop):
        # In "--a "1" " the value is outside the quotes: those around it belong to its word.
        if has_flags and not quoted[0][1:-1].strip() and quoted.start() > start:
            yield _Word(text[start : quoted.start()], start - 1, quoted.start() + 1, "text")
            start = quoted.end()
        elif _HOLDS_FLAGS.search(quoted[0][1:-1]):
            if quoted.start() > start:
                yield _Word(text[start : quoted.start()], start, quoted.start(), place)
            if not has_flags:
                yield None
            for word in _WORD_OF_TEXT.finditer(text, quoted.start() + 1, quoted.end() - 1):
                yield _Word(word[0], word.start(), word.end(), "text")
            start, has_flags = quoted.end(), True
    if stop > start:
        yield _Word(text[start:stop], start, stop, place)
    if has_flags:
        yield None


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
