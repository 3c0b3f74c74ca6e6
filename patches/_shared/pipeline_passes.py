"""Passes and messages of a training step by Megatron's functions, for `pipeline.run`.

Functions that releases changed are recognised by their parameters.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed_lite.engine import Function
from mindspeed_lite.memory.recompute_ahead import RecomputedUnits
from mindspeed_lite.pipeline.data_parallel_sync import SyncPlan
from mindspeed_lite.pipeline.steps import Schedule
from mindspeed_lite.pipeline.wgrad import WgradBatches

from .linear_layers import delayed_parameters
from .wrappers import parameters

# Queue attribute of a linear layer that delays weight gradients.
QUEUE = "wgrad_queue"


class DelayedWgrads:
    """Delayed weight gradients of one model chunk, a batch per backward pass."""

    def __init__(self, model: Any) -> None:
        self._layers = [each for each in model.modules() if getattr(each, QUEUE, None) is not None]
        self._batches = WgradBatches([getattr(each, QUEUE) for each in self._layers])

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Context in which `backward_dw`, called by Megatron's plans, keeps weight gradients pending."""
        self._keep(True)
        try:
            yield
        finally:
            self._keep(False)

    def _keep(self, is_kept: bool) -> None:
        for layer in self._layers:
            getattr(layer, QUEUE).is_kept = is_kept

    def seal(self, is_last: bool) -> None:
        """End a backward pass; the last one keeps autograd's placeholder for gradient reduction."""
        self._batches.seal()
        if not is_last:
            for layer in self._layers:
                for param in delayed_parameters(layer):
                    param.grad = None

    def run(self, is_last: bool) -> None:
        """Compute the oldest batch; the last one notifies gradient reduction."""
        self._batches.run(announce=is_last)


