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


def printed(capsys, *arguments, code=0):
    assert cli.main(["features", *arguments]) == code
    return capsys.readouterr().out


def test_the_list_is_that_of_the_declarations(capsys):
    out = printed(capsys)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for feature in runtime.catalogue():
        assert f"{feature.name} {feature.numerics} {feature.summary}" in lines
    assert f"{len(runtime.catalogue())} features." in out and not ESCAPE.search(out)
    themes = [*dict.fromkeys(feature.theme for feature in runtime.catalogue())]
    assert [line for line in lines if line in themes] == themes


def test_the_list_needs_no_torch():
    code = "import sys; from mindspeed_lite import cli; cli.main(['features']); assert 'torch' not in sys.modules"
    run = python("-c", code)
    assert run.returncode == 0, run.stderr


def test_json_is_one_document_with_everything(capsys):
    document = json.loads(printed(capsys, "--json"))
    assert document["schema_version"] == features.SCHEMA_VERSION
    rows = {row["name"]: row for row in document["features"]}
    assert set(rows) == {feature.name for feature in runtime.catalogue()}
    for feature in runtime.catalogue():
        row = rows[feature.name]
        assert [flag["flag"] for flag in row["flags"]] == [option.flag for option in feature.options]
        assert [patch["target"] for patch in row["patches"]] == [patch.target for patch in feature.patches]
        assert set(row["backends"]) == set(feature.operators) and row["numerics"] in features.NUMERICS
        assert row["verified"] or all(isinstance(patch, Provide) for patch in feature.patches), feature.name


def test_a_release_counts_only_if_every_target_is_known():
    feature = runtime.catalogue()["use_flash_attn"]
    every = {patch.target: Fingerprint("()", "0") for patch in feature.patches}
    table = Table({"0.17.0": every, "0.18.0": {}, "0.16.0": every, "0.19.0": dict([*every.items()][:1])})
    assert features.verified_releases(feature, table) == ["0.16.0", "0.17.0"]


@pytest.mark.parametrize("name", ["use-flash-attn", "--use-flash-attn", "--attention-backend"])
def test_a_feature_is_found_by_name_and_flag(capsys, name):
    out = printed(capsys, name)
    for text in ("--use-flash-attn", "docs/features/use_flash_attn.md", "ulp", "attention: reference, cpu"):
        assert text in out


def test_every_feature_can_be_asked_for(capsys):
    for feature in runtime.catalogue():
        squeezed = "".join(printed(capsys, feature.name).split())
        relations = (each.feature for each in (*feature.requires, *feature.conflicts))
        texts = (*feature.conflicting_args.values(), feature.not_auto, *(each.target for each in feature.patches))
        for text in (feature.summary, *relations, *texts):
            assert "".join(text.split()) in squeezed


def test_a_diff_shows_how_targets_differ_from_another_copy(capsys, tmp_path):
    from mindspeed_lite.platform import megatron

    out = printed(capsys, "use_fused_swiglu", "--diff")
    assert "bias_swiglu_impl: verified" in out and "@@" not in out
    other = tmp_path / "megatron" / "core"
    shutil.copytree(megatron.root() / "megatron" / "core", other, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    changed = other / "fusions" / "fused_bias_swiglu.py"
    changed.write_text(changed.read_text().replace("def bias_swiglu_impl(input", "def bias_swiglu_impl(other"))
    out = printed(capsys, "use_fused_swiglu", "--diff", "--against", str(tmp_path), code=1)
    assert "-def bias_swiglu_impl(other" in out
