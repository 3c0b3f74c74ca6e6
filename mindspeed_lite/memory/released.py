"""Frees the storage of a saved tensor and refills it before its backward pass."""

from __future__ import annotations

import torch


class ReleasedTensor:
    """Tensor whose storage is empty until `fill`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # `.data` has its own version counter, so `fill` does not modify a saved tensor.
        self._values = tensor.data
        self._bytes = tensor.untyped_storage().nbytes()
        tensor.untyped_storage().resize_(0)

    def fill(self, values: torch.Tensor) -> None:
        self._values.untyped_storage().resize_(self._bytes)
        self._values.copy_(values)
