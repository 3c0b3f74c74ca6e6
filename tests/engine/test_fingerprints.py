"""The table of known fingerprints, what it says of a target, and the command that writes it."""

import importlib
import json

import pytest

from mindspeed_lite.engine import Around, Override
from mindspeed_lite.engine.fingerprints import Table
from mindspeed_lite.engine.source import Fingerprint, fingerprint, reader_of
from tests.harness.plans import passing
from tools.fingerprints import main

BODY = "has another body than in the verified releases"
SIGNATURE = "has the signature (x, y=), unlike the verified releases"
VALUE = "has the signature of a value, unlike the verified releases"
UNKNOWN = "is in no verified release"
SOURCES = {"1.2.0": "def f(x): return 1\n", "1.3.0": "def f(x): return 2\ndef g(x): return 3\n"}


@pytest.fixture
def table(tmp_path):
    """Of two releases, by way of the disk."""
    entries = {}
    for version, source in SOURCES.items():
        (tmp_path / version).mkdir()
        (tmp_path / version / "m.py").write_text(source)
        reader = reader_of(tmp_path / version)
        entries[version] = {f"m:{name}": fingerprint(reader, f"m:{name}") for name in "fg" if f"def {name}" in source}
    Table(entries).save(tmp_path / "table.json")
    assert list(json.loads((tmp_path / "table.json").read_text())) == list(SOURCES)
    found = Table.load(tmp_path / "table.json")
    assert found.entries == entries
    return found


@pytest.mark.parametrize(
    ("versions", "source", "verdict", "around"),
    [
        ("", SOURCES["1.2.0"], "verified", ""),
        ("", SOURCES["1.3.0"], "verified", ""),
        (">=1.3", SOURCES["1.2.0"], BODY, ""),
        (">=1.3", SOURCES["1.3.0"], "verified", ""),
        ("", "def f(x, y=1): return 1\n", SIGNATURE, SIGNATURE),
        ("", "f = 3\n", VALUE, VALUE),
        ("", "def f(x): return 4\n", BODY, ""),
        (">=1.4", SOURCES["1.2.0"], UNKNOWN, UNKNOWN),
        ("", "", "is not in the source of its module", "is not in the source of its module"),
    ],
)
def test_any_release_that_a_patch_is_for_verifies_it(table, tmp_path, versions, source, verdict, around):
    (tmp_path / "m.py").write_text(source)
    reader, objection = reader_of(tmp_path), "" if verdict == "verified" else verdict
    assert table.compare(Around("m:f", passing, versions=versions), "m:f", reader) == (verdict, around)
    assert table.compare(Override("m:f", passing, versions=versions), "m:f", reader) == (verdict, objection)


def test_the_loaded_object_is_judged_before_its_source(make_host, tmp_path):
    host = make_host({"mod": "def f(x): return x\n"})
    target = f"{host}.mod:f"
    table = Table({"1.0": {target: fingerprint(reader_of(tmp_path), target)}})
    around, override = Around(target, passing), Override(target, passing)
    assert table.judge(around) == table.judge(override) == ("verified", [])
    importlib.import_module(f"{host}.mod").f = eval("lambda x: 7")
    verdict, (objection,) = table.judge(override)
    assert verdict.startswith("was replaced by") and objection == f"`{target}` {verdict}"
    assert table.judge(around) == (verdict, [])


def test_what_a_patch_relies_on_is_judged_like_an_override_and_may_be_absent_where_it_was(make_host, tmp_path):
    host = make_host({"mod": "def f(x): return x\ndef helper(x): return x\n"})
    f, helper, gone = (f"{host}.mod:{name}" for name in ("f", "helper", "gone"))
    live = {text: fingerprint(reader_of(tmp_path), text) for text in (f, helper)}
    other = Fingerprint("(x)", "aaaa")
    around = Around(f, passing, relies_on=[helper, gone])
    missing = f"`{gone}` does not exist: `{host}.mod` has no `gone`."
    assert Table({"1.0": {**live, gone: other}}).judge(around) == ("verified", [missing])
    assert Table({"1.0": {**live, gone: other}, "2.0": live}).judge(around) == ("verified", []), "as in 2.0"
    changed = Table({"1.0": {**live, helper: other, gone: other}, "2.0": {**live, helper: other}})
    assert changed.judge(around) == (BODY, [f"`{helper}` {BODY}, and `{f}` relies on it"])


PATCHES = """
    from mindspeed_lite.engine import Around, Feature, Override, Provide
    FEATURE = Feature(
        "one", "s", "bitwise",
        [
            Override("m:f", lambda w, s: w, versions="<1.3"),
            Around("m:g", lambda w, s: w, versions=">=1.3"),
            Provide("m:h", lambda s: 1),
        ],
    )
"""


def test_the_command_line_writes_a_table_and_checks_it(table, make_host, tmp_path, capsys):
    roots = [f"--root={version}={tmp_path / version}" for version in SOURCES]
    written = tmp_path / "new.json"
    words = ["--package", make_host({"one": PATCHES}), *roots, "--out", str(written)]
    assert main(words) == 0
    assert {version: list(rows) for version, rows in Table.load(written).entries.items()} == {
        "1.2.0": ["m:f"],
        "1.3.0": ["m:g"],
    }
    assert main([*words, "--check"]) == 0
    (tmp_path / "1.2.0" / "m.py").write_text("def f(x): return 1000\n")
    assert main([*words, "--check"]) == 1 and "`m:f` at 1.2.0" in capsys.readouterr().err
    (tmp_path / "1.3.0" / "m.py").write_text("")
    before = written.read_text()
    assert main(words) == 1 and "feature `one` at 1.3.0: `m:g`" in capsys.readouterr().err
    assert written.read_text() == before
