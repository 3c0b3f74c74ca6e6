"""Laboratory: emulated CPU streams, throttled links, timelines and predictions for GPUs, on one machine.

Outside the wheel; benchmarks and tests use it, the package does not.
"""
