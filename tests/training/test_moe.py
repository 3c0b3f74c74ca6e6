"""Experts, permutation and router in real training: on against off over layouts, dispatchers, dropping and padding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import checkouts, matrix
from tests.harness.core_trainings import DRIFT, MOE, MOE_CONFIGURED, fault, losses
from tests.harness.messages import sent
from tests.harness.script_trainings import LAYOUTS as SCRIPT_LAYOUTS
from tests.harness.script_trainings import NO_DROPOUT, lm_losses, train
from tests.harness.training import Trainer

# What a feature computes with.
OPERATORS = {"moe_grouped_gemm": "grouped_matmul", "moe_permute_fusion": "permute", "moe_router_fusion": "moe_router"}
STEPS = 8

# Layout: processes, options. TP with experts wants sequence parallelism.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ep2": (2, {"ep": 2}),
    "tp2": (2, {"tp": 2, "sp": True}),
    "tp2_etp1_ep2": (2, {"tp": 2, "sp": True, "etp": 1, "ep": 2}),
}
MODELS: dict[str, dict[str, Any]] = {
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "dropped": {"moe_expert_capacity_factor": 1.0},
    "padded": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "shared": {"moe_shared_expert_intermediate_size": 64},
    "shared, overlapped": {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_overlap": True},
    "sigmoid, groups, bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_router_dtype": "fp32",
    },
    "first softmax, then choice": {"moe_router_pre_softmax": True, "moe_z_loss_coeff": 1e-3},
}


def compare(
    train: Trainer, nproc: int, options: dict[str, Any], flags: dict[str, Any], moe: dict[str, Any], steps: int = STEPS
) -> list[float]:
    """Losses with features off, after it has been seen that those with features on are the same to rounding."""
    moe = {"moe_router_dtype": "fp32", **moe}
    options = {"experts": 4, "steps": steps, **options}
    off = train.core("device", nproc, {**options, "moe": moe})
    fused = {name: True for name in MOE_CONFIGURED if name in flags}
    result = train.core("features", nproc, {**options, "moe": {**moe, **fused}}, flags=flags)
    # Losses may have the same bits: the operators' own are those of Megatron's on some processors.
    asked = {OPERATORS[name] for name in OPERATORS if name in flags}
    assert asked <= result.operators(), "the features were not in force"
    assert fault(off.history(), result.history()) == "" and len(losses(off)) == steps
    return losses(off)


@pytest.mark.parametrize(("release", "layout"), matrix.pairs([*LAYOUTS], [("0.17.1", "tp2_etp1_ep2")], newest=[]))
def test_layouts_train_as_off_does(trainer: Callable[[str], Trainer], release: str, layout: str) -> None:
    off = compare(trainer(release), *LAYOUTS[layout], MOE, {})
    assert off[-1] < off[0] - 0.3, "the model does not learn"


@pytest.mark.parametrize("model", matrix.only(["sigmoid, groups, bias"], [*MODELS]))
@pytest.mark.parametrize("release", matrix.only(["0.19.2"], ["0.17.1", "0.19.2"]))
def test_models_train_as_off_does(trainer: Callable[[str], Trainer], release: str, model: str) -> None:
    compare(trainer(release), *LAYOUTS["ep2"], MOE, MODELS[model])


FOUR: dict[str, dict[str, Any]] = {"ep4": {"ep": 4}, "tp2_ep2": {"tp": 2, "sp": True, "ep": 2}}


@matrix.whole
@pytest.mark.parametrize("layout", [*FOUR])
def test_four_processes(trainer: Callable[[str], Trainer], layout: str) -> None:
    compare(trainer("0.19.2"), 4, FOUR[layout], MOE, {})


@matrix.whole
def test_whole_experts_on_tensor_parallel_ranks_are_the_same_model(trainer: Callable[[str], Trainer]) -> None:
    """What --moe-tp-extend-ep sets, against experts that are split: the same losses."""
    split, whole = (
        trainer("0.19.2").core("device", 2, {**LAYOUTS[layout][1], "experts": 4, "steps": STEPS}).history()
        for layout in ("tp2", "tp2_etp1_ep2")
    )
    assert fault(split, whole) == ""


@matrix.whole
def test_gradients_are_accumulated_and_activations_recomputed(trainer: Callable[[str], Trainer]) -> None:
    train = trainer("0.19.2")
    fusion = {**MOE, "use_gradient_accumulation_fusion": True, "use_fused_swiglu": True}
    options = {"ep": 2, "wgrad_fusion": True, "overlap_grad_reduce": True, "distributed_optimizer": True}
    options = {"experts": 4, "steps": STEPS, **options}
    off = train.core("device", 2, {**options, "wgrad_fusion": False, "moe": {"moe_router_dtype": "fp32"}})
    plain = train.core("features", 2, {**options, "moe": MOE_CONFIGURED}, flags=fusion)
    assert fault(off.history(), plain.history()) == ""
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"], "moe_grouped_gemm": True}
    recomputed = train.core("features", 2, {**options, "moe": {**MOE_CONFIGURED, **recompute}}, flags=fusion)
    assert recomputed.history() == plain.history(), "recomputation changes no bit"


@matrix.whole
@pytest.mark.parametrize("release", ["0.16.1", "0.19.2"])
def test_delayed_weight_gradients_change_no_bit(trainer: Callable[[str], Trainer], release: str) -> None:
    flags = {**MOE, "use_gradient_accumulation_fusion": True, "delay_wgrad_compute": True}
    options = {"ep": 2, "experts": 4, "steps": 4, "wgrad_fusion": True, "ddp_delay_wgrad_compute": True,
               "overlap_grad_reduce": True, "moe": MOE_CONFIGURED}  # fmt: skip
    histories = [
        trainer(release)
        .core(
            "features",
            2,
            {**options, "config": {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": delay}},
            flags=flags,
        )
        .history()
        for delay in (False, True)
    ]
    assert histories[0] == histories[1]


COMBINED: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"ep": 2}),
    "tp2_etp1_ep2": LAYOUTS["tp2_etp1_ep2"],
    "pp2_vpp2": (4, {"ep": 2, "pp": 2, "vpp": 2, "layers": 4}),
    "ep4": (4, {"ep": 4}),
    "distributed": (2, {"ep": 2, "distributed_optimizer": True, "overlap_param_gather": True}),
    "dense and experts": (2, {"ep": 2, "moe": {"moe_layer_freq": [0, 1]}}),
    **{name: (2, {"ep": 2, "moe": MODELS[name]}) for name in ("dropped", "padded", "shared", "sigmoid, groups, bias")},
    "recompute": (2, {"ep": 2, "moe": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}}),
    "a rank without tokens": (2, {"ep": 2}),
    "mtp": (2, {"ep": 2, "config": {"mtp_num_layers": 1}}),
    "cp2": (2, {"ep": 2, "cp": 2}),
}
# Megatron's local attention takes no split sequences.
SPLIT = {"context_parallel_size": 2, "context_parallel_algo": "ulysses_cp_algo", "use_flash_attn": True}


# With one expert a rank Megatron 0.16 frees what its backward pass reads.
COMBINED_PAIRS = [each for each in matrix.pairs([*COMBINED], [], newest=["ep2"]) if each.values != ("0.16.1", "ep4")]


@pytest.mark.parametrize(("release", "layout"), COMBINED_PAIRS)
@pytest.mark.parametrize("arm", matrix.only(["features"], ["device", "features"]))
def test_the_combined_schedule_trains_as_the_plain_one(
    trainer: Callable[[str], Trainer], release: str, layout: str, arm: str
) -> None:
    """Messages stay in a stream's lane and arrive late, whoever reads one too early trains something else."""
    nproc, options = COMBINED[layout]
    fused = {**MOE, "use_gradient_accumulation_fusion": True, "delay_wgrad_compute": True}
    fused |= SPLIT if "cp" in options else {}
    flags: dict[str, Any] = {"flags": fused} if arm == "features" else {}
    overlapped = {"flags": {**fused, "moe_fb_overlap": True}} if flags else {}
    delayed = arm == "features"
    moe = {**(MOE_CONFIGURED if delayed else {}), **options.get("moe", {})}
    options = {"experts": 4, "steps": 4, "wgrad_fusion": delayed, "overlap_grad_reduce": True, **options, "moe": moe}
    told = "a_rank_without_tokens" if layout == "a rank without tokens" else "late_messages"
    routed = {"before": f"tests.harness.simulated:{told}"} if told != "late_messages" else {}
    config = {**options.get("config", {}), "overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": delayed}
    combined = {**options, "ddp_delay_wgrad_compute": delayed, "config": config}
    # Megatron's combined schedule adds up gradients of multi-token prediction in an order of its own.
    same_order = layout == "mtp" and delayed
    off = trainer(release).core(arm, nproc, combined if same_order else options, **flags, **routed)
    on = trainer(release).core(arm, nproc, combined, before=f"tests.harness.simulated:{told}", **overlapped)
    assert len(losses(off)) == 4
    if layout in ("shared", "mtp") and not same_order:
        assert fault(off.history(), on.history()) == ""
    else:
        assert on.history() == off.history()
    for rank in range(nproc):
        assert told != "late_messages" or "a message travels beside" in on.log(rank)


