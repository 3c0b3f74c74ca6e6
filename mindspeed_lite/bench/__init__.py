"""Benchmarks of training, operators and memory; imported only by commands."""
