"""Who holds which shard: operators across ranks. Process groups are passed in and never looked up.

expert             tokens on their way to experts on other ranks and back
cross_entropy      the loss over a vocabulary that is split over a group; the same without materialised logits
overlapped_gemm    GEMMs overlapped with the collectives that feed them or that they feed, in chunks of rows
mc2                the same by one operator of an NPU
balance            who has how many tokens: counts by layer, expert and rank, and their file
symmetric          the same through CUDA symmetric memory
fused_gemm_collective              what operators that multiply and communicate in one have in common
tp_linear          linear layers of a tensor-parallel group on top of these
"""
