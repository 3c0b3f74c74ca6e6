import sys

import pytest

from mindspeed_lite.engine import (
    Collision,
    ConflictError,
    EngineError,
    Option,
    PlanError,
    Provide,
    Relation,
    Replace,
    RequirementError,
    TargetError,
    Wrap,
)
from mindspeed_lite.engine.fingerprints import Table, fingerprint_root

from .support import feature, passing, plan_of, reasons_of, transaction_of

SOURCE = "def f(x): return x\ndef g(x, clamp_value=None): return x\nclass C:\n    def m(self): return 1\n"


def one(x):
    return x


def other(x):
    return x


@pytest.fixture
def host(make_host):
    return make_host({"mod": SOURCE, "user": "from HOST.mod import f as again\n"})


@pytest.fixture
def at(host):
    return lambda path: f"{host}.mod:{path}"


def table_of(root, *targets, version="1.0"):
    return Table({version: {target: fingerprint_root(root, target) for target in targets}})


def test_a_feature_not_asked_for_is_off_and_its_targets_are_not_even_looked_at():
    plan = plan_of(feature("x", Replace("no_such_host:f", one)), off=("x",))
    assert plan.outcome("x").status == "off" and plan.steps == ()


def test_a_feature_asked_for_is_applied(at):
    plan = plan_of(feature("x", Replace(at("f"), one)))
    assert plan.outcome("x").status == "applied"
    (step,) = plan.steps
    assert (step.feature, step.value, step.verified) == ("x", one, "unverified")


def test_all_reasons_are_collected(at):
    made = feature(
        "x",
        Replace(at("g"), one),
        Replace(at("f"), one, versions=">=2"),
        Replace(at("gone"), one),
        condition=lambda context: ["needs an even size", f"not on {context.device}"],
    )
    reasons = " / ".join(reasons_of(made))
    for part in ("even size", "not on cpu", "grew parameter `clamp_value`", "version 1.0", "`gone`"):
        assert part in reasons


def test_a_condition_that_answers_with_one_text_means_one_reason():
    assert reasons_of(feature("x", condition=lambda context: "no")) == ["no"]


def test_a_condition_that_fails_names_the_feature():
    with pytest.raises(PlanError, match=r"`x` \(--x\): condition failed with ZeroDivisionError"):
        plan_of(feature("x", condition=lambda context: 1 / 0))


def test_conflicting_features_raise_and_name_both_and_the_reason():
    pair = [feature("a"), feature("b", conflicts=[Relation("a", "both own the norm")])]
    with pytest.raises(ConflictError, match=r"`b` \(--b\) and `a` \(--a\) conflict: both own the norm"):
        plan_of(*pair)
    assert plan_of(*pair, off=("a",)).outcome("b").status == "applied"


def test_a_requirement_that_is_off_raises():
    pair = [feature("a"), feature("b", requires=[Relation("a", "needs its layout")])]
    with pytest.raises(RequirementError, match="requires feature `a`, which is off: needs its layout"):
        plan_of(*pair, off=("a",))
    assert plan_of(*pair).outcome("b").status == "applied"


def test_what_requires_a_skipped_feature_is_skipped_too(at):
    chain = [
        feature("c", Replace(at("f"), one), requires=[Relation("b", "r")]),
        feature("b", requires=[Relation("a", "r")]),
        feature("a", condition=lambda context: ["no"]),
    ]
    plan = plan_of(*chain)
    assert [plan.outcome(name).status for name in "abc"] == ["skipped"] * 3
    assert plan.outcome("c").reasons == ["requires feature `b`, which was skipped"]
    assert plan.steps == ()


def test_a_target_that_is_gone_although_its_versions_match_raises_with_all_names(at):
    with pytest.raises(TargetError) as caught:
        plan_of(feature("x", Replace(at("gone"), one, versions=">=1")))
    for part in ("`x` (--x)", at("gone"), "host version 1.0", "Turn it off"):
        assert part in str(caught.value)


def test_the_variant_for_the_running_release_is_taken(at):
    made = feature("x", Replace(at("f"), one, versions="<2"), Replace(at("f"), other, versions=">=2"))
    assert plan_of(made, version="1.0").steps[0].value is one
    assert plan_of(made, version="2.1").steps[0].value is other


def test_a_symbol_that_moved_is_a_variant_of_its_old_place(at):
    moved = Replace(at("f"), one, versions=">=1", variant_of="host.old:f")
    made = feature("x", Replace("host.old:f", one, versions="<1"), moved)
    assert [step.patch for step in plan_of(made).steps] == [moved]


def test_a_feature_without_a_variant_for_the_release_is_skipped_whole(at):
    made = feature("x", Replace(at("f"), one), Wrap(at("C.m"), passing, versions=">=2"))
    (reason,) = reasons_of(made)
    assert at("C.m") in reason and "1.0" in reason and ">=2" in reason


def test_two_replacements_by_one_feature_for_one_release_are_refused(at):
    with pytest.raises(PlanError, match="two replacements"):
        plan_of(feature("x", Replace(at("f"), one, versions=">=1"), Replace(at("f"), other, versions="<3")))


def test_two_replacements_by_two_features_conflict_even_under_two_names(at, host):
    with pytest.raises(ConflictError, match="both replace"):
        plan_of(feature("a", Replace(at("f"), one)), feature("b", Replace(at("f"), other)))
    with pytest.raises(ConflictError, match="both replace"):
        plan_of(feature("a", Replace(at("f"), one)), feature("b", Replace(f"{host}.user:again", other)))
    with pytest.raises(ConflictError, match="both provide"):
        plan_of(*(feature(name, Provide(at("new"), lambda session: one)) for name in "ab"))


