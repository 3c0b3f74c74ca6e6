"""Optimizer state in host memory: the step of an optimizer to the last bit, in the order that memory wants."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mindspeed_lite.memory import host, host_mapped_moments, swapped_optimizer_state
from mindspeed_lite.memory.copy_engine import Buffer
from mindspeed_lite.memory.host_mapped_moments import HostMappedMoments
from mindspeed_lite.memory.swapped_optimizer_state import SwappedOptimizerState
from mindspeed_lite.optim import fused_adam as stepping
from mindspeed_lite.optim.fused_adam import FusedAdam, FusedAdamW
from mindspeed_lite.optim.quantized_moments import QuantizedMoments
from mindspeed_lite.optim.split_params import SplitFP32Params
from tests.harness.lanes import Lanes

SHAPES = [(300, 100), (20_000,), (100,), (50, 900), (10_000,), (25_000,)]
LARGE = [shape for shape in SHAPES if shape != (100,)]
NUMBERS = sum(torch.Size(shape).numel() for shape in LARGE)
NAMES = ("exp_avg", "exp_avg_sq")
FORMS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.uint8}


@pytest.fixture(autouse=True)
def small_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(host.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(swapped_optimizer_state, "_SMALLEST", 4096)
    monkeypatch.setattr(host_mapped_moments, "_SMALLEST", 4096)
    monkeypatch.setattr(host_mapped_moments, "_PORTION", 1 << 17)


class Late:
    """Copies are made as late as is allowed: when compute waits for them, or a copy that follows them is made.

    What copies run from and to is not kept alive: whoever frees memory under a copy fails. `live` bytes are those of
    all that has been copied from or to and not been freed.
    """

    def __init__(self) -> None:
        self.order: list[str] = []
        self._jobs: dict[int, Callable[[], None]] = {}
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0xAB, dtype=torch.uint8)

    def d2h(self, source: torch.Tensor, buffer: Buffer) -> int:
        return self._copy("out", source, buffer, buffer.write)

    def h2d(self, buffer: Buffer, target: torch.Tensor) -> int:
        target.fill_(0xCD)
        return self._copy("back", target, buffer, buffer.read)

    def wait(self, mark: int) -> None:
        self._jobs.pop(mark, lambda: None)()

    @property
    def live(self) -> int:
        self._seen = {key: pair for key, pair in self._seen.items() if not pair[0].expired()}
        return sum(nbytes for _, nbytes in self._seen.values())

    def _copy(self, lane: str, memory: torch.Tensor, buffer: Buffer, copy: Callable[[torch.Tensor], Any]) -> int:
        self.order.append(f"{lane} {memory.numel()}")
        storage = memory.untyped_storage()
        reference, nbytes = StorageWeakRef(storage), storage.nbytes()
        self._seen[storage._cdata] = (reference, nbytes)

        def issue(after: list[int]) -> int:
            def job() -> None:
                for earlier in after:
                    self.wait(earlier)
                alive = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
                assert alive is not None, "memory was freed under a copy"
                copy(torch.empty(0, dtype=torch.uint8).set_(alive))

            self._jobs[len(self.order)] = job
            return len(self.order)

        return buffer.copied_by(issue)


def swapped(link: Any = None, times: int = 3, on_refusal: Any = None) -> SwappedOptimizerState:
    return SwappedOptimizerState(Late() if link is None else link, times, on_refusal)


PLACEMENTS: dict[str, Callable[[], Any]] = {"mapped": lambda: HostMappedMoments(None), "swapped": swapped}


def optimizer_of(
    home: Any, form: str = "fp32", shares: bool = False, kind: Any = FusedAdamW, own: bool = True, shapes: Any = SHAPES
) -> tuple[Any, list[torch.Tensor]]:
    """An optimizer and its parameters, which are copies of a model's bf16 weights, or if not `own` its weights."""
    generator = torch.Generator().manual_seed(3)
    mains = [torch.randn(shape, generator=generator) for shape in shapes]
    weights = [main.bfloat16() for main in mains]
    optimizer = kind(mains, lr=1e-2, weight_decay=0.1)
    if form != "fp32":
        optimizer.quantized_moments = QuantizedMoments(optimizer, lambda each: FORMS[form])
    if shares:
        optimizer.split_params = SplitFP32Params(optimizer, lambda: dict(zip(mains, weights, strict=True)))
    optimizer.placement = home
    optimizer.weights = dict(zip(mains, weights, strict=True)) if own else {}
    if isinstance(home, SwappedOptimizerState) and own:
        home.register(mains)
    return optimizer, mains


