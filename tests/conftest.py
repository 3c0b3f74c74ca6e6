"""Triton kernels run on CPU tensors in the tests of a machine without a GPU: Triton's interpreter does it.

Triton asks when a kernel is decorated, so this must be said before anything imports one.
"""

from __future__ import annotations

import os

import torch

# Counting devices, unlike asking whether CUDA is available, leaves this process fit to be forked.
if torch.cuda.device_count() == 0:
    os.environ.setdefault("TRITON_INTERPRET", "1")
