"""In a training process: counts what weights, gradients, optimizer states and saved activations take.

Beside what a `Recorder` writes, one line of the kind `memory` a process, before its `end`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch

from mindspeed_lite.bench import recorder
from mindspeed_lite.bench.plan import Plan
from mindspeed_lite.memory.saved_tensors import Tracker


class MemoryRecorder(recorder.Recorder):
    """A recorder that counts bytes as well; what it times is slower than it would be."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._taken: dict[str, Any] = {}
        self._tracker = Tracker(lambda address: False)

    def around(self, model: list[Any], optimizer: Any, step: Callable[[], Any]) -> Any:
        """Run one training step and count; see `mindspeed_lite.bench.probes.memory`."""
        from mindspeed_lite.bench.probes import memory

        others = {tensor.untyped_storage().data_ptr() for tensor in (*memory.weights(model), *memory.gradients(model))}
        self._tracker.is_excluded = others.__contains__
        with self._tracker:
            result = step()
        weights, gradients = list(memory.weights(model)), list(memory.gradients(model))
        states = list(memory.states(optimizer))
        addressed, away = memory.in_host_memory(optimizer)
        self._taken = {
            "parameters": sum(each.numel() for each in weights),
            "weights": size(weights),
            "gradients": size(gradients, weights),
            "optimizer": size(states, [*weights, *gradients]) - addressed,
            "host": addressed + away,
            "activations": self._tracker.peak,
        }
        return result

    def _write(self, kind: str, **fields: Any) -> None:
        if kind == "end":
            kept = [asdict(each) for each in self._tracker.at_peak]
            super()._write("memory", **self._taken, kept=kept)
        super()._write(kind, **fields)


def size(tensors: Iterable[torch.Tensor], beside: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of all storages, each once and without those of the tensors beside them."""
    others = {each.untyped_storage()._cdata for each in beside}
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
    return sum(storage.nbytes() for key, storage in storages.items() if key not in others)


__all__ = ["MemoryRecorder", "size"]
