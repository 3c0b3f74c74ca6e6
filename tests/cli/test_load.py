"""`mindspeed-lite load`: the table, the picture, and one line for what cannot be shown."""

from __future__ import annotations

import json

import pytest

from mindspeed_lite.cli import load
from mindspeed_lite.parallel.balance import record

HEADER = record.LoadHeader(experts=4, topk=2, expert_parallel=2, replicas=1, decoder_layers=2, layers=(2, 3))


@pytest.fixture
def file(tmp_path):
    steps = [
        record.LoadStep(each, [4, 4], [[4, 0, 2, 2], [2, 2, 2, each]], [[4, 4], [4, 2 + each]]) for each in (1, 2, 3)
    ]
    record.append(tmp_path / "load.jsonl", steps, HEADER)
    return tmp_path / "load.jsonl"


def test_a_row_for_each_layer(file, capsys):
    out = file.with_suffix(".json")
    assert load.main([str(file), "--last", "2", "--json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 steps, 2 to 3: 4 experts, 2 of them for a token, over 2 ranks"
    assert lines[2].split() == ["layer", "experts", "worst", "variation", "idle", "ranks", "dropped"]
    assert lines[3].split() == ["2", "2.00", "2.00", "0.71", "1", "1.00", "0.0", "%"]
    assert lines[4].split()[:3] == ["mtp", "1", "1.17"]
    found = json.loads(out.read_text())
    assert (found["first_step"], found["last_step"], found["steps"]) == (2, 3, 2)
    assert found["balance"][0]["imbalance"] == 2.0


def test_the_picture_is_written(file):
    pytest.importorskip("matplotlib")
    picture = file.with_suffix(".png")
    assert load.main([str(file), "--plot", str(picture)]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["no"], "cannot be read: No such file"),
        (["{file}", "--last", "0"], "at least 1, not 0"),
        (["{file}", "--plot", "no/picture.png"], "there is no such folder"),
        (["{folder}"], "cannot be read: Is a directory"),
        (["{other}"], "want the header"),
    ],
)
def test_bad_input_is_one_line(file, capsys, arguments, why):
    other = file.with_name("other")
    other.write_text('{"loss": 1}\n')
    given = [each.format(file=file, folder=file.parent, other=other) for each in arguments]
    assert load.main(given) == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1 and error.startswith("mindspeed-lite load: error: ")
