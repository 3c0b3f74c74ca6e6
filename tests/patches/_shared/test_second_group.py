"""A second group of the same ranks, made once."""

from __future__ import annotations

from tests.harness.processes import forked, on_ranks


@forked("megatron")
def test_it_has_the_same_ranks_and_carries_messages(tmp_path):
    import torch
    import torch.distributed as dist

    from mindspeed_lite.engine import Context, Report, Session, Settings
    from mindspeed_lite.patches._shared.second_group import second_group
    from tests.harness.process_groups import joined

    def body(rank):
        world = joined(rank, 3, tmp_path)
        settings = Settings({})
        session = Session(settings, Context(settings, "cpu", {}), Report({}, "cpu"))
        if rank == 2:
            return
        # Ranks beside it need not take part.
        group = dist.new_group([0, 1], use_local_synchronization=True)
        second = second_group(group, session)
        assert second_group(group, session) is second is not group and second is not world
        assert dist.get_process_group_ranks(second) == [0, 1]
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total, group=second)
        assert total.item() == 3.0

    on_ranks(3, body)
