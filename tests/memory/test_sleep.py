"""Sleep of plain modules: parts, files, copies that come late, fixed storages, and each refusal in one line."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mindspeed_lite
from mindspeed_lite.memory import host, sleep
from mindspeed_lite.memory.sleep import Sleeper, SleepError
from tests.harness.lanes import Lanes
from tests.harness.processes import forked


class Scaled(torch.nn.Linear):
    """Keeps a workspace and scales outside of parameters and buffers, as Transformer Engine's modules do."""

    def __init__(self) -> None:
        super().__init__(40, 30)
        self.workspaces = [torch.randn(1000), {"scale": torch.rand(7)}]


def pair() -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(Scaled(), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 5))
    model[2].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    train(model, optimizer)
    return model, optimizer


def train(model: torch.nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 40, generator=torch.Generator().manual_seed(5))).square().sum().backward()
    optimizer.step()


def bits(model: torch.nn.Sequential, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [each for state in optimizer.state.values() for each in state.values()]
    scaled: Any = model[0].workspaces
    return copy.deepcopy([*model.state_dict().values(), *states, scaled[0], scaled[1]["scale"]])


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def nbytes(tensors: Any) -> int:
    return sum(each.untyped_storage().nbytes() for each in tensors)


@pytest.mark.parametrize("to", [False, True])
@pytest.mark.parametrize("block", [1 << 28, 1000])
def test_every_bit_returns(to: bool, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep, "_BLOCK", block)
    model, optimizer = pair()
    weight: Any = model[0].weight
    view, before = weight.data[3:5, 1:], bits(model, optimizer)
    for _ in range(2):
        report = str(mindspeed_lite.sleep(model, optimizer, to=str(tmp_path) if to else None))
        assert (f"files in {tmp_path}" if to else "host memory") in report and "released" in report
        assert nbytes([*model.parameters(), *model.buffers()]) == 0
        assert all(each.grad is None for each in model.parameters())
        assert "on cpu" in str(mindspeed_lite.wake())
        assert same(bits(model, optimizer), before)
        assert torch.equal(view, before[0][3:5, 1:])
        train(model, optimizer)
        before = bits(model, optimizer)
    assert not [*tmp_path.iterdir()]  # the files have no name


def test_parts_wake_in_any_order() -> None:
    model, optimizer = pair()
    before = bits(model, optimizer)
    report = mindspeed_lite.sleep(model, optimizer, keep=["optimizer"])
    assert [row[2] for row in report.rows] == ["host memory", "released", "stays on cpu"]
    mindspeed_lite.sleep(model, optimizer)
    mindspeed_lite.wake("weights")
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 40))  # log-probabilities, for example
    model.train()
    with pytest.raises(SleepError, match="forward pass of Sequential: asleep gradients"):
        model(torch.ones(2, 40))
    mindspeed_lite.sleep(model, optimizer)
    mindspeed_lite.wake("gradients", "optimizer")
    mindspeed_lite.wake("weights")
    assert same(bits(model, optimizer), before)
    train(model, optimizer)


def test_what_sleeps_refuses_each_use_with_a_line(tmp_path: Path) -> None:
    model, optimizer = pair()
    calls: list[Callable[[], Any]] = [
        lambda: model(torch.ones(2, 40)),
        lambda: model[0](torch.ones(2, 40)),
        lambda: model.state_dict(),
        lambda: model[2].state_dict(),
        lambda: model.load_state_dict({}),
        lambda: optimizer.step(),
        lambda: optimizer.state_dict(),
        lambda: optimizer.load_state_dict({}),
        lambda: mindspeed_lite.sleep(model, optimizer),
    ]
    attributes = {**vars(optimizer)}
    mindspeed_lite.sleep(model, optimizer)
    for call in calls:
        with pytest.raises(SleepError, match=r"asleep weights") as caught:
            call()
        assert "\n" not in str(caught.value)
    mindspeed_lite.wake()
    assert vars(optimizer) == attributes and not any(each._forward_pre_hooks for each in model.modules())
    wrong: dict[str, Callable[[], Any]] = {
        "nothing sleeps": mindspeed_lite.wake,
        "awake weights, asleep nothing": lambda: mindspeed_lite.wake("weights", model=model),
        "moments unknown: parts are weights, optimizer, gradients": lambda: mindspeed_lite.wake("moments"),
        "grads unknown": lambda: mindspeed_lite.sleep(model, keep=["grads"]),
        "is no folder: create it": lambda: mindspeed_lite.sleep(model, to=str(tmp_path / "none")),
        "a dict is no model": lambda: mindspeed_lite.sleep({}),
        "nothing is left to move": lambda: mindspeed_lite.sleep(model, keep=["weights", "optimizer", "gradients"]),
    }
    for text, call in wrong.items():
        with pytest.raises(SleepError, match=text):
            call()


