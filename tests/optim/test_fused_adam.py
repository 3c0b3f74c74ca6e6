"""FusedAdamW and FusedAdam are torch's optimizers in everything but the step."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from mindspeed_lite.optim.fused_adam import FusedAdam, FusedAdamW, adopt

KINDS = {FusedAdamW: torch.optim.AdamW, FusedAdam: torch.optim.Adam}
RULE = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((6, 5), (0,), (7,), (40,))]


def groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Two, as Megatron makes them: with and without decay, each with keys of its own."""
    return [{"params": params[:2], "wd_mult": 1.0}, {"params": params[2:], "weight_decay": 0.0, "lr": 3e-3}]


def train(optimizer: torch.optim.Optimizer, steps: int = 5, first: int = 0) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in range(first, first + steps):
        for place, param in enumerate(params):
            # The last one has no gradient in every other step.
            param.grad = None if place == 3 and step % 2 else torch.sin(param.detach() * (step + 1) + place)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9
        optimizer.step()


def same(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine["param_groups"] == other["param_groups"]
    assert mine["state"].keys() == other["state"].keys()
    for place, state in mine["state"].items():
        assert list(state) == list(other["state"][place]) == ["step", "exp_avg", "exp_avg_sq"]
        assert torch.equal(state["step"], other["state"][place]["step"])
        assert state["step"].dtype == torch.float32 and state["step"].device.type == "cpu"
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(state[name], other["state"][place][name], rtol=1e-5, atol=1e-7)
    for group, group_of_other in zip(ours.param_groups, theirs.param_groups, strict=True):
        for a, b in zip(group["params"], group_of_other["params"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_decays_rates_and_missing_gradients_are_torchs(kind: Any) -> None:
    ours, theirs = kind(groups(parameters()), **RULE), KINDS[kind](groups(parameters()), **RULE)
    train(ours)
    train(theirs)
    assert ours.state_dict()["state"][3]["step"] == 3 and ours.state_dict()["state"][0]["step"] == 5
    same(ours, theirs)


def test_adopting_changes_the_step_and_nothing_else() -> None:
    theirs, plain = torch.optim.AdamW(groups(parameters()), **RULE), torch.optim.AdamW(groups(parameters()), **RULE)
    train(theirs, 2)
    train(plain, 2)
    kept, before = theirs.param_groups, copy.deepcopy(theirs.state_dict())
    ours = adopt(theirs)
    assert ours is theirs and type(ours) is FusedAdamW and isinstance(ours, torch.optim.AdamW)
    assert ours.param_groups is kept and ours.state_dict()["param_groups"] == before["param_groups"]
    train(ours, 3, first=2)
    train(plain, 3, first=2)
    same(ours, plain)
    assert type(adopt(torch.optim.Adam(parameters()))) is FusedAdam
    assert adopt(torch.optim.SGD(parameters(), lr=0.1)) is None
    assert adopt(ours) is None, "it is what adopting makes"


def test_pickles_and_copies_are_fused_and_know_nothing_of_a_session() -> None:
    ours = FusedAdamW(parameters(), **RULE)
    ours.on_fallback = lambda reasons: None
    ours.step_data = replace(ours.step_data, cast_targets={ours.param_groups[0]["params"][0]: torch.zeros(6, 5)})
    for twin in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        assert type(twin) is FusedAdamW and twin.on_fallback is None and not twin.step_data.cast_targets
        train(twin, 1)


def test_hooks_run_once_and_the_closure_is_evaluated() -> None:
    ours, seen = FusedAdamW(parameters(), **RULE), []
    ours.register_step_pre_hook(lambda *_: seen.append("before"))
    ours.register_step_post_hook(lambda *_: seen.append("after"))
    for param in ours.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    assert ours.step(lambda: seen.append("closure") or 3.0) == 3.0
    ours.param_groups[0]["amsgrad"] = True  # aside
    ours.state.clear()
    ours.step()
    assert seen == ["before", "closure", "after", "before", "after"]


def test_scales_are_applied_once_and_gradients_left_alone() -> None:
    ours, theirs = (kind(parameters(), **RULE) for kind in (FusedAdamW, torch.optim.AdamW))
    factors = (0.25, None, 0.5, None)
    for optimizer in (ours, theirs):
        for place, param in enumerate(optimizer.param_groups[0]["params"]):
            param.grad = torch.cos(param.detach()) * (1.0 if optimizer is ours else factors[place] or 1.0)
    params = ours.param_groups[0]["params"]
    kept = [param.grad.clone() for param in params]
    ours.step_data = replace(
        ours.step_data,
        grad_scales={param: factor for param, factor in zip(params, factors, strict=True) if factor is not None},
    )
    ours.step()
    theirs.step()
    same(ours, theirs)
    assert not ours.step_data.grad_scales
    assert all(torch.equal(param.grad, grad) for param, grad in zip(params, kept, strict=True))


def test_copies_are_written_for_every_parameter_and_once() -> None:
    ours = FusedAdamW(parameters(), **RULE)
    params = ours.param_groups[0]["params"]
    dtypes = (torch.bfloat16, torch.bfloat16, torch.float16, torch.bfloat16)
    copies = {param: torch.full_like(param, 9.0, dtype=dtype) for param, dtype in zip(params, dtypes, strict=True)}
    ours.step_data = replace(ours.step_data, cast_targets=copies)
    for param in params[:3]:  # the last has no gradient, and gets its copy all the same
        param.grad = torch.ones_like(param)
    ours.step()
    assert ours.step_data.casts_done and not ours.step_data.cast_targets
    for param, out in copies.items():
        assert torch.equal(out, param.to(out.dtype))
    ours.step()
    assert not ours.step_data.casts_done, "nothing was asked for"


ASIDE = {
    "amsgrad is set": {"amsgrad": True},
    "maximize is set": {"maximize": True},
    "the learning rate or a beta is a tensor": {"lr": torch.tensor(1e-2)},
}


@pytest.mark.parametrize("reason", ASIDE)
def test_what_only_torch_knows_is_torchs_step(reason: str) -> None:
    said: list[list[str]] = []
    ours, theirs = (kind(parameters(), **{**RULE, **ASIDE[reason]}) for kind in (FusedAdamW, torch.optim.AdamW))
    ours.on_fallback = said.append
    for optimizer in (ours, theirs):
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.cos(param.detach()) * (1.0 if optimizer is ours else 0.5)
    ours.step_data = replace(ours.step_data, grad_scales=dict.fromkeys(ours.param_groups[0]["params"], 0.5))
    ours.step_data = replace(ours.step_data, cast_targets={ours.param_groups[0]["params"][0]: torch.zeros(6, 5)})
    ours.step()
    theirs.step()
    assert said == [[reason]] and not ours.step_data.casts_done
    for a, b in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        assert torch.equal(a, b)
    param = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    assert FusedAdamW([param]).reasons() == ["a parameter is torch.bfloat16, its gradient torch.strided"]


def test_one_count_shared_by_all_is_counted_once() -> None:
    """Megatron's distributed optimizer loads one tensor into every parameter's state."""
    ours, theirs = (kind(parameters(), **RULE) for kind in (FusedAdamW, torch.optim.AdamW))
    train(ours, 2)
    train(theirs, 2)
    shared = torch.tensor(2.0)
    for state in ours.state.values():
        state["step"] = shared
    for param in (param for each in (ours, theirs) for param in each.param_groups[0]["params"]):
        param.grad = torch.ones_like(param)
    for state in theirs.state.values():
        state["step"] = torch.tensor(2.0)
    ours.step()
    theirs.step()
    same(ours, theirs)


def test_parameters_of_one_rule_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from mindspeed_lite.optim import fused_adam as module

    calls: list[int] = []
    real = module.adamw
    monkeypatch.setattr(module, "adamw", lambda *lists, **rule: (calls.append(len(lists[0])), real(*lists, **rule)))
    ours = FusedAdamW(groups(parameters()), **RULE)
    for group in ours.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    ours.step()
    assert calls == [2, 2]
