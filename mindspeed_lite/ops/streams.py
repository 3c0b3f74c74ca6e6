"""Identity of a device's current stream, for caches of device tensors.

Memory that one stream filled must not be read by another that does not wait for it, nor be given to others while
another reads it. A cache with the stream in its key fills, reads and frees an entry in one order. A captured graph runs
after its warm-up, whose entries it may read: while capturing, the stream is the one before.
"""

from __future__ import annotations

from typing import Any

import torch

# A tenth of the time of a Stream object; only builds with CUDA have it.
# Device -> the stream of the last call that was not captured.
_last: dict[torch.device, int] = {}
_RAW_STREAM: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def stream_id(device: torch.device) -> int:
    if device.type in ("cpu", "meta"):
        return 0
    module: Any = torch.get_device_module(device)
    if not module.is_initialized():  # tensors without storage
        return 0
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing() and device in _last:
        return _last[device]
    if device.type == "cuda" and device.index is not None and _RAW_STREAM is not None:
        found = int(_RAW_STREAM(device.index))
    else:
        found = int(module.current_stream(device).stream_id)
    _last[device] = found
    return found
