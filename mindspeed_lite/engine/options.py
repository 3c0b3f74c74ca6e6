"""Flags of features as argparse groups of a parser that belongs to the host and has flags of its own."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .feature import Feature, Option, matches

_MARK = "_declared_by"


@dataclass(frozen=True)
class Collision:
    """A flag that the host uses for something of its own; `feature` is empty for a flag of no feature."""

    flag: str
    feature: str


def add_arguments(
    parser: argparse.ArgumentParser,
    features: Iterable[Feature],
    extra: Iterable[Option] = (),
    *,
    title: str = "mindspeed_lite",
    host_version: str,
) -> list[Collision]:
    """Add one group per feature and one for `extra`; a flag it has is reused if it means the same."""
    groups: list[tuple[str, str, str | None, list[Option]]] = [("", title, None, list(extra))]
    for each in features:
        groups.append((each.name, f"{title}: {each.name}", each.summary, list(each.options)))
    collisions = []
    for feature, heading, summary, options in groups:
        group: Any = None
        for option in options:
            taken = [a for a in parser._actions if option.flag in a.option_strings or a.dest == option.dest]
            if not taken:
                group = group or parser.add_argument_group(heading, summary)
                setattr(group.add_argument(option.flag, **_keywords(option)), _MARK, option)
            elif not all(_is_the_same(action, option, host_version) for action in taken):
                collisions.append(Collision(option.flag, feature))
    return collisions


def _is_the_same(action: argparse.Action, option: Option, host_version: str) -> bool:
    ours = getattr(action, _MARK, None)
    if ours is not None:
        return bool(ours == option)
    return option.flag in action.option_strings and option.upstream != "" and matches(option.upstream, host_version)


def _keywords(option: Option) -> dict[str, Any]:
    # argparse formats help with %; a lone one would break the host's whole --help.
    keywords: dict[str, Any] = {"dest": option.dest, "help": re.sub(r"(?<!%)%(?![%(])", "%%", option.help)}
    if option.is_switch:
        return keywords | {"action": "store_true", "default": False}
    keywords |= {"default": option.default, "type": _reading(option)}
    optional = {"choices": option.choices, "nargs": option.nargs, "metavar": option.metavar}
    return keywords | {name: value for name, value in optional.items() if value is not None}


def given_options(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> frozenset[str]:
    """The dests that a command line names itself, told from its words alone: no action runs, nothing is converted."""
    words = list(arguments)
    if parser.fromfile_prefix_chars is not None:
        words = parser._read_args_from_files(words)
    if "--" in words:
        words = words[: words.index("--")]
    return frozenset(dest for word in words for dest in _named(parser, word))


def _named(parser: argparse.ArgumentParser, word: str) -> Iterator[str]:
    """The dests of the options in one word: one, or those of short switches that are written together."""
    actions = parser._option_string_actions
    if len(word) < 2 or word[0] not in parser.prefix_chars:
        return
    option = word if word in actions else word.partition("=")[0]
    is_long = option[1:2] != "" and option[1] in parser.prefix_chars
    if option not in actions and (parser.allow_abbrev or not is_long):
        longer = [each for each in actions if each.startswith(option)]
        option = longer[0] if len(longer) == 1 else option
    if option in actions:
        yield actions[option].dest
    elif not is_long:
        for letter in word[1:]:
            action = actions.get(word[0] + letter)
            if action is None:
                return
            yield action.dest
            if action.nargs != 0:
                return  # the rest of the word is its value


def _reading(option: Option) -> Callable[[str], Any]:
    """The option's type for argparse, which names only a builtin one in its error: any other says what it takes."""
    convert = option.convert
    if isinstance(convert, type):
        return convert

    def read(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"takes {error}, not {text!r}") from None

    return read
