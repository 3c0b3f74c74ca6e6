"""Recomputation as steps of the schedule, in training: bits of recomputation in the backward pass, or of none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_lite.pipeline import orders, recompute_plan, trace
from mindspeed_lite.pipeline.orders import PipelineShape
from tests.harness import checkouts, matrix
from tests.harness.training import Result, Trainer

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
VPP2 = {"pp": 2, "vpp": 2, "layers": 4, "dropout": 0.1, "micro_batches": 6}
PP2 = {"pp": 2, "dropout": 0.1}
SYNC = {"distributed_optimizer": True, "overlap_grad_reduce": True, "sync_functions": True}
# Processes, options, flags beside the recomputation's own.
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "virtual stages": (2, VPP2, {}),
    "virtual stages, some layers": (
        2,
        {**VPP2, "layers": 8, "config": {**FULL, "recompute_method": "block"}},
        {},
    ),
    "virtual stages, reduced together": (4, {**VPP2, **SYNC}, {}),
    "two stages": (2, PP2, {"pipeline_schedule_max_live": 1}),
    "two stages, tied, multi-token prediction": (
        2,
        {**PP2, "tied": True, "config": {**FULL, "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}},
        {"pipeline_schedule_max_live": 1},
    ),
    "two stages, tensor parallel": (4, {**PP2, "tp": 2, "sp": True}, {"pipeline_schedule_max_live": 1}),
    "two stages, experts": (4, {**PP2, "ep": 2, "experts": 4}, {"pipeline_schedule_max_live": 1}),
}
# Megatron 0.18 gives its own recomputation of a prediction layer an argument that this does not take.
FAILS_ALONE = ("0.18.2", "two stages, tied, multi-token prediction")
PAIRS = [
    pair
    for pair in matrix.pairs(
        [*LAYOUTS], [("0.15.3", "virtual stages")], newest=["virtual stages"], among=checkouts.EVERY
    )
    if tuple(pair.values) != FAILS_ALONE
]
STEPS = {"steps": 2, "digest": True, "evaluate": True}


def histories(result: Result) -> list[Any]:
    return [result.history(rank) for rank in range(len(result.codes))]


def on(trainer: Trainer, nproc: int, options: dict[str, Any], flags: dict[str, Any]) -> Result:
    return trainer.core("features", nproc, options, flags={"strict": True, **flags})


def executed(folder: Path, schedule: Any) -> int:
    return len(trace.training_steps(trace.read(folder), schedule))


@pytest.mark.parametrize(("release", "layout"), PAIRS)
def test_in_advance_it_has_the_bits_of_recomputation_in_the_backward_pass(
    trainer: Callable[[str], Trainer], release: str, layout: str, tmp_path: Path
) -> None:
    nproc, options, _ = LAYOUTS[layout]
    options = {"config": FULL, **options, **STEPS}
    off = trainer(release).core("device", nproc, options)
    flags = {"recompute_in_advance": True, "pipeline_schedule_trace": str(tmp_path)}
    assert histories(on(trainer(release), nproc, options, flags)) == histories(off)
    chunks, microbatches = options.get("vpp", 1), options.get("micro_batches", 4)
    base = orders.build("interleaved" if chunks > 1 else "1f1b", PipelineShape(2, microbatches, chunks))
    assert executed(tmp_path, recompute_plan.in_advance(base)) == 2


@pytest.mark.parametrize(("release", "layout"), PAIRS)
def test_in_the_bubble_it_has_the_bits_of_no_recomputation(
    trainer: Callable[[str], Trainer], release: str, layout: str, tmp_path: Path
) -> None:
    nproc, options, flags = LAYOUTS[layout]
    mtp = {name: value for name, value in options.get("config", {}).items() if name.startswith("mtp_")}
    off = trainer(release).core("device", nproc, {**options, **STEPS, "config": mtp})
    flags = {"recompute_in_bubble": True, "pipeline_schedule_trace": str(tmp_path), **flags}
    result = on(trainer(release), nproc, {**options, **STEPS, "config": {**FULL, **mtp}}, flags)
    assert histories(result) == histories(off)
    chunks, microbatches = options.get("vpp", 1), options.get("micro_batches", 4)
    base = orders.build("interleaved" if chunks > 1 else "1f1b", PipelineShape(2, microbatches, chunks))
    planned = recompute_plan.in_bubble(base, flags.get("pipeline_schedule_max_live"))
    assert planned.recomputed and executed(tmp_path, planned) == 2


@matrix.whole
@pytest.mark.parametrize("order", ["zb-auto", "dualpipev"])
def test_in_advance_beside_weight_gradients_apart(trainer: Callable[[str], Trainer], order: str) -> None:
    options = {"pp": 2, "micro_batches": 5, "layers": 4, "config": FULL, **STEPS, "wgrad_fusion": True}
    flags: dict[str, Any] = {"use_gradient_accumulation_fusion": True, "pipeline_schedule": order}
    if order == "dualpipev":
        options, flags = {**options, "vpp": 2}, {"use_gradient_accumulation_fusion": True, "schedules_method": order}
    without = on(trainer("0.19.2"), 2, options, flags)
    ahead = on(trainer("0.19.2"), 2, options, {**flags, "recompute_in_advance": True})
    assert histories(ahead) == histories(without)


@matrix.whole
def test_a_model_that_recomputes_nothing_is_one_line(trainer: Callable[[str], Trainer]) -> None:
    job = {"entry": "core", "arm": "features", "nproc": 2, "options": PP2, "flags": {"recompute_in_bubble": True}}
    refused = trainer("0.19.2").run(**job)
    assert refused.codes != [0, 0] and "set recompute_granularity to 'full'" in refused.log()
