"""FusedAdam of Transformer Engine with the fused step: its values, its state, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_lite.optim.fused_adam import FusedStep, adopt, release
from mindspeed_lite.optim.split_params import SplitFP32Params
from tests.te_contract.conftest import STAND_IN

RULE: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2, "betas": (0.8, 0.9)}


def _params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.linspace(-1, 1, size)) for size in (7, 4)]


def _train(optimizers: list[Any], steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        for optimizer in optimizers:
            for param in optimizer.param_groups[0]["params"]:
                param.grad = torch.linspace(0, step + 1, param.numel()).cos()
            optimizer.step()


def _near(one: Any, other: Any) -> None:
    for ours, theirs in zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(ours, theirs)
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(one.state[ours][name], other.state[theirs][name])
            assert {*one.state[ours]} == {*other.state[theirs]}


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_the_step_is_ours_and_the_state_theirs(imported: Callable[[Path], Any], adam_w_mode: bool) -> None:
    fused_adam = imported(STAND_IN).optimizers.FusedAdam
    ours, theirs = (fused_adam(_params(), adam_w_mode=adam_w_mode, **RULE) for _ in range(2))
    _train([ours, theirs], 1)
    assert adopt(ours) is ours and isinstance(ours, FusedStep) and isinstance(ours, fused_adam)
    _train([ours, theirs], 2, 1)
    _near(ours, theirs)
    assert ours.param_groups[0]["step"] == theirs.param_groups[0]["step"] == 3
    assert (
        ours.param_groups[0]["params"][0] in ours.state and "step" not in ours.state[ours.param_groups[0]["params"][0]]
    )
    # A checkpoint of either is loaded by the other.
    states = ours.state_dict(), theirs.state_dict()
    ours.load_state_dict(states[1])
    theirs.load_state_dict(states[0])
    _train([ours, theirs], 1, 3)
    release(ours)
    assert type(ours) is fused_adam
    _train([ours, theirs], 1, 4)
    _near(ours, theirs)
    assert ours.param_groups[0]["step"] == 5


def test_options_that_ours_has_not_run_their_step(imported: Callable[[Path], Any]) -> None:
    fused_adam = imported(STAND_IN).optimizers.FusedAdam
    seen: list[list[str]] = []
    ours, theirs = (fused_adam(_params(), bias_correction=False, **RULE) for _ in range(2))
    adopted = adopt(ours)
    assert adopted is not None
    adopted.on_fallback = seen.append
    _train([ours, theirs], 2)
    _near(ours, theirs)
    assert seen == [["bias_correction is not set"]] * 2
    assert adopt(fused_adam(_params(), master_weights=True)).reasons() == ["master_weights is set"]
    assert adopt(torch.optim.SGD(_params(), lr=0.1)) is None


def test_shared_storage_has_the_values_of_remainders(imported: Callable[[Path], Any]) -> None:
    """Halves of ours hold the bits that `store_param_remainders` holds."""
    fused_adam = imported(STAND_IN).optimizers.FusedAdam
    main = torch.nn.Parameter(torch.linspace(-1, 1, 8).bfloat16().float())
    high = main.detach().bfloat16()
    ours = fused_adam([main], **RULE)
    half = torch.nn.Parameter(high.clone())
    theirs = fused_adam([half], master_weights=True, store_param_remainders=True, **RULE)
    adopted = adopt(ours)
    assert adopted is not None
    adopted.split_params = SplitFP32Params(adopted, lambda: {main: high})
    for step in range(3):
        main.grad = torch.linspace(0, step + 1, 8).bfloat16().float()
        half.grad = main.grad.bfloat16()
        ours.step()
        theirs.step()
    low = theirs.state[half]["master_param"]
    joined = ((half.detach().view(torch.int16).int() << 16) + low.int()).view(torch.float32)
    torch.testing.assert_close(adopted.fp32_copy(main)["param"], joined)
    release(ours)
    torch.testing.assert_close(main.detach(), joined)
