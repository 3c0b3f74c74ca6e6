"""Benchmarks the operators' cases: `run` measures and reports, `equivalence` and `earlier` compare."""
