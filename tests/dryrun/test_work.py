"""What a dry run counts: operators by module and pass, their operations and bytes, and modules of saved tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mindspeed_lite.dryrun.fake_tensors import StoragelessMode
from mindspeed_lite.dryrun.work import WorkRecorder
from mindspeed_lite.memory.saved_tensors import Tracker
from mindspeed_lite.ops import traced
from mindspeed_lite.ops.attention import attention
from mindspeed_lite.ops.grouped_matmul import grouped_matmul

ROWS, WIDTH, LAYERS, STEPS = 8, 16, 3, 2
PRODUCT = 2 * ROWS * WIDTH * WIDTH


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
def mode(monkeypatch):
    monkeypatch.setattr(traced, "dry", True)
    with StoragelessMode() as found:
        yield found


def counted(recorder, name):
    return {(each["module"], each["pass"]): each[name] for each in recorder.counted() if each[name]}


@pytest.mark.parametrize("recomputes", [False, True])
def test_passes_of_a_layer_belong_to_its_modules(mode, recomputes):
    recorder = WorkRecorder()
    model = nn.Module()
    model.decoder = Block(recomputes)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    weights = {each.untyped_storage()._cdata for each in model.parameters()}
    saved = Tracker(weights.__contains__, counts_fake=True, module=recorder.module)
    with recorder.recording(mode, [model]), saved:
        for _ in range(STEPS):
            model.decoder(x).sum().backward()
        recorder.within("optimizer")(optimizer.step)()
    passes = {"forward": 1, "backward": 2, **({"recompute": 1} if recomputes else {})}
    modules = [f"decoder.layers.*.{name}" for name in ("first", "second")]
    assert counted(recorder, "flops") == {
        (module, during): times * LAYERS * STEPS * PRODUCT for module in modules for during, times in passes.items()
    }
    launches, sizes = (counted(recorder, name) for name in ("launches", "bytes"))
    assert launches["decoder.layers.*.first", "forward"] == LAYERS * STEPS
    assert sizes["decoder.layers.*.first", "forward"] == LAYERS * STEPS * 4 * (2 * ROWS * WIDTH + WIDTH * WIDTH)
    assert {during for _, during in launches} == {*passes, "optimizer"}
    # Of a layer itself: its activation.
    assert launches["decoder.layers.*", "forward"] == LAYERS * STEPS
    assert launches["", "optimizer"] == 2 * LAYERS
    # A recomputed layer keeps its input; others keep the input of both products, one as the activation's result.
    kept = {each.module: each.count for each in saved.at_peak}
    assert sum(kept.values()) == (LAYERS + 1 if recomputes else 2 * LAYERS)
    assert kept["decoder" if recomputes else "decoder.layers.*"] == LAYERS


def test_a_kernel_of_the_package_is_one_launch(mode):
    recorder = WorkRecorder()
    q = torch.ones(64, 2, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    x, weights = torch.ones(10, 8, requires_grad=True), [torch.ones(6, 8, requires_grad=True) for _ in range(2)]
    with recorder.recording(mode, []):
        with torch.no_grad():
            grouped_matmul(x, weights, [4, 6])
        assert counted(recorder, "launches") == {("", "forward"): 1}
        assert counted(recorder, "flops") == {("", "forward"): 2 * 10 * 8 * 6}
        attention(q, q, q, window=(15, 0)).sum().backward()
    assert traced.observer is None
    # Sixteen keys for a query, fewer for the first fifteen.
    forward = 2 * 2 * 4 * (16 * 64 - 120) * (8 + 8)
    assert counted(recorder, "flops") == {("", "forward"): 2 * 10 * 8 * 6 + forward, ("", "backward"): 5 * forward // 2}
