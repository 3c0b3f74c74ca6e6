"""`--enable-expert-placement` in real training: the same bits on and off, over optimizers, layouts and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import checkouts, matrix, placed_experts
from tests.harness.script_trainings import LAYOUTS, NO_DROPOUT, lm_losses, train
from tests.harness.training import Trainer

FOUR = [
    name
    for name, (options, _) in placed_experts.CASES.items()
    if options.get("ep") == 4 or name.startswith(("tp2_ep2", "pp2_ep2", "ep2_dp2"))
]
TWO = [name for name in placed_experts.CASES if name not in FOUR]
# What a run of a few seconds trains.
FEW = ["fp32", "both"]


def faults(train: Trainer, nproc: int, cases: list[str], out: Path, steps: int = 6) -> dict[str, list[str]]:
    """What did not hold, by case, on any rank."""
    script = str(Path(placed_experts.__file__))
    found: dict[str, list[str]] = {}
    # Megatron's models outlive their trainings, and with them the threads of their groups: few trainings a process.
    for some in (cases[first : first + 5] for first in range(0, len(cases), 5)):
        argv = [script, str(out), str(steps), *some]
        train.run(entry="script", arm="device", nproc=nproc, argv=argv, timeout=900).check()
        ranks = [json.loads((out / f"{rank}.json").read_text()) for rank in range(nproc)]
        assert all([*each] == some for each in ranks)
        found |= {case: texts for case in some if (texts := [text for each in ranks for text in each[case]])}
    return found


def test_experts_that_change_places_change_no_bit(trainer: Callable[[str], Trainer], tmp_path: Path) -> None:
    mutation = "fp32 | moments stay"
    found = faults(trainer("0.19.2"), 2, [*FEW, "predicted", "refused", mutation], tmp_path)
    assert [*found] == [mutation], found


@matrix.whole
@pytest.mark.parametrize("release", checkouts.ALL)
def test_every_form_of_optimizer_and_of_layer(trainer: Callable[[str], Trainer], release: str, tmp_path: Path) -> None:
    assert faults(trainer(release), 2, [*TWO, "predicted", "refused"], tmp_path) == {}


@matrix.whole
def test_what_is_broken_on_purpose_is_rejected(trainer: Callable[[str], Trainer], tmp_path: Path) -> None:
    broken = [f"{case} | {each}" for case in ("fp32", "both") for each in placed_experts.MUTATIONS]
    assert [*faults(trainer("0.19.2"), 2, broken, tmp_path)] == broken


@matrix.whole
@pytest.mark.parametrize("release", ["0.16.1", "0.19.2"])
def test_layouts_of_four_ranks(trainer: Callable[[str], Trainer], release: str, tmp_path: Path) -> None:
    # With one expert a rank Megatron 0.16 frees what its backward pass reads; here a rank has two.
    assert faults(trainer(release), 4, FOUR, tmp_path) == {}


@matrix.whole
@pytest.mark.parametrize("ranks", [2, 4])
def test_fifty_steps(trainer: Callable[[str], Trainer], ranks: int, tmp_path: Path) -> None:
    cases = {2: ["distributed"], 4: ["ep4, distributed", "tp2_ep2, distributed", "pp2_ep2, distributed"]}[ranks]
    assert faults(trainer("0.19.2"), ranks, cases, tmp_path, 50) == {}


GIVEN = [*NO_DROPOUT, *LAYOUTS["ep2"][1].split(), "--num-experts", "8", "--clip-grad", "1000"]
PLACED = ["--enable-expert-placement", "--expert-placement-freq", "1", "--expert-placement-break-even", "0"]
FORMS = {
    "distributed": ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
    "plain": [],
    "quantized": ["--use-distributed-optimizer", "--quant-states", "fp8", "--reuse-fp32-param"],
    "asynchronous": ["--use-distributed-optimizer", "--async-save"],
}
DRAWN = "tests.harness.simulated:drawn_placements"


@pytest.mark.parametrize("release", matrix.only(["0.19.2"], checkouts.WITH_TRAINING))
def test_a_kill_between_two_exchanges_loses_nothing(
    trainer: Callable[[str], Trainer], release: str, tmp_path: Path
) -> None:
    """The checkpoint before it goes on without the feature, with the losses of a run that never had it."""
    given = [*GIVEN, *FORMS["distributed"]]
    whole = lm_losses(train(trainer(release), "adaptor", 2, given, 4).check())
    saving = ["--save", str(tmp_path / "saved"), "--save-interval", "2", *PLACED]
    killed = train(
        trainer(release), "adaptor", 2, [*given, *saving], 4, before="tests.harness.simulated:killed_between_exchanges"
    )
    assert any(killed.codes) and "experts changed places" in killed.log(0) and "home 2" in killed.log(0)
    rest = train(trainer(release), "adaptor", 2, [*given, "--load", str(tmp_path / "saved")], 4).check()
    assert lm_losses(rest) == whole[2:]


@matrix.whole
@pytest.mark.parametrize("form", [*FORMS])
@pytest.mark.parametrize("writer", ["on", "off"])
def test_checkpoints_interchange(trainer: Callable[[str], Trainer], form: str, writer: str, tmp_path: Path) -> None:
    given = [*GIVEN, *FORMS[form]]
    run = trainer("0.19.2")
    whole = lm_losses(train(run, "adaptor", 2, given, 6).check())
    arms = {"on": PLACED, "off": []}
    folder = str(tmp_path / "saved")
    saving = ["--save", folder, "--save-interval", "3", "--exit-interval", "3"]
    written = train(run, "adaptor", 2, [*given, *arms[writer], *saving], 6, before=DRAWN).check()
    assert lm_losses(written) == whole[:3]
    for reader in arms:
        rest = train(run, "adaptor", 2, [*given, *arms[reader], "--load", folder], 6, before=DRAWN).check()
        assert lm_losses(rest) == whole[3:]
    # Other expert-parallel sizes read it too: one rank's losses are near, since it adds in another order.
    alone = [*given, "--expert-model-parallel-size", "1", "--load", folder, "--no-load-optim"]
    found = [lm_losses(train(run, "adaptor", 1, alone, 4).check())[0]]
    assert abs(found[0] - whole[3]) <= 2.0**-8 * whole[3]


@matrix.whole
def test_training_goes_on_in_its_places_after_a_checkpoint(trainer: Callable[[str], Trainer], tmp_path: Path) -> None:
    given = [*GIVEN, *FORMS["distributed"]]
    whole = lm_losses(train(trainer("0.19.2"), "adaptor", 2, given, 6).check())
    saving = ["--save", str(tmp_path), "--save-interval", "2", *PLACED, "--expert-placement-freq", "3"]
    on = train(trainer("0.19.2"), "adaptor", 2, [*given, *saving], 6, before=DRAWN).check()
    assert lm_losses(on) == whole
