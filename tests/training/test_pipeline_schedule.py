"""Schedules as data in real training: Megatron's orders bit for bit, zero-bubble ones, and what was executed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_lite.pipeline import orders, trace, zero_bubble
from mindspeed_lite.pipeline.orders import PipelineShape
from mindspeed_lite.pipeline.steps import Schedule
from tests.harness import checkouts, matrix
from tests.harness.training import Result, Trainer

SYNC = {"distributed_optimizer": True, "overlap_grad_reduce": True, "sync_functions": True}
# Before 0.16 the scale has no default.
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}
PP2, VPP2 = {"pp": 2}, {"pp": 2, "vpp": 2, "layers": 4}
# Number of processes, options; by what is new in it.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "two stages": (2, PP2),
    "two stages, tied, one micro-batch": (
        2,
        {**PP2, "tied": True, "micro_batches": 1, "config": {"calculate_per_token_loss": True}},
    ),
    "two stages, reduced as it comes": (4, {**PP2, **SYNC, "overlap_param_gather": True}),
    "two stages, reduced without functions": (4, {**PP2, "overlap_grad_reduce": True, "no_sync": True}),
    "two stages, tensor parallel": (4, {**PP2, "tp": 2, "sp": True, "tied": True}),
    "two stages, experts": (4, {**PP2, "ep": 2, "experts": 4}),
    "two stages, multi-token prediction": (2, {**PP2, "config": MTP}),
    "two stages, lengths exchanged": (
        2,
        {**PP2, "config": {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}},
    ),
    "two stages, outputs released": (2, {**PP2, "config": {"deallocate_pipeline_outputs": True}}),
    "two stages, recomputed in part": (
        2,
        {
            **PP2,
            "dropout": 0.1,
            "config": {
                "num_microbatches_with_partial_activation_checkpoints": 1,
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 1,
            },
        },
    ),
    "four stages": (4, {"pp": 4, "layers": 4, "micro_batches": 6}),
    "four stages, fewer micro-batches": (4, {"pp": 4, "layers": 4, "micro_batches": 2}),
    "virtual stages": (2, VPP2),
    "virtual stages, all ahead": (2, {**VPP2, "micro_batches": 2}),
    "virtual stages, a rest": (
        2,
        {**VPP2, "micro_batches": 5, "config": {"microbatch_group_size_per_vp_stage": 3}},
    ),
    "virtual stages, outputs released": (2, {**VPP2, "config": {"deallocate_pipeline_outputs": True}}),
    "virtual stages, reduced together": (
        4,
        {**VPP2, **SYNC, "overlap_param_gather": True, "align_param_gather": True},
    ),
    "virtual stages, lengths exchanged": (
        2,
        {**VPP2, "config": {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}},
    ),
    "three virtual stages, reduced together": (
        4,
        {"pp": 2, "vpp": 3, "layers": 6, **SYNC, "overlap_param_gather": True, "align_param_gather": True},
    ),
    "four stages of two, not overlapped": (
        4,
        {"pp": 4, "vpp": 2, "layers": 8, "config": {"overlap_p2p_comm": False, "batch_p2p_comm": True}},
    ),
    "four stages of two, overlapped": (4, {"pp": 4, "vpp": 2, "layers": 8, "micro_batches": 8}),
}
STEPS = {"steps": 2, "digest": True, "evaluate": True}


def order_of(options: dict[str, Any]) -> str:
    return "interleaved" if "vpp" in options else "1f1b"


def histories(result: Result) -> list[Any]:
    """The losses, gradient norms and bits of all gradients of every rank."""
    return [result.history(rank) for rank in range(len(result.codes))]


@pytest.mark.parametrize(
    ("release", "layout"),
    matrix.pairs(
        [*LAYOUTS],
        [
            ("0.12.1", "virtual stages"),
            ("0.13.1", "virtual stages"),
            ("0.14.0", "two stages"),
            ("0.16.1", "virtual stages"),
        ],
        newest=["two stages, multi-token prediction", "virtual stages, a rest", "virtual stages, reduced together"],
        among=checkouts.EVERY,
    ),
)
def test_megatrons_orders_give_the_same_bits(trainer: Callable[[str], Trainer], release: str, layout: str) -> None:
    nproc, options = LAYOUTS[layout]
    options = {**options, **STEPS}
    off = trainer(release).core("device", nproc, options)
    flags = {"pipeline_schedule": order_of(options), "strict": True}
    on = trainer(release).core("features", nproc, options, flags=flags)
    assert histories(on) == histories(off)
    assert any(name == "evaluation" for name, _ in off.history()) and "gradients" in dict(off.history(0))


FUSION = {"use_gradient_accumulation_fusion": True, "strict": True}
SPLIT: dict[str, tuple[int, dict[str, Any]]] = {
    "two stages": (2, PP2),
    "two stages, tied": (2, {**PP2, "tied": True, "bias": True}),
    "two stages, reduced as it comes": (4, {**PP2, **SYNC}),
    "two stages, reduced without functions": (4, {**PP2, "overlap_grad_reduce": True, "no_sync": True}),
    "two stages, tensor parallel": (4, {**PP2, "tp": 2, "sp": True}),
    "two stages, experts": (4, {**PP2, "ep": 2, "experts": 4}),
    "two stages, multi-token prediction": (2, {**PP2, "config": MTP}),
    "two stages, recomputed": (
        2,
        {
            **PP2,
            "config": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        },
    ),
    "four stages": (4, {"pp": 4, "layers": 4, "micro_batches": 6}),
}


def planned(order: str, shape: PipelineShape) -> Schedule:
    if order == "zb-auto":
        return zero_bubble.automatic(shape)
    return orders.build(order, shape)


def executed(folder: Path, schedule: Schedule) -> int:
    """How many training steps the ranks have run, each in the order of the schedule."""
    return len(trace.training_steps(trace.read(folder), schedule))


# Before 0.14 gradient reduction does not wait for them.
@pytest.mark.parametrize("order", matrix.only(["zb-auto"], ["zb-h1", "zb-auto"]))
@pytest.mark.parametrize(
    ("release", "layout"),
    matrix.pairs([*SPLIT], [], newest=["two stages, reduced as it comes"], among=checkouts.EVERY[2:]),
)
def test_weight_gradients_apart_give_the_same_bits_in_the_order_that_is_printed(
    trainer: Callable[[str], Trainer], release: str, layout: str, order: str, tmp_path: Path
) -> None:
    nproc, options = SPLIT[layout]
    options = {"micro_batches": 5, **options, **STEPS, "wgrad_fusion": True}
    off = trainer(release).core("features", nproc, options, flags=FUSION)
    flags = {**FUSION, "pipeline_schedule": order, "pipeline_schedule_trace": str(tmp_path)}
    on = trainer(release).core("features", nproc, options, flags=flags)
    assert histories(on) == histories(off)
    shape = PipelineShape(options["pp"], options["micro_batches"])
    assert executed(tmp_path, planned(order, shape)) == STEPS["steps"]
    with pytest.raises(trace.TraceError):
        executed(tmp_path, planned("1f1b", shape))


@matrix.whole
@pytest.mark.parametrize("release", checkouts.EVERY[2:])
def test_weight_gradients_of_virtual_stages_apart_give_the_same_bits(
    trainer: Callable[[str], Trainer], release: str
) -> None:
    options = {**VPP2, **STEPS, "wgrad_fusion": True}
    off = trainer(release).core("features", 2, options, flags=FUSION)
    on = trainer(release).core("features", 2, options, flags={**FUSION, "pipeline_schedule": "zb-auto"})
    assert histories(on) == histories(off)


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
    options = {**PP2, **STEPS, "wgrad_fusion": True}
    off = trainer("0.19.2").core("features", 2, options, flags=FUSION)
    flags = {**FUSION, "pipeline_schedule": f"{file}:one_at_a_time"}
    assert histories(trainer("0.19.2").core("features", 2, options, flags=flags)) == histories(off)


@matrix.whole
def test_an_order_that_cannot_run_is_refused(trainer: Callable[[str], Trainer], tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    flags = {**FUSION, "pipeline_schedule": f"{file}:backwards_first"}
    refused = trainer("0.19.2").run(entry="core", arm="features", nproc=2, options={**PP2, **STEPS}, flags=flags)
    assert refused.codes != [0, 0] and "before the F that it needs" in refused.log()
