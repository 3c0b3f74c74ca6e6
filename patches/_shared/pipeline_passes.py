"""The passes and messages of Megatron, as the executor of `mindspeed_lite.pipeline.run` calls them.

Megatron's own `forward_step`, `backward_step`, `deallocate_output_tensor` and `P2PCommunicator` do the work. Nothing of
them is repeated here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed_lite.memory.recompute_ahead import RecomputedUnits
from mindspeed_lite.pipeline.steps import Schedule

from .data_parallel_sync import SyncPlan
from .delayed_wgrads import DelayedWgrads
from .schedule_functions import in_stage, parameters, taken


@dataclass
class TrainingStep:
    """What Megatron's loop hands to every forward pass of a training step, and what these return.

    models, iterators: those of each model chunk.
    checkpointed: by (chunk, micro-batch), whether all layers are recomputed, where Megatron recomputes some partially.
    """

    forward_step_func: Callable[..., Any]
    iterators: Sequence[Any]
    models: Sequence[Any]
    config: Any
    num_microbatches: int
    cp_size: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    checkpointed: Mapping[tuple[int, int], bool] = field(default_factory=dict)
    losses: list[Any] = field(default_factory=list)
    num_tokens: Any = None


class MegatronPasses:
    """The computations of a rank, by Megatron's functions; what does not change between micro-batches is bound once.

    delayed: the weight gradients of each chunk, in orders that have steps for them.
    recomputed: in orders that have steps for recomputation, what forwards leave to them.
    """

    def __init__(
        self,
        schedules: Any,
        this: TrainingStep,
        schedule: Schedule,
        rank: int,
        plan: SyncPlan,
        delayed: Sequence[DelayedWgrads] = (),
        recomputed: RecomputedUnits | None = None,
    ) -> None:
        self._schedules, self._this = schedules, this
        self._last_backward, self._complete = plan.last_of_chunks
        self._delayed, self._recomputed = delayed, recomputed
        self.releases = bool(this.config.deallocate_pipeline_outputs)
        # Megatron numbers model chunks where there are several.
        self._vp_stages = [None] if schedule.num_chunks == 1 else list(range(schedule.num_chunks))
        last = schedule.num_stages - 1
        self._is_last = [stage == last for stage in schedule.placement[rank]]
        # Up to 0.16 it takes a type of model too, which it does not read for one tensor.
        has_type = "model_type" in parameters(schedules.backward_step)
        self._more = (schedules.get_model_type(this.models[0]), this.config) if has_type else (this.config,)

    def forward(self, chunk: int) -> Callable[[int, Any], Any]:
        this, forward_step = self._this, self._in_stage(chunk, self._schedules.forward_step)
        function, iterator, model = this.forward_step_func, this.iterators[chunk], this.models[chunk]
        count, losses, config, collects = this.num_microbatches, this.losses, this.config, this.collect_non_loss_data
        stage = {"vp_stage": self._vp_stages[chunk], "is_last_stage": self._is_last[chunk]}
        more = taken(self._schedules.forward_step, cp_group_size=this.cp_size, **stage)
        fully = this.checkpointed
        # What the loss is divided by at the end of the step; else nothing reads it.
        num_tokens = this.num_tokens if config.calculate_per_token_loss else None
        is_first = self._schedules.check_first_val_step
        first, later = (is_first(this.first_val_step, this.forward_only, each) for each in (True, False))

        def forward(microbatch: int, received: Any) -> Any:
            nonlocal num_tokens
            output, tokens = forward_step(
                function,
                iterator,
                model,
                count,
                received,
                losses,
                config,
                collect_non_loss_data=collects,
                checkpoint_activations_microbatch=fully.get((chunk, microbatch)) if fully else None,
                is_first_microbatch=later if microbatch else first,
                current_microbatch=microbatch,
                **more,
            )
            if num_tokens is not None:
                num_tokens += tokens
            return output

        return forward if self._recomputed is None else self._recomputed.recording(forward, chunk)

    def recompute(self, chunk: int) -> Callable[[int], None]:
        assert self._recomputed is not None
        return self._in_stage(chunk, functools.partial(self._recomputed.recompute, chunk))

    def backward(self, chunk: int) -> Callable[[int, Any, Any, Any], Any]:
        split = self.input_grad(chunk)
        if not self._delayed:
            return split
        weight_grad = self.weight_grad(chunk)

        def backward(microbatch: int, received: Any, output: Any, gradient: Any) -> Any:
            found = split(microbatch, received, output, gradient)
            weight_grad(microbatch)
            return found

        return backward

    def input_grad(self, chunk: int) -> Callable[[int, Any, Any, Any], Any]:
        step, more = self._in_stage(chunk, self._schedules.backward_step), self._more
        if not self._delayed:
            return lambda microbatch, received, output, gradient: step(received, output, gradient, *more)
        delayed, last = self._delayed[chunk], self._last_backward[chunk]

        def input_grad(microbatch: int, received: Any, output: Any, gradient: Any) -> Any:
            found = step(received, output, gradient, *more)
            delayed.seal(microbatch == last)
            return found

        return input_grad

    def weight_grad(self, chunk: int) -> Callable[[int], None]:
        delayed, last = self._delayed[chunk], self._complete[chunk]

        def weight_grad(microbatch: int) -> None:
            delayed.run(microbatch == last)

        return weight_grad

    def _in_stage(self, chunk: int, function: Callable[..., Any]) -> Callable[..., Any]:
        return in_stage(self._schedules, self._vp_stages[chunk], function)

    def hand_over(self, output: Any) -> Any:
        return output.detach().requires_grad_(torch.is_grad_enabled())

    def release(self, output: Any) -> None:
        self._schedules.deallocate_output_tensor(output, True)


class MegatronTransport:
    """Messages by Megatron's communicator; `shape`: that of every tensor. A call returns when all of it is done."""

    is_async = False

    def __init__(self, communicator: Any, shape: Any) -> None:
        self.exchange: Callable[..., tuple[Any, Any]] = functools.partial(
            communicator.send_forward_backward_recv_forward_backward, tensor_shape=shape
        )


class OverlappedTransport:
    """The same, but a call returns when it has begun. It moves tensors one way."""

    is_async = True

    def __init__(self, communicator: Any, shape: Any) -> None:
        self._communicator, self._shape = communicator, shape

    def exchange(self, to_next: Any, to_prev: Any, from_prev: bool, from_next: bool) -> tuple[Any, ...]:
        """Begin to send and receive."""
        if to_next is not None or from_prev:
            tensor, handles = self._communicator.send_forward_recv_forward(
                to_next, recv_prev=from_prev, tensor_shape=self._shape, overlap_p2p_comm=True
            )
            return tensor, None, _wait(handles, "recv_prev"), _wait(handles, "send_next")
        tensor, handles = self._communicator.send_backward_recv_backward(
            to_prev, recv_next=from_next, tensor_shape=self._shape, overlap_p2p_comm=True
        )
        return None, tensor, _wait(handles, "recv_next"), _wait(handles, "send_prev")


def _wait(handles: Mapping[str, Any], name: str) -> Callable[[], object] | None:
    return handles[name].wait if name in handles else None
