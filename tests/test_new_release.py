"""`python -m tools.new_release`: what a release changes, from source alone."""

from __future__ import annotations

import pytest

from mindspeed_lite.platform import megatron
from tests.harness import checkouts
from tools import fingerprints, matrix, new_release

OLDER, NEWER = "0.18.2", "0.19.2"


def found() -> dict[str, new_release.Change]:
    root, other = megatron.root(), checkouts.folder(OLDER)
    assert root is not None and other is not None
    return {each.target: each for each in new_release.changes(root, NEWER, other, OLDER)}


def test_each_changed_target_comes_with_its_difference_and_the_features_it_hits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes = found()
    loss = changes["megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy"]
    assert loss.how.startswith("has the signature (vocab_parallel_logits, target, label_smoothing=, tp_group=)")
    assert "use_fused_cross_entropy" in {feature.name for feature, _ in loss.patches}
    assert any(line.startswith("+") and "tp_group" in line for line in loss.lines)
    # The same in both releases.
    assert "megatron.core.fusions.fused_bias_dropout:bias_dropout_add_fused_train" not in changes
    assert "use_fused_cross_entropy" in loss.refused()
    around = changes["megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__"]
    assert around.how == "has another body" and "reuse_fp32_param" not in around.refused()
    assert "use_fused_cross_entropy (override)" in str(loss)
    assert new_release.main([NEWER, "--against", NEWER]) == 0
    assert "0 of" in capsys.readouterr().out


def test_a_table_of_another_release_is_out_of_date(capsys: pytest.CaptureFixture[str]) -> None:
    for version, code, words in ((NEWER, 0, ""), (OLDER, 1, f"at {OLDER}: the table is out of date")):
        assert fingerprints.main(["--check", "--root", f"{version}={megatron.root()}"]) == code
        assert words in capsys.readouterr().err


def test_a_place_without_megatron_is_one_line(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert new_release.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: there is no megatron/core in it\n"
    assert new_release.main(["no version"]) == 2
    assert "no version" in capsys.readouterr().err


def test_what_cannot_be_fetched_is_one_line_and_records_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkouts, "PIP_INSTALL", ["false"])
        for main in (new_release.main, lambda words: matrix.main(["--environment", *words])):
            assert main(["0.1.99"]) == 2
            assert capsys.readouterr().err.startswith("error: megatron-core 0.1.99 cannot be installed")
    before = matrix.FILE.read_bytes()
    with pytest.raises(SystemExit):
        # The environment's own Megatron would be trained and recorded under this name.
        matrix.main(["--release", "0.1.99"])
    assert "0.1.99: there is no megatron/core in" in capsys.readouterr().err
    assert matrix.FILE.read_bytes() == before
