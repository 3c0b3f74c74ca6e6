"""What a layer saves when it runs again is attributed to its parts, and what is outside of layers is not."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from mindspeed_lite.memory.layer_records import ATTENTION, INPUT_NORM, LAYER, LayerRecorder


def test_storages_belong_to_the_parts_that_saved_them_and_moments_to_layers() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    table = torch.randn(4, 8)
    recorder = LayerRecorder(2, {weight.untyped_storage().data_ptr()}.__contains__, lambda: None)

    def body(x: torch.Tensor) -> torch.Tensor:
        recorder.enter(INPUT_NORM, x)
        y = x.exp() * 1.0
        recorder.leave(INPUT_NORM, y)
        recorder.enter(ATTENTION)
        z = torch.tanh((y @ weight) * table)
        recorder.leave(ATTENTION)
        return x + z

    def layer(number: int, x: torch.Tensor) -> torch.Tensor:
        is_first = True

        def run(x: torch.Tensor) -> torch.Tensor:
            nonlocal is_first
            if is_first:
                is_first = False
                return body(x)
            with recorder.again(number, x, [table]):
                return body(x)

        with recorder.forward(number):
            out: torch.Tensor = checkpoint(run, x, use_reentrant=True)
        return out

    with recorder:
        x = torch.randn(4, 8, requires_grad=True)
        for _ in range(2):
            out = layer(1, layer(0, x))
            (out * out.detach().clone()).sum().backward()
    size = 4 * 8 * 4
    for record in recorder.layers:
        assert record.bytes == 3 * size
        kinds = sorted((sorted(each.parts), each.enters, each.leaves) for each in record.storages)
        # The layer's input itself is saved by no part; exp saves its output, tanh its own.
        assert kinds == [
            ([], INPUT_NORM, ""),
            ([ATTENTION], "", ""),
            ([ATTENTION], "", INPUT_NORM),
            ([INPUT_NORM], "", ""),
        ]
        assert len(record.seconds[LAYER]) == 2 and record.cost(LAYER) >= record.cost(ATTENTION) > 0
    # The last layer's input and that of the one before are kept then, and outside of layers what the product saved.
    assert set(recorder.moments) >= {(1, (1, 1)), (0, (1, 0)), (-1, (1, 1))}
    assert recorder.moments[-1, (1, 1)] == size
