"""Megatron's functions as the executor calls them, in each release."""

from __future__ import annotations

import enum
from types import SimpleNamespace

import pytest
import torch

from mindspeed_lite.patches._shared import pipeline_passes
from mindspeed_lite.patches._shared.pipeline_passes import QUEUE, DelayedWgrads
from mindspeed_lite.pipeline.wgrad import WgradQueue
from tests.harness.processes import forked


def passes(chunks, rank, deallocate=False):
    from megatron.core.pipeline_parallel import schedules

    from mindspeed_lite.patches._shared.pipeline_passes import MegatronPasses, TrainingStep
    from mindspeed_lite.pipeline import orders
    from mindspeed_lite.pipeline.data_parallel_sync import sync_plan
    from mindspeed_lite.pipeline.orders import PipelineShape

    name = "1f1b" if chunks == 1 else "interleaved"
    schedule = orders.build(name, PipelineShape(2, 2, chunks))
    config = SimpleNamespace(deallocate_pipeline_outputs=deallocate, timers=None, grad_scale_func=None)
    this = TrainingStep(None, [None] * chunks, [SimpleNamespace()] * chunks, config, 2, 1, False, False, None)
    schedules.get_model_type = lambda model: None
    plan = sync_plan(list(schedule.steps(rank)), chunks, rank)
    return MegatronPasses(schedules, this, schedule, rank, plan)


@forked("megatron")
def test_an_output_is_released_where_the_configuration_says_so():
    import torch

    assert not passes(1, 0, False).releases
    output = torch.ones(2, 3)
    here = passes(1, 0, True)
    here.release(output)
    assert here.releases and output.numel() == 1


@forked("megatron")
def test_what_is_handed_over_begins_a_graph_and_outlives_the_release():
    import torch

    weight = torch.ones(3, requires_grad=True)
    output = weight * 2
    here = passes(1, 0, True)
    received = here.hand_over(output)
    here.release(output)
    assert received.is_leaf and received.requires_grad and received.tolist() == [2.0] * 3
    with torch.no_grad():
        assert not here.hand_over(weight * 2).requires_grad


@forked("megatron")
def test_chunks_are_numbered_where_there_are_several_and_the_last_stage_is_the_orders():
    assert passes(1, 1)._vp_stages == [None] and passes(1, 1)._is_last == [True]
    assert passes(2, 0)._vp_stages == [0, 1] and passes(2, 0)._is_last == [False, False]
    assert passes(2, 1)._is_last == [False, True]


@pytest.mark.parametrize(("ahead", "back"), [(0, 1), (0, None), (None, 1)])
@forked("megatron")
def test_each_pass_is_given_its_own_model_and_micro_batch(ahead, back):
    import inspect

    import torch
    from megatron.core.pipeline_parallel import combined_1f1b, schedules

    from mindspeed_lite import platform
    from mindspeed_lite.patches._shared.pipeline_passes import CombinedPasses, TrainingStep
    from mindspeed_lite.pipeline import orders
    from mindspeed_lite.pipeline.data_parallel_sync import sync_plan
    from mindspeed_lite.pipeline.orders import PipelineShape

    platform.activate()
    schedule = orders.build("dualpipev-whole", PipelineShape(2, 3, 2))
    config = SimpleNamespace(deallocate_pipeline_outputs=False, calculate_per_token_loss=True, timers=None)
    models = [SimpleNamespace(), SimpleNamespace()]
    total = torch.zeros([], dtype=torch.int)
    this = TrainingStep(None, ["a", "b"], models, config, 3, 1, False, False, None, num_tokens=total)
    schedules.get_model_type = lambda model: None
    passes = CombinedPasses(schedules, this, schedule, 0, sync_plan(list(schedule.steps(0)), 2, 0))
    signature = inspect.signature(combined_1f1b.combined_forward_backward_step)
    calls = []

    def step(*args, **kwargs):
        calls.append(signature.bind(*args, **kwargs).arguments)
        return "output", torch.tensor(5), "gradient"

    passes._step = step
    if back is None:
        assert passes.forward(ahead)(2, "received") == "output"
    elif ahead is None:
        assert passes.backward(back)(1, "input", "made", "given") == "gradient"
    else:
        assert passes.pair(ahead, back)(2, "received", 1, "input", "made", "given") == ("output", "gradient")
    (call,) = calls
    assert call["f_model"] is (None if ahead is None else models[ahead])
    assert call["b_model"] is (None if back is None else models[back])
    assert call["data_iterator"] == (None if ahead is None else "a")
    assert (call["current_microbatch"], call["input_tensor"]) == ((None, None) if ahead is None else (2, "received"))
    if back is not None:
        assert [call[f"b_{name}"] for name in ("input_tensor", "output_tensor", "output_tensor_grad")] == [
            "input", "made", "given"
        ]  # fmt: skip
    assert total.item() == (0 if ahead is None else 5)


def test_each_backward_pass_is_one_batch_and_reduction_is_told_once():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
    layers = (model[0], model[2])
    log = []
    for number, layer in enumerate(layers):
        queue = WgradQueue()
        queue.call_when_done(lambda number=number: log.append(f"reduce {number}"))
        setattr(layer, QUEUE, queue)
    delayed = DelayedWgrads(model)
    for microbatch in range(3):
        for number, layer in enumerate(layers):
            getattr(layer, QUEUE).put(lambda text=f"{number}:{microbatch}": log.append(text))
            layer.weight.grad = torch.ones(2, 2)
        delayed.seal(is_last=microbatch == 2)
        assert (layers[0].weight.grad is None) == (microbatch < 2)
        if microbatch == 1:
            delayed.run(is_last=False)
    assert log == ["0:0", "1:0"]
    delayed.run(is_last=False)
    delayed.run(is_last=True)
    assert log[2:] == ["0:1", "1:1", "0:2", "reduce 0", "1:2", "reduce 1"]


