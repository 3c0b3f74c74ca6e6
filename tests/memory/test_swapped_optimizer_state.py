"""Numbers that come and go in groups: the step of an optimizer to the last bit, in the order that memory wants."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mindspeed_lite.memory import swapped_optimizer_state
from mindspeed_lite.memory.copy_engine import Buffer, CopyEngine
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


@pytest.fixture(autouse=True)
def small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapped_optimizer_state, "_SMALLEST", 4096)


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
        nbytes = source.numel()
        return self._copy("out", source, buffer, lambda memory: buffer.tensor[:nbytes].copy_(memory))

    def h2d(self, buffer: Buffer, target: torch.Tensor) -> int:
        target.fill_(0xCD)
        nbytes = target.numel()
        return self._copy("back", target, buffer, lambda memory: memory.copy_(buffer.tensor[:nbytes]))

    def wait(self, mark: int) -> None:
        self._jobs.pop(mark, lambda: None)()

    @property
    def live(self) -> int:
        self._seen = {key: pair for key, pair in self._seen.items() if not pair[0].expired()}
        return sum(nbytes for _, nbytes in self._seen.values())

    def _copy(self, lane: str, memory: torch.Tensor, buffer: Buffer, copy: Callable[[torch.Tensor], Any]) -> int:
        self.order.append(f"{lane} {memory.numel()}")
        storage = memory.untyped_storage()
        reference, nbytes, earlier = StorageWeakRef(storage), storage.nbytes(), buffer.last
        self._seen[storage._cdata] = (reference, nbytes)

        def job() -> None:
            if earlier is not None:
                self.wait(earlier)
            alive = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            assert alive is not None, "memory was freed under a copy"
            copy(torch.empty(0, dtype=torch.uint8).set_(alive))

        mark = buffer.last = len(self.order)
        self._jobs[mark] = job
        return mark


LINKS: dict[str, Callable[[], CopyEngine]] = {
    "slow": lambda: Lanes(bandwidth=2e8),
    "fast": Lanes,
    "late": Late,
}


def home_of(link: CopyEngine | None = None, times: int = 3, on_refusal: Any = None) -> SwappedOptimizerState:
    return SwappedOptimizerState(Late() if link is None else link, times, on_refusal)


def optimizer_of(
    home: SwappedOptimizerState | None,
    form: str = "fp32",
    shares: bool = False,
    kind: Any = FusedAdamW,
    own: bool = True,
    shapes: Any = SHAPES,
) -> tuple[Any, list[torch.Tensor]]:
    """An optimizer and its parameters, which are copies of a model's bf16 weights, or if not `own` its weights."""
    generator = torch.Generator().manual_seed(3)
    mains = [torch.randn(shape, generator=generator) for shape in shapes]
    weights = [main.bfloat16() for main in mains]
    optimizer = kind(mains, lr=1e-2, weight_decay=0.1)
    if form != "fp32":
        optimizer.quantized_moments = QuantizedMoments(
            optimizer, lambda each: {"bf16": torch.bfloat16, "fp8": torch.uint8}[form]
        )
    if shares:
        optimizer.split_params = SplitFP32Params(optimizer, lambda: dict(zip(mains, weights, strict=True)))
    optimizer.placement = home
    optimizer.weights = dict(zip(mains, weights, strict=True)) if own else {}
    if home is not None and own:
        home.register(mains)
    return optimizer, mains