@pytest.mark.parametrize("release", matrix.only(["0.19.2"], checkouts.WITH_TRAINING))
def test_the_flag_of_the_combined_schedule(trainer: Callable[[str], Trainer], release: str, tmp_path: Path) -> None:
    nproc, layout = SCRIPT_LAYOUTS["ep2"]
    given = [*NO_DROPOUT, *layout.split(), "--gradient-accumulation-fusion"]
    flags = ["--moe-fb-overlap", "--mindspeed-lite-strict", "--mindspeed-lite-report", str(tmp_path / "report.json")]
    off = train(trainer(release), "adaptor", nproc, given).check()
    on = train(trainer(release), "adaptor", nproc, [*given, *flags]).check()
    assert len(lm_losses(on)) == 4 and on.history() == off.history()
    entries = json.loads((tmp_path / "report.json").read_text())["entries"]
    status = {entry["feature"]: entry["status"] for entry in entries}
    assert status["moe_fb_overlap"] == status["delay_wgrad_compute"] == "applied"


BETWEEN = {
    "ep2": (2, {"ep": 2}),
    "shared": (2, {"ep": 2, "moe": MODELS["shared, overlapped"]}),
    "tp2_etp1_ep2": LAYOUTS["tp2_etp1_ep2"],
    "pp2_vpp2": (4, {"ep": 2, "pp": 2, "vpp": 2, "layers": 4}),
    "ep4": (4, {"ep": 4}),
    "distributed": (2, {"ep": 2, "distributed_optimizer": True, "overlap_param_gather": True}),
    **{name: (2, {"ep": 2, "moe": MODELS[name]}) for name in ("dropped", "padded", "sigmoid, groups, bias")},
    "recompute": (2, {"ep": 2, "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}}),
    "a rank without tokens": (2, {"ep": 2}),
    "recompute full": (2, {"ep": 2, "config": {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}}),
}  # fmt: skip


@pytest.mark.parametrize(("release", "layout"), matrix.pairs([*BETWEEN], [], newest=["shared"]))
def test_messages_behind_the_shared_expert_and_weight_gradients_change_no_bit(
    trainer: Callable[[str], Trainer], release: str, layout: str
) -> None:
    """Off runs the shared expert where on does: what is left is who waits when."""
    flags = {**MOE, "use_gradient_accumulation_fusion": True}
    nproc, options = BETWEEN[layout]
    moe = {**MOE_CONFIGURED, **options.get("moe", {})}
    options = {"experts": 4, "steps": 4, "wgrad_fusion": True, "overlap_grad_reduce": True, **options, "moe": moe}
    told = "a_rank_without_tokens" if layout == "a rank without tokens" else "counted_messages"
    before = f"tests.harness.simulated:{told}"
    off = trainer(release).core("features", nproc, options, flags=flags, before=before)
    on = trainer(release).core(
        "features",
        nproc,
        options,
        flags={**flags, "moe_alltoall_overlap_comm": True, "strict": True},
        before=before,
    )
    assert len(losses(off)) == 4 and on.history() == off.history()
    for rank in range(nproc):
        assert told != "counted_messages" or "a weight gradient beside a message" in on.log(rank)


# Processes, processes of a node, options. A token's two rows add up to the same bits in any order.
LEVELS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "ep4": (4, 2, {"ep": 4, "experts": 8}),
    "ep4, a rank a node": (4, 1, {"ep": 4}),
    "tp2_etp1_ep4": (4, 2, {"tp": 2, "sp": True, "etp": 1, "ep": 4}),
    "tp2_ep2": (4, 2, {"tp": 2, "sp": True, "ep": 2}),
    "pp2_vpp2": (4, 1, {"ep": 2, "pp": 2, "vpp": 2, "layers": 4}),
    "distributed": (4, 2, {"ep": 4, "distributed_optimizer": True, "overlap_param_gather": True}),
    "ep2, top 1": (2, 1, {"ep": 2, "moe": {"moe_router_topk": 1, "moe_router_pre_softmax": True}}),
    "ep4, top 5": (4, 2, {"ep": 4, "experts": 8, "moe": {"moe_router_topk": 5}}),
    "ep2, all": (2, 1, {"ep": 2, "experts": 8, "moe": {"moe_router_topk": 8}}),
    **{
        name: (2, 1, {"ep": 2, "moe": MODELS[name]})
        for name in ("dropped", "padded", "shared", "shared, overlapped", "sigmoid, groups, bias")
    },
    "recompute": (2, 1, {"ep": 2, "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}}),
    "a rank without tokens": (2, 1, {"ep": 2}),
    "recompute full": (2, 1, {"ep": 2, "config": {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}}),
    "combined schedule": (2, 1, {"ep": 2, "config": {"overlap_moe_expert_parallel_comm": True}}),
}  # fmt: skip
# More than two rows of a token, or another order of the rows of an expert.
ROUNDED = ("ep4, top 5", "ep2, all", "padded")


@pytest.mark.parametrize(("release", "layout"), matrix.pairs([*LEVELS], [("0.16.1", "ep4")], newest=["ep4", "padded"]))
def test_an_exchange_on_two_levels_trains_as_one_on_one(
    trainer: Callable[[str], Trainer], release: str, layout: str
) -> None:
    nproc, size, options = LEVELS[layout]
    moe = {**MOE_CONFIGURED, **options.get("moe", {})}
    options = {"experts": 4, "steps": 4, **options, "moe": moe}
    told = "a_rank_without_tokens" if layout == "a rank without tokens" else "counted_levels"
    before = f"tests.harness.simulated:{told}"
    off = trainer(release).core("features", nproc, options, flags=MOE, before=before)
    levels = {"moe_hierarchical_alltoallv": True, "moe_node_size": size}
    on = trainer(release).core("features", nproc, options, flags={**MOE, **levels}, before=before)
    assert len(losses(off)) == 4
    if layout in ROUNDED:
        assert fault(off.history(), on.history()) == ""
    else:
        assert on.history() == off.history()
    for rank in range(nproc):
        assert told != "counted_levels" or "rows crossed nodes once" in on.log(rank)


# Processes, options, features: a loop over experts and one grouped product; gradients by autograd and accumulated.
LOOP: dict[str, Any] = {"strict": True}
ACCUMULATED = {**MOE, "use_gradient_accumulation_fusion": True}
OVERLAPPED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
COPIED: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "ep2, loop": (2, {"ep": 2}, LOOP),
    "ep2, loop, accumulated": (2, {"ep": 2}, {**LOOP, "use_gradient_accumulation_fusion": True}),
    "ep2, loop, biases": (2, {"ep": 2, "bias": True}, LOOP),
    "ep2": (2, {"ep": 2}, MOE),
    "ep2, biases": (2, {"ep": 2, "bias": True}, ACCUMULATED),
    "ep2, distributed": (2, {"ep": 2, **OVERLAPPED}, ACCUMULATED),
    "ep2, 16-bit gradients": (2, {"ep": 2, "fp32": False, "grad_reduce_in_fp32": False}, ACCUMULATED),
    "ep4, one expert": (4, {"ep": 4, "experts": 4}, ACCUMULATED),
    "ep4": (4, {"ep": 4, "distributed_optimizer": True}, ACCUMULATED),
    "tp2_ep2": (4, {"tp": 2, "sp": True, "ep": 2}, ACCUMULATED),
    "tp2_ep2, loop": (4, {"tp": 2, "sp": True, "ep": 2}, LOOP),
    "tp2_etp1_ep4": (4, {"tp": 2, "sp": True, "etp": 1, "ep": 4}, MOE),
    "ep2_dp2, distributed": (4, {"ep": 2, **OVERLAPPED}, ACCUMULATED),
    "ep2_pp2": (4, {"ep": 2, "pp": 2}, ACCUMULATED),
    "ep2_pp2_vpp2": (4, {"ep": 2, "pp": 2, "vpp": 2, "layers": 4}, MOE),
    "dropped": (2, {"ep": 2, "moe": MODELS["dropped"]}, ACCUMULATED),
    "shared": (2, {"ep": 2, "moe": MODELS["shared"]}, ACCUMULATED),
    "sigmoid": (2, {"ep": 2, "moe": {"moe_router_score_function": "sigmoid"}}, ACCUMULATED),
    "recompute": (2, {"ep": 2, "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}},
                  ACCUMULATED),
    "recompute full": (2, {"ep": 2, "config": {"recompute_granularity": "full", "recompute_method": "uniform",
                                               "recompute_num_layers": 1}}, LOOP),
    "overlapped": (2, {"ep": 2, "moe": MODELS["shared, overlapped"]},
                   {**ACCUMULATED, "moe_alltoall_overlap_comm": True}),
    "two levels": (2, {"ep": 2}, {**ACCUMULATED, "moe_hierarchical_alltoallv": True, "moe_node_size": 1}),
    "released": (2, {"ep": 2}, {**ACCUMULATED, "moe_zero_memory": "level1"}),
}  # fmt: skip
# fp32: losses and gradient norms of eight steps of which each adds up in another order.
OTHER_ORDER = 2.0**-17


def copied(train: Trainer, layout: str, options: dict[str, Any], steps: int, **more: Any) -> list[tuple[float, float]]:
    """Losses and gradient norms off and on: a router of skew 4 to 1, and all copies that lower the fullest load."""
    nproc, given, flags = COPIED[layout]
    configured = MOE_CONFIGURED if "moe_permute_fusion" in flags else {"moe_router_dtype": "fp32"}
    fusion = "use_gradient_accumulation_fusion" in flags
    moe = {**configured, **given.get("moe", {})}
    options = {"experts": 8, "steps": steps, "wgrad_fusion": fusion, **options, **given, "moe": moe}
    off = train.core("features", nproc, options, flags=flags, before="tests.harness.simulated:skewed_router")
    balanced = {**flags, "balanced_moe_experts": True, "balanced_moe_break_even": 0.0}
    on = train.core("features", nproc, options, flags=balanced, before="tests.harness.simulated:copied_experts", **more)
    for rank in range(nproc):
        assert "experts were copied" in on.log(rank)
    assert len(off.history()) == len(on.history()) == steps
    found = zip(off.history(), on.history(), strict=True)
    return [(float.fromhex(a), float.fromhex(b)) for one, other in found for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize(
    ("release", "layout"),
    matrix.pairs([*COPIED], [("0.16.1", "ep2, loop")], newest=["ep2, distributed", "ep2, 16-bit gradients", "tp2_ep2"]),
)
def test_copies_of_hot_experts_train_as_none(trainer: Callable[[str], Trainer], release: str, layout: str) -> None:
    bound = OTHER_ORDER if COPIED[layout][1].get("fp32", True) else DRIFT
    for place, (a, b) in enumerate(copied(trainer(release), layout, {"fp32": True}, STEPS)):
        assert abs(a - b) <= bound * abs(a), f"step {place // 2}: {a} off, {b} on"


@matrix.whole
@pytest.mark.parametrize("layout", ["ep2, distributed", "ep4", "tp2_ep2", "ep2_pp2"])
def test_fifty_steps_with_copies_of_hot_experts(trainer: Callable[[str], Trainer], layout: str) -> None:
    """bf16 with fp32 main parameters."""
    for a, b in copied(trainer("0.19.2"), layout, {}, 50)[::2]:
        assert abs(a - b) <= 2 * DRIFT * abs(a)


MC2 = {"ep2": (2, {"ep": 2}), "ep4": (4, {"ep": 4}), "tp2_etp1_ep2": LAYOUTS["tp2_etp1_ep2"]}


@pytest.mark.parametrize(("release", "layout"), matrix.pairs([*MC2], [], newest=["ep2"]))
def test_exchange_and_product_in_one_train_as_separate_steps(
    trainer: Callable[[str], Trainer], release: str, layout: str
) -> None:
    """With a twin of CANN's operators over gloo."""
    nproc, options = MC2[layout]
    flags = {**MOE, "use_gradient_accumulation_fusion": True}
    options = {"experts": 4, "steps": 4, "wgrad_fusion": True, "moe": MOE_CONFIGURED, **options}
    off = trainer(release).core("features", nproc, options, flags=flags)
    on = trainer(release).core(
        "features",
        nproc,
        options,
        flags={**flags, "moe_alltoall_mc2": True},
        before="tests.harness.simulated:alltoall_mc2",
    )
    assert len(losses(off)) == 4 and fault(off.history(), on.history()) == ""
    for rank in range(nproc):
        assert "exchange and product in one" in on.log(rank)


@pytest.mark.parametrize("release", matrix.only([], checkouts.WITH_TRAINING))
def test_the_flags_of_two_levels(trainer: Callable[[str], Trainer], release: str, tmp_path: Path) -> None:
    nproc, layout = SCRIPT_LAYOUTS["ep2"]
    given = [*NO_DROPOUT, *layout.split()]
    flags = ["--moe-hierarchical-alltoallv", "--moe-node-size", "1", "--mindspeed-lite-strict"]
    off = train(trainer(release), "adaptor", nproc, given).check()
    on = train(trainer(release), "adaptor", nproc, [*given, *flags]).check()
    assert len(lm_losses(on)) == 4 and on.history() == off.history()


AGAIN: dict[str, tuple[int, dict[str, Any]]] = {
    **BETWEEN,
    "tp2": (2, {"tp": 2, "sp": True}),
    "tp2 ep2": (4, {"tp": 2, "sp": True, "ep": 2}),
    "norm recomputed": (2, {"ep": 2}),
    "some layers": (4, {"ep": 2, "pp": 2, "vpp": 2, "layers": 8}),
    "unfused wgrad": (2, {"ep": 2, "wgrad_fusion": False}),
    "top 1": (2, {"ep": 2, "moe": {"moe_router_topk": 1, "moe_router_pre_softmax": True}}),
    "a rank without tokens": (2, {"ep": 2}),
}  # fmt: skip
AGAIN.pop("recompute")
AGAIN.pop("recompute full")


@pytest.mark.parametrize(
    ("release", "layout", "level", "overlapped"),
    matrix.only(
        [("0.19.2", "shared", "level1", True), ("0.16.1", "a rank without tokens", "level0", True)],
        [
            (release, layout, level, overlapped)
            for release in checkouts.ALL
            for layout in AGAIN
            for level in ("level0", "level1")
            for overlapped in (True, False)
        ],
    ),
)
def test_rows_that_are_exchanged_again_change_no_bit(
    trainer: Callable[[str], Trainer], release: str, layout: str, level: str, overlapped: bool
) -> None:
    flags = {**MOE, "use_gradient_accumulation_fusion": True}
    nproc, options = AGAIN[layout]
    overlaps = overlapped and options.get("ep", 1) > 1
    flags |= {"moe_alltoall_overlap_comm": True} if overlaps else {}
    flags |= {"recompute_norm": True} if layout == "norm recomputed" else {}
    options = {"experts": 4, "steps": 4, "wgrad_fusion": True, "overlap_grad_reduce": True, **options}
    options["moe"] = {**MOE_CONFIGURED, **options.get("moe", {})}
    told = "a_rank_without_tokens" if layout == "a rank without tokens" else "rows_exchanged_again"
    before = f"tests.harness.simulated:{told}"
    number = {"moe_zero_memory_num_layers": 3} if layout == "some layers" else {}
    off = trainer(release).core("features", nproc, options, flags=flags, before=before)
    on = trainer(release).core(
        "features", nproc, options, flags={**flags, "moe_zero_memory": level, **number}, before=before
    )
    assert len(losses(off)) == 4 and on.history() == off.history()
    for rank in range(nproc):
        assert "rows were exchanged again" not in off.log(rank)
        assert "rows were exchanged again" in on.log(rank) or options.get("ep", 1) == 1


@matrix.whole
@pytest.mark.parametrize("release", ["0.16.1", "0.19.2"])
@pytest.mark.parametrize("layout", ["ep2", "tp2_etp1_ep2", "pp2_vpp2", "shared"])
@pytest.mark.parametrize("level", ["level0", "level1"])
def test_rows_are_exchanged_again_in_the_combined_schedule(
    trainer: Callable[[str], Trainer], release: str, layout: str, level: str
) -> None:
    nproc, options = COMBINED[layout]
    flags = {**MOE, "use_gradient_accumulation_fusion": True, "delay_wgrad_compute": True}
    options = {"experts": 4, "steps": 4, "wgrad_fusion": True, "overlap_grad_reduce": True, **options}
    options |= {"ddp_delay_wgrad_compute": True, "moe": {**MOE_CONFIGURED, **options.get("moe", {})},
                "config": {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}}  # fmt: skip
    late = "tests.harness.simulated:late_messages"
    off = trainer(release).core("features", nproc, options, flags=flags, before=late)
    on = trainer(release).core("features", nproc, options, flags={**flags, "moe_zero_memory": level}, before=late)
    assert len(losses(off)) == 4 and on.history() == off.history()
    told = "tests.harness.simulated:rows_exchanged_again"
    again = trainer(release).core("features", nproc, options, flags={**flags, "moe_zero_memory": level}, before=told)
    assert again.history() == off.history()
    for rank in range(nproc):
        assert "rows were exchanged again" in again.log(rank)


GATHERED: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"ep": 2}),
    "shared": (2, {"ep": 2, "moe": MODELS["shared"]}),
    "tp2, shared": (2, {"tp": 2, "sp": True, "moe": MODELS["shared"]}),
    "tp2_etp1_ep2": LAYOUTS["tp2_etp1_ep2"],
    "pp2_vpp2, shared": (4, {"ep": 2, "pp": 2, "vpp": 2, "layers": 4, "moe": MODELS["shared"]}),
    "ep4": (4, {"ep": 4}),
    "distributed": (2, {"ep": 2, "distributed_optimizer": True, "overlap_param_gather": True}),
    "dropped": (2, {"ep": 2, "moe": MODELS["dropped"]}),
    "sigmoid, groups, bias": (2, {"ep": 2, "moe": MODELS["sigmoid, groups, bias"]}),
    "recompute": (2, {"ep": 2, "moe": {
        **MODELS["shared"], "recompute_granularity": "selective", "recompute_modules": ["moe"]}}),
    "recompute full": (2, {"ep": 2, "config": {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}}),
    "router in bf16": (2, {"ep": 2, "moe": {
        **MODELS["shared"], "moe_router_dtype": None, "moe_router_fusion": False}}),
    "a rank without tokens": (2, {"ep": 2, "moe": MODELS["shared"]}),
}  # fmt: skip


@pytest.mark.parametrize(("release", "layout"), matrix.pairs([*GATHERED], [], newest=["shared"]))
def test_tokens_gathered_behind_the_shared_expert_change_no_bit(
    trainer: Callable[[str], Trainer], release: str, layout: str
) -> None:
    flags = {**MOE, "use_gradient_accumulation_fusion": True}
    nproc, options = GATHERED[layout]
    moe = {**MOE_CONFIGURED, **options.get("moe", {}), "moe_token_dispatcher_type": "allgather"}
    options = {"experts": 4, "steps": 4, "wgrad_fusion": True, "overlap_grad_reduce": True, **options, "moe": moe}
    told = "a_rank_without_tokens" if layout == "a rank without tokens" else "shared_expert_beside_messages"
    before = f"tests.harness.simulated:{told}"
    off = trainer(release).core("features", nproc, options, flags=flags, before=before)
    flags = {**flags, "moe_allgather_overlap_comm": True, "strict": True}
    on = trainer(release).core("features", nproc, options, flags=flags, before=before)
    assert len(losses(off)) == 4 and on.history() == off.history()
    for rank in range(nproc):
        if told == "a_rank_without_tokens":
            continue
        assert "a weight gradient beside a message" in on.log(rank)
        for part in ("first part", "second part", "first backward part", "second backward part"):
            assert (f"its {part} beside a message" in on.log(rank)) == ("moe_shared_expert_intermediate_size" in moe)


GIVEN = [*NO_DROPOUT, *SCRIPT_LAYOUTS["ep2"][1].split(), "--moe-grouped-gemm", "--gradient-accumulation-fusion"]
EXCHANGES = {
    "alltoall": ("alltoall", "--moe-alltoall-overlap-comm"),
    "level1": ("alltoall", "--moe-zero-memory level1"),
    "alltoall, level0": ("alltoall", "--moe-alltoall-overlap-comm --moe-zero-memory level0"),
    "allgather": ("allgather", "--moe-allgather-overlap-comm"),
    "two levels": ("alltoall", "--moe-hierarchical-alltoallv --moe-node-size 1"),
}
# With the feature, of the model, and on both sides.
DELAYED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "alltoall": ({"moe_alltoall_overlap_comm": True}, {}, {}),
    "level0": ({"moe_zero_memory": "level0"}, {}, {}),
    "level1, alltoall": ({"moe_zero_memory": "level1", "moe_alltoall_overlap_comm": True}, {}, {}),
    "allgather": ({"moe_allgather_overlap_comm": True}, {}, {"moe_token_dispatcher_type": "allgather"}),
    "two levels": ({"moe_hierarchical_alltoallv": True, "moe_node_size": 2}, {}, {}),
    "combined schedule": (
        {"moe_fb_overlap": True},
        {
            "ddp_delay_wgrad_compute": True,
            "config": {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True},
        },
        {},
    ),
}


