"""Weight gradients in real training: accumulated in their product, and delayed, against Megatron's own path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.harness import matrix
from tests.harness.core_trainings import fault, losses
from tests.harness.training import Trainer

FUSION = {"use_gradient_accumulation_fusion": True, "strict": True}
DELAY = {**FUSION, "delay_wgrad_compute": True}
STEPS = 12

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tied, across a pipeline": (2, {"pp": 2, "tied": True}),
    "tied, reduced as it comes": (2, {"tied": True, "overlap_grad_reduce": True, "distributed_optimizer": True}),
    "16-bit main gradients": (1, {"grad_reduce_in_fp32": False}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_fusion_follows_megatrons_own_path(trainer: Callable[[str], Trainer], layout: str) -> None:
    nproc, options = LAYOUTS[layout]
    options = {**options, "steps": STEPS}
    off = trainer("0.19.2").core("device", nproc, options)
    on = trainer("0.19.2").core("features", nproc, {**options, "wgrad_fusion": True}, flags=FUSION)
    assert losses(off)[-1] < losses(off)[0] - 1
    assert fault(off.history(), on.history()) == ""


ROWS: dict[str, tuple[int, dict[str, Any]]] = {
    **LAYOUTS,
    "reduced as it comes": (2, {"overlap_grad_reduce": True, "distributed_optimizer": True, "wgrad_fusion": True}),
    "tensor parallel": (2, {"tp": 2, "sp": True, "overlap_grad_reduce": True, "wgrad_fusion": True}),
    "tied, with the fusion": (1, {"tied": True, "wgrad_fusion": True}),
}


@pytest.mark.parametrize(
    ("release", "layout"),
    matrix.pairs(
        [*ROWS],
        [("0.17.1", "reduced as it comes")],
        newest=["tensor parallel", "tied, across a pipeline", "tied, with the fusion", "16-bit main gradients"],
    ),
)
def test_the_embeddings_gradient_in_rows_follows_the_dense_one(
    trainer: Callable[[str], Trainer], release: str, layout: str
) -> None:
    nproc, options = ROWS[layout]
    options = {**options, "steps": STEPS}
    flags = {"use_gradient_accumulation_fusion": options.get("wgrad_fusion", False), "strict": True}
    off = trainer(release).core("features", nproc, options, flags=flags)
    on = trainer(release).core("features", nproc, options, flags={**flags, "use_fused_embedding": True})
    assert losses(off)[-1] < losses(off)[0] - 1
    # To the zeros that a shared weight's output layer hands to autograd rows are added as they were to zeros before.
    assert (losses(on) == losses(off)) is (layout == "tied, with the fusion")
    assert fault(off.history(), on.history()) == ""


@pytest.mark.parametrize(
    ("release", "layout"),
    [
        ("0.19.2", {"overlap_grad_reduce": True, "distributed_optimizer": True}),
        pytest.param("0.16.1", {"tp": 2, "sp": True, "etp": 1, "overlap_grad_reduce": True}, marks=matrix.whole),
    ],
)
def test_the_delay_changes_no_bit(trainer: Callable[[str], Trainer], release: str, layout: dict[str, Any]) -> None:
    """Driven by Megatron's own combined schedule, which asks layer by layer; strict: it has asked for everything."""
    options = {"ep": 2, "experts": 4, "steps": 4, "wgrad_fusion": True, "ddp_delay_wgrad_compute": True, **layout}
    histories = [
        trainer(release)
        .core(
            "features",
            2,
            {**options, "config": {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": delay}},
            flags=DELAY,
        )
        .history()
        for delay in (False, True)
    ]
    assert histories[0] == histories[1] and float.fromhex(histories[0][-1][0]) < float.fromhex(histories[0][0][0])
