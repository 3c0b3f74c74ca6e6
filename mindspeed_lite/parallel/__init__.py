"""Operators across ranks, on shards. Process groups are passed in and never looked up.

overlapped_gemm    GEMMs overlapped with their collectives, in chunks of rows
mc2, symmetric     the same by one operator: CANN's on NPUs, CUDA symmetric memory
tp_linear          tensor-parallel linear layers on top of these
cross_entropy      the loss over a sharded vocabulary
context            attention over a sharded sequence
expert             the exchange of tokens with experts on other ranks
balance            equal load of experts and of data-parallel ranks
groups             new process groups by some ranks alone
"""
