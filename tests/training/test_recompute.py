"""Activations and norms released and recomputed, in real training: the same bits over layouts, with all else on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.harness import checkouts, matrix
from tests.harness.core_trainings import CONFIGURED, FEATURES, LAYOUTS, MOE, MOE_CONFIGURED, losses
from tests.harness.training import Trainer

RECOMPUTE = {"recompute_activation_function": True, "recompute_norm": True, "strict": True}
STEPS = 3


def same_bits(train: Trainer, nproc: int, options: dict[str, Any], flags: dict[str, Any], more: dict[str, Any]) -> None:
    options = {**options, "steps": STEPS}
    off = train.core("features" if flags else "device", nproc, options, **({"flags": flags} if flags else {}))
    on = train.core("features", nproc, options, flags={**flags, **more})
    assert len(losses(off)) == STEPS and on.history() == off.history()


@pytest.mark.parametrize(("release", "layout"), matrix.pairs([*LAYOUTS], [], newest=["pp2_vpp2"]))
def test_recomputation_changes_no_bit(trainer: Callable[[str], Trainer], release: str, layout: str) -> None:
    nproc, options = LAYOUTS[layout]
    same_bits(trainer(release), nproc, {**options, "dropout": 0.1}, {}, RECOMPUTE)


@pytest.mark.parametrize("layout", matrix.only(["tp2_sp"], ["tp2_sp", "pp2_vpp2"]))
def test_beside_every_other_feature(trainer: Callable[[str], Trainer], layout: str) -> None:
    nproc, options = LAYOUTS[layout]
    same_bits(trainer("0.19.2"), nproc, {**options, **CONFIGURED, "dropout": 0.1}, FEATURES, RECOMPUTE)


def test_experts_in_a_grouped_product(trainer: Callable[[str], Trainer]) -> None:
    shared = {"moe_shared_expert_intermediate_size": 64}
    options = {**LAYOUTS["ep2"][1], "moe": {"moe_router_dtype": "fp32", **MOE_CONFIGURED, **shared}}
    same_bits(trainer("0.19.2"), 2, options, MOE, RECOMPUTE)


@pytest.mark.parametrize("release", matrix.only(["0.19.2"], checkouts.ALL))
@pytest.mark.parametrize(
    "config",
    [
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    ],
    ids=["full", "selective"],
)
def test_beside_megatrons_own_recomputation(
    trainer: Callable[[str], Trainer], release: str, config: dict[str, Any]
) -> None:
    same_bits(trainer(release), 1, {"layers": 3, "dropout": 0.1, "config": config}, {}, RECOMPUTE)