@pytest.mark.parametrize(
    "exchange", matrix.only(["allgather", "combined schedule"], ["allgather", "alltoall", "combined schedule"])
)
def test_lanes_of_experts_off_and_on(trainer: Callable[[str], Trainer], exchange: str) -> None:
    """What `mindspeed-lite bench --trace` records of either arm: the same messages, however they are waited for."""
    flags, options, moe = DELAYED[exchange]
    fused = {**MOE, "use_gradient_accumulation_fusion": True}
    common = {"experts": 4, "ep": 2, "steps": 2, "wgrad_fusion": True, "moe": {**MOE_CONFIGURED, **moe}}
    told = []
    for given, more in ((fused, {}), ({**fused, **flags}, options)):
        before = "tests.harness.simulated:seen_messages"
        result = trainer("0.19.2").core("features", 2, {**common, **more}, flags=given, before=before)
        logs = [result.log(rank).splitlines() for rank in range(2)]
        told.append(
            [[json.loads(line.partition(": ")[2]) for line in log if "messages of experts" in line] for log in logs]
        )
    off, on = told
    assert off == on and len(off[0]) == 2
    # Four micro-batches of two layers: tokens and probabilities there, tokens back, and the gradients of all.
    assert all(step["dispatch"] > step["combine"] >= 2 * 4 * 2 and step["bytes"] > 0 for rank in off for step in rank)


