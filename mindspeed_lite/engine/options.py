"""Adds features' flags to the host's argument parser."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .feature import Feature, Option, matches

_MARK = "_declared_by"


@dataclass(frozen=True)
class Collision:
    """A flag that the host uses otherwise; `feature` is empty for a general flag."""

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
    # A lone % would break argparse's --help.
    keywords: dict[str, Any] = {"dest": option.dest, "help": re.sub(r"(?<!%)%(?![%(])", "%%", option.help)}
    if option.is_switch:
        return keywords | {"action": "store_true", "default": False}
    keywords |= {"default": option.default, "type": _reading(option)}
    optional = {"choices": option.choices, "nargs": option.nargs, "metavar": option.metavar}
    return keywords | {name: value for name, value in optional.items() if value is not None}


def _reading(option: Option) -> Callable[[str], Any]:
    convert = option.convert
    if isinstance(convert, type):
        return convert

    def read(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"takes {error}, not {text!r}") from None

    return read
