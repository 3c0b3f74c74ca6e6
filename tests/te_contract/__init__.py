"""A stand-in for Transformer Engine in pure PyTorch, its tests, and features trained with it.

`stand_in/` goes on PYTHONPATH. It holds what Megatron 0.16 to main takes from Transformer Engine without fp8, by the
signatures of release 2.20.2, and computes the same values on CPU.
"""
