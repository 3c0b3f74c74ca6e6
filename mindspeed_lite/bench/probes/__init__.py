"""Probes that hook Megatron for the benchmarks: training step, profiler ranges, memory inside a step."""
