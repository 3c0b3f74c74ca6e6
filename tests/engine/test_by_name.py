"""One replacement for a target whose parameters differ from release to release."""

import importlib
import inspect

import pytest

from mindspeed_lite.engine import ApplyError, FallbackError, Override, change
from tests.harness.plans import applied, context_of, feature, plan_of, session_of, swaps_of

SOURCE = """
    def same(x, scale, shift=0, rest=None): return ["same", x, scale, shift, rest]
    def short(x, scale): return ["short", x, scale]
    def gap(x, scale, rest=None): return ["gap", x, scale, rest]
    def grown(x, scale, more=None, shift=0, rest=None): return ["grown", x, scale, more, shift, rest]
    def demanding(x, scale, more): return ["demanding", x, scale, more]
    def open_ended(x, scale, **others): return ["open_ended", x, scale, others]
    def lost(scale): return ["lost", scale]
    class C:
        def method(this, x): return ["method", x]
"""


def over(wrapped, session):
    def ours(x, scale, shift=0, rest=None):
        return ["ours", shift, rest, wrapped(x, scale, shift, rest)]

    return ours


def of_a_method(wrapped, session):
    def ours(self, x, shift=0):
        return ["ours", shift, wrapped(self, x, shift)]

    return ours


@pytest.fixture
def host(make_host):
    return importlib.import_module(f"{make_host({'mod': SOURCE})}.mod")


def fitted(host, name, make=over):
    return feature("x", Override(f"{host.__name__}:{name}", make, by_name=True))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("same", ["ours", 0, None, ["same", 1, 2, 0, None]]),
        ("short", ["ours", 0, None, ["short", 1, 2]]),
        ("gap", ["ours", 0, None, ["gap", 1, 2, None]]),
        ("grown", ["ours", 0, None, ["grown", 1, 2, None, 0, None]]),
        ("open_ended", ["ours", 0, None, ["open_ended", 1, 2, {"shift": 0, "rest": None}]]),
    ],
)
def test_a_parameter_that_the_release_lacks_keeps_its_default(host, name, found):
    function = getattr(host, name)
    signature = inspect.signature(function)
    with applied(fitted(host, name)):
        assert function(1, 2) == function(1, scale=2) == function(scale=2, x=1) == found
        assert inspect.signature(function) == signature
    assert function(1, 2)[0] == name


def test_parameters_meet_by_name_whatever_their_order(host):
    with applied(fitted(host, "gap")):
        assert host.gap(1, 2, 3) == ["ours", 0, 3, ["gap", 1, 2, 3]]
    with applied(fitted(host, "grown")):
        assert host.grown(1, 2, None, 4, 5) == ["ours", 4, 5, ["grown", 1, 2, None, 4, 5]]


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


def test_a_new_parameter_without_a_default_is_always_the_originals(host):
    with applied(fitted(host, "demanding")):
        assert host.demanding(1, 2, 3) == ["demanding", 1, 2, 3]


def test_a_parameter_that_the_replacement_needs_and_the_target_lacks_is_an_error(host):
    with pytest.raises(ApplyError, match="target lost parameter `x`"), applied(fitted(host, "lost")):
        pass
    assert host.lost(1) == ["lost", 1]


def test_a_method_may_name_its_instance_otherwise(host):
    # By a replacement's name an instance is no parameter of the target.
    with (
        pytest.raises(ApplyError, match="target lost parameter `self`"),
        applied(fitted(host, "C.method", of_a_method)),
    ):
        pass


def test_a_patch_whose_target_a_release_lacks_is_not_needed_there(host):
    made = feature(
        "x",
        Override(f"{host.__name__}:short", over, by_name=True),
        Override(f"{host.__name__}:gone", over, absent_in="<2"),
    )
    (step,) = plan_of(made, version="1.0").outcome("x").steps
    assert step.patch.target.endswith(":short")
    moved = Override(f"{host.__name__}:gap", over, versions=">=3", variant_of=f"{host.__name__}:gone")
    older = feature("x", *made.patches, moved)
    assert len(plan_of(older, version="1.0").outcome("x").steps) == 1
