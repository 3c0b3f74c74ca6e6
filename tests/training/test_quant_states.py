"""Narrow moments in real training: losses beside those of plain ones, in every layout, and resumed runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import checkouts, matrix
from tests.harness.core_trainings import MORE, losses
from tests.harness.script_trainings import NO_DROPOUT, lm_losses, train
from tests.harness.training import Result, Trainer

OFF = {"use_fused_adamw": True, "strict": True}
STEPS = 12
# Stochastic rounding is noise on each step of each parameter; over so few steps that is a small part of the loss.
DRIFT = {"bf16": 2e-3, "fp8": 2e-2}


@pytest.mark.parametrize(
    ("release", "layout", "form"),
    matrix.only(
        [("0.19.2", "tied", "fp8")],
        [(release, layout, form) for release in checkouts.ALL for layout in MORE for form in DRIFT],
    ),
)
def test_losses_stay_beside_those_of_plain_moments(
    trainer: Callable[[str], Trainer], release: str, layout: str, form: str
) -> None:
    nproc, options = MORE[layout]
    options = {**options, "steps": STEPS}
    flags: tuple[dict[str, Any], ...] = (OFF, {"quant_states": form, "strict": True})
    off, on = (losses(trainer(release).core("features", nproc, options, flags=each)) for each in flags)
    assert len(on) == STEPS and on[-1] < on[0] - 0.3 and on != off
    for step, (a, b) in enumerate(zip(off, on, strict=True)):
        assert abs(a - b) <= DRIFT[form] * abs(a), f"step {step}: {a} off, {b} on"


@pytest.mark.parametrize("form", matrix.only(["fp8"], [*DRIFT]))
@pytest.mark.parametrize("distributed", matrix.only([True], [True, False]))
def test_a_resumed_run_is_the_run(
    trainer: Callable[[str], Trainer], distributed: bool, form: str, tmp_path: Path
) -> None:
    """With both flags that change what an optimizer keeps: the same losses to the last bit."""
    script = [*NO_DROPOUT, "--ckpt-format", "torch_dist", "--quant-states", form, "--reuse-fp32-param"]
    if distributed:
        script += ["--use-distributed-optimizer"]

    def run(*more: str) -> Result:
        return train(trainer("0.19.2"), "adaptor", 2, [*script, *more], 6).check()

    saving = ["--save", str(tmp_path), "--save-interval", "3"]
    whole = lm_losses(run(*saving, "--exit-interval", "6"))
    again = lm_losses(run("--load", str(tmp_path), "--ckpt-step", "3"))
    assert len(whole) == 6 and again == whole[3:]
