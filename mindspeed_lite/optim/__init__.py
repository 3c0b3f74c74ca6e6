"""Optimizers on top of the operators.

fused_adam           torch's Adam and AdamW with one fused step
split_params         fp32 main parameters as bf16 weights plus low halves
quantized_moments    Adam's moments in bf16 or fp8
grad_norm            2-norm of gradients, for clipping
"""
