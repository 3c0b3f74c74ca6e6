"""`--swap-optimizer` in real Megatron, over simulated lanes: the same training to the last bit, numbers elsewhere."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import mindspeed_lite
from mindspeed_lite.engine import EngineError
from mindspeed_lite.patches import swap_optimizer as patch
from tests.harness import matrix, simulated
from tests.harness.lanes import Lanes
from tests.harness.optimizers import KINDS, assert_equal, gradients, inner, optimizer_of, saved, start
from tests.harness.processes import forked

OFF = {"use_fused_adamw": True, "strict": True}
ON = {"swap_optimizer": True, "swap_optimizer_times": 3, "strict": True}
BESIDE: dict[str, dict[str, Any]] = {
    "alone": {},
    "quant_states": {"quant_states": "fp8"},
    "reuse_fp32_param": {"reuse_fp32_param": True},
    "both": {"quant_states": "bf16", "reuse_fp32_param": True},
}
MOMENTS = ("exp_avg", "exp_avg_sq")


def begin(groups: Path) -> None:
    simulated.swap_optimizer(bandwidth=1e8)
    start(groups)


def train(options: dict[str, Any], overflow: int | None = None) -> dict[str, Any]:
    """The history and what it left, of six steps."""
    model, optimizer = optimizer_of(**options)
    history = []
    for step in range(6):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        gradients(model, step, float(optimizer.get_loss_scale()))
        if step == overflow:
            next(model.parameters()).main_grad.view(-1)[3] = float("inf")
        before = away(optimizer)
        history.append(optimizer.step())
        if step == overflow:
            assert away(optimizer) == before, "a step that is skipped moves nothing"
    own = inner(optimizer)
    with own.materialized():
        return {
            "history": history,
            "model": {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
            "main": [parameter.detach().clone() for parameter in optimizer.get_parameters()],
            "state": copy.deepcopy(own.state_dict()),
        }


def away(optimizer: Any) -> list[str]:
    """What holds no numbers, by name and size."""
    return [
        f"{name} {main.numel()}"
        for main in optimizer.get_parameters()
        for name, each in {"param": main, **inner(optimizer).state.get(main, {})}.items()
        if each.untyped_storage().nbytes() < each.nbytes
    ]


@pytest.mark.parametrize(
    ("kind", "beside"),
    matrix.only(
        [("bf16", "alone"), ("bf16, distributed", "both"), ("fp16", "alone"), ("fp32", "quant_states")],
        [
            (kind, beside)
            for kind in KINDS
            for beside in BESIDE
            if kind.startswith("bf16") or "reuse" not in str(BESIDE[beside])
        ],
    ),
)
@forked("megatron")
def test_training_is_bit_for_bit_that_of_the_fused_step(kind: str, beside: str, groups: Path) -> None:
    begin(groups)
    found = []
    for flags in (OFF, ON):
        with mindspeed_lite.enabled(**flags, **BESIDE[beside]):
            found.append(train(KINDS[kind], overflow=2 if kind.startswith("fp16") else None))
            assert not mindspeed_lite.report().fallbacks
    assert_equal(*found)


@pytest.mark.parametrize("kind", ["bf16", "bf16, distributed", "fp32"])
@forked("megatron")
def test_numbers_are_elsewhere_for_as_long_as_it_is_on(kind: str, groups: Path) -> None:
    begin(groups)
    with mindspeed_lite.enabled(**ON):
        model, optimizer = optimizer_of(**KINDS[kind])
        copied = set() if kind == "fp32" else {32 * 8, 24 * 40, 24}
        assert set(away(optimizer)) == {f"param {size}" for size in copied}, "before the first step already"
        expected = {f"{name} {size}" for name in MOMENTS for size in (32 * 8, 24 * 40, 24, 6 * 8)}
        expected |= {f"param {size}" for size in copied}
        for step in range(2):
            gradients(model, step)
            optimizer.step()
            assert set(away(optimizer)) == expected
        home = inner(optimizer).placement
        moved = {"out": 12, "back": 12} if copied else {"out": 8, "back": 8}
        home._engine.moved = dict.fromkeys(moved, 0)
        gradients(model, 2)
        optimizer.step()
        # A router is an fp32 weight of the model itself.
        wide, every = 0 if kind == "fp32" else 6 * 8, 32 * 8 + 24 * 40 + 24 + 6 * 8
        assert home._engine.moved == {lane: each * every - (4 * wide if copied else 0) for lane, each in moved.items()}
        before = saved(model, optimizer)
        with inner(optimizer).materialized():
            numbers = [main.clone() for main in optimizer.get_parameters()]
    assert away(optimizer) == [] and all(map(torch.equal, optimizer.get_parameters(), numbers))
    assert_equal(saved(model, optimizer), before)
    gradients(model, 3)
    optimizer.step()


@pytest.mark.parametrize("kind", ["bf16", "bf16, distributed"])
@forked("megatron")
def test_weights_that_are_loaded_become_the_main_parameters(kind: str, groups: Path) -> None:
    begin(groups)
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
            # A step that is torch's own, and the copy that it leaves to Megatron.
            for group in inner(optimizer).param_groups:
                group["maximize"] = True
            gradients(model, 2)
            with pytest.raises(EngineError, match="maximize is set"):
                optimizer.step()
            inner(optimizer).on_fallback = None
            optimizer.step()
            ended.append(saved(model, optimizer))
    assert_equal(*ended)


@forked("megatron")
def test_no_more_room_is_said_and_training_goes_on(groups: Path) -> None:
    begin(groups)
    patch.CopyEngine = lambda device: Lanes(fail_at=2)
    with mindspeed_lite.enabled(**OFF):
        off = train(KINDS["bf16"])
    with mindspeed_lite.enabled(**{**ON, "strict": False}):
        on = train(KINDS["bf16"])
        (fallback,) = mindspeed_lite.report().fallbacks
        assert fallback.feature == "swap_optimizer" and "bytes of host memory: no more pinned memory" in fallback.reason
    assert_equal(on, off)
