import json
import subprocess
import sys

import pytest

from mindspeed_lite.engine.errors import FingerprintError
from mindspeed_lite.engine.fingerprints import (
    Fingerprint,
    Table,
    fingerprint_live,
    fingerprint_root,
    fingerprint_source,
    main,
    verdict,
)

PLAIN = "def f(x, y=1, *, z):\n    total = x + 1\n    return total * y\n"
DRESSED = '''
# a comment
def f(
    x: "Tensor",
    y: int = 1,
    *,
    z,
) -> "Tensor":
    """What it does."""
    total: int = (x + 1)  # why

    return total*y
'''


@pytest.fixture
def of(tmp_path):
    def fingerprint(source, qualname="f"):
        path = tmp_path / "file.py"
        path.write_text(source)
        return fingerprint_source(path, qualname)

    return fingerprint


def test_layout_comments_annotations_and_docstrings_make_no_difference(of):
    assert of(PLAIN) == of(DRESSED)
    assert of(PLAIN).signature == "(x, y=, *, z)"
    assert len(of(PLAIN).source) == 16


@pytest.mark.parametrize(
    ("old", "new"), [("x + 1", "x + 2"), ("x + 1", "x - 1"), ("y=1", "y=2"), ("def f", "@jit\ndef f")]
)
def test_a_changed_constant_operator_default_or_decorator_does(of, old, new):
    changed = of(PLAIN.replace(old, new))
    assert changed.source != of(PLAIN).source
    assert changed.signature == of(PLAIN).signature


def test_a_class_has_the_signature_of_its_constructor(of):
    assert of("class B:\n    def __init__(self, a): ...\nclass f(B):\n    pass\n").signature == "(self, a)"
    assert of("class f:\n    x: int\n").source != of("class f:\n    pass\n").source
    assert of("class f:\n    x: int = 1\n") == of("class f:\n    x: float = 1\n")


def test_all_definitions_count(of):
    both = "try:\n    import te\n    def f(a): return 1\nexcept ImportError:\n    def f(b): return 2\n"
    assert of(both).signature == "(a) | (b)"
    assert of(both).source != of(both.replace("return 2", "return 3")).source
    assert of("if fast:\n    f = g\nelse:\n    f = None\n").signature == ""


def test_what_is_not_defined_is_an_error(of):
    with pytest.raises(FingerprintError):
        of("def g(): pass\ndef h():\n    def f(): pass\n")


@pytest.fixture
def host(make_host):
    return make_host(
        {
            "__init__": "from .mod import f as g\n",
            "mod": f"{PLAIN}\nclass Base:\n    def method(self, a): return a\n",
            "sub": "from HOST.mod import Base as B\nfrom math import sqrt\nclass Child(B): pass\n",
        }
    )


def test_imports_and_bases_inside_the_package_are_followed(host, tmp_path):
    def at(target):
        return fingerprint_root(tmp_path, f"{host}{target}")

    assert at(":g") == at(".mod:f")
    assert at(".sub:Child.method") == at(".mod:Base.method")
    assert at(".sub:sqrt").signature == ""
    with pytest.raises(FingerprintError):
        at(".sub:Child.other")
    with pytest.raises(FingerprintError):
        at(".missing:f")
    assert host not in sys.modules


def test_live_and_static_fingerprints_agree_and_follow_the_file(host, tmp_path):
    for target in (f"{host}:g", f"{host}.mod:f", f"{host}.sub:Child.method"):
        assert fingerprint_live(target) == fingerprint_root(tmp_path, target)
    before = fingerprint_live(f"{host}.mod:f")
    path = tmp_path / host / "mod.py"
    path.write_text(path.read_text().replace("x + 1", "x + 1000"))
    assert fingerprint_live(f"{host}.mod:f") != before
    assert fingerprint_live("no_such_package:f") is None
    assert fingerprint_live("math:sqrt") is None


A, B, C = Fingerprint("(x)", "aaaa"), Fingerprint("(x)", "bbbb"), Fingerprint("(x, y)", "cccc")


@pytest.mark.parametrize(
    ("version", "live", "expected"),
    [
        ("1.2.0", A, "verified"),
        ("1.2.0", B, "same_signature"),
        ("1.2.0", C, "changed"),
        ("1.2.9", A, "verified"),
        ("1.2.9rc1", A, "verified"),
        ("1.2.9", B, "same_signature"),
        ("1.4.0", A, "same_signature"),
        ("1.4.0", C, "changed"),
        ("1.2.0", None, "unknown"),
    ],
)
def test_the_verdict_rests_on_the_release_or_on_its_series(version, live, expected):
    table = Table({"1.2.0": {"m:f": A}, "1.3.0": {"m:f": B}})
    assert verdict(table, "m:f", version, live) == expected
    assert verdict(table, "m:other", version, live) == "unknown"


def test_a_table_survives_the_disk(tmp_path):
    table = Table({"1.10.0": {"m:f": A}, "1.2.0": {"m:g": B, "m:f": C}})
    table.save(tmp_path / "table.json")
    again = Table.load(tmp_path / "table.json")
    assert again.entries == table.entries
    assert again.versions("m:f") == ["1.2.0", "1.10.0"]
    assert again.lookup("m:f", "1.2.0") == C and again.lookup("m:f", "2") is None
    assert list(json.loads((tmp_path / "table.json").read_text())) == ["1.2.0", "1.10.0"]


PATCHES = """
    from mindspeed_lite.engine import Feature, Option, Replace, Wrap, Provide
    FEATURE = Feature(
        "one", "s", [Option("--one", "h")], "bitwise",
        [
            Replace("cli_host.mod:f", lambda x: x, versions="<2"),
            Wrap("cli_host.mod:g", lambda w, s: w, versions=">=2"),
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


def test_the_command_line_keeps_releases_it_is_not_shown(releases):
    Table({"0.9": {"cli_host.mod:f": A}}).save(releases[1] / "table.json")
    assert main(arguments(releases)) == 0
    assert Table.load(releases[1] / "table.json").lookup("cli_host.mod:f", "0.9") == A


def test_the_command_runs_as_a_module_without_a_word_of_warning():
    command = [sys.executable, "-W", "error", "-m", "mindspeed_lite.engine.fingerprints", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == 0 and done.stderr == ""
