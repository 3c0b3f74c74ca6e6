"""`--optimize-send-recv-comm`: which group each message of Megatron's communicator takes, and when it applies."""

from __future__ import annotations

import pytest

import mindspeed_lite
from mindspeed_lite.patches.optimize_send_recv_comm import FEATURE
from tests.harness.processes import forked, on_ranks
from tests.harness.swapped import is_swapped


@pytest.mark.parametrize("batched", [True, False])
@forked("megatron")
def test_what_goes_up_the_pipeline_takes_the_second_group(tmp_path, batched):
    from types import SimpleNamespace

    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import p2p_communication

    from mindspeed_lite import platform
    from tests.harness.process_groups import joined

    ranks = 3
    config = SimpleNamespace(
        batch_p2p_comm=batched, batch_p2p_sync=False, overlap_p2p_comm=not batched, pipeline_dtype=torch.float32,
        timers=None, use_ring_exchange_p2p=False, variable_seq_lengths=False, mtp_standalone=False,
        virtual_pipeline_model_parallel_size=None,
    )  # fmt: skip

    def body(rank):
        platform.activate()
        joined(rank, ranks, tmp_path)
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
        own = parallel_state.get_pipeline_model_parallel_group()
        used = []
        own_batch, own_send = dist.batch_isend_irecv, dist.isend

        def batch(ops):
            used.extend(("down" if each.peer == (rank + 1) % ranks else "up", each.group)
                        for each in ops if each.op is dist.isend)  # fmt: skip
            return own_batch(ops)

        def send(tensor, dst, group):
            used.append(("down" if dst == (rank + 1) % ranks else "up", group))
            return own_send(tensor, dst, group)

        dist.batch_isend_irecv = batch
        if not batched:
            dist.isend = send

        def exchange():
            communicator = p2p_communication.P2PCommunicator(pp_group=own, config=config)
            down, up = (torch.full((4,), 10.0 * rank + place) for place in (1, 2))
            return communicator.send_forward_backward_recv_forward_backward(down, up, True, True, (4,))

        with mindspeed_lite.enabled(optimize_send_recv_comm=True, strict=True):
            for _ in range(2):
                above, below = exchange()
                assert above.tolist() == [10.0 * ((rank - 1) % ranks) + 1] * 4
                assert below.tolist() == [10.0 * ((rank + 1) % ranks) + 2] * 4
            groups = {way: {group for each, group in used if each == way} for way in ("down", "up")}
            assert len(used) == 4 and groups["down"] == {own}
            (second,) = groups["up"]
            assert second is not own and dist.get_process_group_ranks(second) == [*range(ranks)]
        assert not is_swapped(FEATURE.patches[1].target)
        used.clear()
        exchange()
        assert {group for _, group in used} == {own}
        dist.barrier()

    on_ranks(ranks, body)
