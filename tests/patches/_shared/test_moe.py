"""What the features for mixtures of experts share; each one's own test has it in Megatron."""

from __future__ import annotations

import pytest

from mindspeed_lite.engine import Context, Report, Session, Settings
from mindspeed_lite.patches._shared import moe as shared
from tests.harness.process_groups import start
from tests.harness.processes import forked


@forked("megatron")
def test_a_layer_that_is_read_waits_for_its_parameters_whatever_else_looks_on():
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    from mindspeed_lite.patches._shared.moe import before_call, has_hooks

    start()
    told = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    )
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    model = DistributedDataParallel(config, told, torch.nn.Sequential(torch.nn.Linear(8, 8)))
    layer, seen = model.module[0], []
    for group in model.bucket_groups:
        group.finish_param_sync = lambda **_: seen.append("gathered")
    before_call(layer)
    assert set(seen) == {"gathered"} and not has_hooks(layer)
    layer.register_forward_pre_hook(lambda *_: seen.append("entered"))
    seen.clear()
    before_call(layer)
    assert set(seen) == {"gathered"} and has_hooks(layer)


def session_of(feature):
    return Session(Settings({}), Context(Settings({}), "cpu", {}, {}), Report({}, "cpu")).of(feature)


def test_a_job_goes_to_the_feature_whose_message_is_to_come():
    session, ran = session_of(shared.ALLTOALL), []
    assert not shared.put(session, lambda: ran.append("none"))
    first = shared.messages_of(session, shared.ALLTOALL)
    second = shared.messages_of(session.of(shared.ALLGATHER), shared.ALLGATHER)
    assert first is shared.messages_of(session, shared.ALLTOALL) and first is not second
    assert not shared.put(session, lambda: ran.append("none"))
    second.messages.takes_jobs = True
    assert shared.put(session, lambda: ran.append("second"))
    first.messages.run_jobs()
    assert ran == []
    second.messages.run_jobs()
    assert ran == ["second"]


def test_messages_are_those_of_the_call_that_issues_them():
    session = session_of(shared.ALLTOALL)
    state = shared.messages_of(session, shared.ALLTOALL)

    def token_dispatch(self, error=None):
        assert self == "dispatcher" and state.is_dispatch is True
        if error:
            raise error
        return "tokens"

    dispatch = shared.message_patches(shared.ALLTOALL, shared.DISPATCHER)[0].make(token_dispatch, session)
    assert dispatch("dispatcher") == "tokens" and state.is_dispatch is None
    with pytest.raises(ValueError, match="lost"):
        dispatch("dispatcher", error=ValueError("lost"))
    assert state.is_dispatch is None


def test_what_found_no_message_is_computed_before_gradients_are_reduced():
    session, ran = session_of(shared.ALLTOALL), []
    shared.messages_of(session, shared.ALLTOALL).messages.put(lambda: ran.append("a gradient"), is_certain=True)
    patch = shared.message_patches(shared.ALLTOALL, shared.DISPATCHER)[2]
    patch.make(lambda self: ran.append("reduced"), session)(None)
    assert ran == ["a gradient", "reduced"]
