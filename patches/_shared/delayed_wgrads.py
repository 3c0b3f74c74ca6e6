"""The weight gradients that a model chunk puts aside, in the hands of a pipeline schedule.

The linear layers of `delay_wgrad_compute` queue them. A schedule has a step for those of each backward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from mindspeed_lite.pipeline.wgrad import WgradBatches

QUEUE = "wgrad_queue"


class DelayedWgrads:
    """Those of one model chunk."""

    def __init__(self, model: Any) -> None:
        self._layers = [each for each in model.modules() if getattr(each, QUEUE, None) is not None]
        self._batches = WgradBatches([getattr(each, QUEUE) for each in self._layers])

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Within it no layer computes its gradients because Megatron asks for them."""
        for layer in self._layers:
            getattr(layer, QUEUE).is_kept = True
        try:
            yield
        finally:
            for layer in self._layers:
                getattr(layer, QUEUE).is_kept = False

    def seal(self, is_last: bool) -> None:
        """End a backward pass. Autograd was given something in the gradients' stead, which only the last one keeps:
        gradient reduction looks for it."""
        self._batches.seal()
        if not is_last:
            for layer in self._layers:
                layer.weight.grad = None

    def run(self, is_last: bool) -> None:
        """Compute the gradients of the oldest backward pass; after the last one gradient reduction is told."""
        self._batches.run(announce=is_last)
