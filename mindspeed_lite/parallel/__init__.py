"""Distributed operators on shards. Callers pass process groups in.

overlapped_gemm    GEMMs overlapped with their collectives, in chunks of rows
mc2, symmetric     fused GEMM and collective: CANN on NPUs, CUDA symmetric memory
tp_linear          tensor-parallel linear layers on top of these
cross_entropy      vocabulary-parallel loss
context            context-parallel attention
expert             expert-parallel token exchange
balance            load balance of experts and data-parallel ranks
groups             process groups created without the rest of the world
"""
