"""Orders of a pipeline in the training loop: Megatron's own to the bit, ours against them, and what was executed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_lite.pipeline import orders, recompute_plan, trace, zero_bubble
from mindspeed_lite.pipeline.orders import PipelineShape
from mindspeed_lite.pipeline.steps import OverlappedPair, Schedule
from tests.harness import checkouts, rows
from tests.harness.rows import DRIFT, NEW, WGRAD, Rows
from tests.harness.training import Result, Trainer

# Before 0.14 a pipeline's passes and messages take no process groups.
RELEASES = checkouts.EVERY[2:]
TODAY = checkouts.TODAY if checkouts.TODAY in RELEASES else RELEASES[0]
VPP2 = "pp2 vpp2 layers4"
VPP2_4 = "pp4 vpp2 layers8"
TOGETHER = "sync overlap_gather align_gather"
ONE_CHUNK = {
    "pp2": TODAY, "pp2 tied micro1 per_token": "", "pp2 dp2 sync overlap_gather": "",
    "pp2 dp2 overlap_grad no_sync": "", "pp2 tp2 sp tied": "", "pp2 ep2 experts4": "", "pp2 mtp": NEW,
    "pp2 lengths": "", "pp2 outputs_released": "", "pp2 dropout full_block_some": "", "pp4 layers4 micro6": "",
    "pp4 layers4 micro2": "",
}  # fmt: skip
TWO_CHUNKS = {
    VPP2: TODAY, f"{VPP2} micro2": "", f"{VPP2} micro5 groups_of_3": NEW,
    f"{VPP2} outputs_released": "", f"{VPP2} dp2 {TOGETHER}": NEW, f"{VPP2} lengths": "",
    f"pp2 vpp3 layers6 dp2 {TOGETHER}": "", f"{VPP2_4} messages_whole": "", f"{VPP2_4} micro8": "",
}  # fmt: skip
TABLE = [
    Rows("1f1b", ONE_CHUNK, "pipeline_schedule=1f1b", base="bits", steps=2, releases=RELEASES),
    Rows("interleaved", TWO_CHUNKS, "pipeline_schedule=interleaved", base="bits", steps=2, releases=RELEASES),
]


# Weight gradients apart.
def zb_auto(shape: PipelineShape) -> Schedule:
    return zero_bubble.automatic(shape)


def named(order: str) -> Callable[[PipelineShape], Schedule]:
    return lambda shape: orders.build(order, shape)


APART = {
    "pp2": "", "pp2 tied bias": "", "pp2 dp2 sync": NEW, "pp2 dp2 overlap_grad no_sync": "", "pp2 tp2 sp": "",
    "pp2 ep2 experts4": "", "pp2 mtp": "", "pp2 full": "", "pp4 layers4 micro6": "",
}  # fmt: skip
apart = Rows("zb-auto", APART, "pipeline_schedule=zb-auto", both=WGRAD, base="micro5 wgrad bits", steps=2,
             order=zb_auto, releases=RELEASES)  # fmt: skip
TABLE += [
    apart,
    replace(apart, name="zb-h1", on="pipeline_schedule=zb-h1", order=named("zb-h1"),
            layouts=dict.fromkeys(APART, "")),
    Rows("zb-auto", {VPP2: ""}, apart.on, both=WGRAD, base="wgrad bits", steps=2, releases=apart.releases),
]  # fmt: skip


# Recomputation as steps: in advance it has the bits of recomputation in the backward pass, in the bubble those of none.
def base_of(shape: PipelineShape) -> Schedule:
    return orders.build("interleaved" if shape.chunks > 1 else "1f1b", shape)


def in_advance(shape: PipelineShape) -> Schedule:
    return recompute_plan.in_advance(base_of(shape))


def in_bubble(most: int | None) -> Callable[[PipelineShape], Schedule]:
    def order(shape: PipelineShape) -> Schedule:
        found = recompute_plan.in_bubble(base_of(shape), most)
        assert found.recomputed
        return found

    return order


CHUNKS, SOME = f"{VPP2} micro6 dropout", "pp2 vpp2 layers8 micro6 dropout"
STAGES = {"pp2 dropout": "", "pp2 dropout tp2 sp": "", "pp2 dropout ep2 experts4": ""}
# Megatron 0.18 gives its own recomputation of a prediction layer an argument that this does not take.
MTP, TAKES_NO_ARGUMENT = "pp2 dropout tied mtp", (("0.18.2", "pp2 dropout tied mtp"),)
STEPS: dict[str, Any] = {"steps": 2, "releases": RELEASES, "absent": TAKES_NO_ARGUMENT}
LIMITED = "recompute_in_bubble pipeline_schedule_max_live=1"
TABLE += [
    Rows("in advance", {CHUNKS: f"{TODAY} {NEW}", f"{CHUNKS} dp2 sync": "", **STAGES, MTP: ""},
         "recompute_in_advance", base="bits full", order=in_advance, **STEPS),
    Rows("in advance", {SOME: ""}, "recompute_in_advance", base="bits full_block", order=in_advance, **STEPS),
    Rows("in the bubble", {CHUNKS: f"{TODAY} {NEW}", f"{CHUNKS} dp2 sync": ""}, "recompute_in_bubble",
         base="bits", more="full", order=in_bubble(None), **STEPS),
    Rows("in the bubble", {SOME: ""}, "recompute_in_bubble", base="bits", more="full_block", order=in_bubble(None),
         **STEPS),
    Rows("in the bubble", {**STAGES, MTP: ""}, LIMITED, base="bits", more="full", order=in_bubble(1), **STEPS),
    Rows("in advance, zb-auto", {"pp2 micro5 layers4 full": ""}, "recompute_in_advance", base="wgrad bits", steps=2,
         both=f"{WGRAD} pipeline_schedule=zb-auto", releases=[NEW]),
    Rows("in advance, V", {"pp2 vpp2 micro5 layers4 full": ""}, "recompute_in_advance", base="wgrad bits", steps=2,
         both=f"{WGRAD} schedules_method=dualpipev", rank=0, releases=[NEW]),
]  # fmt: skip

# A V against one stage with the same weights; it has its losses on the first rank.
BASE = "by_name wgrad layers4 micro5"
V, DETACH = "schedules_method=dualpipev", "schedules_method=dualpipev dualpipev_dw_detach"
REFERENCES = {
    "pp2 vpp2": ("", ""), "pp4 vpp2 layers8 micro8": ("layers8 micro8", ""), "pp2 vpp2 tp2 sp": ("tp2 sp", ""),
    "pp2 vpp2 ep2 experts4": ("ep2 experts4", ""), "pp2 vpp2 dp2 sync": ("dp2 dist", NEW), "pp2 vpp2 full": ("", ""),
}  # fmt: skip


def same_first_loss(off: Result, on: Result) -> None:
    """Before the first update the passes are the same."""
    assert on.losses(0)[0] == off.losses(0)[0]


TABLE += [
    Rows(name, {layout: quick if on == DETACH else ""}, on, both=WGRAD, base=BASE, reference=f"{BASE} {reference}",
         near=DRIFT, rank=0, steps=8, learns=0.3, check=same_first_loss)
    for name, on in (("V", V), ("V, detached", DETACH))
    for layout, (reference, quick) in REFERENCES.items()
]  # fmt: skip
# In 16 bits one step in twenty rounds another way, and the gradient norm follows it.
TABLE += [
    Rows("V on text", {layout: ""}, V, both=WGRAD, base=f"{BASE} fp32 text slow", rank=0, steps=20, learns=0.3,
         reference=f"{BASE} fp32 text slow {REFERENCES[layout][0]}", near=DRIFT, releases=[NEW])
    for layout in ("pp2 vpp2", "pp4 vpp2 layers8 micro8")
]  # fmt: skip


def pairs_run_together(order: str, folder: Callable[[], Path]) -> Callable[[Result, Result], None]:
    """The two passes of a pair have one begin and one end."""

    def check(off: Result, on: Result) -> None:
        built = orders.build(order, PipelineShape(2, 5, 2))
        records = trace.read(folder())
        for rank, entries in enumerate(built.ranks):
            own, length = [each for each in records if each.rank == rank], len(list(built.steps(rank)))
            for first in range(0, len(own), length):
                times = {each.step: (each.begin, each.end) for each in own[first : first + length]}
                for pair in (entry for entry in entries if isinstance(entry, OverlappedPair)):
                    assert times[pair.forward] == times[pair.backward]

    return check


folders: list[Path] = []
# With both features one micro-batch's attention runs while another's tokens travel.
TABLE += [
    Rows(f"pairs, {order}", {"": NEW if on == DETACH else "", "sync": "", "per_token": ""}, "moe_fb_overlap",
         both=f"{WGRAD} {on} delay_wgrad_compute", base=f"{BASE} pp2 vpp2 ep2 experts4 bits",
         more="combined delayed", rank=0, before="late_messages", seen=("a message is in flight",),
         order=named(order), check=pairs_run_together(order, lambda: folders[-1]))
    for order, on in (("dualpipev", V), ("dualpipev-dw-detach", DETACH))
]  # fmt: skip

# Groups for each direction of a pipeline's messages, in Megatron's orders and in ours.
directions = Rows("directions", {
    "pp2": NEW, "pp4 layers4 micro6": "", VPP2: "", f"{VPP2_4} messages_whole": "", "pp2 lengths": "",
}, "optimize_send_recv_comm", base="bits", steps=2)  # fmt: skip
TABLE += [
    directions,
    replace(directions, name="directions, 1f1b", layouts={"pp2": ""}, both="pipeline_schedule=1f1b"),
    replace(directions, name="directions, interleaved", layouts={VPP2_4: ""}, both="pipeline_schedule=interleaved"),
    replace(directions, name="directions, zb-h1", layouts={"pp4 layers4 wgrad": NEW},
            both=f"{WGRAD} pipeline_schedule=zb-h1"),
    replace(directions, name="directions, V", layouts={f"{VPP2} micro5 wgrad": ""}, both=f"{WGRAD} {DETACH}", rank=0),
    replace(directions, name="directions, in advance", layouts={f"{VPP2} full": ""}, both="recompute_in_advance"),
]  # fmt: skip

# Twenty steps on real text in every order, against the same model without a pipeline.
TEXT = f"{BASE} text slow"
ORDERS = {
    "V": (V, "vpp2", ""), "V, detached": (DETACH, "vpp2", ""), "zb-auto": ("pipeline_schedule=zb-auto", "", ""),
    "in advance": ("recompute_in_advance", "full", ""), "in the bubble": (LIMITED, "full", "full"),
}  # fmt: skip
CONTEXT = "context_parallel_size=2 context_parallel_algo=megatron_cp_algo use_flash_attn"
for layout in ("", "tp2 sp", "ep2 experts4", "cp2", "tied", "mtp", "full"):
    for name, (on, words, without) in ORDERS.items():
        # A V needs an embedding of its own and no further tokens; in the bubble is for what recomputes nothing else.
        if (on in (V, DETACH) and layout in ("tied", "mtp")) or layout == without == "full":
            continue
        TABLE.append(
            Rows(f"{name} on text", {f"pp2 {words} {layout}": ""}, on, base=TEXT, reference=f"{TEXT} {layout}",
                 both=f"{WGRAD} {CONTEXT if layout == 'cp2' else ''}", near=DRIFT, steps=20, learns=0.3,
                 rank=0 if on in (V, DETACH) else -1, releases=[NEW])
        )  # fmt: skip


@pytest.mark.parametrize(("release", "row", "layout"), rows.parameters(TABLE))
def test_orders_train_as_megatrons_own(
    trainer: Callable[[str], Trainer], release: str, row: Rows, layout: str, tmp_path: Path
) -> None:
    folders.append(tmp_path)
    rows.check(trainer(release), row, layout, tmp_path)


def test_a_trace_of_another_order_is_refused(trainer: Callable[[str], Trainer], tmp_path: Path) -> None:
    """So that what the rows have executed is what their order says."""
    flags = {"strict": True, "pipeline_schedule": "1f1b", "pipeline_schedule_trace": str(tmp_path)}
    trainer(NEW).core("features", 2, {"pp": 2, "steps": 1, "micro_batches": 5}, flags=flags)
    shape = PipelineShape(2, 5)
    assert len(trace.training_steps(trace.read(tmp_path), base_of(shape))) == 1
    for other in (zb_auto(shape), in_advance(shape)):
        with pytest.raises(trace.TraceError):
            trace.training_steps(trace.read(tmp_path), other)


OWN = """
from mindspeed_lite.pipeline.steps import backward, forward