@matrix.whole
@pytest.mark.parametrize("exchange", [*DELAYED])
def test_ranks_that_are_late_by_chance_neither_hang_nor_err(trainer: Callable[[str], Trainer], exchange: str) -> None:
    """Four ranks, each late at random before every message, 200 steps: every loss has the same bits."""
    flags, options, moe = DELAYED[exchange]
    fused = {**MOE, "use_gradient_accumulation_fusion": True}
    common = {"experts": 8, "ep": 4, "steps": 200, "layers": 1, "micro_batches": 2, "wgrad_fusion": True,
              "overlap_grad_reduce": True, "lr": 3e-4, "moe": {**MOE_CONFIGURED, **moe}}  # fmt: skip
    off = trainer("0.19.2").core("features", 4, common, flags=fused, timeout=900)
    on = trainer("0.19.2").core(
        "features",
        4,
        {**common, **options},
        flags={**fused, **flags},
        before="tests.harness.messages:delay_exchanges",
        timeout=900,
    )
    assert len(losses(off)) == 200 and on.history() == off.history()
    for rank in range(4):
        assert sent(on.log(rank)) >= 200 * 2 * 4, "messages were late"


@matrix.whole
@pytest.mark.parametrize("exchange", [*EXCHANGES])
@pytest.mark.parametrize(
    "more", ["--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo", "--mtp-num-layers 1"]
)
def test_the_exchange_beside_split_sequences_and_further_tokens(
    trainer: Callable[[str], Trainer], exchange: str, more: str
) -> None:
    dispatcher, flags = EXCHANGES[exchange]
    given = [*GIVEN, *more.split(), "--moe-token-dispatcher-type", dispatcher]
    off = train(trainer("0.19.2"), "adaptor", 2, given).check()
    on = train(trainer("0.19.2"), "adaptor", 2, [*given, *flags.split(), "--mindspeed-lite-strict"]).check()
    assert len(lm_losses(on)) == 4 and on.history() == off.history()


