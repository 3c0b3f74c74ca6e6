"""Laboratory: emulated CPU streams, throttled links and timelines, to measure overlap on one machine.

Outside the wheel; benchmarks and tests use it, the package does not.
"""
