"""`mindspeed-lite balance-lengths`: the table, the file, and one line for what cannot be shown."""

from __future__ import annotations

import json

import pytest

from mindspeed_lite.cli import balance_lengths
from mindspeed_lite.parallel.balance.length_simulation import GeneratedLengths
from tests.harness import document_data

SMALL = ["--seq-length", "512", "--steps", "4", "--ranks", "2", "--global-batch-size", "16"]


def test_a_row_for_each_assignment_and_the_file(tmp_path, capsys):
    out = tmp_path / "lengths.json"
    index = document_data.write(tmp_path / "set", 400, GeneratedLengths(8, 1.2, 512)) + ".idx"
    for given in ([index], ["--generate", "shortest=8", "tail=1.2"]):
        assert balance_lengths.main([*given, *SMALL, "--json", str(out)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("4 steps of 16 sequences of 512 tokens, 8 micro-batches for each of 2 ranks")
        before, after, waiting, bound = json.loads(out.read_text())
        assert [line.split("  ")[0] for line in lines[3:7]] == [
            each["name"] for each in (before, after, waiting, bound)
        ]
        assert before["step"] > after["step"] >= bound["step"] >= 1
        assert before["micro_batch"] > waiting["micro_batch"] == bound["micro_batch"]
        assert lines[3].split()[-2] == f"{before['step']:.4f}"
        assert f"{before['step'] / after['step']:.2f}x faster" in lines[-2]
        assert f"{before['micro_batch'] / waiting['micro_batch']:.2f}x faster" in lines[-1]
    assert balance_lengths.main([*given, *SMALL, "--micro-batch-size", "2"]) == 0
    assert "4 micro-batches for each of 2 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "INDEX or --generate, one of them"),
        (["no"], "no: cannot be read: No such file"),
        ([__file__], "is no index of a Megatron data set"),
        (["--generate", "heat=3"], "not 'heat=3'"),
        (["--generate", "tail=x"], "not 'tail=x'"),
        (["--generate", "tail=0.01"], "tail=0.01: at least 0.1"),
        (["--generate", "tail=nan"], "not 'tail=nan'"),
        (["--generate", "shortest=0"], "shortest=0: at least 1"),
        (["--generate", f"shortest={10**400}"], "too large"),
        (["--generate", "--ranks", "0"], "--ranks takes a number of at least 1, not 0"),
        (["--generate", "--ranks", "5"], "48 samples are no micro-batches of 1 for each of 5 ranks"),
        (["--generate", "--json", "no/out.json"], "there is no such folder"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, why):
    assert balance_lengths.main([*arguments, "--steps", "1", "--seq-length", "64"]) == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1 and error.startswith("mindspeed-lite balance-lengths: error: ")
