"""Decides what is kept, where, and for how long: tensors and optimizers in, tensors out, no Megatron.

host                        host memory that a device addresses
copy_engine                 copies between a device and its host beside compute, and pinned buffers for them
offload                     activations that wait for the backward pass in host memory
saved_tensors               what autograd saves for the backward pass, counted
layer_records               what a layer saves and how long its parts take, recorded
layer_ways                  the ways to run a layer, each part kept, computed again or moved to the host
recompute_choice            the ways that take least time within a budget
host_mapped_moments         optimizer moments in host memory that the device addresses, as many as a budget allows
swapped_optimizer_state     optimizer state in host memory that comes to the device in groups
"""