def test_a_schedule_keeps_gradients_that_megatron_asks_for():
    from mindspeed_lite.patches.delay_wgrad_compute import backward_dw

    model, log = torch.nn.Sequential(torch.nn.Linear(2, 2)), []
    setattr(model[0], QUEUE, WgradQueue())
    getattr(model[0], QUEUE).put(lambda: log.append("computed"))
    with DelayedWgrads(model).kept():
        backward_dw(model[0])
        assert log == []
    backward_dw(model[0])
    assert log == ["computed"] and len(getattr(model[0], QUEUE)) == 0


class ModelType(enum.Enum):
    encoder_or_decoder = 1
    encoder_and_decoder = 2


def release(name):
    """The parameters of a release's functions, and what tells which virtual stage runs."""
    here = SimpleNamespace(ModelType=ModelType, get_model_type=lambda model: model, stages=[], group="group")
    here.parallel_state = SimpleNamespace(
        set_virtual_pipeline_model_parallel_rank=here.stages.append,
        get_pipeline_model_parallel_group=lambda: here.group,
    )

    def schedule(*, model):
        pass

    if name in ("0.12", "0.13"):
        here.get_tensor_shapes = lambda *, rank, model_type, seq_length, encoder_decoder_xattn: None
    else:
        here.get_tensor_shapes = lambda *, seq_length, tp_group, cp_group: None
    if name == "0.12":
        here.forward_step = lambda model, current_microbatch=None: None
    else:
        here.forward_step = lambda model, current_microbatch=None, vp_stage=None: None
    if name == "0.14":

        def schedule(*, model, grad_finalize_pgs=None):
            pass

    if name == "0.16":

        def schedule(*, model, pg_collection=None, force_all_reduce=False):
            pass

    here.forward_backward_pipelining_without_interleaving = schedule
    return here


def test_a_function_is_told_what_it_takes():
    def function(first, *, second=None):
        return first, second

    assert pipeline_passes.filter_kwargs(function, second=1) == {"second": 1}
    assert pipeline_passes.filter_kwargs(function, second=1, third=2) == {"second": 1}


@pytest.mark.parametrize(("name", "told"), [("0.12", {1: [1]}), ("0.13", {1: []}), ("0.16", {1: []})])
def test_the_virtual_stage_is_set_where_passes_are_not_told_it(name, told):
    here = release(name)
    function = pipeline_passes.in_stage(here, 1, lambda x, more=0: x + more)
    assert function(2, more=3) == 5 and here.stages == told[1]
    assert pipeline_passes.in_stage(here, None, len) is len


def test_groups_go_on_under_the_name_that_the_release_has():
    def told(name, groups):
        return pipeline_passes.finalize_kwargs(release(name), groups, True)

    assert told("0.12", None) == {} and told("0.14", None) == {}
    assert told("0.14", "groups") == {"grad_finalize_pgs": "groups"}
    assert told("0.16", None) == {"force_all_reduce": True}
    assert told("0.16", "groups") == {"force_all_reduce": True, "pg_collection": "groups"}


def test_lengths_are_of_groups_or_of_megatrons_own():
    assert pipeline_passes.tensor_shape_kwargs(release("0.16"), "tp", "cp", 3) == {
        "tp_group": "tp",
        "cp_group": "cp",
    }
    old = pipeline_passes.tensor_shape_kwargs(release("0.12"), "tp", "cp", 3)
    assert old == {"rank": 3, "model_type": None, "encoder_decoder_xattn": False}


def test_an_encoder_with_a_decoder_is_left_to_megatron():
    old, new = release("0.12"), release("0.16")
    assert pipeline_passes.unsupported_reasons(old, ModelType.encoder_or_decoder) == []
    (reason,) = pipeline_passes.unsupported_reasons(old, ModelType.encoder_and_decoder)
    assert "two tensors" in reason
    old.group = ["one", "another"]
    (reason,) = pipeline_passes.unsupported_reasons(old, ModelType.encoder_or_decoder)
    assert "several pipelines" in reason
    assert pipeline_passes.unsupported_reasons(new, ModelType.encoder_and_decoder) == []


def test_functions_stand_in_for_a_communicator():
    sent = []

    def both(output, gradient, recv_prev, recv_next, tensor_shape, config):
        sent.append((output, recv_next, tensor_shape, config))
        return "previous", "next"

    def one_way(output, recv, tensor_shape, config, overlap_p2p_comm=False):
        return overlap_p2p_comm, config

    functions = SimpleNamespace(
        send_forward_recv_forward=one_way,
        send_backward_recv_backward=one_way,
        send_forward_backward_recv_forward_backward=both,
    )
    found = pipeline_passes.communicator(SimpleNamespace(p2p_communication=functions), "group", "config")
    assert found.pp_group == "group"
    exchanged = found.send_forward_backward_recv_forward_backward("out", None, False, True, tensor_shape="shape")
    assert exchanged == ("previous", "next") and sent == [("out", True, "shape", "config")]
    assert found.send_forward_recv_forward(None, True, tensor_shape=None, overlap_p2p_comm=True) == (True, "config")
    own = SimpleNamespace(P2PCommunicator=lambda pp_group, config: (pp_group, config))
    assert pipeline_passes.communicator(own, "group", "config") == ("group", "config")
