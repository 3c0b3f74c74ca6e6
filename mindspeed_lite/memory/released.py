"""Gives up the memory of a tensor that autograd holds, and fills it again before the backward pass reads it.

The graph stays what it is: what was saved looks into a storage that is empty for a while. So the values may come from
anywhere, and nothing of how they are computed again is recorded.
"""

from __future__ import annotations

import torch


class ReleasedTensor:
    """`tensor`, whose storage is empty from here on until `fill`; so is every other view of that storage."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # With a version of its own: what was saved does not count as changed when it is filled.
        self._values = tensor.data
        self._bytes = tensor.untyped_storage().nbytes()
        tensor.untyped_storage().resize_(0)

    def fill(self, values: torch.Tensor) -> None:
        """Take its memory back and copy `values`, of its shape and dtype, into it."""
        self._values.untyped_storage().resize_(self._bytes)
        self._values.copy_(values)
