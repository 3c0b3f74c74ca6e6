import pytest

from mindspeed_lite.engine import (
    Around,
    ConflictError,
    Option,
    Override,
    PlanError,
    Provide,
    Relation,
    RequirementError,
    TargetError,
    automatic_reasons,
)
from mindspeed_lite.engine.fingerprints import Table
from mindspeed_lite.engine.source import fingerprint, reader_of
from tests.harness.plans import calling, context_of, feature, passing, plan_of, reasons_of, steps_of

SOURCE = """
def f(x): return x
def g(x, clamp_value=None): return x
class C:
    kind: str
    def __init__(self): self.group = None
    def m(self): return 1
def look():
    try:
        from te import fast
    except ImportError:
        fast = None
    return new if fast is None else fast
"""


def one(x):
    return x


@pytest.fixture
def host(make_host):
    return make_host({"mod": SOURCE, "user": "from HOST.mod import f as again\n"})


@pytest.fixture
def at(host):
    return lambda path: f"{host}.mod:{path}"


@pytest.fixture
def known(at, tmp_path):
    """The table of a release in which every target of the host looks as it does here."""
    reader = reader_of(tmp_path)
    return Table({"1.0": {at(path): fingerprint(reader, at(path)) for path in ("f", "g", "C.m", "look")}})


def over(target, **keywords):
    return Override(target, calling(one), **keywords)


def test_all_reasons_are_collected(at, known):
    made = feature(
        "x",
        over(at("g"), reads=["C.nothing", "gone", "C.group"]),
        over(at("gone")),
        condition=lambda context: ["needs an even size", f"not on {context.device}"],
        conflicting_args={"fp8": "no fp8"},
    )
    reasons = " / ".join(reasons_of(made, table=known, host_args={"fp8": True}))
    for part in ("even size", "not on cpu", "no fp8", "no attribute `nothing`", "`gone`"):
        assert part in reasons
    assert "group" not in reasons


@pytest.mark.parametrize("what", ["condition", "arguments"])
def test_a_question_that_fails_names_the_feature(what):
    with pytest.raises(PlanError, match=rf"`x` \(--x\): {what} failed with ZeroDivisionError"):
        plan_of(feature("x", **{what: lambda context: 1 / 0}))


@pytest.mark.parametrize(
    ("relation", "off", "error", "says"),
    [
        ("conflicts", (), ConflictError, r"`a` \(--a\) and `b` \(--b\) conflict: their norm"),
        ("requires", ("a",), RequirementError, "requires feature `a`, which is off: their norm"),
    ],
)
def test_features_that_conflict_or_lack_another_raise_and_name_both_and_the_reason(relation, off, error, says):
    pair = [feature("a"), feature("b", **{relation: [Relation("a", "their norm")]})]
    with pytest.raises(error, match=says):
        plan_of(*pair, off=off)
    assert plan_of(*pair, off=() if off else ("a",)).outcome("b").status == "applied"


def test_what_requires_a_skipped_feature_is_skipped_too(at):
    chain = [
        feature("c", over(at("f")), requires=[Relation("b", "r")], arguments=lambda context: {"layers": 1}),
        feature("b", requires=[Relation("a", "r")]),
        feature("a", condition=lambda context: ["no"]),
    ]
    plan = plan_of(*chain)
    assert [plan.outcome(name).status for name in "abc"] == ["skipped"] * 3
    assert plan.outcome("c").reasons == ["requires feature `b`, which was skipped"]
    assert steps_of(plan) == [] and plan.outcome("c").arguments == {}


def test_a_target_that_is_gone_although_its_versions_match_raises_with_all_names(at):
    with pytest.raises(TargetError) as caught:
        plan_of(feature("x", over(at("gone"), versions=">=1")))
    for part in ("`x` (--x)", at("gone"), "host version 1.0", "Turn it off"):
        assert part in str(caught.value)


def test_only_the_patches_for_the_running_release_are_taken(at):
    older, newer = over(at("f"), versions="<2"), over(at("f"), versions=">=2")
    made = feature("x", older, newer, unsupported={">=3": "no such layer"})
    for version, patch in (("1.0", older), ("2.1", newer), ("2.0rc1", newer)):
        (step,) = steps_of(plan_of(made, version=version))
        assert step.patch is patch
    assert reasons_of(made, version="3.0") == ["no such layer"]


def test_two_features_do_not_provide_one_symbol(at):
    with pytest.raises(ConflictError, match=r"`a` .* and `b` .* both provide"):
        plan_of(*(feature(name, Provide(at("new"), lambda session: one)) for name in "ab"))


# What is known of the target


def test_a_symbol_the_host_has_is_reported_as_provided_already(at):
    plan = plan_of(feature("x", Provide(at("f"), lambda session: one)))
    assert plan.outcome("x").status == "applied"
    assert [step.verdict for step in steps_of(plan)] == ["already provided by the host"]


