import argparse

import pytest

from mindspeed_lite.engine import Option, Settings, add_arguments
from tests.harness.plans import feature


def parser_of(features=(), extra=(), version="1.0", host=()):
    parser = argparse.ArgumentParser()
    for flag, keywords in host:
        parser.add_argument(flag, **keywords)
    return parser, add_arguments(parser, features, extra, host_version=version)


def test_flags_appear_in_a_group_per_feature_with_types_and_defaults():
    options = [
        Option("--x", "turn on"),
        Option("--x-level", "100% of it, not %(default)s", default=3),
        Option("--x-mode", "h", default="a", choices=["a", "b"], metavar="MODE"),
        Option("--x-sizes", "h", default=None, type=int, nargs="+"),
    ]
    parser, collisions = parser_of([feature("x", options=options)], [Option("--extra", "h")])
    assert collisions == {}
    defaults = parser.parse_args([])
    assert vars(defaults) == {"x": False, "x_level": 3, "x_mode": "a", "x_sizes": None, "extra": False}
    given = parser.parse_args(["--x", "--x-level", "5", "--x-mode", "b", "--x-sizes", "1", "2"])
    assert (given.x, given.x_level, given.x_mode, given.x_sizes) == (True, 5, "b", [1, 2])
    text = parser.format_help()
    for part in ("mindspeed_lite: x", "turn on", "100% of it, not 3"):
        assert part in text


def test_a_flag_the_host_has_with_the_same_meaning_is_reused():
    option = Option("--fuse", "h", upstream=">=1.0")
    host = [("--fuse", {"action": "store_true", "help": "the host's own"})]
    parser, collisions = parser_of([feature("x", options=[option])], host=host)
    assert collisions == {} and "the host's own" in parser.format_help()
    assert parser.parse_args(["--fuse"]).fuse


@pytest.mark.parametrize(
    ("option", "host"),
    [
        (Option("--fuse", "h"), ("--fuse", {})),
        (Option("--fuse", "h", upstream=">=2"), ("--fuse", {})),
        (Option("--fuse", "h", upstream=">=1"), ("--no-fuse", {"dest": "fuse", "action": "store_false"})),
    ],
)
def test_a_flag_or_dest_the_host_uses_otherwise_is_a_collision(option, host):
    _, collisions = parser_of([feature("x", options=[option])], host=[host])
    assert collisions == {"x": "--fuse means something else in this host"}
    assert parser_of([], [option], host=[host])[1] == {"": "--fuse means something else in this host"}


def test_a_flag_may_be_stored_under_another_name_than_the_hosts():
    option = Option("--fuse", "h", name="use_fuse")
    host = [("--no-fuse", {"dest": "fuse", "action": "store_false"})]
    parser, collisions = parser_of([feature("x", options=[option])], host=host)
    assert collisions == {}
    assert vars(parser.parse_args([])) == {"fuse": True, "use_fuse": False}
    assert vars(parser.parse_args(["--fuse", "--no-fuse"])) == {"fuse": False, "use_fuse": True}
    assert Settings.of([option], parser.parse_args(["--fuse"])).use_fuse is True


def test_a_shared_flag_is_added_once_and_a_second_call_adds_nothing():
    shared = Option("--level", "h", default=1)
    features = [feature(name, options=[shared]) for name in "ab"]
    parser, collisions = parser_of(features)
    assert collisions == {}
    assert add_arguments(parser, features, host_version="1.0") == {}
    different = feature("c", options=[Option("--level", "h", default=2)])
    assert add_arguments(parser, [different], host_version="1.0") == {"c": "--level means something else in this host"}
