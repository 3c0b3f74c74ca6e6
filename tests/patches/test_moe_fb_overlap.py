"""`--moe-fb-overlap`: what it says to Megatron, and when it says nothing."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from mindspeed_lite.engine import Context, Report, Session, Settings
from mindspeed_lite.patches import moe_fb_overlap
from mindspeed_lite.patches.moe_fb_overlap import FEATURE

MODEL = {
    "num_experts": 8,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "bf16": True,
    "overlap_moe_expert_parallel_comm": False,
}


def context(**args):
    return Context(Settings({"moe_fb_overlap": True}), "cpu", {}, {**MODEL, **args})


def test_one_expert_a_rank_wants_a_release_that_keeps_its_input():
    settings = Settings({"moe_fb_overlap": True})
    for release, count in (("0.16.1", 1), ("0.17.0", 0)):
        given = Context(settings, "cpu", {"megatron-core": release}, {**MODEL, "num_experts": 2})
        assert len(moe_fb_overlap.layout_reasons(given)) == count


def test_stages_of_two_chunks_are_enough():
    stages = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
    assert moe_fb_overlap.layout_reasons(context(**stages)) == []


def test_dualpipev_brings_its_own_stages():
    settings = Settings({"moe_fb_overlap": True, "schedules_method": "dualpipev"})
    given = Context(settings, "cpu", {}, {**MODEL, "pipeline_model_parallel_size": 2})
    assert moe_fb_overlap.layout_reasons(given) == []


PARTS = ("moe_dispatch", "mlp", "moe_combine")
CONTEXTS = {"attn": "get_fp8_context", "pre_dispatch_computation": "get_low_precision_context"}


class Node:
    def __init__(self, name: str, issued: list[str]) -> None:
        self.name, self.issued = name, issued

    def forward(self, x: str) -> str:
        self.issued.append(f"F {self.name}")
        return f"{x} {self.name}"

    def backward(self, grad: str) -> str:
        self.issued.append(f"B {self.name}")
        return f"{grad} {self.name}"

    def backward_dw(self) -> None:
        self.issued.append(f"W {self.name}")


def layer(first: str, issued: list[str]) -> SimpleNamespace:
    skipped = SimpleNamespace(forward=lambda x: x, backward=lambda grad: grad)
    return SimpleNamespace(
        **{name: Node(name, issued) for name in (first, *PARTS)},
        **{CONTEXTS[first]: contextlib.nullcontext},
        mtp_post_process=skipped,
        config=SimpleNamespace(ep_overlap_early_attn_memory_release=False),
    )


@pytest.mark.parametrize("first", ["attn", "pre_dispatch_computation"])
def test_messages_leave_before_what_does_not_feed_them(first: str) -> None:
    settings = Settings({})
    session = Session(settings, Context(settings, "cpu", {}, {}), Report({}, "cpu")).of("moe_fb_overlap")
    run = FEATURE.patches[0].make(None, session)
    issued: list[str] = []
    x, grad = run(layer(first, issued), layer(first, issued), "x", "g")
    assert x == f"x {first} moe_dispatch mlp moe_combine" and grad == f"g moe_combine mlp moe_dispatch {first}"
    first_pair = [
        "B moe_combine",
        f"F {first}",
        "F moe_dispatch",
        "B mlp",
        "B moe_dispatch",
        "F mlp",
        "F moe_combine",
        f"B {first}",
    ]
    assert issued == first_pair
    # Weight gradients wait for the next combine, and in the last layer those of experts for its own dispatch: what
    # waits longer would be computed when gradients of another micro-batch are ready.
    issued.clear()
    run(layer(first, issued), layer(first, issued), "x", "g", is_last_layer_in_bwd=True)
    assert issued == [
        "B moe_combine",
        "W mlp",
        f"W {first}",
        f"F {first}",
        "F moe_dispatch",
        "B mlp",
        "B moe_dispatch",
        "W mlp",
        "F mlp",
        "F moe_combine",
        f"B {first}",
    ]
    # Without a forward pass each message has what there is; attention's last ones go with messages of the pipeline.
    issued.clear()
    run(None, layer(first, issued), None, "g")
    assert issued == ["B moe_combine", "B mlp", "B moe_dispatch", "W mlp", f"B {first}"]
