"""Who holds which slice: operators across ranks. Process groups are passed in and never looked up.

cross_entropy    the loss over a vocabulary that is split over a group; the same without materialised logits
pipelined        products beside the collectives that feed them or that they feed, in slices of rows
mc2              the same by one operator of an NPU
slices           how many slices: a trial that all ranks of a group make together
tp_linear        linear layers of a tensor-parallel group on top of these
"""
