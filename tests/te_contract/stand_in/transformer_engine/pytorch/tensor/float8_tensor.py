"""Tensors in fp8 with one scale, of which the stand-in makes none."""

from ..quantized_tensor import QuantizedTensor


class Float8Tensor(QuantizedTensor):
    """A tensor in fp8 with one scale."""
