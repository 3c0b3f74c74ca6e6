"""Probes that hook Megatron for benchmarks."""
