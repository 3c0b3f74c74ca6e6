"""Memory features: recomputation, offloading and optimizer state on the host.

host                        host memory that kernels address
copy_engine                 asynchronous copies, pinned buffers
hooked_module               a module's forward within a context
offload                     activations on the host
saved_tensors               bytes saved by autograd; tensors with freed and refilled storage
layer_records               saved bytes and time per layer part
memory_options              parts of a layer kept, recomputed or offloaded
recompute_choice            fastest options within a budget
recompute_ahead             recomputation before the gradient arrives
host_mapped_moments         optimizer moments in `host` memory
swapped_optimizer_state     optimizer state on the host between steps
"""
