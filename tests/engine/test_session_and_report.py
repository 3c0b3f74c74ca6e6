import gc
import json
import logging

import pytest
import torch

from mindspeed_lite.engine import (
    Around,
    Context,
    FallbackError,
    Option,
    Override,
    Provide,
    Report,
    Settings,
    Verification,
)
from mindspeed_lite.engine.report import Fallback
from tests.harness.plans import calling, context_of, feature, passing, plan_of, session_of


def new_session(**keywords):
    return session_of(Context(Settings({}), "cpu", {}), **keywords)


@pytest.fixture
def session():
    return new_session()


def test_fallbacks_notices_and_decisions_are_recorded_and_logged_once(session, caplog, monkeypatch):
    with caplog.at_level(logging.WARNING, "mindspeed_lite"):
        for _ in range(2):
            session.fallback("norm", "odd size")
            session.of("norm").fallback("norm", "odd size")
            session.fallback_of("norm")("float64")
            session.of("x").notice("no kernel library")
        monkeypatch.setenv("RANK", "0")
        session.log_decision("x: keeps the side stream")
        monkeypatch.setenv("RANK", "1")
        session.log_decision("x: keeps the other stream")
    assert session.report.fallbacks == [Fallback("norm", "odd size"), Fallback("norm", "float64")]
    assert session.report.notices == ["no kernel library", "x: keeps the side stream", "x: keeps the other stream"]
    texts = [each.getMessage() for each in caplog.records]
    assert len(texts) == 3 and "odd size" in texts[0] and "float64" in texts[1]
    assert texts[2] == "x: keeps the side stream"


def test_strict_forbids_fallbacks_every_time_as_long_as_the_session_lives():
    strict = new_session(strict=True)
    tell = strict.fallback_of("norm")
    with pytest.raises(FallbackError, match=r"`norm`.*odd size"):
        tell("odd size")
    with pytest.raises(FallbackError):
        strict.fallback("norm", "odd size")
    assert len(strict.report.fallbacks) == 1
    del strict
    gc.collect()
    tell("odd size")


def test_state_is_made_once_and_a_new_view_of_the_feature_keeps_its_own(session):
    old, new, other = session.of("x"), session.of("x"), session.of("y")
    first = old.state("lanes", object)
    assert old.state("lanes", dict) is first is other.find("lanes") and other.find("other") is None
    second = new.state("lanes", object)  # made before what it was ends
    assert first is not second and session.find("lanes") is second
    assert old.end() == [] and session.find("lanes") is new.state("lanes", object) is second
    third = session.of("x")
    third.state("lanes", object)
    third.end()  # a change that failed
    assert session.find("lanes") is second


def test_the_end_runs_callbacks_the_latest_first_and_names_those_that_fail(session):
    view, seen = session.of("x"), []
    view.on_end(lambda: seen.append(1))
    view.on_end(lambda: 1 / 0)
    view.on_end(lambda: seen.append(view.find("lanes")))
    view.state("lanes", lambda: "kept")
    (failed,) = view.end()
    assert seen == ["kept", 1] and "feature `x`" in failed and "ZeroDivisionError" in failed
    assert view.end() == [] and view.find("lanes") is None


def test_a_mark_restores_what_was_there_and_spares_what_others_set(session):
    layer, view = torch.nn.Linear(1, 1), session.of("x")
    layer.first = layer.second = "theirs"
    for name in ("first", "second", "third"):
        view.mark(layer, name, "ours")
    layer.second = "theirs again"
    del layer.third
    view.end()
    assert (layer.first, layer.second) == ("theirs", "theirs again") and not hasattr(layer, "third")


def test_a_session_goes_on_with_other_features_and_back(session):
    view = session.of("x")
    kept = view.state("lanes", object)
    view.fallback("x", "odd size")
    view.notice("old")
    settings, report = Settings({"x": 2}), Report({}, "cpu")
    undo = session.renew(settings, Context(settings, "npu", {}), report, True)
    assert (view.settings, view.context.device, view.strict, view.report) == (settings, "npu", True, report)
    assert report.fallbacks == [Fallback("x", "odd size")] and report.notices == []
    view.notice("old")
    assert report.notices == ["old"], "each report says its own notices"
    with pytest.raises(FallbackError):
        view.fallback("x", "odd size")
    assert len(report.fallbacks) == 1 and view.state("lanes", list) is kept
    undo()
    assert view.context.device == "cpu" and not view.strict and view.report.notices == ["old"]


