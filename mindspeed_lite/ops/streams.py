"""Identity of a device's current stream, for caches of device tensors.

Memory that one stream filled must not be read by another that does not wait for it, nor be given to others while
another reads it. A cache with the stream in its key fills, reads and frees an entry in one order.
"""

from __future__ import annotations

from typing import Any

import torch

# A tenth of the time of a Stream object; only builds with CUDA have it.
_RAW_STREAM: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def stream_id(device: torch.device) -> int:
    if device.type in ("cpu", "meta"):
        return 0
    module: Any = torch.get_device_module(device)
    if not module.is_initialized():  # tensors without storage
        return 0
    if device.type == "cuda" and device.index is not None and _RAW_STREAM is not None:
        return int(_RAW_STREAM(device.index))
    return int(module.current_stream(device).stream_id)
