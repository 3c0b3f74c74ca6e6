"""Groups that some ranks make without the others, where groups have ended or ranks have other groups."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from mindspeed_lite.parallel import groups
from mindspeed_lite.parallel.node_groups import NodeGroups
from tests.harness.process_groups import joined
from tests.harness.processes import forked, on_ranks


def _adds_up(group, expected):
    found = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(found, group=group)
    assert int(found) == expected


def _ended_and_made_again(rank, folder):
    world = joined(rank, 2, folder)
    for _ in range(3):
        (made,) = groups.new_groups(world, [0, 1])
        _adds_up(made, 3)
        dist.destroy_process_group(made)
        # The other rank goes ahead.
        time.sleep(0.5 * rank)


def _made_after_another_has_ended(rank, folder):
    world = joined(rank, 2, folder)
    other = dist.new_group([0, 1])
    first = groups.new_groups(world, [0, 1])
    dist.destroy_process_group(other)
    for each in (*first, *groups.new_groups(world, [0, 1])):
        _adds_up(each, 3)


def _with_groups_of_one_rank(rank, folder):
    world = joined(rank, 2, folder)
    if rank:
        dist.new_group([rank], use_local_synchronization=True)
    (made,) = groups.new_groups(world, [0, 1])
    _adds_up(made, 3)


SETTINGS = (_ended_and_made_again, _made_after_another_has_ended, _with_groups_of_one_rank)


@forked()
@pytest.mark.parametrize("setting", [each.__name__ for each in SETTINGS])
def test_names_of_groups_neither_repeat_nor_differ(tmp_path, setting):
    on_ranks(2, lambda rank: globals()[setting](rank, tmp_path))


@forked("features")
def test_two_levels_are_set_up_twice_in_one_process(tmp_path):
    def body(rank):
        for number in range(2):
            folder = tmp_path / str(number)
            folder.mkdir(exist_ok=True)
            nodes = NodeGroups(joined(rank, 4, folder), 2)
            _adds_up(nodes.within, (3, 7)[rank // 2])
            _adds_up(nodes.between, (4, 6)[rank % 2])
            dist.barrier()
            dist.destroy_process_group()

    on_ranks(4, body)
