"""Adds features' flags to the host's argument parser."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from typing import Any

from .feature import Feature, Option, matches

_MARK = "_declared_by"


def add_arguments(
    parser: argparse.ArgumentParser,
    features: Iterable[Feature],
    extra: Iterable[Option] = (),
    *,
    host_version: str,
) -> dict[str, str]:
    """Add a group per feature; return features whose flag the host uses otherwise, with the reason."""
    groups: list[tuple[str, str, Iterable[Option]]] = [("", "mindspeed_lite", extra)]
    groups += [(each.name, f"mindspeed_lite: {each.name}", each.options) for each in features]
    collisions = {}
    for feature, heading, options in groups:
        group: Any = None
        for option in options:
            flag, dest = option.flag, option.dest
            taken = [each for each in parser._actions if each.dest == dest or flag in each.option_strings]
            if not taken:
                group = group or parser.add_argument_group(heading)
                setattr(group.add_argument(flag, **_keywords(option)), _MARK, option)
            elif not all(_is_the_same(action, option, host_version) for action in taken):
                collisions[feature] = f"{flag} means something else in this host"
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
    optional = {"choices": option.choices, "nargs": option.nargs, "metavar": option.metavar}
    keywords |= {name: value for name, value in optional.items() if value is not None}
    return keywords | {"default": option.default, "type": _reader(option.convert)}


def _reader(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"takes {error}, not {text!r}") from None

    return convert if isinstance(convert, type) else read