@dataclass
class TrainingStep:
    """Arguments and results of a training step's forward passes.

    models, iterators: per chunk. checkpointed: by (chunk, micro-batch), whether all layers are recomputed.
    """

    forward_step_func: Function
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
    """Forward and backward passes of a schedule, executed by Megatron's `forward_step` and `backward_step`.

    Args:
        delayed: deferred weight gradients per chunk, if the schedule has steps for them.
        recomputed: recorder of checkpoints, if the schedule has recomputation steps.
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
        self._last_backward, self._complete = plan.last_backward, plan.complete
        self._delayed, self._recomputed = delayed, recomputed
        self.releases = bool(this.config.deallocate_pipeline_outputs)
        self._vp_stages = [None] if schedule.num_chunks == 1 else list(range(schedule.num_chunks))
        last = schedule.num_stages - 1
        self._is_last = [stage == last for stage in schedule.placement[rank]]
        # In 0.14 backward_step has an unused model type argument.
        has_type = "model_type" in parameters(schedules.backward_step)
        self._more = (schedules.get_model_type(this.models[0]), this.config) if has_type else (this.config,)

    def forward(self, chunk: int) -> Callable[[int, Any], Any]:
        this, forward_step = self._this, self._schedules.forward_step
        function, iterator, model = this.forward_step_func, this.iterators[chunk], this.models[chunk]
        count, losses, config, collects = this.num_microbatches, this.losses, this.config, this.collect_non_loss_data
        vp_stage, is_last_stage = self._vp_stages[chunk], self._is_last[chunk]
        fully = this.checkpointed
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
                cp_group_size=this.cp_size,
                vp_stage=vp_stage,
                is_last_stage=is_last_stage,
            )
            if num_tokens is not None:
                num_tokens += tokens
            return output

        return forward if self._recomputed is None else self._recomputed.recording(forward, chunk)

    def recompute(self, chunk: int) -> Callable[[int], None]:
        assert self._recomputed is not None
        return functools.partial(self._recomputed.recompute, chunk)

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
        step, more = self._schedules.backward_step, self._more
        if not self._delayed:
            return lambda microbatch, received, output, gradient: step(received, output, gradient, *more)
        delayed, last = self._delayed[chunk], self._last_backward[chunk].microbatch

        def input_grad(microbatch: int, received: Any, output: Any, gradient: Any) -> Any:
            found = step(received, output, gradient, *more)
            delayed.seal(microbatch == last)
            return found

        return input_grad

    def weight_grad(self, chunk: int) -> Callable[[int], None]:
        delayed, last = self._delayed[chunk], self._complete[chunk].microbatch

        def weight_grad(microbatch: int) -> None:
            delayed.run(microbatch == last)

        return weight_grad

    def hand_over(self, output: Any) -> Any:
        return output.detach().requires_grad_(torch.is_grad_enabled())

    def release(self, output: Any) -> None:
        self._schedules.deallocate_output_tensor(output, True)


class CombinedPasses(MegatronPasses):
    """Passes by Megatron's `combined_forward_backward_step`, in pairs or alone.

    Each layer part has its own graph, so a planned forward needs a planned backward.
    """

    def __init__(self, *args: Any) -> None:
        from megatron.core.pipeline_parallel import combined_1f1b

        super().__init__(*args)
        self._step = combined_1f1b.combined_forward_backward_step
        has_priority = hasattr(self._this.config, "high_priority_a2a_comm_stream")
        priority = {"high_priority": self._this.config.high_priority_a2a_comm_stream} if has_priority else {}
        combined_1f1b.set_streams(**priority)

    def forward(self, chunk: int) -> Callable[[int, Any], Any]:
        run = self._run(chunk, None)
        return lambda microbatch, received: run(microbatch, received, None, None, None, None)[0]

    def backward(self, chunk: int) -> Callable[[int, Any, Any, Any], Any]:
        run = self._run(None, chunk)
        return lambda *of_backward: run(None, None, *of_backward)[1]

    def input_grad(self, chunk: int) -> Callable[[int, Any, Any, Any], Any]:
        run, delayed = self._run(None, chunk), self._delayed[chunk]
        last = self._last_backward[chunk].microbatch

        def input_grad(microbatch: int, received: Any, output: Any, gradient: Any) -> Any:
            with delayed.kept():
                _, found = run(None, None, microbatch, received, output, gradient)
            delayed.seal(microbatch == last)
            return found

        return input_grad

    def pair(self, ahead: int, back: int) -> Callable[[int, Any, int, Any, Any, Any], tuple[Any, Any]]:
        return self._run(ahead, back)

    def _run(self, ahead: int | None, back: int | None) -> Callable[..., tuple[Any, Any]]:
        this, step = self._this, self._step
        config, losses, total = this.config, this.losses, this.num_tokens
        iterator, model = (None, None) if ahead is None else (this.iterators[ahead], this.models[ahead])
        other = None if back is None else this.models[back]
        is_first = self._schedules.check_first_val_step

        def run(
            microbatch: int | None, received: Any, _: int | None, other_received: Any, output: Any, gradient: Any
        ) -> tuple[Any, Any]:
            made, tokens, found = step(
                this.forward_step_func,
                iterator,
                model,
                this.num_microbatches,
                received,
                losses,
                other,
                other_received,
                output,
                gradient,
                config,
                f_model_chunk_id=ahead,
                collect_non_loss_data=this.collect_non_loss_data,
                is_first_microbatch=is_first(this.first_val_step, this.forward_only, microbatch == 0),
                current_microbatch=microbatch,
            )
            if ahead is not None and config.calculate_per_token_loss:
                total.add_(tokens)
            return made, found

        return run


class MegatronTransport:
    """Blocking sends and receives by Megatron's communicator; all tensors have `shape`."""

    is_async = False

    def __init__(self, communicator: Any, shape: Any) -> None:
        self.exchange: Callable[..., tuple[Any, Any]] = functools.partial(
            communicator.send_forward_backward_recv_forward_backward, tensor_shape=shape
        )


class OverlappedTransport:
    is_async = True

    def __init__(self, communicator: Any, shape: Any) -> None:
        self._communicator, self._shape = communicator, shape

    def exchange(self, to_next: Any, to_prev: Any, from_prev: bool, from_next: bool) -> tuple[Any, ...]:
        """Start to send and receive; return tensors and what waits for them."""
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
