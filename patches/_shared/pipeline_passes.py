"""The passes and messages of Megatron, as the executor of `mindspeed_lite.pipeline.run` calls them.

Megatron's own `forward_step`, `backward_step`, `deallocate_output_tensor` and `P2PCommunicator` do the work. Nothing of
them is repeated here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed_lite.pipeline.run import Exchanged
from mindspeed_lite.pipeline.steps import Kind, Schedule, Step

from .data_parallel_sync import SyncPlan
from .delayed_wgrads import DelayedWgrads


@dataclass
class TrainingStep:
    """What Megatron's loop hands to every forward pass of a training step, and what these return.

    models, iterators: those of each model chunk.
    checkpointed: forwards that recompute all layers, where Megatron recomputes some micro-batches partially.
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
    checkpointed: Mapping[Step, bool] = field(default_factory=dict)
    losses: list[Any] = field(default_factory=list)
    num_tokens: Any = None


class MegatronPasses:
    """The computations of a rank, by Megatron's functions.

    delayed: the weight gradients of each chunk, in orders that have steps for them.
    """

    def __init__(
        self,
        schedules: Any,
        this: TrainingStep,
        schedule: Schedule,
        rank: int,
        plan: SyncPlan,
        delayed: Sequence[DelayedWgrads] = (),
    ) -> None:
        self._schedules, self._this, self._plan, self._delayed = schedules, this, plan, delayed
        # Megatron numbers model chunks where there are several.
        self._vp_stages = [None] if schedule.num_chunks == 1 else list(range(schedule.num_chunks))
        self._is_last = [stage == schedule.num_stages - 1 for stage in schedule.placement[rank]]
        # Up to 0.16 it has a type of model too, which it does not read.
        has_type = "model_type" in inspect.signature(schedules.backward_step).parameters
        self._more = (schedules.get_model_type(this.models[0]),) if has_type else ()

    def forward(self, step: Step, received: Any) -> Any:
        this, chunk = self._this, step.chunk
        is_first = self._schedules.check_first_val_step(this.first_val_step, this.forward_only, step.microbatch == 0)
        output, num_tokens = self._schedules.forward_step(
            this.forward_step_func,
            this.iterators[chunk],
            this.models[chunk],
            this.num_microbatches,
            received,
            this.losses,
            this.config,
            cp_group_size=this.cp_size,
            collect_non_loss_data=this.collect_non_loss_data,
            checkpoint_activations_microbatch=this.checkpointed.get(step) if this.checkpointed else None,
            is_first_microbatch=is_first,
            current_microbatch=step.microbatch,
            vp_stage=self._vp_stages[chunk],
            is_last_stage=self._is_last[chunk],
        )
        this.num_tokens += num_tokens
        return output

    def recompute(self, step: Step, received: Any) -> Any:
        raise NotImplementedError(f"step {step}: recomputation is a step of no order here")

    def backward(self, step: Step, received: Any, output: Any, gradient: Any) -> Any:
        found = self._schedules.backward_step(received, output, gradient, *self._more, self._this.config)
        if self._delayed:
            self._delayed[step.chunk].seal(step in self._plan.last_backward)
            if step.kind is Kind.BACKWARD:
                self._delayed[step.chunk].run(step in self._plan.complete)
        return found

    def weight_grad(self, step: Step) -> None:
        self._delayed[step.chunk].run(step in self._plan.complete)

    def hand_over(self, output: Any) -> Any:
        return output.detach().requires_grad_(torch.is_grad_enabled())

    def release(self, output: Any) -> None:
        self._schedules.deallocate_output_tensor(output, self._this.config.deallocate_pipeline_outputs)


class MegatronTransport:
    """Messages by Megatron's communicator; `shape`: that of every tensor."""

    def __init__(self, communicator: Any, shape: Any) -> None:
        self._communicator, self._shape = communicator, shape

    def exchange(self, to_next: Any, to_prev: Any, from_prev: bool, from_next: bool) -> Exchanged:
        """Send and receive, and wait for all of it."""
        got_prev, got_next = self._communicator.send_forward_backward_recv_forward_backward(
            to_next, to_prev, recv_prev=from_prev, recv_next=from_next, tensor_shape=self._shape
        )
        return got_prev, got_next, None, None


class OverlappedTransport(MegatronTransport):
    """The same, but a call returns when it has begun. It moves tensors one way."""

    def exchange(self, to_next: Any, to_prev: Any, from_prev: bool, from_next: bool) -> Exchanged:
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
