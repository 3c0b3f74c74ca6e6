"""Optimizers on top of the operators.

fused_adam           torch's Adam and AdamW with one fused step for all parameters
split_params         fp32 main parameters stored as the bf16 weights and their low halves
quantized_moments    Adam's moments in fewer bits
"""
