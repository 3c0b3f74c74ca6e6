"""The class of quantized tensors, of which the stand-in makes none."""

import torch


class QuantizedTensor(torch.Tensor):
    """Base of all quantized tensors."""
