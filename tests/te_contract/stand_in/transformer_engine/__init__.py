"""Stand-in for Transformer Engine 2.20.2: what Megatron takes of it without fp8, in PyTorch."""

from . import common, pytorch

__version__ = "2.20.2"
__all__ = ["common", "pytorch"]
