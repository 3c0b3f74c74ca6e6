"""The standing benchmarks: `python -m benchmarks` from the repository's root, or `make bench`."""
