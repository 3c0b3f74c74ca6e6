"""`mindspeed-lite balance`: loads of experts and sequence lengths; tables and files."""

from __future__ import annotations

import json

import pytest

from mindspeed_lite import cli
from mindspeed_lite.parallel.balance import record
from tests.harness import document_data

HEADER = record.LoadHeader(experts=4, topk=2, expert_parallel=2, replicas=1, decoder_layers=2, layers=(2, 3))


def balance(capsys, *arguments):
    assert cli.main(["balance", *map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_record_has_a_row_for_each_layer(tmp_path, capsys):
    file, out = tmp_path / "load.jsonl", tmp_path / "out.json"
    steps = [
        record.LoadStep(each, [4, 4], [[4, 0, 2, 2], [2, 2, 2, each]], [[4, 4], [4, 2 + each]]) for each in (1, 2, 3)
    ]
    record.append(file, steps, HEADER)
    lines = balance(capsys, file, "--last", 2, "--json", out)
    assert lines[0] == "2 steps, 2 to 3: 4 experts, 2 of them for a token, over 2 ranks"
    assert lines[2].split() == ["layer", "experts", "worst", "variation", "idle", "ranks", "dropped"]
    assert lines[3].split() == ["2", "2.00", "2.00", "0.71", "1", "1.00", "0.0", "%"]
    assert lines[4].split()[:3] == ["mtp", "1", "1.17"]
    found = json.loads(out.read_text())
    assert (found["first_step"], found["last_step"], found["steps"]) == (2, 3, 2)
    assert found["balance"][0]["imbalance"] == 2.0 and len(found["policies"]) == 4


def test_a_policy_has_a_row_and_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "load.jsonl"
    skewed = [[[9, 7, 1, 1], [1, 1, 1, 9]], [[9, 7, 1, 1], [3, 1, 1, 7]]] * 3
    steps = [record.LoadStep(at, [9, 9], rows, [[0, 0], [0, 0]]) for at, rows in enumerate(skewed, 1)]
    record.append(file, steps, HEADER)
    out, picture = tmp_path / "balance.json", tmp_path / "load.png"
    lines = balance(capsys, file, "--interval", 2, "--plot", picture, "--json", out)
    place = next(place for place, line in enumerate(lines) if line.startswith("policy"))
    rows = [line.split() for line in lines[place + 1 : place + 5]]
    assert [row[0] for row in rows] == ["none", "copies", "placement", "both"]
    none, copies, placed, both = json.loads(out.read_text())["policies"]
    assert rows[0][1:3] == [f"{none['imbalance']:.3f}", "1.000"]
    # Experts take half of an even step.
    step = (1 + 0.5 * (copies["imbalance"] - 1)) / (1 + 0.5 * (none["imbalance"] - 1))
    assert rows[1][2] == f"{step:.3f}" and step < 0.9
    assert both["imbalance"] <= placed["imbalance"] < none["imbalance"] and copies["copied"] > 0
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_lengths_have_a_row_for_each_assignment(tmp_path, capsys):
    small, out = ["--seq-length", 512, "--steps", 4, "--ranks", 2, "--global-batch-size", 16], tmp_path / "out.json"
    index = document_data.write(tmp_path / "set", 400, document_data.GeneratedLengths(8, 1.2, 512)) + ".idx"
    lines = balance(capsys, index, *small, "--json", out)
    assert lines[0].startswith("4 steps of 16 sequences of 512 tokens, 8 micro-batches for each of 2 ranks")
    before, after, waiting = found = json.loads(out.read_text())["assignments"]
    assert [line.split("  ")[0] for line in lines[3:6]] == [each["name"] for each in found]
    assert before["step"] > after["step"] >= 1 and before["micro_batch"] > waiting["micro_batch"]
    assert lines[3].split()[-2] == f"{before['step']:.4f}"
    assert f"{before['step'] / after['step']:.2f}x faster" in lines[-2]
    assert f"{before['micro_batch'] / waiting['micro_batch']:.2f}x faster" in lines[-1]
