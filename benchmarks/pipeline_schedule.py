"""Host time of a pipeline schedule's loop for each pass: Megatron's own against the executor of `--pipeline-schedule`.

python -m benchmarks.pipeline_schedule [--ranks 4] [--microbatches 64] [--rounds 40]

Passes and messages cost nothing here: a forward returns a tensor, a message is there at once. What is left is the loop.
Both run in one process in turns, on each rank's part of the schedule; the figure is the least of the rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


class P2PCommunicator:
    """Megatron's interface; what is received is one tensor that is always there."""

    virtual_pipeline_model_parallel_size: int | None = None

    def __init__(self, config: Any, rank: int, ranks: int, chunks: int) -> None:
        self.config, self.tensor = config, torch.zeros(1, requires_grad=True)
        self.pp_group = SimpleNamespace(rank=lambda: rank, size=lambda: ranks)
        self.is_pp_first_stage, self.is_pp_last_stage = rank == 0, rank == ranks - 1
        self.total_stages, self.current_stage = ranks, rank
        self.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None

    def recv_forward(self, shape: Any, is_end: bool) -> Any:
        return None if is_end else self.tensor

    recv_backward = recv_forward

    def send_forward(self, tensor: Any, is_end: bool) -> None:
        pass

    send_backward = send_forward

    def send_forward_recv_backward(self, tensor: Any, shape: Any, is_end: bool) -> Any:
        return None if is_end else self.tensor

    send_backward_recv_forward = send_forward_recv_backward

    def send_forward_backward_recv_forward_backward(self, *tensors: Any, **how: Any) -> Any:
        return self.tensor, self.tensor

    def send_forward_recv_forward(self, tensor: Any, overlap_p2p_comm: bool = False, **how: Any) -> Any:
        arrived = {"send_next": self, "recv_prev": self}
        return (self.tensor, arrived) if overlap_p2p_comm else self.tensor

    def send_backward_recv_backward(self, tensor: Any, overlap_p2p_comm: bool = False, **how: Any) -> Any:
        arrived = {"send_prev": self, "recv_next": self}
        return (self.tensor, arrived) if overlap_p2p_comm else self.tensor

    def wait(self) -> None:
        pass


def _setting(rank: int, ranks: int, chunks: int, microbatches: int) -> dict[str, Any]:
    """The arguments of a call for one rank."""
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=ranks * chunks,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=True,
        overlap_p2p_comm=False,
    )
    models: list[Any] = [torch.nn.Identity() for _ in range(chunks)]
    for model in models:
        model.config, model.model_type = config, None
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    return {
        "forward_step_func": None,
        "data_iterator": [None] * chunks,
        "model": models,
        "num_microbatches": microbatches,
        "seq_length": 1,
        "micro_batch_size": 1,
        "p2p_communicator": P2PCommunicator(config, rank, ranks, chunks),
        "pg_collection": SimpleNamespace(tp=group, cp=group),
    }


def _seconds(run: Callable[..., Any], given: dict[str, Any]) -> float:
    begin = time.perf_counter()
    run(**given)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=40)
    wanted = parser.parse_args()

    import mindspeed_lite
    from mindspeed_lite import platform

    platform.activate()
    torch.set_num_threads(1)
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.process_groups_config import ProcessGroupCollection

    output, tokens = torch.zeros(1), torch.zeros([], dtype=torch.int)
    schedules.forward_step = lambda *args, **kwargs: (output, tokens)
    schedules.backward_step = lambda *args, **kwargs: output
    print(f"{'order':<12} {'rank':>4} {'Megatron us':>12} {'ours us':>8} {'ratio':>6}   (a pass, least of the rounds)")
    for order, chunks in (("1f1b", 1), ("interleaved", 2)):
        with mindspeed_lite.enabled(pipeline_schedule=order):
            ours = schedules.get_forward_backward_func(wanted.ranks, chunks if chunks > 1 else None)
            own = ours.__wrapped__
            for rank in range(wanted.ranks):
                given = _setting(rank, wanted.ranks, chunks, wanted.microbatches)
                collection = ProcessGroupCollection()
                collection.tp, collection.cp = given["pg_collection"].tp, given["pg_collection"].cp
                given["pg_collection"] = collection
                times: dict[str, list[float]] = {"own": [], "ours": []}
                for _ in range(wanted.rounds):
                    times["own"].append(_seconds(own, given))
                    times["ours"].append(_seconds(ours, given))
                passes = 2 * wanted.microbatches * chunks
                a, b = (min(each) / passes * 1e6 for each in times.values())
                print(f"{order:<12} {rank:>4} {a:>12.2f} {b:>8.2f} {b / a:>6.2f}")


if __name__ == "__main__":
    main()
