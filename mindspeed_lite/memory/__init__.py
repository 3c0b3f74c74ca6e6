"""What is kept, where, and for how long. Tensors and optimizers in, tensors out; Megatron is not named here.

host       memory of the host that a device addresses
link       copies between a device and its host beside compute, and buffers for them
offload    activations that wait for the backward pass in host memory
saved      what autograd keeps for the backward pass, counted
virtual    moments of an optimizer that stand there, as many as a budget allows
streamed   what an optimizer keeps, which stands in host memory and comes to the device in groups
"""
