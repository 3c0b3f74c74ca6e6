"""Memory features: recomputation, offloading and optimizer state on the host.

host                        host memory that kernels address
copy_engine                 asynchronous copies and pinned buffers
offload                     activations on the host until their backward pass
released                    tensors with freed and refilled storage
saved_tensors               bytes saved by autograd
layer_records               saved bytes and time per layer part
memory_options              options of a layer: parts kept, recomputed or offloaded
recompute_choice            fastest options within a budget
recompute_table             prints a choice
recompute_ahead             recomputation before the gradient arrives
host_mapped_moments         optimizer moments in host memory that kernels address
swapped_optimizer_state     optimizer state on the host between steps
"""
