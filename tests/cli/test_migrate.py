"""`mindspeed-lite migrate`: the report, the file it writes, and what it refuses to write over."""

from __future__ import annotations

import stat

import pytest

from mindspeed_lite.cli import main

SCRIPT = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py \\\n    --norm-topk-prob \\\n    --use-mc2 --auto-settings --bf16\n"
)
TRANSLATED = (
    "torchrun --nproc_per_node 8 -m mindspeed_lite run pretrain_gpt.py \\\n"
    "    --use-ascend-mc2 --auto-settings --bf16\n"
)


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setattr("mindspeed_lite.cli.migrate._flags_of_megatron", lambda: None)
    path = tmp_path / "pretrain.sh"
    path.write_text(SCRIPT)
    path.chmod(0o755)
    return path


def test_the_flags_by_what_becomes_of_them_and_the_translated_script(script, tmp_path, capsys):
    out = tmp_path / "out.sh"
    assert main(["migrate", str(script), "-o", str(out)]) == 1
    text = capsys.readouterr().out
    assert (
        "5 flags of MindSpeed's table: 1 refused, 0 skipped, 0 unknown value, 1 translated, 1 not needed, 2 kept"
        in (" ".join(text.split()))
    )
    assert "refused: take them out\n\n--auto-settings (done another way" in text
    assert "translated\n\n--use-mc2 is read as --use-ascend-mc2: " in text
    assert "stay as they are\n\n--nproc_per_node --bf16" in text and f"written: {out}" in text
    assert script.read_text() == SCRIPT
    assert out.read_text() == TRANSLATED and out.stat().st_mode & stat.S_IXUSR
    out.write_text(TRANSLATED.replace("--auto-settings ", ""))
    assert main(["migrate", str(out)]) == 0


def test_nothing_is_written_over_in_silence(script, capsys):
    assert main(["migrate", str(script), "-o", str(script)]) == 2 and script.read_text() == SCRIPT
    assert capsys.readouterr().err == (
        f"mindspeed-lite migrate: error: -o {script}: it exists; give another name, or --force to write over it\n"
    )
    assert main(["migrate", str(script), "-o", str(script), "--force"]) == 1 and script.read_text() == TRANSLATED


def test_flags_are_compared_with_the_installed_megatron(tmp_path, capsys):
    script = tmp_path / "pretrain.sh"
    script.write_text("OPTIONS='--use-rope-scaling --hidden-sise 64 --moe-router-padding-for-fp8'\n")
    assert main(["migrate", str(script)]) == 0
    text = capsys.readouterr().out
    assert "unrecognized argument --hidden-sise: did you mean --hidden-size?" in text
    assert "--use-rope-scaling" not in text and "No command starts a training script" in text


def test_a_python_script_and_the_shim(tmp_path, capsys):
    source, out, shim = tmp_path / "pretrain_gpt.py", tmp_path / "out.py", tmp_path / "shim"
    source.write_text("from mindspeed import megatron_adaptor\n")
    assert main(["migrate", str(source), "-o", str(out)]) == 0
    assert out.read_text() == "from mindspeed_lite import megatron_adaptor\n"
    assert "1 import line of megatron_adaptor changed" in capsys.readouterr().out
    source.write_text("from mindspeed_llm import megatron_adaptor\nfrom mindspeed_llm.training import pretrain\n")
    assert main(["migrate", str(source)]) == 1
    assert "imports more of MindSpeed (mindspeed_llm.training): start Megatron-LM's own" in capsys.readouterr().out
    assert main(["migrate", "--shim", str(shim)]) == 0
    assert (shim / "mindspeed_llm" / "megatron_adaptor.py").is_file()
    (shim / "mindspeed" / "__init__.py").write_text("")
    assert main(["migrate", "--shim", str(shim)]) == 2
    assert "mindspeed itself is installed" in capsys.readouterr().err
