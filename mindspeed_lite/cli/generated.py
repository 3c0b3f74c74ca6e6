"""The words of `--generate`: fields of a data class, each as NAME=NUMBER."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any


def read(kind: type, words: Sequence[str], least: Mapping[str, float]) -> dict[str, Any]:
    """The fields of the data class `kind` that the words give.

    Args:
        kind: its fields have defaults, which are whole numbers or floats.
        least: the least value of a field; 1 where none is given, and none for `seed`.

    Raises:
        ValueError: with the word that gives no such number.
    """
    kinds: dict[str, Any] = {each.name: type(each.default) for each in fields(kind)}
    given: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            given[name] = kinds[name](value)
            if kinds[name] is float and not math.isfinite(given[name]):
                raise ValueError
        except (KeyError, ValueError):
            raise ValueError(f"--generate takes NAME=NUMBER of {', '.join(kinds)}, not {word!r}") from None
        if name != "seed" and given[name] < least.get(name, 1):
            raise ValueError(f"--generate {word}: at least {least.get(name, 1)}")
    return given
