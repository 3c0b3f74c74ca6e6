"""What Megatron's pipeline functions of a release are told; training on each is in tests/training."""

from __future__ import annotations

import enum
from types import SimpleNamespace

import pytest

from mindspeed_lite.patches._shared import schedule_functions


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

    assert schedule_functions.filter_kwargs(function, second=1) == {"second": 1}
    assert schedule_functions.filter_kwargs(function, second=1, third=2) == {"second": 1}


@pytest.mark.parametrize(("name", "told"), [("0.12", {1: [1]}), ("0.13", {1: []}), ("0.16", {1: []})])
def test_the_virtual_stage_is_set_where_passes_are_not_told_it(name, told):
    here = release(name)
    function = schedule_functions.in_stage(here, 1, lambda x, more=0: x + more)
    assert function(2, more=3) == 5 and here.stages == told[1]
    assert schedule_functions.in_stage(here, None, len) is len


def test_groups_go_on_under_the_name_that_the_release_has():
    def told(name, groups):
        return schedule_functions.finalize_kwargs(release(name), groups, True)

    assert told("0.12", None) == {} and told("0.14", None) == {}
    assert told("0.14", "groups") == {"grad_finalize_pgs": "groups"}
    assert told("0.16", None) == {"force_all_reduce": True}
    assert told("0.16", "groups") == {"force_all_reduce": True, "pg_collection": "groups"}


def test_lengths_are_of_groups_or_of_megatrons_own():
    assert schedule_functions.tensor_shape_kwargs(release("0.16"), "tp", "cp", 3) == {
        "tp_group": "tp",
        "cp_group": "cp",
    }
    old = schedule_functions.tensor_shape_kwargs(release("0.12"), "tp", "cp", 3)
    assert old == {"rank": 3, "model_type": None, "encoder_decoder_xattn": False}


def test_an_encoder_with_a_decoder_is_left_to_megatron():
    old, new = release("0.12"), release("0.16")
    assert schedule_functions.unsupported_reasons(old, ModelType.encoder_or_decoder) == []
    (reason,) = schedule_functions.unsupported_reasons(old, ModelType.encoder_and_decoder)
    assert "two tensors" in reason
    old.group = ["one", "another"]
    (reason,) = schedule_functions.unsupported_reasons(old, ModelType.encoder_or_decoder)
    assert "several pipelines" in reason
    assert schedule_functions.unsupported_reasons(new, ModelType.encoder_and_decoder) == []


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
    found = schedule_functions.communicator(SimpleNamespace(p2p_communication=functions), "group", "config")
    assert found.pp_group == "group"
    exchanged = found.send_forward_backward_recv_forward_backward("out", None, False, True, tensor_shape="shape")
    assert exchanged == ("previous", "next") and sent == [("out", True, "shape", "config")]
    assert found.send_forward_recv_forward(None, True, tensor_shape=None, overlap_p2p_comm=True) == (True, "config")
    own = SimpleNamespace(P2PCommunicator=lambda pp_group, config: (pp_group, config))
    assert schedule_functions.communicator(own, "group", "config") == ("group", "config")
