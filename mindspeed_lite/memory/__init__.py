"""What is kept, where, and for how long. Tensors and optimizers in, tensors out; Megatron is not named here.

host       memory of the host that a device addresses
virtual    moments of an optimizer that stand there, as many as a budget allows
"""
