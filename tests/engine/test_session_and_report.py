import json
import logging

import pytest

from mindspeed_lite.engine import (
    Context,
    Fallback,
    FallbackError,
    Option,
    Provide,
    Replace,
    Report,
    Session,
    Settings,
    Transaction,
    Verification,
    Wrap,
)

from .support import context_of, feature, passing, plan_of, session_of


@pytest.fixture
def session():
    return session_of(Context(Settings({}), "cpu", {}))


def test_a_fallback_is_recorded_and_logged_once_per_reason(session, caplog):
    with caplog.at_level(logging.WARNING, "mindspeed_lite"):
        for _ in range(3):
            session.fallback("norm", "odd size")
        session.fallback("norm", "float64")
    assert session.report.fallbacks == [Fallback("norm", "odd size"), Fallback("norm", "float64")]
    assert len(caplog.records) == 2 and "odd size" in caplog.text


def test_strict_forbids_fallbacks_every_time():
    strict = session_of(Context(Settings({}), "cpu", {}), strict=True)
    for _ in range(2):
        with pytest.raises(FallbackError, match=r"`norm`.*odd size"):
            strict.fallback("norm", "odd size")
    assert len(strict.report.fallbacks) == 1


def test_nobody_verifies_unless_told(session):
    assert session.verifier is None and session.report.verifications == []


def test_a_notice_is_said_once(session):
    session.notice("no kernel library")
    session.notice("no kernel library")
    assert session.report.notices == ["no kernel library"]


def fused(x):
    return x


@pytest.fixture
def report(make_host):
    host = make_host({"mod": "def f(x): return x\ndef g(x): return x\n", "user": "from HOST.mod import f\n"})
    __import__(f"{host}.user")
    features = [
        feature(
            "norm",
            Replace(f"{host}.mod:f", fused),
            Wrap(f"{host}.mod:g", passing),
            Provide(f"{host}.mod:f2", lambda session: fused),
            Provide("json", lambda session: None),
            options=[Option("--norm", "h"), Option("--norm-level", "h", default=2)],
            adjust=lambda context: {"fusion": False},
        ),
        feature("rope", condition=lambda context: ["interleaved layout", "head size 96"]),
        feature("adam"),
    ]
    context = context_of(features, off=("adam",))
    report = Report({"product": "0.1", "host": "1.0", "torch": "2.11"}, "cpu")
    session = Session(context.settings, context, report)
    plan = plan_of(*features, off=("adam",), session=session)
    session.transaction = Transaction(plan, session)
    session.transaction.apply()
    report.record(plan, context.settings, session.transaction)
    report.entries[1].backends.append("reference")
    session.fallback("norm", "odd size")
    session.notice("something")
    report.verifications += [
        Verification("norm", "rms", "float32 x[3]", "ulp", "host", 2, 2e-7, None, "output", 1e-7, 4e-7, "float64"),
        Verification("norm", "rms", "float32 x[4]", "deviation", "host", 1, 0.1, 0.2, verdict="exceeds", problem="no"),
    ]
    session.transaction.undo()
    return report


def test_a_report_holds_what_was_applied_skipped_and_off(report):
    norm, rope = (next(e for e in report.entries if e.feature == name) for name in ("norm", "rope"))
    assert (norm.status, norm.flags) == ("applied", {"--norm": True, "--norm-level": 2})
    assert norm.adjustments == {"fusion": False}
    assert {(each.how, each.verified) for each in norm.patches} == {
        ("replace", "unverified"),
        ("wrap", "unverified"),
        ("provide", "provided"),
        ("provide", "already provided by the host"),
    }
    assert [len(each.holders) for each in norm.patches if each.how == "replace"] == [1]
    assert (rope.status, rope.reasons) == ("skipped", ["interleaved layout", "head size 96"])
    assert [each.feature for each in report.entries if each.status == "off"] == ["adam"]


def test_a_report_survives_json(report):
    data = json.loads(report.to_json())
    assert data["schema_version"] == 1
    again = Report.from_dict(data)
    assert again == report and again.as_dict() == report.as_dict() == data
    earlier = Report.from_dict({key: value for key, value in data.items() if key != "verifications"})
    assert earlier.verifications == [] and earlier.notices == report.notices
    with pytest.raises(ValueError, match="schema 9"):
        Report.from_dict({**data, "schema_version": 9})


def test_the_text_fits_the_width_and_says_it_all(report):
    text = report.to_text(width=80)
    assert max(map(len, text.splitlines())) <= 80
    for part in (
        "product 0.1, host 1.0, torch 2.11, device cpu",
        "applied (1)",
        "norm  --norm --norm-level=2  [bitwise; by reference]",
        "1 more holder)",
        "sets fusion = False",
        "skipped (1)",
        "- interleaved layout",
        "- head size 96",
        "off: adam",
        "norm: odd size",
        "something",
        "norm, rms float32 x[3]: ok (2 calls beside host; apart by output 2.0e-07;",
        "norm, rms float32 x[4]: exceeds (1 call beside host; apart by output",
    ):
        assert part in text
    assert "\x1b" not in text and "\x1b[32mapplied\x1b[0m" in report.to_text(color=True)
