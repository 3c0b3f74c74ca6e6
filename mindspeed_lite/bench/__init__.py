"""Benchmarks: patches on against off in training, operators against plain PyTorch, and memory as predicted against measured;
nothing but the commands imports this."""
