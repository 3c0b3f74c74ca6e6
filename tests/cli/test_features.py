"""`mindspeed-lite features`: every declaration, complete, at every width."""

import json
import shutil

import pytest

from mindspeed_lite import cli, runtime
from mindspeed_lite.cli import features
from mindspeed_lite.engine import Provide
from mindspeed_lite.engine.fingerprints import Table
from mindspeed_lite.engine.source import Fingerprint
from tests.harness.commands import ESCAPE, python


def say(capsys, *arguments):
    code = cli.main(["features", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("columns", [40, 60, 79, 100, 150, 300])
def test_every_feature_is_one_line_at_every_width(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = say(capsys)
    assert code == 0
    firsts = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    assert sorted(firsts) == sorted(feature.name for feature in runtime.catalogue())
    assert max(map(len, out.splitlines())) <= max(60, min(columns, 200))
    assert not ESCAPE.search(out)


def test_the_index_is_what_the_declarations_say():
    assert features.read_index() == features.describe_all()


def test_features_that_the_index_does_not_know_are_read_from_their_declarations(capsys, monkeypatch, tmp_path):
    index = json.loads(features.INDEX.read_text())
    monkeypatch.setattr(features, "INDEX", tmp_path / "features.json")
    features.INDEX.write_text(json.dumps(index[1:]))
    assert features.read_index() == index


def test_json_is_one_document_with_everything(capsys):
    code, out, _ = say(capsys, "--json")
    document = json.loads(out)
    assert code == 0 and document["schema_version"] == features.SCHEMA_VERSION
    found = {row["name"]: row for row in document["features"]}
    assert set(found) == {feature.name for feature in runtime.catalogue()}
    for feature in runtime.catalogue():
        row = found[feature.name]
        assert [flag["flag"] for flag in row["flags"]] == [option.flag for option in feature.options]
        assert [patch["target"] for patch in row["patches"]] == [patch.target for patch in feature.patches]
        assert set(row["backends"]) == set(feature.operators)
        assert row["numerics"] in features.NUMERICS


def test_every_feature_is_verified_somewhere(capsys):
    _, out, _ = say(capsys, "--json")
    for row in json.loads(out)["features"]:
        patches = runtime.catalogue()[row["name"]].patches
        if any(not isinstance(patch, Provide) for patch in patches):
            assert row["verified"], row["name"]


def test_a_release_counts_only_if_every_target_is_known():
    feature = runtime.catalogue()["use_flash_attn"]
    known = Fingerprint("()", "0")
    every = {patch.target: known for patch in feature.patches}
    some = {feature.patches[0].target: known}
    table = Table({"0.17.0": every, "0.18.0": {}, "0.16.0": every, "0.19.0": some})
    assert features.verified_releases(feature, table) == ["0.16.0", "0.17.0"]


@pytest.mark.parametrize("name", ["use_flash_attn", "use-flash-attn", "--use-flash-attn", "--attention-backend"])
def test_one_feature_has_all_its_details(capsys, name):
    code, out, _ = say(capsys, name)
    assert code == 0
    for text in ("--use-flash-attn", "docs/features/use_flash_attn.md", "ulp", "attention: reference, cpu"):
        assert text in out
    for feature in runtime.catalogue():
        if feature.name != "use_flash_attn":
            assert not any(line.startswith(feature.name) for line in out.splitlines())


def test_every_feature_can_be_asked_for(capsys):
    for feature in runtime.catalogue():
        code, out, _ = say(capsys, feature.name)
        assert code == 0 and feature.summary.split()[0] in out
        for relation in (*feature.requires, *feature.conflicts):
            assert relation.feature in out
        squeezed = "".join(out.split())
        for text in (*feature.conflicting_args.values(), feature.not_auto, *(each.target for each in feature.patches)):
            assert "".join(text.split()) in squeezed
        document = json.loads(say(capsys, feature.name, "--json")[1])
        assert [row["name"] for row in document["features"]] == [feature.name]


def test_an_unknown_name_has_close_ones(capsys):
    code, out, err = say(capsys, "use_flash_atn")
    assert (code, out) == (2, "") and "did you mean use_flash_attn" in err and err.count("\n") == 1
    code, _, err = say(capsys, "qqqq")
    assert code == 2 and err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["--swap-attention"]])
def test_it_imports_neither_megatron_nor_torch(arguments):
    program = (
        f"import sys; from mindspeed_lite.cli import main; code = main(['features', *{arguments}]); "
        "sys.exit(3 if {'megatron', 'torch'} & set(sys.modules) else code)"
    )
    run = python("-c", program)
    assert run.returncode == 0, run.stderr
    assert not ESCAPE.search(run.stdout)


def test_indented_parts_of_a_docstring_keep_their_lines():
    described = {**features.read_index()[0], "doc": "One line.\n\nAn example:\n    a = 1\n    b = 2\n"}
    assert "    a = 1\n    b = 2\n" in "\n".join(features._details(described))


def test_a_diff_shows_how_targets_differ_from_another_copy(capsys, tmp_path):
    from mindspeed_lite.platform import megatron

    target = megatron.root() / "megatron" / "core" / "fusions" / "fused_bias_swiglu.py"
    code, out, _ = say(capsys, "use_fused_swiglu", "--diff")
    assert code == 0 and "as verified" in out and "@@" not in out
    other = tmp_path / "megatron" / "core"
    shutil.copytree(megatron.root() / "megatron" / "core", other, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    changed = other / "fusions" / target.name
    changed.write_text(changed.read_text().replace("def bias_swiglu_impl(input", "def bias_swiglu_impl(other"))
    code, out, _ = say(capsys, "use_fused_swiglu", "--diff", "--against", str(tmp_path))
    assert code == 1 and "-def bias_swiglu_impl(other" in out
    for arguments, text in (
        (["--diff"], "name of a feature"),
        (["use_flash_attn", "--diff", "--against", "/no"], "/no"),
    ):
        code, out, err = say(capsys, *arguments)
        assert code == 2 and text in err and err.count("\n") == 1
