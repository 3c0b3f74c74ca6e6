"""Flags beside a feature's first one."""

from __future__ import annotations

import pytest

from mindspeed_lite.engine import Option, OptionError, Settings
from mindspeed_lite.patches._shared.given_flags import given_flags, require_first

OPTIONS = (
    Option("--number", help="A number.", default=3, type=int),
    Option("--share", help="A share.", default=None, type=float),
    Option("--switch", help="A switch."),
)


def test_those_at_their_default_are_left_out_and_the_rest_is_written_as_given():
    assert given_flags(OPTIONS, Settings.of(OPTIONS, {})) == []
    assert given_flags(OPTIONS, Settings.of(OPTIONS, {"number": 3, "share": None, "switch": False})) == []
    found = given_flags(OPTIONS, Settings.of(OPTIONS, {"number": 4, "share": 0.0, "switch": True}))
    assert found == ["--number 4", "--share 0", "--switch"]


def test_flags_that_do_nothing_alone_are_refused():
    options = (OPTIONS[2], *OPTIONS[:2])
    for given in ({}, {"switch": True}, {"switch": True, "number": 4}):
        require_first(options, Settings.of(options, given))
    with pytest.raises(OptionError, match=r"^--number 4 --share 0\.5 has no effect without --switch: add it$"):
        require_first(options, Settings.of(options, {"number": 4, "share": 0.5}))
