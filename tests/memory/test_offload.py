"""Activations in host memory: gradients to the last bit, in any order of passes, hidden where arithmetic allows it."""

from __future__ import annotations

import contextlib
import gc
import random
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mindspeed_lite.memory import offload as module
from mindspeed_lite.memory.copy_engine import Buffer, PinnedBufferPool
from mindspeed_lite.memory.offload import Offload
from tests.harness.lanes import Lanes

WIDTH, ROWS, LAYERS = 64, 96, 5


@pytest.fixture(autouse=True)
def small_storages_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's activations here are 24 KiB each."""
    monkeypatch.setattr("mindspeed_lite.memory.offload.SMALLEST", 1024)


class Layer(torch.nn.Module):
    """Norm, a wide product and back: what a transformer's MLP keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        wide = torch.nn.functional.gelu(self.up(self.norm(x) * table))
        return x + self.down(wide)


class Model:
    """Layers of a chunk, run with or without an offload around them."""

    def __init__(self, layers: int = LAYERS) -> None:
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(layers))
        self.table = torch.randn(ROWS, WIDTH)

    def forward(self, x: torch.Tensor, offload: Offload | None, recompute: int = 0) -> torch.Tensor:
        with contextlib.nullcontext() if offload is None else offload.forward_pass():
            for number, layer in enumerate(self.layers):
                run = checkpoint if number < recompute else lambda function, *args, **kwargs: function(*args)
                x = run(self._one, layer, x, offload, use_reentrant=True)
        return x

    def _one(self, layer: torch.nn.Module, x: torch.Tensor, offload: Offload | None) -> torch.Tensor:
        if offload is None:
            return layer(x, self.table)
        with offload.layer(id(layer), layer.parameters()) as on_output, offload.saving():
            x = layer(x, self.table)
        on_output(x)
        return x

    def gradients(self) -> list[torch.Tensor]:
        found = [each.grad for each in self.layers.parameters()]
        self.layers.zero_grad()
        return found  # type: ignore[return-value]


def batch(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def train(offload: Offload | None, order: str = "FBFB", **kwargs: Any) -> list[torch.Tensor]:
    """Gradients after forward (F) and backward (B) passes, the oldest forward first (B) or the newest (b)."""
    model, waiting, inputs = Model(), [], []
    for number, each in enumerate(order):
        if each == "F":
            inputs.append(batch(number))
            waiting.append(model.forward(inputs[-1], offload, **kwargs))
        else:
            waiting.pop(0 if each == "B" else -1).square().sum().backward()
    return [*model.gradients(), *(each.grad for each in inputs)]  # type: ignore[list-item]


def offload(lanes: Lanes, **kwargs: Any) -> Offload:
    return Offload(lanes, "cpu", **kwargs)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("order", ["FB", "FBFB", "FFFBBB", "FFFbbb", "FFBFBB", "FFbFbb"])
@pytest.mark.parametrize("bandwidth", [float("inf"), 2e7])
def test_gradients_are_the_same_in_any_order_of_passes(order: str, bandwidth: float) -> None:
    lanes = Lanes(bandwidth)
    assert same(train(offload(lanes), order), train(None, order))
    assert not lanes.faults
    # What is held elsewhere went out in vain once: a batch and the table.
    in_vain = 2 * ROWS * WIDTH * 4
    assert lanes.moved["out"] - in_vain == lanes.moved["back"] > 0


@pytest.mark.parametrize("recompute", [1, 3, LAYERS])
def test_layers_that_are_computed_again_move_nothing(recompute: int) -> None:
    lanes = Lanes()
    assert same(train(offload(lanes), recompute=recompute), train(None))
    assert (lanes.moved["back"] > 0) == (recompute < LAYERS - 1)


def test_device_memory_is_freed_and_buffers_are_used_again() -> None:
    lanes, model = Lanes(), Model(12)
    using = offload(lanes)
    out = model.forward(batch(0), using)
    records = [each for each in gc.get_objects() if type(each) is module._Record]
    on_device = [each for each in records if each.storage is not None]
    away = [each for each in records if each.storage is None]
    # Of twelve layers only the last is there, besides what is held elsewhere: the table and the batch.
    assert len(away) >= 10 * 4 and len(on_device) <= 7, (len(away), len(on_device))
    taken = len(lanes.allocated)
    out.sum().backward()
    del out, records, on_device, away
    for number in range(3):
        model.forward(batch(number), using).sum().backward()
    assert len(lanes.allocated) == taken, "every buffer serves again"


def test_what_others_hold_does_not_move_again() -> None:
    lanes, model = Lanes(), Model()
    using = offload(lanes)
    held = batch(0)
    model.forward(held, using).sum().backward()
    first = dict(lanes.moved)
    model.forward(held, using).sum().backward()
    # The table and the batch went out in the first pass, and nobody fetched them.
    assert first["out"] - first["back"] == model.table.nbytes + held.nbytes
    assert lanes.moved["out"] == first["out"] + first["back"] and lanes.moved["back"] == 2 * first["back"]


def test_an_emptied_storage_is_left_to_who_computes_it_again() -> None:
    """As recomputation does it: the output is emptied after its consumer ran, filled before its gradient is."""

    class Again(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            normed = self.norm(x)
            y = self.linear(normed)
            size, source = normed.untyped_storage().nbytes(), x.detach()
            storage = normed.untyped_storage()
            storage.resize_(0)

            def fill(gradient: torch.Tensor) -> None:
                storage.resize_(size)
                storage.copy_(
                    torch.nn.functional.layer_norm(source, (WIDTH,), *self.norm.parameters()).untyped_storage()
                )

            y.register_hook(fill)
            return x + torch.relu(y)

    def run(using: Offload | None) -> list[torch.Tensor]:
        model = Model()
        torch.manual_seed(2)
        model.layers = torch.nn.ModuleList(Again() for _ in range(LAYERS))
        model.forward(batch(5), using).sum().backward()
        return model.gradients()

    lanes = Lanes()
    assert same(run(offload(lanes)), run(None))
    # Norm's input and relu's output of all layers but the last; the emptied ones would be as many again.
    assert 0 < lanes.moved["out"] <= (LAYERS - 1) * 2 * ROWS * WIDTH * 4


def test_who_comes_to_the_address_of_an_emptied_storage_is_another() -> None:
    using, x, met, rounds = offload(Lanes()), batch(1), 0, 0
    guards: list[torch.Tensor] = []
    # How soon a block comes again depends on what the process has freed before.
    while met < 4 and rounds < 1000:
        rounds += 1
        with using.forward_pass(), using.layer(0, []), using.saving():
            emptied = x * 1
            guards.append(torch.empty(ROWS, WIDTH))
            sine = emptied.sin()
            storage, values = emptied.untyped_storage(), emptied.detach().clone()
            address = storage.data_ptr()
            storage.resize_(0)
            # The allocator gives the block again that was freed, often at once, sometimes after other free ones.
            tried = [torch.randn(ROWS, WIDTH)]
            while tried[-1].data_ptr() != address and len(tried) < 32:
                tried.append(torch.randn(ROWS, WIDTH))
            here = tried[-1].requires_grad_()
            met += here.data_ptr() == address
            cosine = here.cos()
        (found,) = torch.autograd.grad(cosine.sum(), here)
        assert torch.equal(found, -here.sin())
        storage.resize_(values.nbytes)
        emptied.data.copy_(values)
        (found,) = torch.autograd.grad(sine.sum(), x)
        assert torch.equal(found, values.cos())
    assert met, "no block was given again: this shows nothing"


class Rounding:
    """A host allocator that rounds up to powers of two and keeps what is freed, as PyTorch's."""

    def __init__(self) -> None:
        self.pinned = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.pinned += 1 << (nbytes - 1).bit_length()
        return torch.empty(nbytes, dtype=torch.uint8)


