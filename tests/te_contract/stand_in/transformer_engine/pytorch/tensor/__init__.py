"""Classes of quantized tensors, of which the stand-in makes none."""

from ..quantized_tensor import QuantizedTensor
from .float8_tensor import Float8Tensor

__all__ = ["Float8Tensor", "QuantizedTensor"]
