"""`mindspeed-lite balance`: the table, the files, and one line for what cannot be shown."""

from __future__ import annotations

import json

import pytest

from mindspeed_lite.cli import balance

MADE = ["--generate", "experts=16", "ranks=4", "topk=2", "layers=2", "steps=12", "skew=4"]


def test_a_row_for_each_policy_and_the_files(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "balance.json", tmp_path / "balance.png"
    sizes = ["--hidden-size", "256", "--moe-ffn-hidden-size", "64"]
    assert balance.main([*MADE, "--interval", "4", *sizes, "--json", str(out), "--plot", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("12 steps, 2 layers: 16 experts over 4 ranks")
    assert [line.split()[0] for line in lines[3:7]] == ["none", "copies", "placement", "both"]
    found = json.loads(out.read_text())
    none, copies, placed, both = found["policies"]
    assert lines[3].split()[1] == f"{none['imbalance']:.3f}" and lines[3].split()[3] == "1.000"
    # The step's share of experts is a half.
    step = (1 + 0.5 * (copies["imbalance"] - 1)) / (1 + 0.5 * (none["imbalance"] - 1))
    assert lines[4].split()[3] == f"{step:.3f}" and step < 0.9
    assert placed["imbalance"] < none["imbalance"] and both["copied"] > 0
    assert sum("copies" in line and "MB" in line for line in lines) == 2
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "FILE or --generate, one of them"),
        (["file", *MADE], "FILE or --generate, one of them"),
        (["no"], "cannot be read: No such file"),
        ([*MADE, "--ranks", "3"], "3 ranks cannot hold 16 experts"),
        ([*MADE, "--decay", "1"], "from 0 to below 1"),
        ([*MADE, "--copies", "-1"], "at least 0, not -1"),
        ([*MADE, "--experts-share", "0"], "above 0"),
        ([*MADE, "--hidden-size", "64"], "go together"),
        ([*MADE, "heat=3"], "not 'heat=3'"),
        ([*MADE, "topk=x"], "not 'topk=x'"),
        ([*MADE, "drift=nan"], "not 'drift=nan'"),
        ([*MADE, "topk=17"], "topk=17: a token has at most all 16 experts"),
        ([*MADE, "layers=0"], "layers=0: at least 1"),
        ([*MADE, "skew=99"], "from 1 to 15"),
        ([*MADE, "--plot", "no/picture.png"], "there is no such folder"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, why):
    # Words of --generate end at the next option.
    given = [each for each in arguments if "=" not in each or each in MADE]
    extra = [each for each in arguments if each not in given]
    if extra:
        given = [*MADE, *extra]
    assert balance.main(given) == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1 and error.startswith("mindspeed-lite balance: error: ")
