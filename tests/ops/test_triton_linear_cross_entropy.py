"""linear_cross_entropy on CUDA: what chunks move, counted on fake CUDA tensors, is what the traffic model says."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_lite.ops.cross_entropy.loss import Kernels, Weights
from mindspeed_lite.ops.linear_cross_entropy import chunks

cuda = pytest.importorskip("mindspeed_lite.ops.linear_cross_entropy.cuda")


class Traffic(TorchDispatchMode):
    """Bytes that products and sums read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.add_, torch.ops.aten.addmm_):
            # What is written in place is among the arguments, and read; `out` is not.
            tensors = [*(each for each in args if isinstance(each, torch.Tensor)), result]
            self.bytes += sum(each.numel() * each.element_size() for each in tensors)
        return result


def moved(tokens: int, width: int, vocabulary: int, columns: int, dtype: torch.dtype) -> int:
    """By both passes in chunks of so many columns; the kernels that look at a chunk's logits aside."""
    kernels = Kernels(lambda rows, *_: rows.new_empty(3, rows.shape[0], dtype=torch.float32), lambda *_: None)
    ctx: Any = types.SimpleNamespace(needs_input_grad=(True, True))
    ctx.save_for_backward = lambda *saved: setattr(ctx, "saved_tensors", saved)
    with FakeTensorMode(), Traffic() as traffic, pytest.MonkeyPatch.context() as patch:

        def add(total: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            """What the operator moves on CUDA; PyTorch cannot fake its product into fp32."""
            traffic.bytes += 2 * total.nbytes + dy.nbytes + x.nbytes
            return total

        patch.setattr(chunks.accumulate_wgrad, "why_not", lambda *given: [])
        patch.setattr(chunks.accumulate_wgrad, "accumulate_wgrad", add)
        hidden = torch.empty(tokens, width, dtype=dtype, device="cuda")
        weight = torch.empty(vocabulary, width, dtype=dtype, device="cuda")
        target = torch.empty(tokens, dtype=torch.int64, device="cuda")
        given = (0, vocabulary, Weights.of(0.0, vocabulary), None, None)
        forward, backward = chunks._LinearCrossEntropy.forward, chunks._LinearCrossEntropy.backward
        parts = chunks._parts(tokens, weight, columns * tokens, keeps=False)
        loss = forward(ctx, hidden, weight, target, kernels, parts, *given)
        backward(ctx, loss)
    return traffic.bytes


@pytest.mark.parametrize(
    ("tokens", "width", "vocabulary", "dtype"),
    [
        (8192, 4096, 131072, torch.bfloat16),
        (1024, 8192, 131072, torch.bfloat16),
        (65536, 2048, 32768, torch.float16),
        (4096, 4096, 65536, torch.float32),
    ],
)
def test_chunks_move_what_the_model_says(tokens: int, width: int, vocabulary: int, dtype: torch.dtype) -> None:
    def model(columns: int) -> int:
        return cuda.accumulation(tokens, width, vocabulary, columns, dtype.itemsize)

    whole = moved(tokens, width, vocabulary, vocabulary, dtype)
    for columns in (512, cuda.COLUMNS):
        assert moved(tokens, width, vocabulary, columns, dtype) - whole == model(columns) - model(vocabulary)
    # 600 TFLOP/s and 3.35 TB/s: less than a tenth of the products' time.
    products = 8 * tokens * vocabulary * width / 600e12
    assert dtype == torch.float32 or model(cuda.COLUMNS) / 3.35e12 < 0.1 * products < model(512) / 3.35e12


def test_the_figure_that_small_chunks_cost() -> None:
    old, new = (cuda.accumulation(8192, 4096, 131072, columns, 2) for columns in (512, cuda.COLUMNS))
    assert (round(old / 1e9), round(new / 1e9, 1)) == (120, 7.5)  # of which 69 and 4.3 GB are the fp32 sums