def step(optimizer: Any, mains: list[torch.Tensor], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for main in mains:
        main.grad = torch.randn(main.shape, generator=generator)
    if optimizer.split_params is None:
        optimizer.step_data = replace(optimizer.step_data, cast_targets=optimizer.weights)
    optimizer.step()


def state(optimizer: Any, mains: list[torch.Tensor]) -> list[torch.Tensor]:
    return [each for main in mains for each in (main, *(optimizer.state[main][name] for name in NAMES))]


def steps(optimizer: Any, mains: list[torch.Tensor], number: int = 3, first: int = 0) -> list[torch.Tensor]:
    """What it has then: parameters, moments, weights."""
    for each in range(first, first + number):
        step(optimizer, mains, each)
    with optimizer.materialized():
        return [each.clone() for each in (*state(optimizer, mains), *optimizer.weights.values())]


def away(optimizer: Any, mains: list[torch.Tensor]) -> list[str]:
    """Placeholders, whose values are on the host."""
    named = [(str(tuple(main.shape)), {"param": main, **optimizer.state.get(main, {})}) for main in mains]
    return [
        f"{shape} {name}"
        for shape, found in named
        for name in ("param", *NAMES)
        if name in found and found[name].untyped_storage().nbytes() < found[name].nbytes
    ]


def mapped(optimizer: Any) -> list[tuple[int, ...]]:
    """Shapes of the parameters whose moments are in mapped memory."""
    return [main.shape for main, (found, places) in optimizer.placement._held.items() if found["exp_avg"] is places[0]]


def all_of(*names: str) -> list[str]:
    return [f"{shape} {name}" for shape in LARGE for name in names]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("placement", "kind", "form", "shares"),
    [
        *(("swapped", FusedAdamW, form, shares) for form in FORMS for shares in (False, True)),
        *(("mapped", FusedAdamW, form, form == "fp8") for form in ("fp32", "fp8")),
        ("swapped", FusedAdam, "fp8", True),
    ],
)
def test_every_form_trains_to_the_same_bits(placement: str, form: str, shares: bool, kind: Any) -> None:
    expected = steps(*optimizer_of(None, form, shares, kind), 4)
    optimizer, mains = optimizer_of(PLACEMENTS[placement](), form, shares, kind)
    assert same(steps(optimizer, mains, 4), expected)
    # Halves stay, and the exponents of fp8, of which there is one for 128 values.
    size = 2 * FORMS[form].itemsize + (4 if placement == "swapped" and not shares else 0)
    assert optimizer.placement.nbytes == size * NUMBERS
    if placement == "mapped":
        optimizer.step()
        assert mapped(optimizer) == LARGE
    else:
        assert optimizer.placement._pool.nbytes <= 1.125 * size * NUMBERS, "buffers are used again"
        sizes = [optimizer.state[main]["exp_avg"].untyped_storage().nbytes() for main in mains if main.numel() > 100]
        assert max(sizes) <= 4, "placeholders"


@pytest.mark.parametrize("times", [1, 100])
@pytest.mark.parametrize("link", [Lanes, lambda: Lanes(bandwidth=2e8)], ids=["fast", "slow"])
def test_numbers_of_groups_and_bandwidths_change_no_bit(link: Any, times: int) -> None:
    optimizer, mains = optimizer_of(swapped(link(), times))
    assert away(optimizer, mains) == all_of("param"), "before the first step already"
    step(optimizer, mains, 0)
    assert away(optimizer, mains) == all_of("param", *NAMES)
    assert all(each.isnan().all() for each in (mains[0], optimizer.state[mains[1]]["exp_avg"]))
    assert same(steps(optimizer, mains, 2, first=1), steps(*optimizer_of(None)))


def test_weights_of_the_model_itself_stay() -> None:
    optimizer, mains = optimizer_of(swapped(), own=False)
    assert same(steps(optimizer, mains), steps(*optimizer_of(None, own=False)))
    assert away(optimizer, mains) == all_of(*NAMES)


def test_three_groups_are_on_the_device_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    link, times = Late(), 8
    optimizer, mains = optimizer_of(swapped(link, times), shapes=[(5_000,)] * 32)
    held: list[int] = []
    given = stepping.adamw

    def adamw(*arguments: Any, **rule: Any) -> None:
        held.append(link.live)
        given(*arguments, **rule)

    monkeypatch.setattr(stepping, "adamw", adamw)
    group = 32 * 5_000 * 12 // times
    for number in range(3):
        held.clear()
        # The first one makes the moments, and sends them away a tensor at a time.
        step(optimizer, mains, number)
        assert link.live == 0, "between steps nothing is on the device"
        # Its own and the next; with the one before from then on; and nothing follows the last.
        assert held == [2 * group, *[3 * group] * (times - 2), 2 * group]


