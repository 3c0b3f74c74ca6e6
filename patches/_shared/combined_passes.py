"""The passes of Megatron's combined schedule, as the executor of `mindspeed_lite.pipeline.run` calls them.

With `--overlap-moe-expert-parallel-comm` a model chunk gives a plan of its layers' parts instead of an output. Megatron
runs the parts of one micro-batch's forward between those of another's backward, so that either computes while tokens of
the other travel. The graph of each part is its own: a forward that has been a plan needs its backward to be one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .combined_schedule import ARGUMENT
from .pipeline_passes import MegatronPasses


def is_asked_for(config: Any) -> bool:
    """Whether the model's passes are plans."""
    return bool(getattr(config, ARGUMENT, False))


class CombinedPasses(MegatronPasses):
    """The computations of a rank by `combined_forward_backward_step`, in pairs and apart."""

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
        run, delayed, last = self._run(None, chunk), self._delayed[chunk], self._last_backward[chunk]

        def input_grad(microbatch: int, received: Any, output: Any, gradient: Any) -> Any:
            # Megatron's plan asks layers for their weight gradients.
            with delayed.kept():
                _, found = run(None, None, microbatch, received, output, gradient)
            delayed.seal(microbatch == last)
            return found

        return input_grad

    def pair(self, ahead: int, back: int) -> Callable[[int, Any, int, Any, Any, Any], tuple[Any, Any]]:
        """The forward of one chunk and the backward of another or the same, for two micro-batches."""
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
