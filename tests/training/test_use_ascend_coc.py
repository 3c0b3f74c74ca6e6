"""`--use-ascend-coc` in real training: the same losses as Megatron's own layers, on every layout that communicates."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import checkouts, matrix
from tests.harness.core_trainings import fault
from tests.harness.messages import sent
from tests.harness.training import Result, Trainer

STEPS = 4
FLAGS = {"use_ascend_coc": True, "coc_parallel_num": 4, "strict": True}
COUNT = "tests.harness.messages:count"
FUSED = {"wgrad_fusion": True}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "tp2 sp": (2, {"tp": 2, "sp": True}),
    "tp2 sp, tied": (2, {"tp": 2, "sp": True, "tied": True}),
    "tp2 sp, recomputed": (
        2,
        {
            "tp": 2,
            "sp": True,
            "dropout": 0.1,
            "config": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        },
    ),
    "tp2 sp, experts": (2, {"tp": 2, "sp": True, "ep": 2, "etp": 1, "experts": 4}),
    "tp2 sp dp2": (4, {"tp": 2, "sp": True, "distributed_optimizer": True, "overlap_grad_reduce": True}),
    "tp2 sp pp2": (4, {"tp": 2, "sp": True, "pp": 2}),
    "tp4 sp": (4, {"tp": 4, "sp": True}),
    "tp4": (4, {"tp": 4}),
}


def close(on: Result, off: Result, layout: str) -> None:
    """A sum over two ranks has one order: the same bits. Over four, gloo's goes around a ring, piece by piece."""
    if layout.startswith("tp4"):
        assert fault(off.history(), on.history()) == ""
    else:
        assert on.history() == off.history()


@pytest.mark.parametrize(
    ("release", "layout"),
    matrix.pairs([*LAYOUTS], [], newest=["tp2 sp, experts"]),
)
def test_slices_train_as_one_message_does(trainer: Callable[[str], Trainer], release: str, layout: str) -> None:
    nproc, options = LAYOUTS[layout]
    options = {**options, "steps": STEPS}
    off = trainer(release).core("device", nproc, options, before=COUNT)
    on = trainer(release).core("features", nproc, options, flags=FLAGS, before=COUNT)
    close(on, off, layout)
    assert sent(on.log()) > sent(off.log()) + 100 * STEPS, "it was not in force"


@pytest.mark.parametrize("release", matrix.only(["0.19.2"], checkouts.ALL))
def test_with_other_features_and_slices_of_its_own_choice(trainer: Callable[[str], Trainer], release: str) -> None:
    others = {"use_gradient_accumulation_fusion": True, "recompute_activation_function": True, "strict": True}
    options = {"tp": 2, "sp": True, "steps": STEPS, "wgrad_fusion": True}
    off = trainer(release).core("features", 2, options, flags=others)
    # Megatron's own name for it.
    on = trainer(release).core("features", 2, options, flags={**others, "tp_comm_overlap": True})
    assert on.history() == off.history()
    assert "use_ascend_coc: column forward of 32 rows, 64 x 96:" in on.log(), "a trial is told"


def test_delayed_weight_gradients(trainer: Callable[[str], Trainer]) -> None:
    """Both buffers: the one that the combined schedule asks for, and the one of the output layer."""
    options = {"tp": 2, "sp": True, "ep": 2, "etp": 1, "experts": 4, "steps": STEPS, "wgrad_fusion": True}
    flags = {"use_gradient_accumulation_fusion": True, "delay_wgrad_compute": True, "strict": True}
    options["config"] = {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}
    options["ddp_delay_wgrad_compute"] = options["overlap_grad_reduce"] = True
    off = trainer("0.19.2").core("features", 2, options, flags=flags)
    on = trainer("0.19.2").core("features", 2, options, flags={**flags, **FLAGS}, before=COUNT)
    assert on.history() == off.history() and sent(on.log()) > 100 * STEPS


@matrix.whole
@pytest.mark.parametrize("release", ["0.17.1", "0.19.2"])
@pytest.mark.parametrize("layout", ["tp2 sp", "tp4 sp", "tp4"])
def test_a_hundred_steps_on_real_text(trainer: Callable[[str], Trainer], release: str, layout: str) -> None:
    nproc, options = LAYOUTS[layout]
    text = Path(__file__).resolve().parents[2] / "LICENSE"
    options = {**options, "steps": 100, "text": str(text), "lr": 1e-3}
    off = trainer(release).core("device", nproc, options)
    on = trainer(release).core("features", nproc, options, flags=FLAGS)
    close(on, off, layout)


@matrix.whole
def test_random_delays_never_stop_it(trainer: Callable[[str], Trainer]) -> None:
    """Four ranks in two groups, each late at random before every message, 200 steps."""
    options = {"tp": 2, "sp": True, "steps": 200, "layers": 1}
    off = trainer("0.19.2").core("device", 4, options)
    on = trainer("0.19.2").core("features", 4, options, flags=FLAGS, before="tests.harness.messages:delay", timeout=900)
    assert on.history() == off.history()


def test_a_killed_rank_ends_the_others(trainer: Callable[[str], Trainer]) -> None:
    """The rank that goes after its third step: the other one says that its peer is gone, long before the timeout."""
    result = trainer("0.19.2").run(
        entry="core", arm="features", nproc=2, options={"tp": 2, "sp": True, "steps": 500}, flags=FLAGS,
        before="tests.harness.messages:die", grace=120,
    )  # fmt: skip
    assert 0 not in result.codes
    assert re.search("connection closed|connection reset|socket closed|broken pipe", result.log(0), re.IGNORECASE)
