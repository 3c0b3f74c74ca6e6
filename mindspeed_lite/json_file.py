"""Reads JSON files against a description; errors name file and value.

A description returns its value or raises `Mismatch`. All packages may import this module.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

T = TypeVar("T")
Description = Callable[[Any], T]

# Keeps sums and squares finite.
MOST = 1e30
MOST_WHOLE = 1 << 53


class JsonFileError(ValueError):
    """The file cannot be read or is not as described; one line."""


class NotJson(JsonFileError):
    """Not JSON, such as an unfinished line."""


class Mismatch(ValueError):
    """Raised when a value does not match its description; `path` is its location in the file."""

    path = ""

    def within(self, part: str) -> Mismatch:
        self.path = part + (f".{self.path}" if self.path and not self.path.startswith("[") else self.path)
        return self


def read(path: str | Path, description: Description[T]) -> T:
    with _opened(path) as file:
        return decode(_decoded(file.read(), path), path, description)


def lines(path: str | Path) -> Iterator[tuple[str, str]]:
    """Yield (`FILE: line 3`, text) of each non-blank line. Raises JsonFileError."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            place = f"{path}: line {number}"
            found = _decoded(line, place)
            if found.strip():
                yield place, found


def decode(text: str, place: object, description: Description[T]) -> T:
    try:
        return description(json.loads(text))
    except json.JSONDecodeError as error:
        line = f"line {error.lineno} " if "\n" in text.strip() else ""
        raise NotJson(f"{place}: is not JSON: {error.msg} at {line}column {error.colno}") from None
    except Mismatch as error:
        raise JsonFileError(f"{place}: {error.path}{': ' if error.path else ''}{error}") from None
    except (RecursionError, ValueError):
        raise JsonFileError(f"{place}: is nested too deeply, or holds a number of too many digits") from None


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[BinaryIO]:
    try:
        with Path(path).open("rb") as file:
            yield file
    except OSError as error:
        raise JsonFileError(f"{path}: cannot be read: {error.strerror or error}") from None


def _decoded(found: bytes, place: object) -> str:
    try:
        return found.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise JsonFileError(f"{place}: is not UTF-8 (byte {found[error.start]:#x} at {error.start})") from None


def whole(what: str, least: int = 0, most: int = MOST_WHOLE) -> Description[int]:
    return lambda value: int(_bounded(value, what, (int,), least, most))


def number(what: str, least: float = 0.0, most: float = MOST) -> Description[float]:
    return lambda value: float(_bounded(value, what, (int, float), least, most))


def _bounded(value: Any, what: str, kinds: tuple[type, ...], least: float, most: float) -> Any:
    if type(value) in kinds and least <= value <= most:
        return value
    is_above = type(value) in (int, float) and value > most
    raise _unlike(f"{what}, {f'at most {most:g}' if is_above else f'at least {least:g}'}", value)


def text(what: str) -> Description[str]:
    def check(value: Any) -> str:
        if not isinstance(value, str) or not value.isprintable():
            raise _unlike(what, value)
        return value

    return check


def one_of(*values: Any) -> Description[Any]:
    def check(value: Any) -> Any:
        for each in values:
            if type(value) is type(each) and value == each:
                return value
        raise _unlike(" or ".join(map(_shown, values)), value)

    return check


def rows(item: Description[T], least: int = 0, count: int | None = None) -> Description[list[T]]:
    def check(value: Any) -> list[T]:
        if not isinstance(value, list) or len(value) < least or count not in (None, len(value)):
            bound = f"at least {least}" if count is None else str(count)
            raise _unlike(f"a list of {bound}", value)
        found: list[T] = []
        try:
            for each in value:
                found.append(item(each))
        except Mismatch as error:
            raise error.within(f"[{len(found)}]") from None
        return found

    return check


def fields(
    required: Mapping[str, Description[Any]],
    optional: Mapping[str, Description[Any]] | None = None,
    *,
    others: bool = False,
    make: Callable[..., Any] = dict,
) -> Description[Any]:
    """Object with these keys, passed to `make`, whose ValueError becomes a Mismatch.

    others: allow and drop further keys.
    """
    known = {**required, **(optional or {})}

    def check(value: Any) -> Any:
        found = _as_object(value)
        given = {}
        for key, description in known.items():
            if key in found:
                given[key] = _entry(key, found[key], description)
            elif key in required:
                raise Mismatch(f"lacks {key}")
        for key in found:
            if key not in known and not others:
                raise Mismatch(f"has an unknown key {_shown(key)}; known: {', '.join(known)}")
        try:
            return make(**given)
        except ValueError as error:
            raise Mismatch(str(error)) from None

    return check


def table(item: Description[T], keys: str, what: str, least: int = 0) -> Description[dict[str, T]]:
    """Object of at least `least` keys matching `keys`; `what` describes a key."""

    def check(value: Any) -> dict[str, T]:
        found = _as_object(value)
        if len(found) < least:
            raise _unlike(f"{what} as a key", value)
        for key in found:
            if not re.fullmatch(keys, key):
                raise _unlike(f"{what} as a key", key)
        return {key: _entry(key, each, item) for key, each in found.items()}

    return check


def _as_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _unlike("an object", value)
    return value


def _entry(key: str, value: Any, description: Description[T]) -> T:
    try:
        return description(value)
    except Mismatch as error:
        is_name = re.fullmatch(r"[A-Za-z_]\w{0,40}", key, re.ASCII)
        raise error.within(key if is_name else f"[{_shown(key)}]") from None


def _unlike(wanted: str, value: Any) -> Mismatch:
    return Mismatch(f"want {wanted}, not {_shown(value)}")


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    found = json.dumps(value)
    return found if len(found) <= 40 else f"{found[:37]}..."
