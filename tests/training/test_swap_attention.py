"""`--swap-attention` in real training over a slow link of the CPU's: the same bits over layouts, with all else on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.harness import matrix
from tests.harness.core_trainings import CONFIGURED, FEATURES, LAYOUTS, MOE, MOE_CONFIGURED, losses
from tests.harness.training import Trainer

SWAP = {"swap_attention": True, "swap_modules": "input_layernorm,self_attention,pre_mlp_layernorm,mlp", "strict": True}
STEPS = 3
# Of layers of a chunk the last one moves nothing.
LAYERS = {"pp2_vpp2": 8, "pp2": 6}


def same_bits(
    train: Trainer, nproc: int, options: dict[str, Any], flags: dict[str, Any], more: dict[str, Any] | None = None
) -> None:
    options = {"layers": 3, **options, "steps": STEPS}
    off = train.core("features" if flags else "device", nproc, options, **({"flags": flags} if flags else {}))
    on = train.core(
        "features",
        nproc,
        options,
        flags={**flags, **SWAP, **(more or {})},
        before="tests.harness.simulated:swap_attention",
    )
    assert len(losses(off)) == STEPS and on.history() == off.history()
    for rank in range(nproc):
        assert "the first bytes came back" in on.log(rank)


@pytest.mark.parametrize(("release", "layout"), matrix.pairs([*LAYOUTS], [], newest=["pp2_vpp2"]))
def test_swapping_changes_no_bit(trainer: Callable[[str], Trainer], release: str, layout: str) -> None:
    nproc, options = LAYOUTS[layout]
    same_bits(trainer(release), nproc, {**options, "layers": LAYERS.get(layout, 3), "dropout": 0.1}, {})


@pytest.mark.parametrize("layout", matrix.only(["pp2_vpp2"], ["single", "tp2_sp", "pp2_vpp2"]))
def test_beside_every_other_feature(trainer: Callable[[str], Trainer], layout: str) -> None:
    nproc, options = LAYOUTS[layout]
    same_bits(trainer("0.19.2"), nproc, {**options, **CONFIGURED, "layers": LAYERS.get(layout, 3)}, FEATURES)


def test_beside_experts_and_outputs_that_are_given_up(trainer: Callable[[str], Trainer]) -> None:
    options = {**LAYOUTS["ep2"][1], "moe": {"moe_router_dtype": "fp32", **MOE_CONFIGURED}}
    options |= {"wgrad_fusion": True, "overlap_grad_reduce": True}
    given_up = {"recompute_activation_function": True, "recompute_norm": True}
    same_bits(trainer("0.19.2"), 2, options, {**MOE, "use_gradient_accumulation_fusion": True}, given_up)