def one_at_a_time(rank, shape):
    for microbatch in range(shape.microbatches):
        yield forward(0, microbatch)
        yield backward(0, microbatch)

def backwards_first(rank, shape):
    for microbatch in range(shape.microbatches):
        yield backward(0, microbatch)
        yield forward(0, microbatch)
"""


def test_an_order_of_the_users_own(trainer: Callable[[str], Trainer], tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    row = Rows("own", {}, f"pipeline_schedule={file}:one_at_a_time", both=WGRAD, base="wgrad bits", steps=2)
    rows.check(trainer(NEW), row, "pp2", tmp_path)


def test_a_v_without_the_fusion_loses_nothing_in_an_evaluation(
    trainer: Callable[[str], Trainer], tmp_path: Path
) -> None:
    """Nothing puts weight gradients aside then, and backwards are whole."""
    options = {**rows.options_of("layers4 micro5 by_name bits"), "steps": 2}
    flags = {"strict": True, "schedules_method": "dualpipev", "pipeline_schedule_trace": str(tmp_path)}
    result = trainer(NEW).core("features", 2, {**options, "pp": 2, "vpp": 2}, flags=flags)
    assert len(trace.training_steps(trace.read(tmp_path), orders.build("dualpipev-whole", PipelineShape(2, 5, 2)))) == 2
    one = trainer(NEW).core("device", 1, options)
    evaluated = [[loss for name, loss in each.history(0) if name == "evaluation"] for each in (result, one)]
    assert len(evaluated[0]) == 10
    for a, b in zip(*evaluated, strict=True):
        assert abs(float.fromhex(a) - float.fromhex(b)) <= DRIFT.loss * abs(float.fromhex(b))
