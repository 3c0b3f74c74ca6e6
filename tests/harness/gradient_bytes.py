"""Bytes that a rank sends to reduce gradients: Megatron's, those of compressed reductions, and what fp32 would take."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from tests.harness.training import Result

_LINE = "bytes of gradients sent: "
_REDUCTIONS = {"start_grad_sync": 0, "compressed_reduce": 1}


def _kind() -> int | None:
    """Which reduction the call is of: the nearest caller of either."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "").rpartition(".")[2]
        for each in (name, frame.f_code.co_name):
            if each in _REDUCTIONS and (each == name or name == "param_and_grad_buffer"):
                return _REDUCTIONS[each]
        frame = frame.f_back  # type: ignore[assignment]
    return None


def count() -> None:
    """Count them from now on; each rank logs the sums when its process group ends."""
    import torch.distributed as dist
    from megatron.core.distributed import param_and_grad_buffer as buffers

    from lab.network import sent_to_each
    from mindspeed_lite.parallel.compressed_reduce import CompressedReduce

    sums = [0, 0, 0]
    start = CompressedReduce.start

    def started(self: Any, gradient: Any, *args: Any) -> Any:
        peers = self._ranks - 1
        sums[2] += 4 * gradient.numel() * peers // self._ranks * (1 if self.scatters else 2)
        return start(self, gradient, *args)

    CompressedReduce.start = started  # type: ignore[method-assign]

    def around(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if (kind := _kind()) is not None:
                given = signature.bind(*args, **kwargs).arguments
                ranks = dist.get_process_group_ranks(given.get("group"))
                sent = sent_to_each(name, given, len(ranks))
                sums[kind] += sum(size for peer, size in zip(ranks, sent, strict=True) if peer != dist.get_rank())
            return original(*args, **kwargs)

        return collective

    for name in ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
        original = getattr(dist, name)
        changed = around(name, original)
        setattr(dist, name, changed)
        for own in [each for each, value in vars(buffers).items() if value is original]:
            setattr(buffers, own, changed)
    ended = dist.destroy_process_group

    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        print(_LINE + " ".join(map(str, sums)), flush=True)
        ended(*args, **kwargs)

    dist.destroy_process_group = destroy_process_group


def check(result: Result) -> None:
    """Every gradient was compressed, to 0.27 of fp32's bytes at most."""
    for rank in range(len(result.codes)):
        exact, compressed, fp32 = map(int, result.log(rank).rpartition(_LINE)[2].split()[:3])
        assert exact == 0 and 0 < compressed <= 0.27 * fp32, (exact, compressed, fp32)
