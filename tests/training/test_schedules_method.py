"""DualPipeV in real training: against one process and against Megatron's schedules, and its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_lite.pipeline import orders, trace
from mindspeed_lite.pipeline.orders import PipelineShape
from mindspeed_lite.pipeline.steps import OverlappedPair, Step
from tests.harness import matrix
from tests.harness.core_trainings import DRIFT, fault, losses
from tests.harness.script_trainings import NO_DROPOUT, lm_losses, train
from tests.harness.training import Trainer

FUSION = {"use_gradient_accumulation_fusion": True, "strict": True}
V = {**FUSION, "schedules_method": "dualpipev"}
TEXT = Path(__file__).resolve().parents[2] / "LICENSE"
BASE = {"layers": 4, "micro_batches": 5, "by_name": True, "wgrad_fusion": True}
SYNC = {"distributed_optimizer": True, "overlap_grad_reduce": True, "sync_functions": True}
# Processes and options of the pipeline, and those of what it is compared with.
LAYOUTS: dict[str, tuple[int, dict[str, Any], int, dict[str, Any]]] = {
    "two ranks": (2, {"pp": 2, "vpp": 2}, 1, {}),
    "four ranks": (4, {"pp": 4, "vpp": 2, "layers": 8, "micro_batches": 8}, 1, {"layers": 8, "micro_batches": 8}),
    "two ranks, tensor parallel": (4, {"pp": 2, "vpp": 2, "tp": 2, "sp": True}, 2, {"tp": 2, "sp": True}),
    "two ranks, experts": (4, {"pp": 2, "vpp": 2, "ep": 2, "experts": 4}, 2, {"ep": 2, "experts": 4}),
    "two ranks, reduced together": (4, {"pp": 2, "vpp": 2, **SYNC}, 2, {"distributed_optimizer": True}),
    "two ranks, recomputed": (
        2,
        {
            "pp": 2,
            "vpp": 2,
            "config": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        },
        1,
        {},
    ),
}


@pytest.mark.parametrize("detach", matrix.only([True], [False, True]))
@pytest.mark.parametrize(("release", "layout"), matrix.pairs([*LAYOUTS], [], newest=["two ranks, reduced together"]))
def test_it_trains_as_one_stage_does(
    trainer: Callable[[str], Trainer], release: str, layout: str, detach: bool
) -> None:
    nproc, options, processes, reference = LAYOUTS[layout]
    options, reference = ({**BASE, **each, "steps": 8} for each in (options, reference))
    one = trainer(release).core("features", processes, reference, flags=FUSION)
    v = trainer(release).core("features", nproc, options, flags={**V, "dualpipev_dw_detach": detach})
    before, after = losses(one, 0)[0], losses(one, 0)[-1]
    assert len(losses(v, 0)) == 8 and after < before - 0.3
    # Before the first update the passes are the same.
    assert losses(v, 0)[0] == before
    assert fault(one.history(0), v.history(0)) == ""


EXPERTS = {"pp": 2, "vpp": 2, "ep": 2, "experts": 4}
COMBINED = {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}
# With both flags one micro-batch's attention runs while another's tokens travel.
OVERLAPPED = {**V, "moe_fb_overlap": True}
KINDS: dict[str, dict[str, Any]] = {
    "alone": {},
    "reduced together": SYNC,
    "tokens counted": {"config": {"calculate_per_token_loss": True}},
}


@pytest.mark.parametrize("detach", matrix.only([True], [False, True]))
@pytest.mark.parametrize(("release", "kind"), matrix.pairs([*KINDS], [], newest=["alone"]))
def test_the_two_passes_of_a_pair_run_through_megatrons_combined_plan(
    trainer: Callable[[str], Trainer], release: str, kind: str, detach: bool, tmp_path: Path
) -> None:
    options = {**BASE, **EXPERTS, "steps": 4, "digest": True, "evaluate": True, **KINDS[kind]}
    flags = {"dualpipev_dw_detach": detach, "delay_wgrad_compute": True}
    off = trainer(release).core("features", 4, options, flags={**V, **flags})
    on = trainer(release).core(
        "features",
        4,
        {**options, "ddp_delay_wgrad_compute": True, "config": {**options.get("config", {}), **COMBINED}},
        flags={**OVERLAPPED, **flags, "pipeline_schedule_trace": str(tmp_path)},
        before="tests.harness.simulated:late_messages",
    )
    assert [on.history(rank) for rank in range(4)] == [off.history(rank) for rank in range(4)]
    order = orders.build("dualpipev-dw-detach" if detach else "dualpipev", PipelineShape(2, 5, 2))
    records = trace.read(tmp_path)
    assert all(step.schedule == order for step in trace.training_steps(records, order))
    times: dict[tuple[int, Step], list[tuple[float, float]]] = {}
    for each in records:
        times.setdefault((each.rank, each.step), []).append((each.begin, each.end))
    for rank, entries in enumerate(order.ranks):
        for pair in (entry for entry in entries if isinstance(entry, OverlappedPair)):
            assert times[rank, pair.forward] == times[rank, pair.backward]
    for rank in range(4):
        assert "a message travels beside" in on.log(rank)


@matrix.whole
@pytest.mark.parametrize("layout", ["two ranks", "four ranks"])
def test_twenty_steps_on_real_text(trainer: Callable[[str], Trainer], layout: str) -> None:
    nproc, options, processes, reference = LAYOUTS[layout]
    # In 16 bits one step in twenty rounds another way, and the gradient norm follows it.
    more = {"steps": 20, "text": str(TEXT), "lr": 1e-3, "fp32": True}
    one = trainer("0.19.2").core("features", processes, {**BASE, **reference, **more}, flags=FUSION)
    v = trainer("0.19.2").core("features", nproc, {**BASE, **options, **more}, flags=V)
    assert losses(one)[-1] < losses(one)[0] - 0.3
    assert fault(one.history(0), v.history(0)) == ""


def test_without_the_fusion_backwards_are_whole_and_an_evaluation_loses_nothing(
    trainer: Callable[[str], Trainer], tmp_path: Path
) -> None:
    """Nothing puts weight gradients aside then. What is executed is the order."""
    options = {**BASE, "steps": 2, "evaluate": True, "wgrad_fusion": False}
    flags = {"strict": True, "schedules_method": "dualpipev", "pipeline_schedule_trace": str(tmp_path)}
    result = trainer("0.19.2").core("features", 2, {**options, "pp": 2, "vpp": 2}, flags=flags)
    records = [each for path in sorted(tmp_path.glob("*.jsonl")) for each in trace.read(path)]
    assert len(trace.training_steps(records, orders.build("dualpipev-whole", PipelineShape(2, 5, 2)))) == 2
    one = trainer("0.19.2").core("device", 1, options)
    evaluated = [[loss for name, loss in each.history(0) if name == "evaluation"] for each in (result, one)]
    assert len(evaluated[0]) == 10
    for a, b in zip(*evaluated, strict=True):
        assert abs(float.fromhex(a) - float.fromhex(b)) <= DRIFT * abs(float.fromhex(b))


PIPELINE = ["--num-layers", "4", "--pipeline-model-parallel-size", "2", "--gradient-accumulation-fusion", *NO_DROPOUT]
FORMAT = ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]


@pytest.mark.parametrize("writes", matrix.only([True], [True, False]))
def test_checkpoints_interchange_with_1f1b(trainer: Callable[[str], Trainer], writes: bool, tmp_path: Path) -> None:
    v = ["--schedules-method", "dualpipev"]
    base = [*PIPELINE, *FORMAT, "--save", str(tmp_path), "--save-interval", "2"]
    first, second = (v, []) if writes else ([], v)
    written = train(trainer("0.19.2"), "adaptor", 2, [*base, *first, "--exit-interval", "2"], 4).check()
    read = train(trainer("0.19.2"), "adaptor", 2, [*base, *second, "--load", str(tmp_path)], 4).check()
    whole = train(trainer("0.19.2"), "adaptor", 2, [*PIPELINE, "--use-distributed-optimizer", *first], 4).check()
    assert "successfully loaded checkpoint" in read.log()
    # The losses are logged by the last rank.
    assert len(lm_losses(written)) == 2 and len(lm_losses(whole)) == 4
    for a, b in zip(lm_losses(read), lm_losses(whole)[2:], strict=True):
        assert abs(a - b) <= DRIFT * abs(b)


def test_a_skipped_feature_leaves_the_order_to_megatron(trainer: Callable[[str], Trainer]) -> None:
    """Neither the V nor recomputation as steps applies to this model: it trains on as without the flags."""
    base = [*PIPELINE, "--num-layers", "2"]
    skipped = ["--schedules-method", "dualpipev", "--recompute-in-advance"]
    off = train(trainer("0.19.2"), "adaptor", 2, base, 2).check()
    on = train(trainer("0.19.2"), "adaptor", 2, [*base, *skipped], 2).check()
    assert lm_losses(on) == lm_losses(off) and len(lm_losses(on)) == 2
    assert on.log().count("the feature whose order it would execute was skipped") == 1
