"""Optimizers whose numbers stand in host memory, over simulated lanes: the losses of the fused AdamW, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import checkouts, matrix
from tests.harness.core_trainings import MORE, losses
from tests.harness.script_trainings import NO_DROPOUT, READERS, lm_losses, train
from tests.harness.training import Result, Trainer

OFF = {"use_fused_adamw": True, "strict": True}
ON = {"swap_optimizer": True, "swap_optimizer_times": 4, "strict": True}
SIMULATED = {"before": "tests.harness.simulated:swap_optimizer"}
STEPS = 6


@pytest.mark.parametrize(
    ("release", "layout"),
    matrix.only(
        [("0.19.2", "dp2_distributed_optimizer")],
        [(release, layout) for release in checkouts.ALL for layout in MORE],
    ),
)
def test_no_bit_differs_from_the_fused_step(trainer: Callable[[str], Trainer], release: str, layout: str) -> None:
    nproc, options = MORE[layout]
    options = {**options, "steps": STEPS}
    off = trainer(release).core("features", nproc, options, flags=OFF)
    on = trainer(release).core("features", nproc, options, flags=ON, **SIMULATED)
    assert len(losses(on)) == STEPS and losses(on)[-1] < losses(on)[0] - 0.3
    assert on.history() == off.history()
    assert all("the first bytes came back" in on.log(rank) for rank in range(nproc))


@matrix.whole
@pytest.mark.parametrize("layout", ["single", "dp2_distributed_optimizer", "tied"])
def test_no_bit_differs_beside_what_narrows_and_shares(trainer: Callable[[str], Trainer], layout: str) -> None:
    nproc, options = MORE[layout]
    options = {**options, "steps": STEPS}
    beside = {"quant_states": "fp8", "reuse_fp32_param": True}
    off = trainer("0.19.2").core("features", nproc, options, flags={**OFF, **beside})
    on = trainer("0.19.2").core("features", nproc, options, flags={**ON, **beside}, **SIMULATED)
    assert on.history() == off.history()
    assert all("the first bytes came back" in on.log(rank) for rank in range(nproc))


@matrix.whole
@pytest.mark.parametrize("reader", [*READERS])
def test_checkpoints_are_those_of_off_in_every_layout(
    trainer: Callable[[str], Trainer], reader: str, tmp_path: Path
) -> None:
    distributed, nproc, layout = READERS[reader]
    script = [*NO_DROPOUT, "--ckpt-format", "torch_dist", "--use-fused-adamw"]
    if distributed:
        script += ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
    flags = ["--swap-optimizer", "--swap-optimizer-times", "4", "--mindspeed-lite-strict"]

    def run(nproc: int, *more: str) -> Result:
        return train(trainer("0.19.2"), "adaptor", nproc, [*script, *more], 6, **SIMULATED).check()

    written = []
    for name, given in (("on", flags), ("off", [])):
        saving = ["--save", str(tmp_path / name), "--save-interval", "3", "--exit-interval", "3"]
        written.append(lm_losses(run(2, *given, *saving)))
    assert written[0] == written[1]
    read = [
        lm_losses(run(nproc, *layout.split(), "--load", str(tmp_path / name), *given))
        for name, given in (("on", []), ("off", flags), ("off", []))
    ]
    assert len(read[0]) == 3 and written[0][0] > read[0][0]
    assert read[0] == read[1] == read[2]


@pytest.mark.parametrize(
    "arguments",
    matrix.only(
        [],
        [
            "--ckpt-format torch",
            "--ckpt-format torch --use-distributed-optimizer",
            "--ckpt-format torch_dist --use-distributed-optimizer",
            "--ckpt-format torch_dist --use-distributed-optimizer --ckpt-fully-parallel-load",
        ],
    ),
)
def test_a_resumed_run_is_the_run(trainer: Callable[[str], Trainer], arguments: str, tmp_path: Path) -> None:
    script = [*NO_DROPOUT, *arguments.split(), "--swap-optimizer", "--mindspeed-lite-strict"]

    def run(*more: str) -> Result:
        return train(trainer("0.19.2"), "adaptor", 2, [*script, *more], 6, **SIMULATED).check()

    # Megatron does not look at --ckpt-step in one of these formats: only the third iteration is saved.
    first = lm_losses(run("--save", str(tmp_path), "--save-interval", "3", "--exit-interval", "3"))
    whole, again = lm_losses(run()), lm_losses(run("--load", str(tmp_path)))
    assert len(whole) == 6 and [*first, *again] == whole
