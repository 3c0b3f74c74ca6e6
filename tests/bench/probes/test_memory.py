"""What a measurement finds of a model and its optimizer, in real Megatron."""

from __future__ import annotations

from pathlib import Path

import pytest

import mindspeed_lite
from mindspeed_lite.bench.probes import memory
from tests.harness.optimizers import KINDS, gradients, optimizer_of, start
from tests.harness.processes import forked

# For a bf16 parameter; those that stay in fp32 have a weight and two moments.
WIDTHS = {
    "none": ({}, 12.0),
    "split": ({"reuse_fp32_param": True}, 10.0),
    "quantized": ({"quant_states": "bf16"}, 8.0),
}


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    """Where the one rank of a test meets itself."""
    return tmp_path / "store"


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("bf16", "none"),
        ("bf16", "split"),
        ("bf16", "quantized"),
        ("bf16, distributed", "none"),
        ("bf16, distributed", "split"),
        ("fp32", "none"),
    ],
)
@forked("megatron")
def test_everything_is_found_once(kind: str, form: str, groups: Path) -> None:
    start(groups)
    flags, width = WIDTHS[form]
    with mindspeed_lite.enabled(use_fused_adamw=True, **flags):
        model, optimizer = optimizer_of(**KINDS[kind])
        gradients(model, 0)
        optimizer.step()
        weights, sums = list(memory.weights([model])), list(memory.gradients([model]))
        states = list(memory.states(optimizer))
        counts = {2: 0, 4: 0}
        for each in weights:
            counts[each.element_size()] += each.numel()
        # The distributed optimizer pads the buffers.
        padding = 0 if "distributed" not in kind else 4096
        assert 0 <= memory.size(weights) - 2 * counts[2] - 4 * counts[4] <= padding
        assert 0 <= memory.size(sums, weights) - 4 * sum(counts.values()) <= padding
        moments = 4 if form == "quantized" else 8
        steps = 8 * len(weights)
        found = memory.size(states, [*weights, *sums])
        assert 0 <= found - width * counts[2] - moments * counts[4] <= steps
        assert memory.in_host_memory(optimizer) == (0, 0)


@pytest.mark.parametrize("is_addressed", [True, False])
@forked("megatron")
def test_what_is_in_host_memory_is_counted_apart(groups: Path, is_addressed: bool) -> None:
    start(groups)

    class StatePlacement:
        nbytes = 640
        device_addressable = is_addressed

    _, optimizer = optimizer_of(**KINDS["bf16"])
    for inner in memory.inner_optimizers(optimizer):
        inner.placement = StatePlacement()
    found = 640 * len(memory.inner_optimizers(optimizer))
    assert memory.in_host_memory(optimizer) == ((found, 0) if is_addressed else (0, found))
