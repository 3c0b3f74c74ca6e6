"""`--reuse-fp32-param` in real Megatron: its own training bit for bit, in 2 bytes a parameter less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mindspeed_lite
from tests.harness.optimizers import (
    KINDS,
    assert_equal,
    gradients,
    inner,
    live_bytes,
    optimizer_of,
    saved,
    start,
    train,
)
from tests.harness.processes import forked

ON = {"reuse_fp32_param": True, "strict": True}
OFF = {"use_fused_adamw": True, "strict": True}
BF16 = ["bf16", "bf16, distributed", "L2", "no clipping", "constant loss scale"]
KINDS = {**KINDS, "constant loss scale, distributed": {**KINDS["constant loss scale"], **KINDS["bf16, distributed"]}}


def found(options: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What `train` leaves, with main parameters and moments as a checkpoint would hold them."""
    result = train(options, **more)
    return {name: result[name] for name in ("history", "model", "scale")}


@pytest.mark.parametrize("kind", BF16)
@forked("megatron")
def test_training_is_bit_for_bit_megatrons_own(kind: str, groups: Path) -> None:
    start(groups)
    off = found(KINDS[kind])
    for flags in (OFF, ON):
        with mindspeed_lite.enabled(**flags):
            on = found(KINDS[kind])
        assert on["history"] == off["history"]
        for name, weight in off["model"].items():
            assert torch.equal(on["model"][name], weight), name


@pytest.mark.parametrize("kind", ["constant loss scale", "constant loss scale, distributed"])
@forked("megatron")
def test_a_step_that_is_skipped_changes_nothing(kind: str, groups: Path) -> None:
    start(groups)
    with mindspeed_lite.enabled(**OFF):
        off = found(KINDS[kind], overflow=2)
    with mindspeed_lite.enabled(**ON):
        on = found(KINDS[kind], overflow=2)
    assert [done for done, _, _ in on["history"]] == [True, True, False, True, True, True]
    assert on["history"] == off["history"]
    assert all(torch.equal(on["model"][name], weight) for name, weight in off["model"].items())


@forked("megatron")
def test_a_parameter_takes_16_bytes_and_not_18(groups: Path) -> None:
    start(groups)
    sizes, stand_ins = [], 0
    for flags in (OFF, ON):
        with mindspeed_lite.enabled(**flags):
            model, optimizer = optimizer_of(**KINDS["bf16"])
            gradients(model, 0)
            optimizer.step()
            sizes.append(live_bytes(model, optimizer))
            if inner(optimizer).split_params is not None:
                stand_ins = 4 * len(inner(optimizer).split_params.halves())
    assert stand_ins > 0
    narrow = sum(each.numel() for each in model.parameters() if each.dtype == torch.bfloat16)
    wide = sum(each.numel() for each in model.parameters() if each.dtype == torch.float32)
    # Gradient buffers are padded.
    padding = sum(buffer.grad_data.nbytes for buffer in model.buffers) - 4 * (narrow + wide)
    assert sizes == [18 * narrow + 16 * wide + padding, 16 * narrow + 16 * wide + padding + stand_ins]


@pytest.mark.parametrize("kind", ["bf16", "bf16, distributed"])
@forked("megatron")
def test_weights_that_are_loaded_become_the_main_parameters(kind: str, groups: Path) -> None:
    start(groups)
    ended = []
    for flags in (OFF, ON):
        with mindspeed_lite.enabled(**flags):
            model, optimizer = optimizer_of(**KINDS[kind])
            gradients(model, 0)
            optimizer.step()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(parameter * 0.5 + 0.1)
            optimizer.reload_model_params()
            gradients(model, 1)
            optimizer.step()
            ended.append(saved(model, optimizer))
    assert_equal(*ended)


@forked("megatron")
def test_weights_that_are_no_half_are_left_alone_and_that_is_said(groups: Path) -> None:
    start(groups)
    mindspeed_lite.enable(reuse_fp32_param=True)
    train(KINDS["fp16"], 2)
    said = [each.reason for each in mindspeed_lite.report().fallbacks if each.feature == "reuse_fp32_param"]
    assert said == ["3 main parameters have no bf16 weight to be half of"]


@forked("megatron")
def test_verify_compares_numbers_that_are_put_together(groups: Path) -> None:
    start(groups)
    mindspeed_lite.enable(**ON, verify=2)
    train(KINDS["bf16"], 3)
    verdicts = {entry.operator: entry.verdict for entry in mindspeed_lite.report().verifications}
    assert verdicts["adamw"] == "ok"