def step(optimizer: Any, mains: list[torch.Tensor], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for main in mains:
        main.grad = torch.randn(main.shape, generator=generator)
    if optimizer.split_params is None:
        optimizer.step_data = replace(optimizer.step_data, cast_targets=optimizer.weights)
    optimizer.step()


def numbers(optimizer: Any, mains: list[torch.Tensor]) -> list[torch.Tensor]:
    with optimizer.materialized():
        found = [each.clone() for main in mains for each in (main, *(optimizer.state[main][name] for name in NAMES))]
    return [*found, *(each.clone() for each in optimizer.weights.values())]


def steps(optimizer: Any, mains: list[torch.Tensor], number: int = 3, first: int = 0) -> list[torch.Tensor]:
    """What it has then: parameters, moments, weights."""
    for each in range(first, first + number):
        step(optimizer, mains, each)
    return numbers(optimizer, mains)


def away(optimizer: Any, mains: list[torch.Tensor]) -> list[str]:
    """What holds no numbers."""
    named = [(str(tuple(main.shape)), {"param": main, **optimizer.state.get(main, {})}) for main in mains]
    return [
        f"{shape} {name}"
        for shape, found in named
        for name in ("param", *NAMES)
        if name in found and found[name].untyped_storage().nbytes() < found[name].nbytes
    ]


def all_of(*names: str) -> list[str]:
    return [f"{shape} {name}" for shape in LARGE for name in names]


@pytest.mark.parametrize("times", [1, 3, 100])
@pytest.mark.parametrize("link", LINKS)
def test_the_training_is_the_same_to_the_last_bit(link: str, times: int) -> None:
    expected = steps(*optimizer_of(None), 4)
    optimizer, mains = optimizer_of(home_of(LINKS[link](), times))
    assert away(optimizer, mains) == all_of("param"), "before the first step already"
    for number in range(4):
        step(optimizer, mains, number)
        assert away(optimizer, mains) == all_of("param", *NAMES)
        assert all(each.isnan().all() for each in (mains[0], optimizer.state[mains[1]]["exp_avg"]))
    assert all(map(torch.equal, numbers(optimizer, mains), expected))
    assert optimizer.placement.nbytes == 12 * NUMBERS


@pytest.mark.parametrize("kind", [FusedAdam, FusedAdamW])
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("form", ["fp32", "bf16", "fp8"])
def test_other_forms_move_as_they_stand(form: str, shares: bool, kind: Any) -> None:
    expected = steps(*optimizer_of(None, form, shares, kind), 4)
    optimizer, mains = optimizer_of(home_of(Lanes(bandwidth=2e8)), form, shares, kind)
    assert all(map(torch.equal, steps(optimizer, mains, 4), expected))
    # Halves stay, and the exponents of fp8, of which there is one for 128 numbers.
    size = {"fp32": 8, "bf16": 4, "fp8": 2}[form] + (0 if shares else 4)
    assert optimizer.placement.nbytes == size * NUMBERS
    assert optimizer.placement._pool.nbytes == size * NUMBERS, "buffers are used again"
    assert all(optimizer.state[main]["exp_avg"].untyped_storage().nbytes() <= 4 for main in mains if main.numel() > 100)


def test_weights_of_the_model_itself_stay() -> None:
    optimizer, mains = optimizer_of(home_of(), own=False)
    assert all(map(torch.equal, steps(optimizer, mains), steps(*optimizer_of(None, own=False))))
    assert away(optimizer, mains) == all_of(*NAMES)


def test_three_groups_are_on_the_device_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    link, times = Late(), 8
    optimizer, mains = optimizer_of(home_of(link, times), shapes=[(5_000,)] * 32)
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


def test_a_group_ends_with_the_parameter_that_fills_it() -> None:
    home = home_of(times=3)
    optimizer, mains = optimizer_of(home)
    assert list(home.update_groups([])) == []
    step(optimizer, mains, 0)
    # 130,000 numbers: thirds of 43,333. What stays belongs to the group where it stands.
    assert list(home.update_groups(mains)) == [slice(0, 2), slice(2, 4), slice(4, 6)]
    assert list(home_of().update_groups(mains)) == [slice(0, 6)], "nothing of it has left"


def test_the_next_group_comes_before_this_one_is_waited_for() -> None:
    link = Late()
    optimizer, mains = optimizer_of(home_of(link, 3), own=False, shapes=[(2_000,), (3_000,), (4_000,)])
    step(optimizer, mains, 0)
    link.order.clear()
    one, two, three = ([f"{{}} {4 * size}"] * 2 for size in (2_000, 3_000, 4_000))
    order = [("back", one), ("back", two), ("out", one), ("back", three), ("out", two), ("out", three)]
    # Thirds of 9,000: the first two are a group, and the third.
    optimizer.placement._times = 9
    step(optimizer, mains, 1)
    assert link.order == [text.format(lane) for lane, texts in order for text in texts]


def test_no_more_room_is_said_once_and_loses_nothing() -> None:
    said: list[str] = []
    expected = steps(*optimizer_of(None), 4)
    for fail_at, left in ((0, []), (3, ["(300, 100)", "(20000,)", "(50, 900)"]), (7, [*map(str, LARGE)])):
        said.clear()
        optimizer, mains = optimizer_of(home_of(Lanes(fail_at=fail_at), on_refusal=said.append))
        assert all(map(torch.equal, steps(optimizer, mains, 4), expected))
        assert [each.removesuffix(" param") for each in away(optimizer, mains) if "param" in each] == left
        assert len(said) == 1 and "bytes of host memory: no more pinned memory" in said[0]
    # The moments of the first alone had room.
    assert [each for each in away(optimizer, mains) if "exp" in each] == [f"(300, 100) {name}" for name in NAMES]


@pytest.mark.parametrize(("form", "shares"), [("fp32", False), ("fp8", False), ("fp32", True), ("fp8", True)])
def test_a_checkpoint_comes_and_goes(form: str, shares: bool) -> None:
    optimizer, mains = optimizer_of(home_of(), form, shares)
    steps(optimizer, mains, 2)
    with optimizer.materialized():
        written = copy.deepcopy(optimizer.state_dict())
        values = [main.clone() for main in mains]
    others = []
    for home in (home_of(), home_of(), None):
        again, own = optimizer_of(home, form, shares)
        if home is not None and len(others) == 1:
            # Into one that has been trained, whose moments others replace.
            steps(again, own, 1, first=7)
        with torch.no_grad(), again.materialized():
            for main, value in zip(own, values, strict=True):
                main.copy_(value)
            loaded = copy.deepcopy(written)
            again.load_state_dict(loaded)
        if home is not None:
            assert away(again, own) == away(optimizer, mains), "it leaves at once"
        others.append(steps(again, own, 2, first=2))
        if home is not None:
            # torch keeps the tensors it is given; others who have them go on reading numbers.
            states = zip(loaded["state"].values(), written["state"].values(), strict=True)
            assert all(
                torch.equal(one["exp_avg"], other["exp_avg"]) for one, other in states if one["exp_avg"].dim() > 1
            )
    expected = steps(optimizer, mains, 2, first=2)
    assert all(torch.equal(one, other) for found in others for one, other in zip(found, expected, strict=True))


def test_plain_copies_are_of_the_host_and_move_nothing() -> None:
    for form, shares in (("fp32", False), ("bf16", False), ("fp32", True), ("fp8", True)):
        optimizer, mains = optimizer_of(home_of(), form, shares)
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
    optimizer, mains = optimizer_of(home_of())
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
    for home in (None, home_of()):
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
        found.append(numbers(optimizer, mains))
        for group in optimizer.param_groups:
            group["maximize"] = True
        step(optimizer, mains, 5)
        found[-1] += numbers(optimizer, mains)
        if home is not None:
            assert away(optimizer, mains) == all_of("param", *NAMES)
    assert all(map(torch.equal, *found))


def test_an_update_that_fails_leaves_numbers_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, mains = optimizer_of(home_of(times=4))
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
    found = numbers(optimizer, mains)
    assert all(map(torch.equal, found[6:18], expected[6:18]))
    assert not any(map(torch.equal, found[:6], expected[:6]))
    assert away(optimizer, mains) == all_of("param", *NAMES)


def test_after_the_end_it_is_an_ordinary_optimizer() -> None:
    optimizer, mains = optimizer_of(home_of(Lanes(bandwidth=2e8)))
    expected = steps(optimizer, mains, 2)
    optimizer.restore()
    assert optimizer.placement.nbytes == 0 and away(optimizer, mains) == []
    found = [each for main in mains for each in (main, *(optimizer.state[main][name] for name in NAMES))]
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, steps(optimizer, mains, 1, first=2), steps(*optimizer_of(None))))
    assert away(optimizer, mains) == []
    optimizer.restore()
