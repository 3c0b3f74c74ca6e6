"""What a layer saves when it runs again is attributed to its parts, and what is outside of layers is not."""

from __future__ import annotations

import contextlib

import torch
from torch.utils.checkpoint import checkpoint

from mindspeed_lite.memory.layer_records import (
    ATTENTION,
    BACKWARD,
    INPUT_NORM,
    LAYER,
    NONE,
    Instant,
    LayerRecorder,
)


def test_storages_belong_to_the_parts_that_saved_them_and_moments_to_layers() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    table = torch.randn(4, 8)
    recorder = LayerRecorder(2, {weight.untyped_storage()._cdata}.__contains__, lambda: None)

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
    outside = Instant(NONE, (1, 1))
    assert set(recorder.moments) >= {
        Instant(1, (1, 1)),
        Instant(0, (1, 0)),
        Instant(0, (1, 0), True),
        outside,
    }
    assert recorder.moments[outside] == size


def test_a_mask_of_all_layers_counts_once_and_layers_know_who_follows() -> None:
    mask = torch.randn(4, 8)
    recorder = LayerRecorder(3, lambda address: False, lambda: None)

    def layer(number: int, x: torch.Tensor) -> torch.Tensor:
        runs = iter(range(2))

        def run(x: torch.Tensor) -> torch.Tensor:
            with recorder.again(number, x, []) if next(runs) else contextlib.nullcontext():
                recorder.enter(ATTENTION)
                y = torch.tanh(x * mask)
                recorder.leave(ATTENTION)
                return y

        with recorder.forward(number):
            out: torch.Tensor = checkpoint(run, x, use_reentrant=True)
        return out

    with recorder:
        for _ in range(2):
            x = torch.randn(4, 8, requires_grad=True)
            with recorder.forward_pass():
                x = layer(1, layer(0, x))
            layer(2, x).sum().backward()
    size = 4 * 8 * 4
    # Every layer has tanh's output alone, and the mask is outside of all of them, once.
    assert [each.bytes for each in recorder.layers] == [size] * 3
    assert {found for found in recorder.moments.values()} == {size}
    assert [each.follower for each in recorder.layers] == [1, NONE, NONE]
    assert [each.is_first for each in recorder.layers] == [True, False, False]
    # The backward pass of a layer that follows is seen: it ends where that of the layer before begins.
    assert [len(each.seconds.get(BACKWARD, [])) for each in recorder.layers] == [0, 2, 0]
    assert recorder.layers[1].cost(BACKWARD) > 0