@matrix.whole
@pytest.mark.parametrize("exchange", ["alltoall, level0", "allgather"])
def test_checkpoints_of_the_exchange_go_on_without_it_and_the_reverse(
    trainer: Callable[[str], Trainer], exchange: str, tmp_path: Path
) -> None:
    dispatcher, flags = EXCHANGES[exchange]
    given = [*GIVEN, "--moe-token-dispatcher-type", dispatcher, "--use-distributed-optimizer"]
    whole = lm_losses(train(trainer("0.19.2"), "adaptor", 2, given, 6).check())
    for writer, reader in ((flags.split(), []), ([], flags.split())):
        folder = str(tmp_path / ("on" if writer else "off"))
        saving = ["--save", folder, "--save-interval", "3", "--exit-interval", "3"]
        train(trainer("0.19.2"), "adaptor", 2, [*given, *writer, *saving], 6).check()
        rest = train(trainer("0.19.2"), "adaptor", 2, [*given, *reader, "--load", folder], 6).check()
        assert lm_losses(rest) == whole[3:]


SKEWED, COPYING = (f"tests.harness.simulated:{name}" for name in ("skewed_router", "copied_experts"))
BALANCED = ["--balanced-moe-experts", "--balanced-moe-hot-expert-num", "2", "--balanced-moe-break-even", "0"]