# Strict, collisions, arguments


def test_arguments_are_each_features_own_and_must_agree():
    a = feature("a", arguments=lambda context: {"layers": context.arg("layers") * 2})
    assert plan_of(a, host_args={"layers": 2}).outcome("a").arguments == {"layers": 4}
    skipped = feature("a", arguments=a.arguments, condition=lambda context: ["no"])
    assert plan_of(skipped, host_args={"layers": 2}).outcome("a").arguments == {}
    b = feature("b", arguments=lambda context: {"layers": 3})
    with pytest.raises(ConflictError, match="host argument `layers`"):
        plan_of(a, b, host_args={"layers": 2})
    same = feature("b", arguments=lambda context: {"layers": 4})
    assert len(plan_of(a, same, host_args={"layers": 2}).applied) == 2


def test_a_host_version_that_is_none_is_refused():
    with pytest.raises(PlanError, match="not a version"):
        plan_of(feature("x"), version="main")


# Auto


def auto(*features, off=None, **keywords):
    off = [each.name for each in features] if off is None else off
    return plan_of(*features, off=off, auto=True, **keywords)


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        (dict(options=[Option("--x", "h", default=0)]), "it needs a value that only the user can choose"),
        (dict(not_auto="it costs time"), "it costs time"),
        (dict(condition=lambda context: ["odd size"]), "odd size"),
        (dict(condition=lambda context: 1 / 0), "condition failed with ZeroDivisionError"),
        (dict(arguments=lambda context: 1 / 0), "arguments failed with ZeroDivisionError"),
        (dict(conflicting_args={"fp8": "no fp8"}), "no fp8"),
        (dict(requires=[Relation("off", "its layout")]), "requires off: its layout"),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_auto_says_why_it_leaves_a_feature_off_and_never_raises(keywords, says, strict):
    unavailable = feature("off", not_auto="not today")
    plan = auto(feature("x", **keywords), unavailable, host_args={"fp8": True}, strict=strict)
    outcome = plan.outcome("x")
    assert outcome.status == "off" and any(says in each for each in outcome.reasons) and not outcome.arguments
    assert plan.applied == []


@pytest.mark.parametrize(
    "patch",
    [
        lambda at: over(at("gone")),
        lambda at: over("no_such_host.mod:f"),
        lambda at: Around(at("C.m"), passing, reads=["tp_group"]),
        lambda at: Provide(at("newer"), lambda session: 1),
    ],
)
def test_auto_leaves_off_what_does_not_fit_the_host(at, known, patch):
    plan = auto(feature("x", patch(at)), feature("y", over(at("f"))), table=known, strict=True)
    assert plan.outcome("x").status == "off" and len(plan.outcome("x").reasons) == 1
    assert plan.outcome("y").status == "applied"


@pytest.mark.parametrize("declares", ["chosen", "asked"])
def test_auto_chooses_nothing_that_conflicts_with_what_was_asked_for(declares):
    names = ("chosen", "asked")
    pair = [
        feature(name, conflicts=[Relation(other, "both own the norm")] if name == declares else [])
        for name, other in (names, names[::-1])
    ]
    plan = auto(*pair, off=["chosen"])
    assert plan.outcome("asked").status == "applied"
    assert plan.outcome("chosen").reasons == ["conflicts with asked: both own the norm"]


@pytest.mark.parametrize("asked", [[], ["b"]])
def test_of_two_that_provide_or_set_the_same_auto_chooses_one(at, asked):
    off = [name for name in "ab" if name not in asked]
    kept, left = ("b", "a") if asked else ("a", "b")
    plan = auto(*(feature(name, Provide(at("new"), lambda session: 1)) for name in "ab"), off=off)
    assert (plan.outcome(kept).status, plan.outcome(left).status) == ("applied", "off")
    assert "both provide" in plan.outcome(left).reasons[0]
    values = [feature(name, arguments=lambda context, name=name: {"layers": name}) for name in "ab"]
    plan = auto(*values, off=off)
    assert plan.outcome(kept).arguments == {"layers": kept} and plan.outcome(left).status == "off"
    assert plan.outcome(left).arguments == {} and "host argument `layers`" in plan.outcome(left).reasons[0]


def test_auto_serves_a_requirement_of_what_was_asked_for():
    pair = [feature("a"), feature("b", requires=[Relation("a", "r")])]
    assert len(auto(*pair, off=["a"]).applied) == 2
    with pytest.raises(RequirementError):
        auto(feature("a", not_auto="no"), pair[1], off=["a"])


def test_automatic_reasons_grant_a_feature_what_it_requires():
    features = [feature("a", not_auto="by name"), feature("b", requires=[Relation("a", "r")])]
    found = automatic_reasons(features, context_of(features, off=("a", "b")))
    assert found == {"a": ["by name"], "b": []}
