"""What is kept, where, and for how long.

host                        host memory that a device addresses
copy_engine                 asynchronous copies between a device and its host, and pinned buffers
offload                     activations in host memory until their backward pass
released                    a tensor whose storage is freed and filled again
saved_tensors               bytes that autograd saves for the backward pass
layer_records               what a layer saves and how long its parts take, recorded
memory_options              the ways to run a layer: each part kept, recomputed or offloaded
recompute_choice            the fastest options within a budget; recompute_table prints them
recompute_ahead             recomputation before its gradient arrives
host_mapped_moments         optimizer moments in host memory that the device addresses
swapped_optimizer_state     optimizer state in host memory between steps
"""
