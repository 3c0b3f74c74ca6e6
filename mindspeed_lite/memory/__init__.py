"""Memory features: recomputation, offloading and optimizer state on the host.

host                        host memory that kernels address
copy_engine                 asynchronous copies, pinned buffers
offload                     activations on the host
released                    tensors with freed and refilled storage
saved_tensors               bytes saved by autograd
layer_records               saved bytes and time per layer part
memory_options              parts of a layer kept, recomputed or offloaded
recompute_choice            fastest options within a budget
recompute_table             prints a choice
recompute_ahead             recomputation before the gradient arrives
host_mapped_moments         optimizer moments in `host` memory
swapped_optimizer_state     optimizer state on the host between steps
"""