@pytest.mark.parametrize("release", matrix.only([], checkouts.WITH_TRAINING))
def test_the_flags_of_copies(trainer: Callable[[str], Trainer], release: str) -> None:
    given = [*GIVEN, "--moe-token-dispatcher-type", "alltoall"]
    off = lm_losses(train(trainer(release), "adaptor", 2, given, before=SKEWED).check())
    on = train(trainer(release), "adaptor", 2, [*given, *BALANCED, "--mindspeed-lite-strict"], before=COPYING).check()
    assert len(off) == 4
    for a, b in zip(lm_losses(on), off, strict=True):
        assert abs(a - b) <= DRIFT * abs(b)
    for rank in range(2):
        assert "experts were copied" in on.log(rank)


@matrix.whole
@pytest.mark.parametrize("writer", ["on", "off"])
def test_checkpoints_with_copies_go_on_without_and_the_reverse(
    trainer: Callable[[str], Trainer], writer: str, tmp_path: Path
) -> None:
    """Files have the same names and shapes, and the reader's losses are those of a run that was never stopped."""
    given = [*GIVEN, "--moe-token-dispatcher-type", "alltoall", "--use-distributed-optimizer"]
    arms = {"on": (BALANCED, COPYING), "off": ([], SKEWED)}
    whole = lm_losses(train(trainer("0.19.2"), "adaptor", 2, given, 6, before=SKEWED).check())
    flags, before = arms[writer]
    saving = ["--save", str(tmp_path), "--save-interval", "3", "--exit-interval", "3"]
    train(trainer("0.19.2"), "adaptor", 2, [*given, *flags, *saving], 6, before=before).check()
    flags, before = arms["off" if writer == "on" else "on"]
    rest = train(trainer("0.19.2"), "adaptor", 2, [*given, *flags, "--load", str(tmp_path)], 6, before=before).check()
    assert len(lm_losses(rest)) == 3
    for a, b in zip(lm_losses(rest), whole[3:], strict=True):
        assert abs(a - b) <= DRIFT * abs(b)


