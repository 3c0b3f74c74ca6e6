"""Benchmarks: patches on against off in training, and operators against plain PyTorch; nothing imports this."""
