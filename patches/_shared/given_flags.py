"""Flags that are given beside the one that turns a feature on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mindspeed_lite.engine import Option, OptionError, Settings


def given_flags(options: Iterable[Option], settings: Settings) -> list[str]:
    """Those that are not at their default, as they are written on a command line."""
    found = []
    for option in options:
        value = settings.get(option.dest)
        if value is not None and value != option.default:
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            found.append(option.flag if option.is_switch else f"{option.flag} {shown}")
    return found


def require_first(options: Sequence[Option], settings: Settings) -> None:
    """The flags behind the first one do nothing without it.

    Raises:
        OptionError: one of them is given, and the first one is not.
    """
    first, *beside = options
    if not settings.get(first.dest) and (given := given_flags(beside, settings)):
        raise OptionError(f"{' '.join(given)} has no effect without {first.flag}: add it")
