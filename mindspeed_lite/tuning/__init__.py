"""Measures alternatives while a training runs and chooses the faster one.

ab_test            a feature off and on in alternate steps; the faster one stays
chunk_autotuner    the number of chunks of each pass of a layer, timed by all ranks of a group together
cache              what the trials of earlier runs found
"""
