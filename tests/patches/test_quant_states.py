"""`--quant-states` in real Megatron: the training of the fused AdamW from rounded moments, and plain checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mindspeed_lite
from tests.harness import optimizers
from tests.harness.optimizers import (
    KINDS,
    Narrow,
    assert_equal,
    gradients,
    inner,
    optimizer_of,
    saved,
    start,
    steps,
)
from tests.harness.processes import forked

OFF = {"use_fused_adamw": True, "strict": True}
FORMS = {"bf16": torch.bfloat16, "fp8": torch.uint8}


def on(form: str, shares: bool = False) -> dict[str, Any]:
    return {"quant_states": form, "reuse_fp32_param": shares, "strict": True}


def dtypes(tree: Any) -> set[torch.dtype]:
    if isinstance(tree, torch.Tensor):
        return {tree.dtype}
    if isinstance(tree, dict):
        tree = list(tree.values())
    return set().union(*map(dtypes, tree)) if isinstance(tree, (list, tuple)) else set()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("kind", "shares"),
    [("fp32", False), *((kind, shares) for kind in ("bf16", "bf16, distributed") for shares in (False, True))],
)
@forked("megatron")
def test_checkpoints_are_plain_and_go_on_to_the_last_bit(
    kind: str, form: str, shares: bool, groups: Path
) -> None:  # fmt: skip
    start(groups)
    if "distributed" in kind:
        optimizers.Model = Narrow  # in this fork: Megatron mixes up groups with fp32 and bf16
    with mindspeed_lite.enabled(**on(form, shares)):
        model, optimizer = optimizer_of(**KINDS[kind])
        for step in range(3):
            gradients(model, step)
            optimizer.step()
        written = saved(model, optimizer)
        assert dtypes(written["optimizer"]) | dtypes(written.get("states", [])) <= {torch.float32}
        read = steps(KINDS[kind], 3, written)
        for step in range(3, 6):
            gradients(model, step)
            optimizer.step()
        assert_equal(read, saved(model, optimizer))
    with mindspeed_lite.enabled(**OFF):
        plain = steps(KINDS[kind], 3, written)
    with mindspeed_lite.enabled(**on("bf16" if form == "fp8" else "fp8", shares)):
        other = steps(KINDS[kind], 3, written)
    for found in (plain, other):
        for name, weight in read["model"].items():
            # Single weights may go elsewhere; the rate is 3e-2 for the embedding, 1e-2 else.
            apart = (found["model"][name].float() - weight.float()).abs().mean()
            assert apart < 8e-3, f"{name}: {apart}"


@forked("megatron")
def test_a_weight_that_two_stages_have_keeps_bf16(groups: Path) -> None:
    start(groups)
    with mindspeed_lite.enabled(**on("fp8")):
        for options in (KINDS["bf16"], KINDS["bf16, distributed"], KINDS["fp32"]):
            shared = optimizers.Model

            class Tied(shared):  # type: ignore[misc, valid-type]
                def __init__(self, dtype: torch.dtype) -> None:
                    super().__init__(dtype)
                    self.embedding.shared_embedding = True

            optimizers.Model = Tied
            try:
                model, optimizer = optimizer_of(**options)
            finally:
                optimizers.Model = shared
            gradients(model, 0)
            optimizer.step()
            kinds = {main.numel(): state["exp_avg"].dtype for main, state in inner(optimizer).state.items()}
            assert kinds[32 * 8] == torch.bfloat16 and kinds[24 * 40] == torch.uint8
