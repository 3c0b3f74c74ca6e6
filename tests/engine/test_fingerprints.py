"""The table of known fingerprints, what it says of a target, and the command that writes it."""

import json

import pytest

from mindspeed_lite.engine import Around, Override
from mindspeed_lite.engine.fingerprints import Table
from mindspeed_lite.engine.source import Fingerprint, fingerprint, live_reader, reader_of
from mindspeed_lite.engine.target import resolve
from tests.harness.plans import passing
from tools.fingerprints import main

A, B, C = Fingerprint("(x)", "aaaa"), Fingerprint("(x)", "bbbb"), Fingerprint("(x, y)", "cccc")
BODY = "has another body than in the verified releases"
SIGNATURE = "has the signature (x, y), unlike the verified releases"
UNKNOWN = "is in no verified release"


@pytest.mark.parametrize(
    ("versions", "live", "verdict", "around"),
    [
        ("", A, "verified", ""),
        ("", B, "verified", ""),
        (">=1.3", A, BODY, ""),
        (">=1.3", B, "verified", ""),
        ("", C, SIGNATURE, SIGNATURE),
        ("", Fingerprint("(x)", "dddd"), BODY, ""),
        (">=1.4", A, UNKNOWN, UNKNOWN),
    ],
)
def test_any_release_that_a_patch_is_for_verifies_it(versions, live, verdict, around):
    table = Table({"1.2.0": {"m:f": A}, "1.3.0": {"m:f": B, "m:g": C}})
    assert table.compare(Around("m:f", passing, versions=versions), live) == (verdict, around)
    objection = "" if verdict == "verified" else verdict
    assert table.compare(Override("m:f", passing, versions=versions), live) == (verdict, objection)
    assert table.compare(Around("m:other", passing), live) == (UNKNOWN, UNKNOWN)


def test_a_value_that_became_a_function_is_told():
    table = Table({"1.0": {"m:f": Fingerprint("(x)", "aaaa")}})
    verdict, objection = table.compare(Around("m:f", passing), Fingerprint("", "bbbb"))
    assert verdict == objection == "has the signature of a value, unlike the verified releases"


def test_the_loaded_object_is_judged_before_its_source(make_host, tmp_path):
    host = make_host({"mod": "def f(x): return x\ndef g(x): return x\n"})
    target = resolve(f"{host}.mod:f")
    table = Table({"1.0": {target.text: fingerprint(reader_of(tmp_path), target.text)}})
    around, override = Around(target.text, passing), Override(target.text, passing)
    assert table.judge(around, target.raw) == table.judge(override, target.raw) == ("verified", "")
    verdict, objection = table.judge(override, len)
    assert verdict == "verified", "what is no Python function has no code to look at"
    theirs = eval("lambda x: 7")
    verdict, objection = table.judge(override, theirs)
    assert verdict == objection and verdict.startswith("was replaced by")
    assert table.judge(around, theirs) == (verdict, "")


def test_what_a_patch_relies_on_is_judged_like_an_override_and_may_be_absent_where_it_was(make_host):
    host = make_host({"mod": "def f(x): return x\ndef helper(x): return x\n"})
    f, helper, gone = (f"{host}.mod:{name}" for name in ("f", "helper", "gone"))
    live = {text: fingerprint(live_reader, text) for text in (f, helper)}
    around = Around(f, passing, relies_on=[helper, gone])
    known = Table({"1.0": {**live, gone: A}})
    assert list(known.doubts(around)) == [f"`{gone}` does not exist: `{host}.mod` has no `gone`."]
    known = Table({"1.0": {**live, gone: A}, "2.0": live})
    assert list(known.doubts(around)) == [], "as in 2.0"
    known = Table({"1.0": {**live, helper: A, gone: A}, "2.0": {**live, helper: A}})
    (doubt,) = known.doubts(around)
    assert doubt == f"`{helper}` {BODY}, and `{f}` relies on it"
    with pytest.raises(ValueError, match="`relies_on` is a sequence of names"):
        Around(f, passing, relies_on=helper)


def test_a_table_survives_the_disk(tmp_path):
    table = Table({"1.10.0": {"m:f": A}, "1.2.0": {"m:g": B, "m:f": C}})
    table.save(tmp_path / "table.json")
    again = Table.load(tmp_path / "table.json")
    assert again.entries == table.entries
    assert again.known(Around("m:f", passing)) == {"1.2.0": C, "1.10.0": A}
    assert again.known(Around("m:f", passing, versions=">=1.5")) == {"1.10.0": A}
    assert list(json.loads((tmp_path / "table.json").read_text())) == ["1.2.0", "1.10.0"]


PATCHES = """
    from mindspeed_lite.engine import Around, Feature, Option, Override, Provide
    FEATURE = Feature(
        "one", "s", [Option("--one", "h")], "bitwise",
        [
            Override("cli_host.mod:f", lambda w, s: w, versions="<2"),
            Around("cli_host.mod:g", lambda w, s: w, versions=">=2"),
            Provide("cli_host.mod:h", lambda s: 1),
        ],
    )
"""


@pytest.fixture
def releases(tmp_path, make_host):
    for version, source in (("1.0", "def f(x): return 1\n"), ("2.0", "def g(x): return 2\n")):
        folder = tmp_path / version / "cli_host"
        folder.mkdir(parents=True)
        (folder / "mod.py").write_text(source)
    return make_host({"one": PATCHES}), tmp_path


def arguments(releases, *more):
    package, root = releases
    roots = [f"--root={version}={root / version}" for version in ("1.0", "2.0")]
    return ["--package", package, *roots, "--out", str(root / "table.json"), *more]


def test_the_command_line_writes_a_table_and_checks_it(releases, capsys):
    assert main(arguments(releases)) == 0
    table = Table.load(releases[1] / "table.json")
    assert {version: list(rows) for version, rows in table.entries.items()} == {
        "1.0": ["cli_host.mod:f"],
        "2.0": ["cli_host.mod:g"],
    }
    assert main(arguments(releases, "--check")) == 0
    (releases[1] / "1.0" / "cli_host" / "mod.py").write_text("def f(x): return 1000\n")
    assert main(arguments(releases, "--check")) == 1
    assert "cli_host.mod:f" in capsys.readouterr().err


def test_the_command_line_names_a_target_that_should_exist(releases, capsys):
    (releases[1] / "2.0" / "cli_host" / "mod.py").write_text("")
    assert main(arguments(releases)) == 1
    assert "feature `one` at 2.0: `cli_host.mod:g`" in capsys.readouterr().err
    assert not (releases[1] / "table.json").exists()
