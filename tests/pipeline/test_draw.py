"""Schedules as text and as a picture."""

from __future__ import annotations

import pytest

from mindspeed_lite.pipeline import draw
from mindspeed_lite.pipeline.costs import uniform
from mindspeed_lite.pipeline.orders import PipelineShape, build
from mindspeed_lite.pipeline.simulate import simulate


def simulated(name, ranks, microbatches, chunks=1, **times):
    return simulate(build(name, PipelineShape(ranks, microbatches, chunks)), uniform(ranks * chunks, **times))


def test_ranks_are_rows_and_steps_as_long_as_they_take():
    # 9 units of time: 3 columns each.
    lines = draw.text(simulated("1f1b", 2, 2), 7 + 27)
    assert lines[:2] == ["rank 0 F0-F1-......B0----...B1----", "rank 1 ...F0-B0----F1-B1----......"]
    assert lines[2] == "F forward, B backward, . idle; a number is the micro-batch"


def test_columns_shorter_than_a_step_are_letters():
    line = draw.text(simulated("1f1b", 2, 40), 60)[1]
    assert len(line) == 60 and set(line.removeprefix("rank 1 ")) <= set("FB-.0123456789")


def test_pairs_and_chunks_have_letters_of_their_own():
    lines = draw.text(simulated("dualpipev-dw-detach", 2, 6, 2), 400)
    assert "F0:3+B1:1" in lines[0] and "W1:0" in lines[0]
    assert "X forward and backward overlapped" in lines[-1] and "chunk:micro-batch" in lines[-1]


def test_colour_takes_no_room():
    found = simulated("zb-h1", 3, 5)
    colored = draw.text(found, 80, color=True)
    assert "\x1b[48;5;" in colored[0]


def test_a_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "schedule.png"
    draw.png({"one": simulated("dualpipev", 2, 4, 2), "two": simulated("1f1b", 2, 4)}, file, "s")
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 5000