@pytest.fixture
def report(make_host):
    host = make_host({"mod": "def f(x): return x\n"})
    features = [
        feature(
            "norm",
            Around(f"{host}.mod:f", passing),
            Override(f"{host}.mod:f", calling(lambda x: x)),
            Provide(f"{host}.mod:f2", lambda session: 1),
            Provide(f"{host}.mod:f", lambda session: None),
            options=[Option("--norm", "h"), Option("--norm-level", "h", default=2)],
            arguments=lambda context: {"fusion": False},
        ),
        feature("rope", condition=lambda context: ["interleaved layout", "head size 96"]),
        feature("adam"),
        feature("auto", options=[Option("--auto", "h", default=0)]),
    ]
    off = ("adam", "auto")
    plan = plan_of(*features, off=off)
    plan.outcome("auto").reasons.append("it needs a value")
    session = session_of(context_of(features, off))
    report = session.report
    report.versions.update({"product": "0.1", "torch": "2.11"})
    report.record(plan)
    report.entries[2].backends.append("reference")
    session.fallback("norm", "odd size")
    session.notice("something")
    report.verifications += [
        Verification("norm", "rms", "float32 x[3]", "ulp", "host", 2, 2e-7, None, "output", 1e-7, 4e-7, "float64"),
        Verification("norm", "rms", "float32 x[4]", "deviation", "host", 1, 0.1, 0.2, verdict="exceeds", problem="no"),
    ]
    return report


def test_a_report_holds_what_was_applied_skipped_and_off_and_survives_json(report):
    norm, rope = (next(e for e in report.entries if e.feature == name) for name in ("norm", "rope"))
    assert (norm.status, norm.flags) == ("applied", {"--norm": True, "--norm-level": 2})
    assert norm.arguments == {"fusion": False} and norm.given == ["--norm"], "a flag at its default is not shown"
    assert {(each.how, each.verified) for each in norm.patches} == {
        ("override", "unverified: is in no verified release"),
        ("around", "unverified: is in no verified release"),
        ("provide", "provided"),
        ("provide", "already provided by the host"),
    }
    assert (rope.status, rope.reasons) == ("skipped", ["interleaved layout", "head size 96"])
    data = json.loads(report.to_json())
    assert data["schema_version"] == 3 and next(iter(data)) == "schema_version"
    assert report.as_dict() == data


def test_the_text_says_what_is_on_and_what_the_user_must_know(report):
    text = report.to_text(details="report.json")
    lines = text.splitlines()
    assert lines[0] == "1 feature on, 1 asked for and not applied, 2 off; details: report.json"
    (row,) = (line.split() for line in lines if line.startswith("  norm "))
    assert row == ["norm", "bitwise", "reference", "2", "of", "4", "unverified"], "no flag that repeats the name"
    known = (
        "host 1.0, product 0.1, torch 2.11 device cpu",
        "skipped (1) rope: interleaved layout; head size 96",
        "fallbacks norm: odd size",
        "norm, rms float32 x[3]: ok (2 calls compared with host; apart by output 2.0e-07;",
        "norm, rms float32 x[4]: exceeds (1 call compared with host; apart by output",
        "notices something",
    )
    verbose = report.to_text(verbose=True)
    assert all(part in " ".join(each.split()) for part in known for each in (text, verbose)), text
    assert "auto: it needs a value" in text and "adam" not in text
    for part in (
        "norm --norm [bitwise; by reference]",
        "mod:f (unverified: is in no verified release)",
        "sets fusion = False",
        "off, not asked for adam",
        "off (1) auto: it needs a value",
    ):
        assert part in " ".join(verbose.split()), verbose
    assert "\x1b" not in text and "\x1b[32m1 feature on" in report.to_text(color=True)
    report.entries[2].given = [f"--a-rather-long-flag-{index} 4" for index in range(9)]
    for width in (80, 100):
        text = report.to_text(width=width)
        assert max(map(len, text.splitlines())) <= width
        assert set(report.to_text(width=1000).split()) == set(text.split()), "between words"