def test_pinned_memory_stays_within_its_budget_and_near_what_is_asked_for() -> None:
    engine, draws = Rounding(), random.Random(1)
    pool = PinnedBufferPool(engine, budget=40 << 20)
    held: list[Buffer] = []
    asked = [draws.randrange(1 << 16, 6 << 20) for _ in range(200)]
    for nbytes in asked:
        while True:
            try:
                held.append(pool.acquire(nbytes))
            except MemoryError:
                pool.release(held.pop(draws.randrange(len(held))))
            else:
                break
        assert held[-1].nbytes >= nbytes and engine.pinned == pool.nbytes <= 40 << 20
    single = PinnedBufferPool(Rounding())
    assert all(nbytes <= single.acquire(nbytes).nbytes <= 1.125 * nbytes + 4096 for nbytes in [*asked, 1, 1 << 20])
    values, back = torch.randint(0, 255, (70_001,), dtype=torch.uint8), torch.zeros(70_001, dtype=torch.uint8)
    buffer = single.acquire(70_001)
    buffer.write(values)
    buffer.read(back)
    assert len(buffer.pieces) > 1 and torch.equal(values, back)


@pytest.mark.parametrize("lack", ["budget", "allocation"])
def test_too_little_host_memory_is_said_once_and_loses_nothing(lack: str) -> None:
    said: list[str] = []
    lanes = Lanes(fail_at=4 if lack == "allocation" else None)
    using = offload(lanes, budget=150_000 if lack == "budget" else None, on_refusal=said.append)
    assert same(train(using, "FFBB"), train(None, "FFBB"))
    assert len(said) == 1 and ("budget of 150,000 bytes" if lack == "budget" else "no more pinned memory") in said[0]
    assert lanes.moved["back"] > 0 and (lack == "allocation" or using.nbytes <= 150_000)


def test_a_graph_that_fails_is_dropped_or_kept_is_right() -> None:
    lanes, model = Lanes(1e7), Model()
    using = offload(lanes)
    table, model.table = model.table, torch.randn(3, 3)
    with pytest.raises(RuntimeError):
        model.forward(batch(0), using)
    model.table = table
    for _ in range(3):
        model.forward(batch(1), using)  # no backward pass
    with torch.no_grad():
        model.forward(batch(1), using)
    out = model.forward(batch(1), using).sum()
    out.backward(retain_graph=True)
    once = model.gradients()
    out.backward()
    again = model.gradients()
    model.forward(batch(1), None).sum().backward()
    expected = model.gradients()
    assert same(once, expected) and same(again, expected)
