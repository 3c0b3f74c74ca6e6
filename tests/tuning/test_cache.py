"""Trials of the number of chunks that a later run finds again: by two ranks, of which only the first has a folder."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import pytest
import torch

from mindspeed_lite.platform.cache import NoCache
from mindspeed_lite.tuning import cache
from mindspeed_lite.tuning.chunk_autotuner import ROUNDS, ChunkAutotuner, Trial
from tests.harness.patience import once_of
from tests.harness.process_groups import joined
from tests.harness.processes import forked, on_ranks

X, W = torch.zeros(20, 4), torch.zeros(4, 6)


def elsewhere():
    raise AssertionError("only the first rank looks for the folder")


def begun(group, folder, message=0.001):
    """A later run's trials: what they say, and a pass that notes how often it runs; two chunks are faster."""
    said, runs = [], []
    cache._message = lambda group, device: message  # a test's machine is busy

    def run(chunks):
        runs.append(chunks)
        time.sleep(0.05 if chunks == 1 else 0.005)

    trials = ChunkAutotuner(group, said.append, folder if group.rank() == 0 else elsewhere)
    return (lambda phase: trials(phase, X, W, run)), said, runs


@once_of(8)
@forked("torch")
def test_a_later_run_takes_what_an_earlier_one_found():
    meeting, folder = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp())

    def body(rank):
        group = joined(rank, 2, meeting)
        chunks, _, runs = begun(group, lambda: folder)
        assert chunks("a") == 2 and runs
        # Another group of the same job, whose first rank writes the same file.
        other, _, _ = begun(group, lambda: folder)
        assert other("b") == 2

        chunks, said, runs = begun(group, lambda: folder)
        assert chunks("a") == chunks("b") == 2 and not runs
        assert len(said) == (2 if rank == 0 else 0)
        assert all("20 rows, 4 x 6: 2 chunks" in text and f"{folder}/chunks-" in text for text in said), said
        assert chunks("c") == 2 and len(runs) == 2 * (ROUNDS + 1), "what was not kept is tried"

    on_ranks(2, body)
    (path,) = folder.iterdir()
    found = json.loads(path.read_text())
    assert [*found["trials"]] == [f"{phase} 20 4 6 torch.float32" for phase in "abc"]
    assert found["place"]["ranks"] == [2] and found["place"]["backend"] == "gloo"


@once_of(8)
@forked("torch")
def test_another_network_or_number_of_threads_is_tried_anew():
    meeting, folder = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp())

    def body(rank):
        group = joined(rank, 2, meeting)
        torch.set_num_threads(1)
        begun(group, lambda: folder)[0]("a")
        chunks, said, runs = begun(group, lambda: folder, message=0.0021)
        assert chunks("a") == 2 and runs and not any("earlier" in text for text in said)
        torch.set_num_threads(2)
        chunks, said, runs = begun(group, lambda: folder)
        assert chunks("a") == 2 and runs and not any("earlier" in text for text in said)

    on_ranks(2, body)
    assert len([*folder.iterdir()]) == 2


@once_of(8)
@forked("torch")
def test_where_nothing_can_be_kept_trials_go_on_and_say_so_once():
    meeting = Path(tempfile.mkdtemp())

    def nowhere():
        raise NoCache("/nowhere: Read-only file system")

    def gone():
        return meeting / "gone"

    def body(rank):
        group = joined(rank, 2, meeting)
        for folder, reason in ((nowhere, "/nowhere: Read-only file system"), (gone, "No such file or directory")):
            chunks, said, runs = begun(group, folder)
            assert chunks("a") == chunks("b") == 2 and runs
            complaints = [text for text in said if "cannot be kept" in text]
            assert len(complaints) == (rank == 0) and all(reason in text for text in complaints)

    on_ranks(2, body)


@once_of(8)
@pytest.mark.parametrize("text", ["", "[]", '{"message_seconds": 1}', '{"message_seconds": "x", "trials": {}}'])
@forked("torch")
def test_a_file_that_is_no_such_file_is_made_anew(text):
    meeting, folder = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp())

    def body(rank):
        group = joined(rank, 2, meeting)
        begun(group, lambda: folder)[0]("a")
        if rank == 0:
            (path,) = folder.iterdir()
            path.write_text(text)
        chunks, _, runs = begun(group, lambda: folder)
        assert chunks("a") == 2 and runs
        chunks, _, runs = begun(group, lambda: folder)
        assert chunks("a") == 2 and not runs

    on_ranks(2, body)


def test_only_sound_trials_are_read():
    times = [1.0] * ROUNDS
    sound = Trial.of("p", (8, 8, 8), {"1": times, "4": times})
    assert sound is not None and sound.rounds == {1: times, 4: times}
    for found in ({}, {"4": times}, {"1": times, "3": times}, {"1": times, "2": times[1:]}):
        assert Trial.of("p", (8, 8, 8), found) is None, found