BESIDE = {
    "ep2": (2, {"ep": 2}),
    "tp2_etp1_ep2": LAYOUTS["tp2_etp1_ep2"],
    "pp2_vpp2": (2, {"pp": 2, "vpp": 2, "layers": 4}),
}


@pytest.mark.parametrize(("release", "layout"), matrix.pairs([*BESIDE], [], newest=[]))
def test_weight_gradients_on_a_side_stream_change_no_bit(
    trainer: Callable[[str], Trainer], release: str, layout: str
) -> None:
    """Over a late thread in the stream's place: who reads a gradient too early trains something else."""
    flags = {**MOE, "use_gradient_accumulation_fusion": True}
    nproc, options = BESIDE[layout]
    options = {"experts": 4, "steps": 4, "wgrad_fusion": True, "overlap_grad_reduce": True,
               "distributed_optimizer": True, "moe": MOE_CONFIGURED, **options}  # fmt: skip
    off = trainer(release).core("features", nproc, options, flags=flags)
    on = trainer(release).core(
        "features",
        nproc,
        options,
        flags={**flags, "moe_wgrad_side_stream": "always"},
        before="tests.harness.simulated:moe_wgrad_side_stream",
    )
    assert len(losses(off)) == 4 and on.history() == off.history()
    for rank in range(nproc):
        assert "a gradient came from the side" in on.log(rank)


