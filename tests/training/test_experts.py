"""Experts off and on in the training loop: operators, exchanges of tokens, overlaps, copies of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness import rows
from tests.harness.rows import DRIFT, EXPERTS, NEW, WGRAD, Near, Rows
from tests.harness.simulated import sent
from tests.harness.training import Result, Trainer

TWO = ["0.16.1", NEW]
OVERLAP = "dist overlap_grad overlap_gather"
FUSED = "experts4 router_fp32"

TABLE = [
    # What differs is the operators of grouped products, permutations and routers.
    Rows("operators", {"": "", "ep2": "", "tp2 sp": "", "tp2 sp etp1 ep2": "0.16.1"}, EXPERTS, base=FUSED,
         more="moe_fused", near=DRIFT, steps=8, learns=0.3),
    Rows("operators", {
        "allgather": "", "dropped": "", "padded": "", "shared": "", "shared_overlap": "", "groups": NEW,
        "pre_softmax": ""}, EXPERTS, base=f"ep2 {FUSED}", more="moe_fused", near=DRIFT, steps=8,
         releases=["0.17.1", NEW]),
    Rows("operators", {"ep4": "", "tp2 sp ep2": ""}, EXPERTS, base=FUSED, more="moe_fused", near=DRIFT, steps=8,
         releases=[NEW]),
    Rows("operators and wgrad", {"ep2 overlap_grad dist": ""}, f"{EXPERTS} {WGRAD} use_fused_swiglu", base=FUSED,
         more="moe_fused wgrad", near=DRIFT, steps=8, releases=[NEW]),
    Rows("activations again", {"ep2 overlap_grad dist wgrad moe_fused experts4": ""},
         both=f"{EXPERTS} {WGRAD} use_fused_swiglu", more="again_activation", steps=8, releases=[NEW]),
    Rows("delayed wgrad", {"ep2 experts4 wgrad ddp_delayed overlap_grad moe_fused combined": ""},
         both=f"{EXPERTS} {WGRAD} delay_wgrad_compute", more="delayed", releases=TWO),
    # Grouped layers are not called, and Megatron waits before such calls; of many buckets, since one is waited for.
    Rows("gathered parameters", {f"dp2 {OVERLAP} bucket4096 experts4": NEW}, "moe_grouped_gemm", near=DRIFT, steps=8,
         releases=[NEW]),
]  # fmt: skip

# Exchanges of tokens, of which every message may come late.
MODEL = "experts4 wgrad overlap_grad moe_fused"
BOTH = f"{EXPERTS} {WGRAD}"
EXCHANGED = {
    "ep2": "", "ep2 shared_overlap": NEW, "tp2 sp etp1 ep2": "", "ep2 pp2 vpp2 layers4": "", "ep4": "",
    "ep2 dist overlap_gather": "", "ep2 dropped": "", "ep2 padded": "", "ep2 groups": "",
}  # fmt: skip
RECOMPUTED = {"ep2 again_experts": "", "ep2 full": ""}
WEIGHTS = ("a weight gradient overlaps",)
PARTS = tuple(f"its {part} {word}overlaps" for part in ("first", "second") for word in ("part ", "backward part "))
alltoall = Rows("alltoall", {**EXCHANGED, **RECOMPUTED}, "moe_alltoall_overlap_comm", both=BOTH, base=MODEL,
                before="counted_messages", seen=WEIGHTS)  # fmt: skip
allgather = Rows(
    "allgather", {
        "ep2": "", "tp2 sp etp1 ep2": "", "ep4": "", "ep2 dist overlap_gather": "", "ep2 dropped": "",
        "ep2 groups": "", "ep2 full": "",
    }, "moe_allgather_overlap_comm", both=BOTH, base=f"{MODEL} allgather", before="counted_messages", seen=WEIGHTS,
)  # fmt: skip
COMBINED = {
    "ep2": NEW, "tp2 sp etp1 ep2": "", "pp2 vpp2 layers4 ep2": "", "ep4": "", "ep2 dist overlap_gather": "",
    "ep2 first_dense": "", "ep2 dropped": "", "ep2 padded": "", "ep2 groups": "", "ep2 again_attention": "",
}  # fmt: skip
# With one expert a rank Megatron 0.16 frees what its backward pass reads; further tokens want a pipeline there.
FAILS_ALONE = tuple(("0.16.1", layout) for layout in ("ep4", "ep2 mtp", "ep2 mtp combined delayed"))
SPLIT = "context_parallel_size=2 context_parallel_algo=ulysses_cp_algo use_flash_attn"
LATE = ("a message is in flight",)
combined = Rows(
    "combined schedule", COMBINED, "moe_fb_overlap", both=f"{BOTH} delay_wgrad_compute", base=MODEL,
    more="combined delayed", before="late_messages", seen=LATE, absent=FAILS_ALONE,
)  # fmt: skip
plain = replace(combined, name="Megatron's combined schedule", on="", both="", base="experts4 overlap_grad",
                more="combined", layouts=dict.fromkeys(COMBINED, ""))  # fmt: skip
TABLE += [
    alltoall,
    replace(alltoall, layouts={"ep2 idle_rank": ""}, seen=()),
    allgather,
    replace(allgather, layouts={
        "ep2 shared": NEW, "tp2 sp shared": "", "pp2 vpp2 layers4 ep2 shared": "", "ep2 shared again_experts": "",
        "ep2 shared router_bf16": ""}, before="shared_expert_overlaps", seen=(*WEIGHTS, *PARTS)),
    replace(allgather, layouts={"ep2 idle_rank shared": ""}, seen=()),
    combined,
    replace(combined, layouts={"ep2 shared": ""}, near=DRIFT),
    replace(combined, layouts={"ep2 idle_rank": ""}, before="", seen=()),
    replace(combined, layouts={"ep2 cp2": ""}, both=f"{combined.both} {SPLIT}"),
    # Megatron's combined schedule adds up gradients of multi-token prediction in an order of its own.
    replace(combined, layouts={"ep2 mtp combined delayed": ""}),
    # Its own schedule, without a feature of ours, over the emulated streams.
    plain,
    replace(plain, layouts={"ep2 shared": "", "ep2 mtp": ""}, near=DRIFT),
]  # fmt: skip

# Rows of tokens that are released and exchanged again in the backward pass.
AGAIN = {
    **EXCHANGED, "ep2 shared_overlap": NEW, "tp2 ep2 sp": "", "pp2 vpp2 layers8 ep2": "", "ep2 no_wgrad": "",
    "ep2 top1": "",
}  # fmt: skip
BACK = ("rows were exchanged again",)
for level in ("level0", "level1"):
    zero = Rows(f"released, {level}", AGAIN, f"moe_zero_memory={level}", both=BOTH, base=MODEL,
                before="rows_exchanged_again", seen=BACK)  # fmt: skip
    ours = replace(zero, name=f"{zero.name}, overlapped", both=f"{BOTH} moe_alltoall_overlap_comm")
    TABLE += [
        replace(zero, layouts=dict.fromkeys(AGAIN, "")),
        replace(zero, layouts={"ep2 idle_rank": ""}),
        replace(zero, layouts={"tp2 sp": ""}, seen=()),
        replace(zero, layouts={"ep2": ""}, both=f"{BOTH} recompute_norm", name=f"{zero.name}, recomputed norms"),
        replace(zero, layouts={"ep2 pp2 vpp2 layers8": ""}, on=f"{zero.on} moe_zero_memory_num_layers=3"),
        ours if level == "level1" else replace(ours, layouts=dict.fromkeys(AGAIN, "")),
        replace(ours, layouts={"ep2 idle_rank": "0.16.1" if level == "level0" else ""}),
        replace(zero, name=f"{zero.name}, combined schedule", releases=TWO,
                layouts={"ep2": "", "tp2 sp etp1 ep2": "", "pp2 vpp2 layers4 ep2": "", "ep2 shared": ""},
                both=combined.both, base=f"{MODEL} combined delayed", before="late_messages rows_exchanged_again"),
    ]  # fmt: skip

# Exchanges on two levels. A token's two rows add up to the same bits in any order; more of them, and other orders of
# an expert's rows, do not.
levels = Rows(
    "two levels", {
        "ep2 top1": "", "ep2 dropped": "", "ep2 shared": "", "ep2 shared_overlap": "", "ep2 groups": "",
        "ep2 again_experts": "", "ep2 full": "", "ep2 combined": "", "ep4": "", "pp2 vpp2 layers4 ep2": "",
    }, "moe_hierarchical_alltoallv moe_node_size=1", both=EXPERTS, base="experts4 moe_fused", before="counted_levels",
    seen=("rows crossed nodes once",),
)  # fmt: skip
TABLE += [
    levels,
    replace(levels, layouts={"ep2 idle_rank": ""}, seen=()),
    replace(levels, layouts={"ep2 experts8 top8": "", "ep2 padded": ""}, near=DRIFT),
    replace(levels, name="nodes of two", on="moe_hierarchical_alltoallv moe_node_size=2", layouts={
        "ep4 experts8": NEW, "tp2 sp etp1 ep4": "", "tp2 sp ep2": "", "ep4 dist overlap_gather": ""}),
    replace(levels, name="nodes of two", on="moe_hierarchical_alltoallv moe_node_size=2",
            layouts={"ep4 experts8 top5": ""}, near=DRIFT),
    # With a twin of CANN's operators over gloo.
    Rows("exchange and product in one", {"ep2": NEW, "ep4": "", "tp2 sp etp1 ep2": ""}, "moe_alltoall_mc2",
         both=BOTH, base="experts4 wgrad moe_fused", before="alltoall_mc2", seen=("exchange and product in one",),
         near=DRIFT),
    # Over a late thread: what reads a gradient too early trains something else.
    Rows("side stream", {"ep2": "", "tp2 sp etp1 ep2": "", "pp2 vpp2 layers4": ""}, "moe_wgrad_side_stream=always",
         both=BOTH, base=f"{MODEL} dist", before="moe_wgrad_side_stream", seen=("a gradient came from the side",)),
]  # fmt: skip

# Copies of hot experts, in fp32: eight steps of which each adds up in another order.
ORDER = Near(2.0**-17, 2.0**-17, 2.0**-17)
COPY = "balanced_moe_experts balanced_moe_break_even=0.0"
copied = Rows(
    "copies", {
        "ep2 bias": "", f"ep2 {OVERLAP}": NEW, "ep4 experts4": "", "ep4 dist": "", "tp2 sp ep2": "",
        f"ep2 dp2 {OVERLAP}": "", "ep2 pp2": "", "ep2 dropped": "", "ep2 shared": "", "ep2 sigmoid": "",
        "ep2 again_experts": "",
    }, COPY, both=BOTH, base="experts8 fp32 skewed moe_fused wgrad", before="copied_experts",
    seen=("experts were copied",), near=ORDER, steps=8,
)  # fmt: skip
loop = replace(copied, name="copies, loop over experts", both="", base="experts8 fp32 skewed router_fp32", layouts={
    "ep2": "0.16.1", "ep2 bias": "", "tp2 sp ep2": "", "ep2 full": ""})  # fmt: skip
TABLE += [
    copied,
    replace(copied, layouts={"ep2 bf16 grads16": NEW}, near=Near(DRIFT.loss, DRIFT.loss, DRIFT.loss)),
    loop,
    replace(loop, layouts={"ep2 wgrad": ""}, both=WGRAD),
    replace(copied, name="copies without wgrad", both=EXPERTS, base="experts8 fp32 skewed moe_fused", layouts={
        "ep2": "", "tp2 sp etp1 ep4": "", "ep2 pp2 vpp2 layers4": ""}),
    replace(copied, layouts={"ep2 shared_overlap": ""}, both=f"{BOTH} moe_alltoall_overlap_comm"),
    replace(copied, name="copies on two levels", layouts={"ep2": ""},
            both=f"{BOTH} moe_hierarchical_alltoallv moe_node_size=1"),
    replace(copied, name="copies, released", layouts={"ep2": ""}, both=f"{BOTH} moe_zero_memory=level1"),
    replace(copied, name="50 steps of copies", layouts={f"ep2 {OVERLAP}": "", "ep4 dist": "", "tp2 sp ep2": "",
                                                        "ep2 pp2": ""},
            base="experts8 skewed moe_fused wgrad", steps=50, near=Near(2 * DRIFT.loss, 1.0, 1.0), releases=[NEW]),
]  # fmt: skip

# Four ranks, each late at random before every message: they neither hang nor err.
DELAYED = {
    "alltoall": ("moe_alltoall_overlap_comm", "", ""),
    "level0": ("moe_zero_memory=level0", "", ""),
    "level1 and alltoall": ("moe_zero_memory=level1 moe_alltoall_overlap_comm", "", ""),
    "allgather": ("moe_allgather_overlap_comm", "", "allgather"),
    "two levels": ("moe_hierarchical_alltoallv moe_node_size=2", "", ""),
    "combined schedule": ("moe_fb_overlap", "combined delayed", ""),
}


def many_messages(off: Result, on: Result) -> None:
    assert all(sent(on.log(rank)) >= 200 * 2 * 4 for rank in range(4)), "no message was late"


TABLE += [
    Rows(f"{name}, late by chance", {"ep4": ""}, on, both=BOTH, more=more, steps=200, releases=[NEW],
         base=f"experts8 layers1 micro2 slow wgrad overlap_grad moe_fused {base}", before="delay_exchanges",
         check=many_messages)
    for name, (on, more, base) in DELAYED.items()
]  # fmt: skip


@pytest.mark.parametrize(("release", "row", "layout"), rows.parameters(TABLE))
def test_experts_train_as_without_the_features(
    trainer: Callable[[str], Trainer], release: str, row: Rows, layout: str, tmp_path: Path
) -> None:
    rows.check(trainer(release), row, layout, tmp_path)
