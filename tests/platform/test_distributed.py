"""Collectives that Megatron makes over NCCL, on two gloo processes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mindspeed_lite import platform
from tests.harness.processes import forked, on_ranks


def joined(path, body, size=2):
    """`body(rank)` on `size` ranks of one process group, initialized as Megatron does it."""

    def rank_body(rank):
        platform.activate()
        dist.init_process_group(
            "nccl",
            init_method=f"file://{path}",
            rank=rank,
            world_size=size,
            device_id=torch.device("cuda", rank),
        )
        body(rank)
        dist.barrier(device_ids=[0])
        dist.destroy_process_group()

    on_ranks(size, rank_body)


@forked()
def test_averages_are_means_however_they_are_asked_for(tmp_path):
    def body(rank):
        assert dist.get_backend() == "gloo"
        average = dist.ReduceOp.AVG
        group = dist.new_group([0, 1], backend="nccl")
        assert dist.get_backend(group) == "gloo"
        assert dist.get_backend(dist.new_subgroups(2, backend="nccl", pg_options=object())[0]) == "gloo"
        # 3 + 5 halves exactly, so the mean has no rounding to hide in.
        for arguments, keywords in (((average,), {}), ((), {"op": average}), ((average, group), {}),
                                    ((), {"op": average, "group": group, "async_op": True})):  # fmt: skip
            tensor = torch.full((5,), 3.0 + 2 * rank)
            work = dist.all_reduce(tensor, *arguments, **keywords)
            if keywords.get("async_op"):
                work.wait()
            assert torch.equal(tensor, torch.full((5,), 4.0)), (arguments, keywords)
        tensor = torch.full((5,), 3.0 + 2 * rank)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((5,), 8.0)), "a sum stays a sum"

        for arguments, keywords in (((average,), {}), ((), {"op": average, "group": group})):
            output, given = torch.empty(2), torch.arange(4.0) + 4 * rank
            dist.reduce_scatter_tensor(output, given, *arguments, **keywords)
            # mean of [0 1 2 3] and [4 5 6 7], each rank its half
            assert torch.equal(output, torch.tensor([[2.0, 3.0], [4.0, 5.0]])[rank]), (arguments, keywords)
        dist.reduce_scatter_tensor(output, torch.arange(4.0) + 4 * rank)
        assert torch.equal(output, torch.tensor([[4.0, 6.0], [8.0, 10.0]])[rank])

        dist.barrier()
        dist.barrier(group, device_ids=[rank])
        dist.barrier(group=group, async_op=True).wait()
        assert dist.get_world_size(dist.new_group(ranks=[0, 1], backend=None)) == 2

    joined(tmp_path / "store", body)


@forked()
def test_parts_of_different_sizes_are_gathered_and_scattered(tmp_path):
    def body(rank):
        for sizes in ([2, 5], [0, 3], [4, 4], [0, 0]):
            mine = torch.arange(sizes[rank] * 3.0).view(-1, 3) + 100 * rank
            parts = list(torch.empty(sum(sizes), 3).split(sizes))
            dist.all_gather(parts, mine)
            for other, part in enumerate(parts):
                assert torch.equal(part, torch.arange(sizes[other] * 3.0).view(-1, 3) + 100 * other), sizes
            given = [torch.full((size, 3), 1.0 + index + rank) for index, size in enumerate(sizes)]
            output = torch.empty(sizes[rank], 3)
            dist.reduce_scatter(output, given)
            assert torch.equal(output, torch.full((sizes[rank], 3), 3.0 + 2 * rank)), sizes

    joined(tmp_path / "store", body)


@forked()
def test_a_tensor_whose_storage_is_swapped_while_it_is_sent_arrives_intact(tmp_path):
    def body(rank):
        # 4 MB: more than the socket takes at once, so the send is still under way when the storage goes.
        count, rounds = 2**20, 50
        if rank == 0:
            works = []
            for index in range(rounds):
                tensor = torch.full((count,), float(index))
                works.append(dist.isend(tensor, 1))
                tensor.data = torch.empty(1)
                del tensor
                torch.full((count,), -1.0)  # takes the memory that a freed storage would leave
            for work in works:
                work.wait()
        else:
            for index in range(rounds):
                received = torch.empty(count)
                dist.irecv(received, 0).wait()
                assert bool((received == index).all()), (index, received.unique())

    joined(tmp_path / "store", body)
