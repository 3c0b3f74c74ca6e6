"""What a step costs the host: each synchronisation, and nothing else; launches and time of modules."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn.modules import module

from mindspeed_lite.dryrun.fake_tensors import StoragelessMode
from mindspeed_lite.dryrun.work import WorkRecorder
from mindspeed_lite.tuning.host import StepWatch
from mindspeed_lite.tuning.synchronizations import SynchronizationRecorder
from tests.harness import matrix


def calls(run, host_is_device=True):
    x, mask = torch.arange(4.0), torch.tensor([True, False, True, False])
    with SynchronizationRecorder(host_is_device) as recorder:
        run(x, mask)
    assert all(re.fullmatch(rf"{__name__}:\d+ (<lambda>|through_torch)", place) for _, place in recorder.counts)
    return {call: count for (call, _), count in recorder.counts.items()}


def through_torch(x, mask):
    return torch.stack([x, x]).norm()


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda x, mask: x[0].item(), {"item": 1}),
        (lambda x, mask: [float(x[0]), int(x[1]), bool(x[2])], {"__float__": 1, "__int__": 1, "__bool__": 1}),
        (lambda x, mask: f"{x[0]:.3f}", {"__format__": 1}),
        (lambda x, mask: (x.tolist(), x.numpy()), {"tolist": 1, "numpy": 1}),
        (lambda x, mask: x[:2] + 1, {}),
        (lambda x, mask: (mask.nonzero(), torch.unique(x), x.equal(x)), {"nonzero": 1, "unique": 1, "equal": 1}),
        (
            lambda x, mask: (x.masked_select(mask), x.long().bincount(), torch.argwhere(mask)),
            {"masked_select": 1, "bincount": 1, "argwhere": 1},
        ),
        (lambda x, mask: torch.where(mask, x, -x), {}),
        (lambda x, mask: torch.where(mask), {"where": 1}),
        (lambda x, mask: torch.repeat_interleave(x, mask.long()), {"repeat_interleave": 1}),
        (lambda x, mask: torch.repeat_interleave(mask.long()), {"repeat_interleave": 1}),
        (lambda x, mask: x.repeat_interleave(repeats=mask.long()), {"repeat_interleave": 1}),
        (lambda x, mask: (torch.repeat_interleave(x, mask.long(), output_size=2), x.repeat_interleave(2)), {}),
        (lambda x, mask: torch.nn.functional.one_hot(x.long()), {"one_hot": 1}),
        (lambda x, mask: torch.nn.functional.one_hot(x.long(), 4), {}),
        (lambda x, mask: (torch.histc(x, 4), torch.histc(x, 4, 0, 3), x.histc(4, min=0, max=3)), {"histc": 1}),
        (lambda x, mask: x.narrow(0, 0, 2 * mask[0].long()), {"narrow": 1}),
        (lambda x, mask: torch.tensor([x[0], x[1]]), {"tensor": 1}),
        (lambda x, mask: (torch.tensor([1.0]), torch.tensor([1.0], device="meta")), {"tensor": 1}),
        # A copy is on the host, and what is made of it; its source is not.
        (lambda x, mask: x.cpu().tolist(), {"cpu": 1}),
        (lambda x, mask: x.to("cpu", torch.float64)[0].item(), {"to": 1}),
        (lambda x, mask: (x.to(x.device), x.to("cpu", non_blocking=True)), {}),
        (lambda x, mask: [bool(2 * each > 0) for each in x.cpu()], {"cpu": 1}),
        (lambda x, mask: (x.cpu(), x.tolist()), {"cpu": 1, "tolist": 1}),
        (lambda x, mask: x.cpu().to("meta"), {"cpu": 1, "to": 1}),
        (lambda x, mask: (torch.tensor([2])[0].item(), x.narrow(0, 0, torch.tensor(2))), {}),
        (lambda x, mask: torch.tensor([2.0], device=x.device).item(), {"item": 1}),
        (lambda x, mask: torch.as_tensor(x)[0].item(), {"item": 1}),
        (lambda x, mask: torch.repeat_interleave(input=x, repeats=mask.long()), {"repeat_interleave": 1}),
        (lambda x, mask: (torch.tensor(data=[1]), x.copy_(other=x), torch.where(condition=mask)), {"where": 1}),
        (lambda x, mask: torch.all(torch.get_rng_state() == torch.get_rng_state()).item(), {}),
        (lambda x, mask: [x[0].item() for _ in range(3)], {"item": 3}),
        (through_torch, {}),
    ],
)
def test_every_call_that_waits_is_counted_and_no_other(run, expected):
    assert calls(run) == expected


def test_a_tensor_that_the_device_layer_leaves_in_place_is_on_the_device(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, **options: self)
    with SynchronizationRecorder(True) as recorder:
        torch.tensor([1.0]).cuda(non_blocking=True).item()
    assert [call for call, _ in recorder.counts] == ["item"]


def test_tensors_of_the_host_do_not_count_beside_a_device():
    assert calls(lambda x, mask: (x.tolist(), x.cpu(), mask.nonzero()), host_is_device=False) == {}
    on_device = torch.ones(4, device="meta")
    assert calls(lambda x, mask: on_device.copy_(x), False) == {"copy_": 1}
    assert calls(lambda x, mask: x.to("meta"), False) == {"to": 1}
    assert calls(lambda x, mask: (x.to("meta", non_blocking=True), on_device.copy_(x, True)), False) == {}


def test_waits_for_a_device_are_counted_and_given_back(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", original := lambda: None)
    assert calls(lambda x, mask: torch.cuda.synchronize()) == {"torch.cuda.synchronize": 1}
    assert torch.cuda.synchronize is original
    # Not called: without a device they would fail.
    waits = (torch.cuda.empty_cache, torch.cuda.Event.synchronize, torch.cuda.Stream.synchronize)
    with SynchronizationRecorder(True) as recorder:
        for each in ("empty_cache", "synchronize"):
            getattr(torch.cuda, each)()
        torch.cuda.Event.synchronize(None)
        torch.cuda.Stream.synchronize(None)
    assert sorted(call for call, _ in recorder.counts) == [
        "torch.cuda.Event.synchronize", "torch.cuda.Stream.synchronize", "torch.cuda.empty_cache",
        "torch.cuda.synchronize",
    ]  # fmt: skip
    assert waits == (torch.cuda.empty_cache, torch.cuda.Event.synchronize, torch.cuda.Stream.synchronize)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda x, mask: x[mask], {"[mask]": 1}),
        (lambda x, mask: x.__setitem__(mask, x[:2] + 1), {"[mask]": 1}),
        (lambda x, mask: x.__setitem__(mask, 1.0), {}),
        (lambda x, mask: x[mask.sum()], {"[number]": 1}),
        (lambda x, mask: torch.arange(mask.sum()), {"[number]": 1}),
        (lambda x, mask: x[mask.sum().item()], {}),
    ],
)
@pytest.mark.parametrize("is_dry", [False, True])
def test_reads_within_torch_are_counted(run, expected, is_dry):
    x, mask = torch.arange(4.0), torch.tensor([True, False, True, False])
    if is_dry:
        mode, recorder = StoragelessMode(), WorkRecorder()
        with mode:
            given = torch.zeros(4), torch.zeros(4, dtype=torch.bool)
            with recorder.recording(mode, []):
                run(*given)
        found = recorder.synchronizations.counts
    else:
        watch = StepWatch(host_is_device=True)
        with watch.counting([]):
            run(x, mask)
        found = watch.launches.reads
    assert {call: count for (call, _), count in found.items() if call.startswith("[")} == expected


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(8, 8), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # With hooks of their own Megatron's code would run in place of some features.
        assert not (self.linear._forward_hooks or self.linear._forward_pre_hooks)
        return self.activation(self.linear(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.layers:
            x = each(x)
        return x


def test_launches_and_times_are_those_of_the_modules():
    model, watch = Block(), StepWatch(host_is_device=True)

    def step() -> None:
        made = model(torch.ones(2, 8, requires_grad=True) + 0)
        made[made > 0].sum().backward()

    hooks = lambda: len(module._global_forward_hooks) + len(module._global_forward_pre_hooks)  # noqa: E731
    with watch.counting([model]):
        step()
    assert "forward ms" not in watch.to_text(80), "nothing was timed"
    with watch.timing([model]):
        step()
    assert hooks() == 0
    assert {key: len(each) for key, each in watch.times.seconds.items()} == {
        (kind, during): count
        for kind, count in (("", 1), ("layers.*", 3), ("layers.*.linear", 3), ("layers.*.activation", 3))
        for during in ("forward", "backward")
    }
    times = {key: sum(each) for key, each in watch.times.seconds.items()}
    assert times["", "forward"] > times["layers.*", "forward"] > times["layers.*.linear", "forward"] > 0
    text = watch.to_text(100)
    # An index by a mask counts in both passes.
    # A linear layer: addmm; backward two products and a sum. The activation: one kernel each.
    rows = {line.split()[0]: line.split()[1:4] for line in text.splitlines() if line.startswith("layers.*")}
    assert rows == {
        "layers.*": ["3", "2", "4"],
        "layers.*.linear": ["3", "1", "3"],
        "layers.*.activation": ["3", "1", "1"],
    }
    assert re.search(r"^2 synchronisations in a step:\n.*\n.*\n +2 +\[mask\] +outside of the model\n", text), text


@matrix.whole
def test_counting_changes_no_bit():
    # Under a mode of the dispatcher a compiled function would run uncompiled, with other random numbers.
    dropped = torch.compile(lambda x: torch.nn.functional.dropout(x, 0.5, True))
    x, watch = torch.ones(64), StepWatch(host_is_device=True)

    def drawn() -> torch.Tensor:
        torch.manual_seed(0)
        return dropped(x)

    expected = drawn()
    with watch.counting([Block()]):
        assert torch.equal(drawn(), expected)
    assert watch.launches.counts["", "forward"] >= 1
