"""Checkpoints of optimizers with numbers in other forms, on a stand-in: plain, and what is applied twice is once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_lite.memory import streamed
from mindspeed_lite.memory.streamed import Streamed
from mindspeed_lite.memory.virtual import Virtual
from mindspeed_lite.ops.adamw.narrow import Narrow
from mindspeed_lite.ops.adamw.optimizer import FusedAdamW
from mindspeed_lite.ops.adamw.shared import Shared
from mindspeed_lite.patches import _optimizer_forms as forms
from tests.memory.lanes import Lanes

PATCHES = {patch.target.rpartition(".")[2]: patch.around for patch in forms.PATCHES}


def optimizer_of(shares: bool, narrow: bool) -> Any:
    """What has the attributes of Float16OptimizerWithFloat16Params, after a step."""
    main = torch.nn.Parameter(torch.randn(300, generator=torch.Generator().manual_seed(0)))
    inner = FusedAdamW([main], lr=0.1)
    if narrow:
        inner.narrow = Narrow(inner, lambda parameter: torch.uint8)
    if shares:
        weight = main.detach().bfloat16()
        inner.shared = Shared(inner, lambda: {main: weight})
    main.grad = torch.ones(300)
    inner.step()
    return SimpleNamespace(optimizer=inner, fp32_from_float16_groups=[[main]])


def state_dict(self: Any) -> dict[str, Any]:
    return {"optimizer": self.optimizer.state_dict(), "fp32_from_fp16_params": self.fp32_from_float16_groups}


def tensors(found: dict[str, Any]) -> list[torch.Tensor]:
    state = found["optimizer"]["state"][0]
    return [found["fp32_from_fp16_params"][0][0], state["exp_avg"], state["exp_avg_sq"]]


@pytest.mark.parametrize(("shares", "narrow"), [(True, False), (False, True), (True, True)])
def test_what_is_saved_is_plain_and_twice_is_once(shares: bool, narrow: bool) -> None:
    optimizer = optimizer_of(shares, narrow)
    once = PATCHES["state_dict"](state_dict, None)
    twice = PATCHES["state_dict"](once, None)
    found = [tensors(wrapped(optimizer)) for wrapped in (once, twice)]
    assert all(each.dtype == torch.float32 and each.isfinite().all() for each in found[0])
    assert (found[0][2] > 0).all() and all(map(torch.equal, *found))

    def get(self: Any, model_param: Any) -> Any:
        main = self.optimizer.param_groups[0]["params"][0]
        return {"param": main, **{name: self.optimizer.state[main][name] for name in ("exp_avg", "exp_avg_sq")}}

    name = "_get_main_param_and_optimizer_states"
    again = PATCHES[name](PATCHES[name](get, None), None)(optimizer, None)
    assert torch.equal(again["param"], found[0][0]) and torch.equal(again["exp_avg"], found[0][1])
    assert torch.equal(again["exp_avg_sq"].abs(), found[0][2])


@pytest.mark.parametrize(("shares", "narrow"), [(True, False), (False, True), (True, True)])
def test_what_is_loaded_is_taken_apart_once(shares: bool, narrow: bool) -> None:
    optimizer = optimizer_of(shares, narrow)
    before = [each.detach().clone() for each in tensors(PATCHES["state_dict"](state_dict, None)(optimizer))]
    main = optimizer.fp32_from_float16_groups[0][0]

    def load(self: Any, number: float) -> None:
        assert self.optimizer.state[main]["exp_avg"].dtype == torch.float32 and main.isfinite().all()
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        with torch.no_grad():
            main.add_(number)

    wrapped = forms.around_whole(forms.around_whole(load, None), None)  # type: ignore[arg-type]
    wrapped(optimizer, 1.0)
    after = tensors(PATCHES["state_dict"](state_dict, None)(optimizer))
    assert torch.equal(after[0], before[0] + 1.0) and all(map(torch.equal, after[1:], before[1:]))
    assert main.isnan().all() == shares
    assert (optimizer.optimizer.state[main]["exp_avg"].dtype == torch.uint8) == narrow


def test_a_plain_optimizer_is_left_to_megatron() -> None:
    optimizer = optimizer_of(False, False)
    assert forms.formed(optimizer) is None and forms.formed(SimpleNamespace(optimizer=None)) is None
    found = tensors(PATCHES["state_dict"](state_dict, None)(optimizer))
    assert found[0] is optimizer.fp32_from_float16_groups[0][0]


def test_numbers_that_are_elsewhere_are_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "_SMALLEST", 64)
    optimizer, other = optimizer_of(False, False), optimizer_of(False, False)
    optimizer.optimizer.home = Streamed(Lanes(), 1)
    other.optimizer.home = Virtual(None)
    assert forms.formed(optimizer) is optimizer.optimizer and forms.formed(other) is None
    before = [each.detach().clone() for each in tensors(state_dict(optimizer))]
    main = optimizer.fp32_from_float16_groups[0][0]
    optimizer.optimizer.home.adopt([main])
    assert main.isnan().all()
    assert all(map(torch.equal, tensors(PATCHES["state_dict"](state_dict, None)(optimizer)), before))


def test_the_copy_of_main_parameters_is_made_once() -> None:
    optimizer, plain = optimizer_of(True, False), []

    def megatrons(self: Any) -> None:
        plain.append(bool(self.fp32_from_float16_groups[0][0].isfinite().all()))

    copy = forms.copy_main(megatrons, None)  # type: ignore[arg-type]
    assert optimizer.optimizer.copied, "by its step"
    copy(optimizer)
    assert plain == []
    optimizer.optimizer.copied = False
    copy(optimizer)
    assert plain == [True]
    copy(SimpleNamespace(optimizer=None, fp32_from_float16_groups=[[torch.ones(2)]]))
    assert plain == [True, True], "of another optimizer it is Megatron's own"


def test_the_end_makes_all_plain_and_holds_nothing_alive() -> None:
    session, optimizer = SimpleNamespace(at_end=[]), optimizer_of(True, True)
    forms.end_with(session, optimizer.optimizer)  # type: ignore[arg-type]
    main = optimizer.fp32_from_float16_groups[0][0]
    (end,) = session.at_end
    end()
    assert main.isfinite().all() and optimizer.optimizer.state[main]["exp_avg"].dtype == torch.float32
    other = SimpleNamespace(at_end=[])
    forms.end_with(other, optimizer_of(True, False).optimizer)  # type: ignore[arg-type]
    other.at_end[0]()
