"""The older name of `tensor.float8_tensor`."""

from .tensor.float8_tensor import Float8Tensor

__all__ = ["Float8Tensor"]
