"""Cases of vocab_embedding, compared with Megatron's masked embedding.

The rank holds one of four shards. `main=1`: unsharded; adds the lookup's gradient to an fp32 main gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_lite.ops.case import Draw, OperatorCases, Work
from mindspeed_lite.ops.vocab_embedding import vocab_embedding

SHARDS = 4


@dataclass(frozen=True)
class Shape:
    """Shape of a lookup. ids: number of tokens; rows: of the shard."""

    ids: int
    hidden: int
    rows: int
    main: bool = False

    def make(self, draw: Draw) -> tuple[Tensor, ...]:
        weight = draw(self.rows, self.hidden, gradient=not self.main)
        ids = draw.integers(self.rows * (1 if self.main else SHARDS), self.ids)
        if not self.main:
            return weight, ids
        main_grad = draw(self.rows, self.hidden, scale=0.0, wide=True, gradient=False)
        return weight, ids, draw(self.ids, self.hidden, gradient=False), main_grad

    def ours(self, weight: Tensor, ids: Tensor, *main: Tensor) -> Tensor:
        if not main:
            return vocab_embedding(ids, weight, self.rows)
        dy, main_grad = main
        leaf = weight.detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(vocab_embedding(ids, leaf, sparse=True), dy)
        assert leaf.grad is not None
        return main_grad.add_(leaf.grad)

    def reference(self, weight: Tensor, ids: Tensor, *main: Tensor) -> Tensor:
        rows = self.rows
        if not main:
            mask = (ids < rows) | (ids >= 2 * rows)
            local = ids.clone() - rows
            local[mask] = 0
            out = torch.nn.functional.embedding(local, weight)
            out[mask, :] = 0.0
            return out
        dy, main_grad = main
        # Autograd's computation in a form that torch.compile can trace.
        out = torch.nn.functional.embedding(ids, weight)
        gradient: Tensor = torch.ops.aten.embedding_dense_backward(dy.view_as(out), ids, rows, -1, False)
        return main_grad.add_(gradient)

    def work(self, size: int) -> tuple[Work, Work | None]:
        ids, hidden, rows = self.ids, self.hidden, self.rows
        if self.main:
            return Work(ids * hidden * (3 * size + 2 * max(4, size)), ids * hidden), None
        return Work((ids + ids // SHARDS) * hidden * size, 0), Work((ids + rows) * hidden * size, ids * hidden)


CASES = OperatorCases(
    "vocab_embedding",
    Shape,
    correctness=("24x16x32", "24x16x32,main=1", "256x256x1024"),
    cpu=("1024x1024x8192", "1024x1024x32768,main=1"),
    accelerator=("8192x4096x8192", "8192x4096x32064", "8192x4096x128256,main=1"),
)
