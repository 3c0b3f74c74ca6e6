"""Features off and on in the training loop: operators, recomputation, memory, optimizers, tensor and context parallel.

Experts are in `test_experts.py`, orders of pipelines in `test_pipelines.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness import checkouts, gradient_bytes, matrix, rows
from tests.harness.rows import DENSE, DRIFT, EXPERTS, NEW, WGRAD, Near, Rows
from tests.harness.simulated import sent
from tests.harness.training import Result, Trainer

SUMS = "use_bias_dropout_fusion use_masked_softmax_fusion"
TRAINED = {"": "", "tp2": "", "tp2 sp": "", "pp2": "", "pp2 vpp2 layers4": NEW, "dp2 dist": "", "ep2 experts4": ""}
TABLE = [
    Rows("operators", {**TRAINED, "tp2 sp": "0.16.1"}, DENSE, more="wgrad", near=DRIFT, steps=6, learns=0.3),
    # Biases, and the attention that makes scores: what a model without our attention still runs.
    Rows(
        "sums and softmax", {"": "0.16.1", "tp2 sp": NEW, "pp2": ""}, SUMS, base="bias sums", more="softmax",
        near=DRIFT, steps=6, learns=0.3,
    ),
    Rows("dropout drawn again", {"bias sums dropout": NEW}, both=SUMS, more="full"),
    Rows("no logits", {"tp2 sp": NEW}, "use_fused_linear_cross_entropy", near=DRIFT),
    # The gradient of the first step depends on the norms' gradients being summed over the ranks: without it, it is off
    # by 3e-5, while the losses hardly move.
    Rows("sequence parallel", {"tp2 sp": ""}, reference="tp2", near=Near(first_norm=2.0**-17)),
    Rows(
        "sequence parallel with operators", {"tp2 sp wgrad": NEW}, both=DENSE, reference="tp2 wgrad",
        near=Near(first_norm=2.0**-17),
    ),
    Rows("a mask tensor", {"": NEW}, both=DENSE, more="mask_tensor", near=DRIFT, releases=[NEW]),
    Rows("norms of q and k", {"gqa qk_norm": NEW}, DENSE, more="wgrad", near=DRIFT, releases=[NEW]),
    # Megatron's local norm refuses zero-centred gamma; it is the same function.
    Rows("zero-centred gamma", {"gqa qk_norm wgrad": NEW}, both=DENSE, more="zero_centred", near=DRIFT, releases=[NEW]),
]  # fmt: skip


def other_bits(off: Result, on: Result) -> None:
    assert on.losses() != off.losses(), "it was not in force"


# Weight gradients.
OVERLAPPED = "dp2 dist overlap_grad"
MAINS = {"pp2 tied": NEW, f"{OVERLAPPED} tied": NEW, "grads16": NEW}
TABLE += [
    Rows("wgrad fusion", MAINS, WGRAD, more="wgrad", near=DRIFT, steps=6, learns=0.3, releases=[NEW]),
    Rows(
        "rows of the embedding", {**dict.fromkeys(MAINS, ""), "pp2 tied": NEW}, "use_fused_embedding", base="micro4",
        near=DRIFT, steps=6, learns=0.3, check=other_bits,
    ),
    Rows(
        "rows of the embedding, fused", {OVERLAPPED: "", "tp2 sp overlap_grad": ""},
        "use_fused_embedding", both=WGRAD, base="wgrad", near=DRIFT, steps=6, learns=0.3, check=other_bits,
    ),
    # To the zeros that the output layer of a shared weight hands to autograd rows are added as they were before.
    Rows(
        "rows of the embedding, fused", {"tied": NEW}, "use_fused_embedding", both=WGRAD, base="wgrad", steps=6,
        learns=0.3,
    ),
    Rows(
        "delayed wgrad", {"ep2 overlap_grad dist": NEW, "tp2 sp ep2 etp1 overlap_grad": ""},
        both=f"{WGRAD} delay_wgrad_compute", base="experts4 wgrad ddp_delayed combined", more="delayed",
        releases=["0.16.1", NEW],
    ),
]  # fmt: skip

# Activations: computed again, or moved to the host over a slow link of the CPU's.
AGAIN = "recompute_activation_function recompute_norm"
OWN = {"layers3 dropout full_block": NEW, "layers3 dropout again_attention": NEW}
SWAP = "swap_attention swap_modules=input_layernorm,self_attention,pre_mlp_layernorm,mlp"
SWAPPED = {
    "layers3": "", "tp2 layers3": "", "tp2 sp layers3": "", "pp2 layers6": "", "pp2 vpp2 layers8": "",
    "dp2 dist layers3": "", "ep2 experts4 layers3": "",
}  # fmt: skip
BACK = ("the first bytes came back",)
TABLE += [
    Rows("recomputed", TRAINED, AGAIN, base="dropout", steps=3),
    Rows("recomputed with operators", {"tp2 sp": NEW, "pp2 vpp2 layers4": ""}, AGAIN, both=DENSE,
         base="wgrad dropout", steps=3, releases=[NEW]),
    Rows("recomputed experts", {"ep2 experts4 moe_fused shared": NEW}, AGAIN, both=EXPERTS, steps=3, releases=[NEW]),
    Rows("recomputed as by Megatron", OWN, AGAIN, steps=3),
    Rows("moved", SWAPPED, SWAP, base="dropout", before="swap_attention", seen=BACK, steps=3),
    Rows("moved with operators", {"layers3": "", "tp2 sp layers3": "", "pp2 vpp2 layers8": NEW}, SWAP, both=DENSE,
         base="wgrad", before="swap_attention", seen=BACK, steps=3, releases=[NEW]),
    Rows("moved with experts", {"ep2 layers3 overlap_grad": NEW}, f"{SWAP} {AGAIN}", both=f"{EXPERTS} {WGRAD}",
         base="experts4 moe_fused wgrad", before="swap_attention", seen=BACK, steps=3, releases=[NEW]),
]  # fmt: skip


def within(budget: float) -> Callable[[Result, Result], None]:
    """What is measured is within the budget in MiB; a cache may have the choice of an earlier run."""

    def check(off: Result, on: Result) -> None:
        lines = re.findall(r"measured .*; the budget", on.log())
        found = [float(each) for line in lines for each in re.findall(r"([\d.]+) MiB", line)]
        assert found and max(found[-len(on.codes) :]) <= budget * 1.03

    return check


def budgeted(layout: str, both: str, budget: float, quick: str = "", **more: object) -> Rows:
    """`--adaptive-memory` within a budget in MiB: about half of what everything takes."""
    given = Rows(
        f"{budget} MiB", {layout: quick}, f"adaptive_memory memory_budget={budget / 1024:.10f}", both=both,
        base="digest layers4", steps=5, check=within(budget),
    )  # fmt: skip
    return replace(given, **more)  # type: ignore[arg-type]


FUSED = "use_flash_attn use_fused_rmsnorm use_fused_swiglu"
MOVED = {"before": "swap_attention", "seen": (), "releases": [NEW]}
TABLE += [
    budgeted("pp2 vpp2", FUSED, 0.3, "0.16.1"),
    budgeted("pp2", FUSED, 0.25),
    budgeted("tp2 sp", FUSED, 0.15),
    # Hooks on saved tensors hide weights from the layers that add to main gradients.
    budgeted("ep2 experts4 wgrad overlap_grad", WGRAD, 0.8),
    budgeted("experts4 shared", f"{FUSED} moe_grouped_gemm", 0.5),
    budgeted("bias dropout", "", 0.6),
    # 0.16 has no layers of multi-token prediction for the local implementation.
    budgeted("mtp", FUSED, 0.4, releases=checkouts.ALL[1:]),
    budgeted("dp2 dist overlap_grad no_sync", FUSED, 0.3),
    budgeted("pp2 layers6", FUSED, 0.5, **MOVED),
    budgeted("pp2 vpp2 layers8", FUSED, 0.6, NEW, **MOVED),
    budgeted("ep2 experts4", "", 0.8, **MOVED),
]

# Optimizers.
STATES = {
    "": "", "tp2": "", "tp2 sp": "", "pp2": "", "pp2 vpp2 layers4": "", "dp2 dist": "", "ep2 experts4": "",
    "pp2 tied": NEW, "dp2 dist overlap_grad overlap_gather": "", "ep2 experts4 dist overlap_grad": "",
}  # fmt: skip
ADAMW = "use_fused_adamw"


def rounds(off: Result, on: Result) -> None:
    assert on.histories() != off.histories(), "no gradient was rounded"
    gradient_bytes.check(on)


COUNTED = "tests.harness.gradient_bytes:count"
SHARED = {**dict.fromkeys(STATES, ""), "dp2 dist": NEW}
OVERLAP = "dist overlap_grad overlap_gather"
TABLE += [
    Rows("fused AdamW", STATES, ADAMW, steps=12, learns=0.3),
    Rows("weights as halves", STATES, "reuse_fp32_param", steps=12, learns=0.3),
    Rows("200 steps of weights as halves", {"": ""}, "reuse_fp32_param", steps=200, releases=[NEW]),
    # Stochastic rounding is noise on each step of each parameter; over so few steps that is a small part of the loss.
    Rows("moments in bf16", dict.fromkeys(STATES, ""), "quant_states=bf16", both=ADAMW, steps=12, learns=0.3,
         near=Near(2e-3, 1.0, 1.0)),
    Rows("moments in fp8", STATES, "quant_states=fp8", both=ADAMW, steps=12, learns=0.3, near=Near(2e-2, 1.0, 1.0)),
    Rows("swapped optimizer", SHARED, "swap_optimizer swap_optimizer_times=4", both=ADAMW, steps=6, learns=0.3,
         before="swap_optimizer", seen=BACK),
    Rows("swapped halves in fp8", {"": "", "dp2 dist": "", "pp2 tied": ""}, "swap_optimizer swap_optimizer_times=4",
         both=f"{ADAMW} quant_states=fp8 reuse_fp32_param", steps=6, before="swap_optimizer", seen=BACK,
         releases=[NEW]),
    # An 8-bit gradient is noise of half a step of 127 of its block's largest value, given back in the next step.
    Rows("gradients in int8",
         {"dp2 dist": NEW, "dp2": NEW, "dp2 dist overlap_grad no_sync bucket4096": NEW, "dp2 overlap_grad no_sync": "",
          "dp4 dist grads16": "", "dp2 tp2 sp dist": "", "dp2 pp2 dist": "", "dp2 ep2 experts4 dist": "",
          "dp2 ep2 experts4 overlap_grad no_sync": ""},
         "grad_reduce_compression=int8", releases=checkouts.EVERY, steps=12, learns=0.3,
         near=Near(2e-3, 2.0**-8, 0.1), before=COUNTED, check=rounds),
    Rows("gradients in fp8", {"dp2 dist": NEW, "dp2": ""}, "grad_reduce_compression=fp8", steps=12, learns=0.3,
         near=Near(5e-3, 2.0**-6, 0.2), before=COUNTED, check=rounds),
    Rows("gradients in int8 with all of the optimizer", {f"dp2 tied {OVERLAP}": NEW, f"dp2 ep2 experts4 {OVERLAP}": ""},
         "grad_reduce_compression=int8 reset_bucket_group_order",
         both=f"{ADAMW} quant_states=fp8 reuse_fp32_param {WGRAD}", more="wgrad", steps=6, learns=0.2,
         near=Near(5e-3, 2.0**-8, 0.2), before=COUNTED, check=rounds),
    Rows("gradients exact in the warm-up", {f"dp2 {OVERLAP}": NEW},
         "grad_reduce_compression=int8 grad_reduce_compression_warmup=4"),
    Rows("order of use", {f"dp2 tied {OVERLAP}": NEW, f"ep2 experts4 {OVERLAP}": ""}, "reset_bucket_group_order"),
]  # fmt: skip


def many_messages(off: Result, on: Result) -> None:
    assert sent(on.log()) > 50 * len(on.losses())


# Tensor parallel in slices: a sum over two ranks has one order, over four gloo's goes around a ring, piece by piece.
COC = "use_ascend_coc coc_parallel_num=4"
SLICES = {
    "tp2": "", "tp2 sp": "", "tp2 sp tied": "", "tp2 sp dropout full": "", "tp2 sp ep2 etp1 experts4": NEW,
    "tp2 sp dp2 dist overlap_grad": "", "tp2 sp pp2": "",
}  # fmt: skip
CHOSEN = ("use_ascend_coc: column forward of 32 rows, 64 x 96:",)
TABLE += [
    Rows("slices", SLICES, COC, before="count", check=many_messages),
    Rows("slices", {"tp4 sp": "", "tp4": ""}, COC, before="count", check=many_messages, near=DRIFT),
    # Megatron's own name for it.
    Rows("slices of its own choice", {"tp2 sp wgrad": NEW}, "tp_comm_overlap",
         both=f"{WGRAD} recompute_activation_function",
         check=lambda off, on: pytest.fail("no trial is logged") if CHOSEN[0] not in on.log() else None),
    # Both buffers: the one that the combined schedule asks for, and the one of the output layer.
    Rows("slices and delayed wgrad", {"tp2 sp ep2 etp1 experts4 wgrad combined delayed overlap_grad": NEW}, COC,
         both=f"{WGRAD} delay_wgrad_compute", before="count", check=many_messages, releases=[NEW]),
    Rows("100 steps of slices", {"tp2 sp text slow": ""}, COC, steps=100, releases=["0.17.1", NEW]),
    Rows("100 steps of slices", {"tp4 sp text slow": "", "tp4 text slow": ""}, COC, steps=100, near=DRIFT,
         releases=["0.17.1", NEW]),
    # Four ranks in two groups, each late at random before every message.
    Rows("slices, late", {"tp2 sp dp2 layers1": ""}, COC, steps=200, before="delay", releases=[NEW]),
]  # fmt: skip

# A pack of documents, split over ranks by Megatron's own partition, which each release has under another name.
CLOSE = Near(2.0**-10, norm=2.0**-7)
RING, GATHERED = "context_parallel_algo=megatron_cp_algo", "context_parallel_algo=kvallgather_cp_algo"
ULYSSES = "context_parallel_algo=ulysses_cp_algo"
ALONE = {"reference": "slow documents", "both": "use_flash_attn", "near": CLOSE, "learns": 0.1}
PADDED = {**ALONE, "reference": "slow padded_documents"}
TABLE += [
    Rows("ring", {"cp2 slow padded_documents": f"0.16.1 {NEW}"}, f"{RING} context_parallel_size=2", **PADDED),
    Rows("ulysses", {"cp2 slow documents": ""}, f"{ULYSSES} context_parallel_size=2", **ALONE),
    Rows("gathered", {"cp2 slow padded_documents": ""}, f"{GATHERED} context_parallel_size=2", **PADDED),
    Rows("double ring", {"cp4 slow documents": ""}, f"{RING} context_parallel_size=4 cp_window_size=2", **ALONE),
]  # type: ignore[arg-type]


@pytest.mark.parametrize(("release", "row", "layout"), rows.parameters(TABLE))
def test_features_train_as_without_them(
    trainer: Callable[[str], Trainer], release: str, row: Rows, layout: str, tmp_path: Path
) -> None:
    if row.name.endswith("MiB"):
        pytest.importorskip("scipy")
    rows.check(trainer(release), row, layout, tmp_path)


@pytest.mark.parametrize(
    ("release", "layout"),
    matrix.only(
        [(NEW, "pp2 vpp2 layers4"), (NEW, "tp2 sp dropout")],
        [(NEW, "pp2 vpp2 layers4"), (NEW, "tp2 sp dropout"), ("0.17.1", "ep2 experts4")],
    ),
)
def test_same_run_twice_is_bitwise_the_same(trainer: Callable[[str], Trainer], release: str, layout: str) -> None:
    """Pipelines send tensors whose storage Megatron frees in flight; a race would show here."""
    options = {**rows.options_of(layout), "steps": 6}
    first, second = (
        trainer(release).run(entry="core", arm="device", nproc=2, options=options).check() for _ in range(2)
    )
    assert first.history() == second.history() and "RNG state changed" not in first.log()
    if "dropout" in options:
        del options["dropout"]
        assert trainer(release).core("device", 2, options).history() != first.history()
