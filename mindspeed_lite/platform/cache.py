"""The folder for what one process finds out and the next need not: compiled kernels, and what trials chose.

`$MINDSPEED_LITE_CACHE`, else `mindspeed_lite` below `$XDG_CACHE_HOME` or `~/.cache`, else a folder of this user's among
the temporary files. Safe to share between machines: whoever keeps something there names what it depends on.
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

CACHE_VARIABLE = "MINDSPEED_LITE_CACHE"


class NoCache(Exception):
    """There is no such folder, and why."""


@functools.cache
def folder() -> Path:
    """The first place that can be written to.

    Raises:
        NoCache: there is none; the text names each place, what is wrong with it, and the variable.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    places = [Path(chosen)] if chosen else [Path(home) / "mindspeed_lite"]
    if not chosen and hasattr(os, "getuid"):
        places.append(Path(tempfile.gettempdir()) / f"mindspeed_lite-{os.getuid()}")
    problems = []
    for place in places:
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=place):
                pass
        except OSError as error:
            problems.append(f"{place}: {error.strerror or error}")
            continue
        # Code is loaded from here: a folder that another user made in a shared place is not ours to trust.
        if hasattr(os, "getuid") and not chosen and place.stat().st_uid != os.getuid():
            problems.append(f"{place}: it belongs to another user")
            continue
        return place
    raise NoCache(f"{'; '.join(problems)}; {CACHE_VARIABLE} may name one")
