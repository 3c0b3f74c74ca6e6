"""Moments in host memory: the step of an optimizer to the last bit, within a budget, whatever comes between."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_lite.memory import host, host_mapped_moments
from mindspeed_lite.memory.host_mapped_moments import HostMappedMoments
from mindspeed_lite.optim.fused_adam import FusedAdamW
from mindspeed_lite.optim.quantized_moments import QuantizedMoments
from mindspeed_lite.optim.split_params import SplitFP32Params

SHAPES = [(300, 100), (20_000,), (100,), (50, 900)]
NAMES = ("exp_avg", "exp_avg_sq")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(host.FOLDER_VARIABLE, str(tmp_path))
    # The tensors of these tests are small.
    monkeypatch.setattr(host_mapped_moments, "_SMALLEST", 4096)


def optimizer_of(
    home: HostMappedMoments | None, form: str = "fp32", shares: bool = False
) -> tuple[Any, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    mains = [torch.randn(shape, generator=generator) for shape in SHAPES]
    weights = [main.bfloat16() for main in mains]
    optimizer = FusedAdamW(mains, lr=1e-2)
    if form != "fp32":
        optimizer.quantized_moments = QuantizedMoments(
            optimizer, lambda each: {"bf16": torch.bfloat16, "fp8": torch.uint8}[form]
        )
    if shares:
        optimizer.split_params = SplitFP32Params(optimizer, lambda: dict(zip(mains, weights, strict=True)))
    optimizer.placement = home
    return optimizer, mains


def steps(optimizer: Any, mains: list[torch.Tensor], number: int = 3, first: int = 0) -> list[torch.Tensor]:
    """What it has then: parameters and moments."""
    for step in range(first, first + number):
        generator = torch.Generator().manual_seed(step)
        for main in mains:
            main.grad = torch.randn(main.shape, generator=generator)
        optimizer.step()
    with optimizer.materialized():
        return [each.clone() for main in mains for each in (main, *(optimizer.state[main][name] for name in NAMES))]


def mapped(optimizer: Any) -> list[tuple[int, ...]]:
    """Shapes of the parameters whose moments are in host memory."""
    return [main.shape for main, (state, places) in optimizer.placement._held.items() if state["exp_avg"] is places[0]]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("form", ["fp32", "bf16", "fp8"])
def test_the_training_is_the_same_to_the_last_bit(form: str, shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_mapped_moments, "_PORTION", 1 << 17)
    expected = steps(*optimizer_of(None, form, shares))
    optimizer, mains = optimizer_of(HostMappedMoments(None), form, shares)
    assert all(map(torch.equal, steps(optimizer, mains), expected))
    one, other = steps(optimizer, mains, 2, first=3), optimizer_of(None, form, shares)
    assert all(map(torch.equal, one, steps(*other, 5)))
    optimizer.step()
    # All but the smallest.
    assert mapped(optimizer) == [shape for shape in SHAPES if shape != (100,)]
    size = {"fp32": 8, "bf16": 4, "fp8": 2}[form]
    assert optimizer.placement.nbytes == size * (30_000 + 20_000 + 45_000)


def test_portions_are_updated_and_released_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_mapped_moments, "_PORTION", 1 << 18)
    released: list[list[int]] = []
    monkeypatch.setattr(host, "release", lambda tensors: released.append([each.numel() for each in tensors]))
    optimizer, mains = optimizer_of(HostMappedMoments(None))
    steps(optimizer, mains, 1)
    # 240 and 160 kB, then nothing and 360 kB.
    assert released == [[30_000, 30_000, 20_000, 20_000], [45_000, 45_000]]
    assert list(HostMappedMoments(None).update_groups([])) == []


def test_a_budget_is_kept_by_all_that_share_it() -> None:
    home = HostMappedMoments(8 * (30_000 + 45_000))
    one, mains = optimizer_of(home)
    other, others = optimizer_of(home)
    for each, own in ((one, mains), (other, others)):
        assert all(map(torch.equal, steps(each, own), steps(*optimizer_of(None))))
    # The first has no room for its third, the other one for its second alone.
    assert home.nbytes == 8 * (30_000 + 20_000 + 20_000)
    del one, mains, other, others, each, own
    assert home.nbytes == 0, "what is gone takes nothing of the budget"
    third, mains = optimizer_of(HostMappedMoments(0))
    steps(third, mains)
    assert mapped(third) == []


def test_no_more_room_is_said_once_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    given, number = host.empty, iter(range(100))

    def empty(*arguments: Any) -> torch.Tensor:
        if next(number) >= 3:
            raise MemoryError("no room")
        return given(*arguments)

    monkeypatch.setattr(host, "empty", empty)
    optimizer, mains = optimizer_of(HostMappedMoments(None, said.append))
    assert all(map(torch.equal, steps(optimizer, mains), steps(*optimizer_of(None))))
    # The second parameter got one of its two.
    assert mapped(optimizer) == [SHAPES[0]] and said == ["no room"]


@pytest.mark.parametrize("form", ["fp32", "fp8"])
def test_a_checkpoint_comes_and_goes(form: str) -> None:
    optimizer, mains = optimizer_of(HostMappedMoments(None), form)
    steps(optimizer, mains, 2)
    with optimizer.materialized():
        written = copy.deepcopy(optimizer.state_dict())
    again, others = optimizer_of(HostMappedMoments(None), form)
    with torch.no_grad():
        for main, other in zip(mains, others, strict=True):
            other.copy_(main)
    with again.materialized():
        again.load_state_dict(written)
    assert mapped(again) == []
    for each, own in ((optimizer, mains), (again, others)):
        steps(each, own, 2, first=2)
    assert all(map(torch.equal, mains, others))
    again.step()
    assert len(mapped(again)) == 3


def test_after_the_end_it_is_an_ordinary_optimizer() -> None:
    optimizer, mains = optimizer_of(HostMappedMoments(None))
    expected = steps(optimizer, mains, 2)
    optimizer.restore()
    assert optimizer.placement.nbytes == 0 and mapped(optimizer) == []
    found = [each for main in mains for each in (main, *(optimizer.state[main][name] for name in NAMES))]
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, steps(optimizer, mains, 1, first=2), steps(*optimizer_of(None))))
    assert mapped(optimizer) == []
