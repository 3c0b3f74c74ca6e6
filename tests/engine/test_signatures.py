"""Signatures of replacements: which fit, and one replacement for parameters that differ from release to release."""

import importlib
import inspect
import re

import pytest

from mindspeed_lite.engine import ApplyError, FallbackError, Override, change
from mindspeed_lite.engine.signatures import render_signature, signature_difference
from tests.harness.plans import applied, context_of, feature, session_of, swaps_of


def of(text):
    space = {}
    exec(f"def f({text}): pass", space)
    return space["f"]


def test_signatures_keep_names_kinds_and_defaults_only():
    parameters = inspect.signature(of("a: int, /, b: str = 'x', *rest: int, z, y=1, **more")).parameters.values()
    assert render_signature(parameters) == "(a, /, b=, *args, y=, z, **kwargs)"
    assert render_signature([]) == "()"


@pytest.mark.parametrize(
    ("original", "replacement", "fits"),
    [
        ("x, y=1", "x, y=2", True),
        ("x, y", "x, y=2", True),
        ("*args", "*rest", True),
        ("*, a, b", "*, b, a", True),
        ("x, clamp_value=None", "x", False),
        ("x", "x, extra=None", False),
        ("x, y", "y, x", False),
        ("x, y", "x, *, y", False),
        ("x, y=1", "x, y", False),
        ("x", "x, *args", False),
        ("x, **kwargs", "x", False),
        # A wrapper may pass through what it does not name, and neither lose nor shift it.
        ("self, x, *, y=1", "*args, **kwargs", True),
        ("self, x, *, y=1", "self, x, *a, y=None, **k", True),
        ("self, x, *, y=1", "self", False),
        ("self, x, *, y=1", "self, y, *args, **kwargs", False),
        ("self, x, *, y=1", "self, *args", False),
    ],
)
def test_a_replacement_is_callable_like_its_target_or_both_signatures_are_shown(original, replacement, fits):
    found = signature_difference(of(original), of(replacement))
    assert (found == "") == fits
    assert fits or re.fullmatch(r"the target takes \(.*\), the wrapper \(.*\)", found)


def test_the_name_of_self_does_not_matter():
    assert signature_difference(of("self, x"), of("module, x"), bound=True) == ""
    assert signature_difference(of("self, x"), of("module, x")) != ""


SOURCE = """
    def same(x, scale, shift=0, rest=None): return ["same", x, scale, shift, rest]
    def short(x, scale): return ["short", x, scale]
    def gap(x, scale, rest=None): return ["gap", x, scale, rest]
    def grown(x, scale, more=None, shift=0, rest=None): return ["grown", x, scale, more, shift, rest]
    def demanding(x, scale, more): return ["demanding", x, scale, more]
    def open_ended(x, scale, **others): return ["open_ended", x, scale, others]
    def lost(scale): return ["lost", scale]
"""


def over(wrapped, session):
    def ours(x, scale, shift=0, rest=None):
        return ["ours", shift, rest, wrapped(x, scale, shift, rest)]

    return ours


@pytest.fixture
def host(make_host):
    return importlib.import_module(f"{make_host({'mod': SOURCE})}.mod")


def fitted(host, name):
    return feature("x", Override(f"{host.__name__}:{name}", over, by_name=True))


@pytest.mark.parametrize(
    ("name", "args", "found"),
    [
        ("same", (1, 2), ["ours", 0, None, ["same", 1, 2, 0, None]]),
        ("short", (1, 2), ["ours", 0, None, ["short", 1, 2]]),
        ("gap", (1, 2, 3), ["ours", 0, 3, ["gap", 1, 2, 3]]),
        ("grown", (1, 2, None, 4, 5), ["ours", 4, 5, ["grown", 1, 2, None, 4, 5]]),
        ("open_ended", (1, 2), ["ours", 0, None, ["open_ended", 1, 2, {"shift": 0, "rest": None}]]),
        ("demanding", (1, 2, 3), ["demanding", 1, 2, 3]),
    ],
)
def test_parameters_meet_by_name_and_what_the_release_lacks_keeps_its_default(host, name, args, found):
    function = getattr(host, name)
    signature = inspect.signature(function)
    with applied(fitted(host, name)):
        assert function(*args) == found
        assert function(**dict(zip(signature.parameters, args, strict=False))) == found
        assert inspect.signature(function) == signature
    assert function(*args)[0] == name


def test_a_call_that_sets_what_the_replacement_does_not_know_goes_to_the_original_and_says_so(host):
    made = fitted(host, "grown")
    session = session_of(context_of([made]))
    swaps = swaps_of(made, session=session)
    change(add=swaps)
    try:
        assert host.grown(1, 2, more=7, rest=5) == ["grown", 1, 2, 7, 0, 5]
        assert host.grown(1, 2, 8) == ["grown", 1, 2, 8, 0, None]
        (fallback,) = session.report.fallbacks
        assert fallback.feature == "x" and "`more` is set" in fallback.reason
        session.renew(session.settings, session.context, session.report, strict=True)
        with pytest.raises(FallbackError, match="`more` is set"):
            host.grown(1, 2, more=7)
        assert host.grown(1, 2)[0] == "ours"
    finally:
        change(remove=swaps)


def test_a_parameter_that_the_replacement_needs_and_the_target_lacks_is_an_error(host):
    with pytest.raises(ApplyError, match="target lost parameter `x`"), applied(fitted(host, "lost")):
        pass
    assert host.lost(1) == ["lost", 1]