def test_the_next_group_comes_before_this_one_is_waited_for() -> None:
    link = Late()
    optimizer, mains = optimizer_of(swapped(link, 3), own=False, shapes=[(2_000,), (3_000,), (4_000,)])
    step(optimizer, mains, 0)
    link.order.clear()
    one, two, three = ([f"{{}} {4 * size}"] * 2 for size in (2_000, 3_000, 4_000))
    order = [("back", one), ("back", two), ("out", one), ("back", three), ("out", two), ("out", three)]
    # Thirds of 9,000: the first two are a group, and the third.
    optimizer.placement._times = 9
    step(optimizer, mains, 1)
    assert link.order == [text.format(lane) for lane, texts in order for text in texts]


def test_portions_are_updated_and_released_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_mapped_moments, "_PORTION", 1 << 18)
    released: list[list[int]] = []
    monkeypatch.setattr(host, "release", lambda tensors: released.append([each.numel() for each in tensors]))
    optimizer, mains = optimizer_of(HostMappedMoments(None), shapes=SHAPES[:4])
    steps(optimizer, mains, 1)
    # 240 and 160 kB, then nothing and 360 kB.
    assert released == [[30_000, 30_000, 20_000, 20_000], [45_000, 45_000]]
    assert list(HostMappedMoments(None).update_groups([])) == []


def test_a_budget_is_kept_by_all_that_share_it() -> None:
    home = HostMappedMoments(8 * (30_000 + 45_000))
    one, mains = optimizer_of(home, shapes=SHAPES[:4])
    other, others = optimizer_of(home, shapes=SHAPES[:4])
    for each, own in ((one, mains), (other, others)):
        assert same(steps(each, own), steps(*optimizer_of(None, shapes=SHAPES[:4])))
    # The first has no room for its third, the other one for its second alone.
    assert home.nbytes == 8 * (30_000 + 20_000 + 20_000)
    del one, mains, other, others, each, own
    assert home.nbytes == 0, "what is gone takes nothing of the budget"


def test_no_more_room_is_said_once_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    expected = steps(*optimizer_of(None), 4)
    # The parameters take 4, 2, 3, 2 and 3 pieces, as do their moments.
    for fail_at, left in ((0, []), (9, ["(300, 100)", "(20000,)", "(50, 900)"]), (22, [*map(str, LARGE)])):
        said.clear()
        optimizer, mains = optimizer_of(swapped(Lanes(fail_at=fail_at), on_refusal=said.append))
        assert same(steps(optimizer, mains, 4), expected)
        assert [each.removesuffix(" param") for each in away(optimizer, mains) if "param" in each] == left
        assert len(said) == 1 and "bytes of host memory: no more pinned memory" in said[0]
    # The moments of the first alone had room.
    assert [each for each in away(optimizer, mains) if "exp" in each] == [f"(300, 100) {name}" for name in NAMES]
    given, number = host.empty, iter(range(100))

    def empty(*arguments: Any) -> torch.Tensor:
        if next(number) >= 3:
            raise MemoryError("no room")
        return given(*arguments)

    monkeypatch.setattr(host, "empty", empty)
    said.clear()
    optimizer, mains = optimizer_of(HostMappedMoments(None, said.append))
    assert same(steps(optimizer, mains, 4), expected)
    # The second parameter got one of its two.
    assert mapped(optimizer) == [SHAPES[0]] and said == ["no room"]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("form", "shares"), [("fp32", False), ("fp8", False), ("fp8", True)])
