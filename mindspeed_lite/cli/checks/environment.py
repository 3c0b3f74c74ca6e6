"""Our variables in the environment."""

from __future__ import annotations

import difflib
import os

from mindspeed_lite import platform
from mindspeed_lite.platform import allocator

from .row import Row, note, ok

_VARIABLES = (platform.DEVICE_VARIABLE, "MINDSPEED_LITE_DISABLE", allocator.ALLOCATOR_VARIABLE)
_OFF = ("", "0", "false", "no", "off")


def check_environment() -> list[Row]:
    rows = []
    for name in sorted(each for each in os.environ if each.startswith("MINDSPEED_LITE_")):
        text = f"{name}={os.environ[name]}"
        if name in _VARIABLES:
            off = name == "MINDSPEED_LITE_DISABLE" and os.environ[name].strip().lower() not in _OFF
            rows.append(note("environment", f"{text}: off") if off else ok("environment", text))
        else:
            close = difflib.get_close_matches(name, _VARIABLES, n=1)
            fix = f"did you mean {close[0]}?" if close else f"there are {', '.join(_VARIABLES)}"
            rows.append(note("environment", f"{text} is not a variable of mindspeed_lite", fix))
    return rows or [ok("environment", "no MINDSPEED_LITE_ variable is set")]
