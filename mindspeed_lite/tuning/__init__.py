"""Measures alternatives while a model trains and chooses the faster one.

ab_test            a feature off and on in alternate steps
chunk_autotuner    the number of chunks of each pass of a layer
cache              results of earlier runs
"""
