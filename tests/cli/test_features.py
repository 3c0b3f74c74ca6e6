"""`mindspeed-lite features`: every declaration, complete, at every width."""

import json
import sys

import pytest

from mindspeed_lite import activation, cli
from mindspeed_lite.cli import features
from mindspeed_lite.engine import Fingerprint, Provide, Table

from .support import ESCAPE, fails_in_one_line, python


def say(capsys, *arguments):
    code = cli.main(["features", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("columns", [40, 60, 79, 100, 120, 150, 200, 300])
def test_every_feature_and_every_flag_is_there_at_every_width(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = say(capsys)
    assert code == 0
    words = set(out.split())
    squeezed = "".join(out.split())
    for feature in activation.catalogue():
        assert feature.name in words
        assert {option.flag for option in feature.options} <= words
        if columns < 150:  # in a table a wrapped cell's lines are apart
            assert all(patch.target in squeezed for patch in feature.patches)
    assert max(map(len, out.splitlines())) <= max(60, min(columns, 200))
    assert not ESCAPE.search(out)


def test_a_wide_terminal_has_a_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "210")
    _, out, _ = say(capsys)
    assert out.splitlines()[0].split()[:2] == ["feature", "flags"]


def test_json_is_one_document_with_everything(capsys):
    code, out, _ = say(capsys, "--json")
    document = json.loads(out)
    assert code == 0 and document["schema_version"] == 1
    found = {row["name"]: row for row in document["features"]}
    assert set(found) == {feature.name for feature in activation.catalogue()}
    for feature in activation.catalogue():
        row = found[feature.name]
        assert [flag["flag"] for flag in row["flags"]] == [option.flag for option in feature.options]
        assert [patch["target"] for patch in row["patches"]] == [patch.target for patch in feature.patches]
        assert set(row["backends"]) == set(feature.operators)
        assert row["numerics"] in features.NUMERICS


def test_every_feature_is_verified_somewhere(capsys):
    _, out, _ = say(capsys, "--json")
    for row in json.loads(out)["features"]:
        patches = activation.catalogue()[row["name"]].patches
        if any(not isinstance(patch, Provide) for patch in patches):
            assert row["verified"], row["name"]


def test_a_release_counts_only_if_every_target_is_known():
    feature = activation.catalogue()["use_flash_attn"]
    known = Fingerprint("()", "0")
    every = {patch.target: known for patch in feature.patches}
    some = {feature.patches[0].target: known}
    table = Table({"0.17.0": every, "0.18.0": {}, "0.16.0": every, "0.19.0": some})
    assert features.verified_releases(feature, table) == ["0.16.0", "0.17.0"]


@pytest.mark.parametrize("name", ["use_flash_attn", "use-flash-attn"])
def test_one_feature_has_all_its_details(capsys, name):
    code, out, _ = say(capsys, name)
    assert code == 0
    for text in ("--use-flash-attn", "docs/features/use_flash_attn.md", "ulp", "attention on reference"):
        assert text in out
    for feature in activation.catalogue():
        if feature.name != "use_flash_attn":
            assert feature.name not in out


def test_every_feature_can_be_asked_for(capsys):
    for feature in activation.catalogue():
        code, out, _ = say(capsys, feature.name)
        assert code == 0 and feature.summary.split()[0] in out
        for relation in (*feature.requires, *feature.conflicts):
            assert relation.feature in out
        document = json.loads(say(capsys, feature.name, "--json")[1])
        assert [row["name"] for row in document["features"]] == [feature.name]


def test_an_unknown_name_has_close_ones(capsys):
    code, out, err = say(capsys, "use_flash_atn")
    assert (code, out) == (2, "") and "did you mean use_flash_attn" in err and err.count("\n") == 1
    code, _, err = say(capsys, "qqqq")
    assert code == 2 and err.count("\n") == 1


def test_it_imports_no_megatron():
    program = (
        "import sys; from mindspeed_lite.cli import main; main(['features']); "
        "sys.exit(3 if any(name.startswith('megatron') for name in sys.modules) else 0)"
    )
    run = python("-c", program)
    assert run.returncode == 0, run.stderr
    assert not ESCAPE.search(run.stdout)


def test_without_torch_it_says_so_in_one_line(tmp_path):
    from .support import command, without

    fails_in_one_line(command("features", **without(tmp_path, "torch")), "torch", "doctor", code=1)


def test_indented_parts_of_a_docstring_keep_their_lines(capsys, monkeypatch):
    module = sys.modules["mindspeed_lite.patches.use_flash_attn"]
    monkeypatch.setattr(module, "__doc__", "One line.\n\nAn example:\n    a = 1\n    b = 2\n")
    assert "    a = 1\n    b = 2\n" in say(capsys, "use_flash_attn")[1]
