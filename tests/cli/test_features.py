"""`mindspeed-lite features`: every declaration, complete, at every width."""

import json
import shutil

import pytest

from mindspeed_lite import cli, runtime
from mindspeed_lite.cli import features
from mindspeed_lite.engine import Provide
from mindspeed_lite.engine.fingerprints import Table
from mindspeed_lite.engine.source import Fingerprint
from tests.harness.commands import ESCAPE


def say(capsys, *arguments):
    code = cli.main(["features", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_every_feature_is_one_line_where_it_is_piped_and_fits_into_a_terminal(capsys, monkeypatch):
    code, out, _ = say(capsys)
    lines = [line.split()[0] for line in out.splitlines() if line.strip()]
    assert code == 0 and {feature.name for feature in runtime.catalogue()} <= set(lines)
    assert sum(line in runtime.catalogue() for line in lines) == len(runtime.catalogue()) and not ESCAPE.search(out)
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, say(capsys)[1].splitlines())) <= 80


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
        assert row["verified"] or all(isinstance(patch, Provide) for patch in feature.patches), feature.name


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
    assert not any(line.startswith("use_fused_rmsnorm") for line in out.splitlines())


def test_every_feature_can_be_asked_for(capsys):
    for feature in runtime.catalogue():
        code, out, _ = say(capsys, feature.name)
        assert code == 0 and feature.summary.split()[0] in out
        for relation in (*feature.requires, *feature.conflicts):
            assert relation.feature in out
        squeezed = "".join(out.split())
        for text in (*feature.conflicting_args.values(), feature.not_auto, *(each.target for each in feature.patches)):
            assert "".join(text.split()) in squeezed


def test_a_diff_shows_how_targets_differ_from_another_copy(capsys, tmp_path):
    from mindspeed_lite.platform import megatron

    target = megatron.root() / "megatron" / "core" / "fusions" / "fused_bias_swiglu.py"
    code, out, _ = say(capsys, "use_fused_swiglu", "--diff")
    assert code == 0 and "bias_swiglu_impl: verified" in out and "@@" not in out
    other = tmp_path / "megatron" / "core"
    shutil.copytree(megatron.root() / "megatron" / "core", other, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    changed = other / "fusions" / target.name
    changed.write_text(changed.read_text().replace("def bias_swiglu_impl(input", "def bias_swiglu_impl(other"))
    code, out, _ = say(capsys, "use_fused_swiglu", "--diff", "--against", str(tmp_path))
    assert code == 1 and "-def bias_swiglu_impl(other" in out