@forked()  # the process would end
def test_reading_a_parameter_asleep_raises() -> None:
    model, optimizer = pair()
    mean: Any = model[1].running_mean
    weight, before = model[0].weight, bits(model, optimizer)
    reads: list[Callable[[], Any]] = [
        lambda: weight.sum(),
        lambda: weight + 1,
        lambda: weight.data,
        lambda: weight.detach(),
        lambda: torch.nn.functional.linear(torch.ones(40), weight),
        lambda: torch.cat([mean, mean]),
        lambda: mean.tolist(),
        lambda: model.double(),
        lambda: repr(weight),
    ]
    mindspeed_lite.sleep(model, optimizer)
    for read in reads:
        with pytest.raises(SleepError, match=r"of a parameter: asleep weights: call mindspeed_lite\.wake\(\) first"):
            read()
    assert isinstance(weight, torch.nn.Parameter) and weight.grad is None and weight.requires_grad
    assert weight.shape == (30, 40) and weight in {weight: 1} and weight.untyped_storage().nbytes() == 0
    mindspeed_lite.wake("weights")
    assert type(weight) is torch.nn.Parameter and type(mean) is torch.Tensor
    for read in reads[:-2]:
        read()
    mindspeed_lite.wake()
    assert same(bits(model, optimizer), before)


def test_an_optimizer_sleeps_after_its_model() -> None:
    model, optimizer = pair()
    before = bits(model, optimizer)
    mindspeed_lite.sleep(model)
    mindspeed_lite.sleep(model, optimizer)
    assert nbytes(state["exp_avg"] for state in optimizer.state.values()) == 0
    with pytest.raises(SleepError, match="step: asleep weights, optimizer, gradients"):
        optimizer.step()
    mindspeed_lite.wake("weights", "gradients")
    mindspeed_lite.sleep(model)  # does not forget the optimizer
    mindspeed_lite.wake("weights", "gradients")
    with pytest.raises(SleepError, match="step: asleep optimizer"):
        optimizer.step()
    mindspeed_lite.wake()
    assert same(bits(model, optimizer), before)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("ddp_config", "nccl_ub", True),
        ("ddp_config", "use_megatron_fsdp", True),
        ("config", "cuda_graph_impl", "local"),
        ("config", "enable_cuda_graph", True),
    ],
)
def test_fixed_addresses_are_refused(name: str, field: str, value: Any) -> None:
    model, optimizer = pair()
    setattr(model, name, SimpleNamespace(**{field: value}))
    with pytest.raises(SleepError, match="turn it off to let the model sleep"):
        mindspeed_lite.sleep(model, optimizer)


def test_models_sleep_apart_and_go() -> None:
    actor, critic = pair(), pair()
    before = bits(*critic)
    mindspeed_lite.sleep(*actor)
    mindspeed_lite.sleep(*critic)
    mindspeed_lite.wake(model=critic[0])
    assert same(bits(*critic), before)
    with pytest.raises(SleepError):
        actor[0](torch.ones(2, 40))
    gone = weakref.ref(actor[0])
    del actor
    gc.collect()
    assert gone() is None and not [each for each in sleep._sleepers.values() if each.is_asleep]


def test_a_device_copies_through_its_engine() -> None:
    model, optimizer = pair()
    before, lanes = bits(model, optimizer), Lanes(1e9)
    sleeper = Sleeper(model, lanes)
    sleeper.sleep([model], optimizer, (), None)
    sleeper.wake(())
    assert same(bits(model, optimizer), before)
    assert not lanes.faults and lanes.moved["out"] == lanes.moved["back"] > 0


def test_fixed_storages_stay_and_are_listed() -> None:
    model, optimizer = pair()
    state = optimizer.state[next(model.parameters())]
    state["exp_avg"] = host.file(state["exp_avg"].shape, torch.float32).copy_(state["exp_avg"])
    report = mindspeed_lite.sleep(model, optimizer)
    assert ("fixed", state["exp_avg"].nbytes, "stays on cpu") in report.rows
    mindspeed_lite.wake()


def test_without_host_memory_nothing_moves() -> None:
    model, optimizer = pair()
    before = bits(model, optimizer)
    with pytest.raises(SleepError, match=r"no room for .* no more pinned memory \(to=FOLDER moves them"):
        Sleeper(model, Lanes(fail_at=0)).sleep([model], optimizer, (), None)
    assert same(bits(model, optimizer), before)
    train(model, optimizer)


def test_a_full_disk_leaves_all_awake_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = pair()
    before, files = bits(model, optimizer), iter([host.file])

    def full(*given: Any) -> torch.Tensor:
        for make in files:
            return make(*given)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(host, "file", full)
    with pytest.raises(SleepError, match=r"no room for .* No space left on device"):
        mindspeed_lite.sleep(model, optimizer, to=str(tmp_path))
    sleeper = sleep._sleepers[model]
    assert not sleeper.is_asleep and not sleeper._memory and same(bits(model, optimizer), before)
    mindspeed_lite.sleep(model, optimizer)
    mindspeed_lite.wake()
    assert same(bits(model, optimizer), before)


def test_without_room_on_the_device_it_sleeps_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = pair()
    before, allocate = bits(model, optimizer), sleep._SleepingPart.allocate

    def fails(part: Any) -> None:
        allocate(part)
        raise RuntimeError("out of memory")

    mindspeed_lite.sleep(model, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(sleep._SleepingPart, "allocate", fails)
        with pytest.raises(SleepError, match=r"wake: no room for .* bytes of weights: out of memory"):
            mindspeed_lite.wake()
    assert nbytes(model.parameters()) == 0
    mindspeed_lite.wake()
    assert same(bits(model, optimizer), before)
