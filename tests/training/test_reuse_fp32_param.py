"""Weights that are half of their main parameters, in real training: Megatron's own losses to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import checkouts, matrix
from tests.harness.core_trainings import MORE, losses
from tests.harness.script_trainings import NO_DROPOUT, READERS, lm_losses, train
from tests.harness.training import Result, Trainer

OFF = {"use_fused_adamw": True, "strict": True}
ON = {"reuse_fp32_param": True, "strict": True}
STEPS = 12


@pytest.mark.parametrize(
    ("release", "layout"),
    matrix.only(
        [("0.19.2", "tied")],
        [(release, layout) for release in checkouts.ALL for layout in MORE],
    ),
)
def test_no_bit_differs_from_megatrons_own_step(trainer: Callable[[str], Trainer], release: str, layout: str) -> None:
    nproc, options = MORE[layout]
    options = {**options, "steps": STEPS}
    fused, on = (trainer(release).core("features", nproc, options, flags=flags) for flags in (OFF, ON))
    off = trainer(release).core("device", nproc, options)
    assert len(losses(on)) == STEPS and losses(on)[-1] < losses(on)[0] - 0.3
    assert on.history() == fused.history() == off.history()


@matrix.whole
def test_two_hundred_steps(trainer: Callable[[str], Trainer]) -> None:
    fused, on = (trainer("0.19.2").core("features", 1, {"steps": 200}, flags=flags) for flags in (OFF, ON))
    off = trainer("0.19.2").core("device", 1, {"steps": 200})
    assert len(on.history()) == 200 and on.history() == fused.history() == off.history()


@pytest.mark.parametrize("reader", matrix.only(["tensor parallel"], [*READERS]))
def test_checkpoints_are_those_of_off_in_every_layout(
    trainer: Callable[[str], Trainer], reader: str, tmp_path: Path
) -> None:
    distributed, nproc, layout = READERS[reader]
    script = [*NO_DROPOUT, "--ckpt-format", "torch_dist", "--use-fused-adamw"]
    if distributed:
        script += ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
    shared = ["--reuse-fp32-param"]

    def run(nproc: int, *more: str) -> Result:
        return train(trainer("0.19.2"), "adaptor", nproc, [*script, *more], 6).check()

    written = []
    for name, flags in (("on", shared), ("off", [])):
        saving = ["--save", str(tmp_path / name), "--save-interval", "3", "--exit-interval", "3"]
        written.append(lm_losses(run(2, *flags, *saving)))
    assert written[0] == written[1]
    read = [
        lm_losses(run(nproc, *layout.split(), "--load", str(tmp_path / name), *flags))
        for name, flags in (("on", []), ("off", shared), ("off", []))
    ]
    assert len(read[0]) == 3 and written[0][0] > read[0][0]
    assert read[0] == read[1] == read[2]
