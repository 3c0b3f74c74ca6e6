"""Measures a training while it runs; chooses the faster of alternatives.

ab_test            a feature off and on in alternate steps
chunk_autotuner    chunk count of each pass of a layer
host               launches and host time of a step, by module
host_tables        tables of host, without torch
operators          modules that operators belong to, and operators that start nothing
synchronizations   calls of a step that wait for a device
"""
