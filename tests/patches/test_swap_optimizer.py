"""`--swap-optimizer` in real Megatron, over simulated lanes: the same training to the last bit, numbers elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mindspeed_lite
from mindspeed_lite.patches import swap_optimizer as patch
from tests.harness import simulated
from tests.harness.lanes import Lanes
from tests.harness.optimizers import KINDS, assert_equal, gradients, inner, optimizer_of, saved, start, train
from tests.harness.processes import forked

OFF = {"use_fused_adamw": True, "strict": True}
ON = {"swap_optimizer": True, "swap_optimizer_times": 3, "strict": True}
MOMENTS = ("exp_avg", "exp_avg_sq")


def begin(groups: Path) -> None:
    simulated.swap_optimizer(bandwidth=1e8)
    start(groups)


def away(optimizer: Any) -> list[str]:
    """What holds no numbers, by name and size."""
    return [
        f"{name} {main.numel()}"
        for main in optimizer.get_parameters()
        for name, each in {"param": main, **inner(optimizer).state.get(main, {})}.items()
        if each.untyped_storage().nbytes() < each.nbytes
    ]


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
