"""Flags that are given beside the one that turns a feature on."""

from __future__ import annotations

from collections.abc import Iterable

from mindspeed_lite.engine import Option, Settings


def given_flags(options: Iterable[Option], settings: Settings) -> list[str]:
    """Those that are not at their default, as they are written on a command line."""
    found = []
    for option in options:
        value = settings.get(option.dest)
        if value is not None and value != option.default:
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            found.append(option.flag if option.is_switch else f"{option.flag} {shown}")
    return found
