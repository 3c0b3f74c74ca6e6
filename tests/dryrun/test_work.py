"""What a dry run records: operators by module and pass, their flops and bytes, and what is kept for backward."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mindspeed_lite.dryrun.fake_tensors import StoragelessMode
from mindspeed_lite.dryrun.work import SavedRecorder, WorkRecorder
from mindspeed_lite.ops import traced
from mindspeed_lite.ops.attention import attention
from mindspeed_lite.ops.grouped_matmul import grouped_matmul
from mindspeed_lite.planner.work import Product, Scores

ROWS, WIDTH, LAYERS = 8, 16, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


class Block(nn.Module):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.layers:
            x = checkpoint(each, x, use_reentrant=True) if self.recomputes else each(x)
        return x


@pytest.fixture
def recorder(monkeypatch):
    found = WorkRecorder()
    monkeypatch.setattr(traced, "dry", True)
    monkeypatch.setattr(traced, "observer", found.kernel)
    mode = StoragelessMode()
    mode.observe = found.observe
    with mode:
        yield found


@pytest.mark.parametrize("recomputes", [False, True])
def test_passes_of_a_layer_belong_to_its_modules(recorder, recomputes):
    model = nn.Module()
    model.decoder = Block(recomputes)
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    saved = SavedRecorder(recorder, {each.untyped_storage()._cdata for each in model.parameters()}.__contains__)
    with recorder.recording([model]), saved:
        for _ in range(2):
            model.decoder(x).sum().backward()
    operations, _ = recorder.last_micro_batch()
    products = Counter((each.module, each.during) for each in operations if each.work)
    for layer in range(LAYERS):
        for name in ("first", "second"):
            path = f"decoder.layers.{layer}.{name}"
            assert products[path, "forward"] == 1 and products[path, "backward"] == 2
            assert products[path, "recompute"] == recomputes
    one = next(each for each in operations if each.work)
    assert one.work == Product(ROWS, WIDTH, WIDTH) and one.flops == 2 * ROWS * WIDTH * WIDTH
    assert one.bytes == 4 * (2 * ROWS * WIDTH + WIDTH * WIDTH)
    relu = [each for each in operations if each.name == "relu" and each.during == "forward"]
    assert [each.module for each in relu] == [f"decoder.layers.{each}" for each in range(LAYERS)]
    # Each layer keeps its input, and unless recomputed the output of the activation, which is the input of `second`.
    kept = Counter(module[: len("decoder.layers.0")] for _, module, _ in saved.after_forward[-1])
    assert kept == {f"decoder.layers.{each}": 1 if recomputes else 2 for each in range(LAYERS)}
    most = max(saved.peaks.values())
    assert most == 4 * ROWS * WIDTH * ((LAYERS + 1) if recomputes else 2 * LAYERS)


def test_kernels_of_the_package_are_one_operation(recorder):
    q = torch.ones(64, 2, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    x, weights = torch.ones(10, 8, requires_grad=True), [torch.ones(6, 8, requires_grad=True) for _ in range(2)]
    with recorder.recording([]):
        attention(q, q, q, window=(15, 0)).sum().backward()
        grouped_matmul(x, weights, [4, 6]).sum().backward()
    found = [(each.work, each.flops) for each in recorder.operations if each.work]
    # Sixteen keys for a query, fewer for the first fifteen.
    scores = Scores(2, 64, 64, 4, 8, 8, (16 * 64 - 120) / 64**2, True)
    forward = Product(10, 8, 6, 2)
    assert found[:2] == [(scores, scores.flops), (scores, 2.5 * scores.flops)]
    assert found[2:] == [(work, forward.flops) for work in (forward, Product(10, 6, 8, 2), forward)]


def test_without_a_dry_run_nothing_is_told():
    assert traced.observer is None
    found = attention(*[torch.ones(2, 1, 1, 4)] * 3, causal=True)
    assert torch.equal(found, torch.ones(2, 1, 1, 4))