def test_wraps_of_two_features_on_one_target_do_not_conflict(at):
    assert len(plan_of(feature("a", Wrap(at("f"), passing)), feature("b", Wrap(at("f"), passing))).steps) == 2


def test_steps_come_in_the_order_in_which_they_compose(at):
    plan = plan_of(
        feature("a", Wrap(at("f"), passing, order=1)),
        feature("d", Wrap(at("f"), passing), Provide(at("new"), lambda session: 1)),
        feature("c", Wrap(at("f"), passing)),
        feature("z", Replace(at("f"), one)),
    )
    assert [step.feature for step in plan.steps] == ["d", "z", "c", "d", "a"]


def test_a_replacement_whose_target_grew_a_parameter_is_skipped_whatever_is_allowed(at):
    (reason,) = reasons_of(feature("x", Replace(at("g"), one)), allow_unverified=True)
    assert reason == f"`{at('g')}`: target grew parameter `clamp_value`"


def test_a_replacement_of_unverified_source_needs_permission(at, tmp_path):
    made = feature("x", Replace(at("f"), one))
    (reason,) = reasons_of(made, allow_unverified=False)
    assert "--mindspeed-lite-allow-unverified" in reason and at("f") in reason
    known = table_of(tmp_path, at("f"))
    assert plan_of(made, table=known).steps[0].verified == "verified"
    (tmp_path / at("f").partition(".")[0] / "mod.py").write_text(SOURCE.replace("return x", "return x + 0"))
    assert "has changed" in reasons_of(made, table=known)[0]
    assert plan_of(made, table=known, allow_unverified=True).steps[0].verified == "unverified"


def test_a_wrap_goes_on_with_a_known_signature_and_not_without(at, tmp_path):
    made = feature("x", Wrap(at("f"), passing))
    known = table_of(tmp_path, at("f"))
    assert plan_of(made, table=known).steps[0].verified == "verified"
    path = tmp_path / at("f").partition(".")[0] / "mod.py"
    path.write_text(SOURCE.replace("return x", "return x + 0"))
    assert plan_of(made, table=known).steps[0].verified == "unverified"
    path.write_text(SOURCE.replace("f(x)", "f(x, y=1)"))
    assert "another signature" in reasons_of(made, table=known)[0]
    assert "is not known" in reasons_of(made, allow_unverified=False)[0]


def test_a_bound_replacement_is_made_with_the_session_unless_the_feature_is_skipped(at):
    sessions = []

    def bind(session):
        sessions.append(session)
        return one

    made = feature("x", Replace(at("f"), bind, bind=True))
    mine = object()
    assert plan_of(made, session=mine).steps[0].value is one and sessions == [mine]
    skipped = feature("x", Replace(at("f"), bind, bind=True), condition=lambda context: ["no"])
    assert reasons_of(skipped) == ["no"] and len(sessions) == 1
    with pytest.raises(PlanError, match="binding"):
        plan_of(feature("x", Replace(at("f"), lambda session: 1 / 0, bind=True)))


def test_strict_turns_skips_into_one_error_with_every_reason():
    pair = [
        feature("a", condition=lambda c: ["first", "second"]),
        feature("b", condition=lambda c: ["third"]),
    ]
    with pytest.raises(PlanError, match=r"`a` \(--a\): first, second; feature `b` \(--b\): third"):
        plan_of(*pair, strict=True)


def test_a_flag_the_host_uses_otherwise_stops_an_enabled_feature():
    collisions = [Collision("--x", "x")]
    with pytest.raises(PlanError, match=r"`x` \(--x\): --x means something else"):
        plan_of(feature("x"), collisions=collisions)
    assert plan_of(feature("x"), off=("x",), collisions=collisions).outcome("x").status == "off"


def test_adjustments_are_collected_and_must_agree():
    a = feature("a", adjust=lambda context: {"layers": context.arg("layers") * 2})
    assert plan_of(a, host_args={"layers": 2}).adjustments == {"layers": 4}
    b = feature("b", adjust=lambda context: {"layers": 3})
    with pytest.raises(ConflictError, match="host argument `layers`"):
        plan_of(a, b, host_args={"layers": 2})


def test_a_host_version_that_is_none_is_refused():
    with pytest.raises(PlanError, match="not a version"):
        plan_of(feature("x"), version="main")


def test_making_a_plan_changes_nothing(at, host):
    plan_of(feature("x", Replace(at("f"), one)), feature("y", Wrap(at("C.m"), passing)))
    before = dict(vars(sys.modules[f"{host}.mod"]))
    plan_of(feature("x", Replace(at("f"), one)), feature("y", Wrap(at("C.m"), passing)))
    with pytest.raises(EngineError):
        plan_of(feature("x", Replace(at("f"), one)), feature("y", Wrap(at("gone"), passing)))
    assert vars(sys.modules[f"{host}.mod"]) == before


def test_a_symbol_the_host_has_is_reported_as_provided_already(at):
    plan = plan_of(feature("x", Provide(at("f"), lambda session: one), Provide("json", lambda session: one)))
    assert plan.outcome("x").status == "applied"
    assert {step.verified for step in plan.steps} == {"already provided by the host"}


def test_switches_default_to_off():
    assert not Option("--x", "h").default
    assert transaction_of(feature("x"), off=("x",)).plan.steps == ()
