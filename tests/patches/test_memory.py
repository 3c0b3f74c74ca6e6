"""What a measurement finds of a model and its optimizer, in real Megatron."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mindspeed_lite
from mindspeed_lite.bench.memory import size
from mindspeed_lite.patches import _memory, _recording
from tests.platform.forked import forked

from .test_use_fused_adamw import KINDS, gradients, groups, optimizer_of, start  # noqa: F401

# For a bf16 parameter; those that stay in fp32 have a weight and two moments.
WIDTHS = {
    "none": ({}, 12.0),
    "shared": ({"reuse_fp32_param": True}, 10.0),
    "narrow": ({"quant_states": "bf16"}, 8.0),
}


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("bf16", "none"),
        ("bf16", "shared"),
        ("bf16", "narrow"),
        ("bf16, distributed", "none"),
        ("bf16, distributed", "shared"),
        ("fp32", "none"),
    ],
)
@forked("megatron")
def test_everything_is_found_once(kind: str, form: str, groups: Path) -> None:  # noqa: F811
    start(groups)
    flags, width = WIDTHS[form]
    with mindspeed_lite.enabled(use_fused_adamw=True, **flags):
        model, optimizer = optimizer_of(**KINDS[kind])
        gradients(model, 0)
        optimizer.step()
        weights, sums = list(_memory.weights([model])), list(_memory.gradients([model]))
        states = list(_memory.states(optimizer))
        counts = {2: 0, 4: 0}
        for each in weights:
            counts[each.element_size()] += each.numel()
        # The distributed optimizer pads the buffers.
        padding = 0 if "distributed" not in kind else 4096
        assert 0 <= size(weights) - 2 * counts[2] - 4 * counts[4] <= padding
        assert 0 <= size(sums, weights) - 4 * sum(counts.values()) <= padding
        moments = 4 if form == "narrow" else 8
        steps = 8 * len(weights)
        found = size(states, [*weights, *sums])
        assert 0 <= found - width * counts[2] - moments * counts[4] <= steps
        assert _memory.in_host_memory(optimizer) == (0, 0)


@pytest.mark.parametrize("is_addressed", [True, False])
@forked("megatron")
def test_what_is_in_host_memory_is_counted_apart(groups: Path, is_addressed: bool) -> None:  # noqa: F811
    start(groups)

    class Home:
        nbytes = 640
        in_place = is_addressed

    _, optimizer = optimizer_of(**KINDS["bf16"])
    for inner in _memory.inner_optimizers(optimizer):
        inner.home = Home()
    found = 640 * len(_memory.inner_optimizers(optimizer))
    assert _memory.in_host_memory(optimizer) == ((found, 0) if is_addressed else (0, found))


def test_a_step_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model and optimizer are handed over by name, and everything is as it was afterwards."""
    training = ModuleType(_recording.TRAINING)

    def train_step(
        forward_step_func: Any, data_iterator: Any, model: Any, optimizer: Any, iteration: Any = None
    ) -> Any:
        return forward_step_func, data_iterator, model, optimizer, iteration

    training.train_step = train_step  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, _recording.TRAINING, training)
    seen = []

    def run(model: Any, optimizer: Any, step: Any) -> Any:
        seen.append((model, optimizer))
        return step()

    remove = _memory.install(run)
    assert training.train_step(1, 2, [3], optimizer=4, iteration=5) == (1, 2, [3], 4, 5)
    assert seen == [([3], 4)]
    remove()
    assert training.train_step is train_step
