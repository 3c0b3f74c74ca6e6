"""`run --rank-order`: ranks meet under their new numbers, wherever the store is; checkpoints; bad files."""

from __future__ import annotations

import json
import os
import socket

import pytest
import torch
import torch.distributed as dist

from mindspeed_lite.cli import rank_order
from mindspeed_lite.cli.terminal import CommandError
from tests.harness.processes import forked, on_ranks


def written(folder, order, /, **changed):
    ranks = len(order)
    matrix = [[1e9] * ranks] * ranks
    content = {
        "format": 1, "hosts": [socket.gethostname()] * ranks, "bandwidth": matrix, "latency": matrix,
        "compute": [1.0] * ranks, "order": order, "seconds": [2.0, 0.5], **changed,
    }  # fmt: skip
    file = folder / "links.json"
    file.write_text(json.dumps(content))
    return str(file)


def launched(rank, ranks, port, agent=False):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(LOCAL_RANK=str(rank), TORCHELASTIC_USE_AGENT_STORE=str(agent))


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@forked("torch")
@pytest.mark.parametrize("agent", [False, True])
def test_ranks_meet_under_their_new_numbers(tmp_path, agent):
    """agent: torchrun's agent keeps the store, else the launcher's rank 0 does."""
    file, port = written(tmp_path, [2, 0, 1]), free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if agent else None

    def body(rank):
        launched(rank, 3, port, agent)
        rank_order.apply(file)
        assert (os.environ["RANK"], os.environ["LOCAL_RANK"]) == (str({2: 0, 0: 1, 1: 2}[rank]), str(rank))
        dist.init_process_group("gloo")
        found = [None] * 3
        dist.all_gather_object(found, rank)
        assert found == [2, 0, 1]
        # A second group uses the store again.
        dist.new_group([0, 2])
        dist.barrier()

    on_ranks(3, body)
    assert store is None or agent


def _checkpoint(folder, action):
    from megatron.core import dist_checkpointing

    rank, weight = dist.get_rank(), torch.full((4,), float(dist.get_rank()))
    sharded = dist_checkpointing.ShardedTensor.from_rank_offsets("weight", weight, (0, rank, 2))
    found = getattr(dist_checkpointing, action)({"weight": sharded}, str(folder))
    return None if found is None else found["weight"].tolist()


@forked("megatron")
def test_a_checkpoint_loads_in_another_order(tmp_path):
    file = written(tmp_path, [1, 0])
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for action in ("save", "load"):
        port = free_port()

        def body(rank, action=action, port=port):
            from mindspeed_lite import platform

            launched(rank, 2, port)
            if action == "save":
                rank_order.apply(file)
            platform.activate()
            dist.init_process_group("gloo")
            assert dist.get_rank() == (1 - rank if action == "save" else rank)
            assert _checkpoint(folder, action) == (None if action == "save" else [float(rank)] * 4)
            dist.barrier()

        on_ranks(2, body)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"order": [0, 0]}, "order does not hold each of the ranks 0 to 1 once"),
        ({"order": []}, "proposes no order: measure with `links --json FILE -- COMMAND`"),
        ({"order": [0, 1, 2]}, "order does not hold"),
        ({"hosts": ["a", "b"]}, "was measured on a, and runs on"),
        ({"hosts": ["a", "b", "c"]}, "bandwidth is no matrix of 3 ranks"),
        ({"bandwidth": [[0, 0], [1, 0]]}, "a link of less than 1 byte/s"),
        ({"format": 2}, "format: want 1"),
        ({"WORLD_SIZE": "3"}, "it has 2 ranks, and the training 3"),
        ({"RANK": ""}, "start the training with torchrun"),
        ({"file": "none.json"}, "none.json: cannot be read"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, monkeypatch, changed, words):
    monkeypatch.setenv("RANK", changed.pop("RANK", "0"))
    monkeypatch.setenv("WORLD_SIZE", changed.pop("WORLD_SIZE", "2"))
    file = changed.pop("file", "") or written(tmp_path, [1, 0], **changed)
    with pytest.raises(CommandError, match="--rank-order") as found:
        rank_order.apply(file)
    assert words in str(found.value) and os.environ["RANK"] in ("0", "")


def test_the_new_rank_0_says_the_predicted_gain(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    file = written(tmp_path, [1, 0], hosts=[f"{socket.gethostname()}({each})" for each in range(2)])
    rank_order.apply(file)
    assert capsys.readouterr().out == (
        f"mindspeed_lite: ranks in the order of {file}; messages of a step: 2.000 s -> 500.0 ms (prediction)\n"
    )
    rank_order.apply(file)
    assert os.environ["RANK"] == "1" and capsys.readouterr().out == "", "RANK is 0, which is now number 1"
