"""Optimizers on top of the operators. Parameters and gradients in; Megatron is not named here.

fused_adam           Adam and AdamW as torch.optim has them, one fused step for all parameters
split_params         fp32 main parameters stored as the bf16 weights and their low halves
quantized_moments    Adam's moments stored in fewer bits
"""
