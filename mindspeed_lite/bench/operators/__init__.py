"""Benchmarks of operators: measurement, equivalence, regressions."""
