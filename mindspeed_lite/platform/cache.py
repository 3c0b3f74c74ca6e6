"""Cache folder for compiled kernels and tuning results.

`$MINDSPEED_LITE_CACHE`, else `mindspeed_lite` in `$XDG_CACHE_HOME` or `~/.cache`, else a temporary folder of this user.
Machines may share it: entry names include all dependencies.
"""

from __future__ import annotations

import functools
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

CACHE_VARIABLE = "MINDSPEED_LITE_CACHE"

_log = logging.getLogger("mindspeed_lite")


class NoCache(Exception):
    """No usable cache folder; the text says why."""


@functools.cache
def folder() -> Path:
    """First place writable only by this user; logs why others are not used. Raises NoCache."""
    problems: list[str] = []
    try:
        for place in _places():
            problem = _problem(place)
            if problem is None:
                if problems:
                    level = logging.WARNING if os.environ.get(CACHE_VARIABLE) else logging.INFO
                    _log.log(level, "cache: %s is used: %s", place, "; ".join(problems))
                return place
            problems.append(f"{place}: {problem}")
    except OSError as error:
        problems.append(error.strerror or str(error))
    raise NoCache(f"{'; '.join(problems)}; {CACHE_VARIABLE} may name one")


def _places() -> Iterator[Path]:
    chosen = os.environ.get(CACHE_VARIABLE)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    yield Path(chosen) if chosen else Path(home) / "mindspeed_lite"
    yield Path(tempfile.gettempdir()) / f"mindspeed_lite-{os.getuid()}"


def _problem(place: Path) -> str | None:
    """Create `place` if needed; return why it cannot be used, or None."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = place.stat()
        # Code is loaded from here, so no other user may write to it.
        if found.st_uid != os.getuid():
            return "it belongs to another user, whose code would be loaded"
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            who = "every user" if found.st_mode & stat.S_IWOTH else "its group"
            return f"{who} can write to it, whose code would be loaded (chmod go-w makes it usable)"
        for each in {*place.absolute().parents, *place.resolve().parents}:
            if each.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
                return f"every user can put another in its place (chmod +t or o-w {each} makes it usable)"
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return error.strerror or str(error)
    return None