def test_a_checkpoint_comes_and_goes(form: str, shares: bool, placement: str) -> None:
    optimizer, mains = optimizer_of(PLACEMENTS[placement](), form, shares)
    steps(optimizer, mains, 2)
    with optimizer.materialized():
        written = copy.deepcopy(optimizer.state_dict())
        values = [main.clone() for main in mains]
    others = []
    for home, trains in ((PLACEMENTS[placement](), False), (PLACEMENTS[placement](), True), (None, False)):
        again, own = optimizer_of(home, form, shares)
        # Into one that has been trained, whose moments others replace.
        if trains:
            steps(again, own, 1, first=7)
        with torch.no_grad(), again.materialized():
            for main, value in zip(own, values, strict=True):
                main.copy_(value)
            loaded = copy.deepcopy(written)
            again.load_state_dict(loaded)
        if placement == "swapped" and home is not None:
            assert away(again, own) == away(optimizer, mains), "it leaves at once"
        others.append(steps(again, own, 2, first=2))
        if placement == "swapped" and home is not None:
            # torch keeps the tensors it is given; others who have them go on reading values.
            states = zip(loaded["state"].values(), written["state"].values(), strict=True)
            assert all(
                torch.equal(one["exp_avg"], other["exp_avg"]) for one, other in states if one["exp_avg"].dim() > 1
            )
    expected = steps(optimizer, mains, 2, first=2)
    assert all(same(found, expected) for found in others)


def test_plain_copies_are_of_the_host_and_move_nothing() -> None:
    for form, shares in (("fp32", False), ("bf16", False), ("fp32", True), ("fp8", True)):
        optimizer, mains = optimizer_of(swapped(), form, shares)
        steps(optimizer, mains, 2)
        before = away(optimizer, mains)
        plain = [optimizer.fp32_copy(main) for main in mains]
        assert away(optimizer, mains) == before
        optimizer.placement.restore()
        for main, found in zip(mains, plain, strict=True):
            with optimizer.materialized([main]):
                expected = {"param": main, **{name: optimizer.state[main][name] for name in NAMES}}
                assert found.keys() == expected.keys()
                assert all(torch.equal(found[name].abs(), expected[name].abs()) for name in expected)
                assert (found["param"] == main).all()


def test_one_whole_inside_another_leaves_it_to_that() -> None:
    optimizer, mains = optimizer_of(swapped())
    steps(optimizer, mains, 1)
    before = away(optimizer, mains)
    with optimizer.materialized():
        with optimizer.materialized(mains[:1]):
            optimizer.fp32_copy(mains[1])
        assert away(optimizer, mains) == []
    assert away(optimizer, mains) == before
    with pytest.raises(ValueError, match="body"), optimizer.materialized(mains[:2]):
        raise ValueError("body")
    assert away(optimizer, mains) == before


def test_a_step_of_torch_and_parameters_without_gradients() -> None:
    found = []
    for home in (None, swapped()):
        optimizer, mains = optimizer_of(home)
        steps(optimizer, mains, 2)
        with optimizer.materialized(mains[:1]):
            # Such a parameter is copied into its weight as it is.
            mains[0].add_(1.0)
        for main in mains:
            main.grad = torch.ones_like(main)
        mains[0].grad = mains[3].grad = None
        optimizer.step_data = replace(optimizer.step_data, cast_targets=optimizer.weights)
        optimizer.step()
        found.append(steps(optimizer, mains, 0))
        for group in optimizer.param_groups:
            group["maximize"] = True
        step(optimizer, mains, 5)
        found[-1] += steps(optimizer, mains, 0)
        if home is not None:
            assert away(optimizer, mains) == all_of("param", *NAMES)
    assert all(map(torch.equal, *found))


def test_an_update_that_fails_leaves_values_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, mains = optimizer_of(swapped(times=4))
    expected = steps(optimizer, mains, 2)
    given, calls = stepping.adamw, iter(range(100))

    def adamw(*arguments: Any, **rule: Any) -> None:
        if next(calls) == 1:
            raise RuntimeError("no kernel")
        given(*arguments, **rule)

    monkeypatch.setattr(stepping, "adamw", adamw)
    with pytest.raises(RuntimeError, match="no kernel"):
        step(optimizer, mains, 2)
    # The first group, of two parameters, has been updated; nothing else has changed.
    found = steps(optimizer, mains, 0)
    assert all(map(torch.equal, found[6:18], expected[6:18]))
    assert not any(map(torch.equal, found[:6], expected[:6]))
    assert away(optimizer, mains) == all_of("param", *NAMES)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_after_the_end_it_is_an_ordinary_optimizer(placement: str) -> None:
    optimizer, mains = optimizer_of(PLACEMENTS[placement]())
    expected = steps(optimizer, mains, 2)
    placement_itself = optimizer.placement
    for _ in range(2):
        optimizer.restore()
        assert placement_itself.nbytes == 0 and optimizer.placement is None and away(optimizer, mains) == []
    assert same(state(optimizer, mains), expected[: 3 * len(mains)])
    assert same(steps(optimizer, mains, 1, first=2), steps(*optimizer_of(None)))
    assert placement_itself.nbytes == 0