@pytest.mark.parametrize("writer", matrix.only(["on"], ["on", "off"]))
def test_checkpoints_of_experts_are_interchangeable_with_off(
    trainer: Callable[[str], Trainer], writer: str, tmp_path: Path
) -> None:
    """Written by one arm on two expert-parallel ranks, read by both on one rank or two tensor-parallel ones."""
    on = ["--moe-grouped-gemm", "--moe-permute-fusion", "--moe-router-fusion"]
    experts = [*NO_DROPOUT, *SCRIPT_LAYOUTS["ep2"][1].split()[2:], "--moe-router-dtype", "fp32"]
    expert_parallel = ["--expert-model-parallel-size", "2"]
    tensor_parallel = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    flags, nproc, layout = {"on": (on, 1, []), "off": ([], 2, tensor_parallel)}[writer]
    saving = [*expert_parallel, *flags, "--save", str(tmp_path), "--save-interval", "3", "--exit-interval", "3"]
    written = train(trainer("0.19.2"), "adaptor", 2, [*experts, *saving], 6).check()
    # Megatron's optimizer has other groups of parameters without expert parallelism and does not load these.
    loading = [*experts, *layout, "--load", str(tmp_path), "--no-load-optim"]
    found = [
        lm_losses(train(trainer("0.19.2"), "adaptor", nproc, [*loading, *reader], 6).check()) for reader in (on, [])
    ]
    assert lm_losses(written)[0] > found[0][0] and len(found[0]) == 3, "it goes on where the writer stopped"
    for a, b in zip(*found, strict=True):
        assert abs(a - b) <= DRIFT * abs(b)


def test_grouped_experts_wait_for_gathered_parameters(trainer: Callable[[str], Trainer]) -> None:
    """Their layers are not called, and Megatron waits before such calls; of many buckets, since one is waited for."""
    overlapped = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    options = {**overlapped, "bucket_size": 4096, "experts": 4, "steps": STEPS}
    off = trainer("0.19.2").core("device", 2, options)
    on = trainer("0.19.2").core("features", 2, options, flags={"moe_grouped_gemm": True, "strict": True})
    assert fault(off.history(), on.history()) == "" and len(losses(off)) == STEPS
