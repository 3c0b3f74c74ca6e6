"""Measures alternatives during training and chooses the faster one.

ab_test            a feature off and on in alternate steps
chunk_autotuner    chunk count of each pass of a layer
"""
