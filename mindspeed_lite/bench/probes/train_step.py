"""Hooks Megatron's train_step for the benchmark and describes the run.

Reaches `megatron.training.training:train_step`, which every supported release calls once per iteration with the same
first results (losses, whether the step was skipped, ..., gradient norm); what it is given passes through untouched.
Evaluation, logging and saving stand outside of it. Nothing here changes what a step computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from mindspeed_lite.engine import Around, ImportHandle, Session, when_imported
from mindspeed_lite.platform import megatron

TRAINING = "megatron.training.training"

# Where a step's result holds what we read, in 0.16 to 0.19.
_LOSSES, _SKIPPED, _GRAD_NORM = 0, 1, 5


class Listener(Protocol):
    """What a benchmark does around a step."""

    def step(self, run: Callable[[], Any]) -> tuple[Any, Callable[[dict[str, float], float | None], None]]:
        """Run the step; returns its result and what to call with its losses and gradient norm."""
        ...


def install(listener: Listener) -> Callable[[], None]:
    """Let `listener` run every training step once Megatron's training module is there; returns an undo callable."""

    def around(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
        def train_step(*args: Any, **kwargs: Any) -> Any:
            result, done = listener.step(lambda: wrapped(*args, **kwargs))
            # Skipped steps of loss scaling and the earlier stages of a pipeline have no losses.
            losses = {} if result[_SKIPPED] else {name: _number(value) for name, value in result[_LOSSES].items()}
            norm = result[_GRAD_NORM]
            done(losses, None if norm is None else _number(norm))
            return result

        return train_step

    return around_steps("recording", "a benchmark listens", around)


def around_steps(name: str, why: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Wrap the training step once Megatron's training module is there; returns an undo callable."""
    applied: list[megatron.Placed] = []
    feature = megatron.always(name, why, Around(f"{TRAINING}:train_step", around))

    def place(module: Any) -> None:
        applied.append(megatron.place(feature))

    handle: ImportHandle = when_imported(TRAINING, place)

    def remove() -> None:
        handle.cancel()
        while applied:
            applied.pop().remove()

    return remove


def _number(value: Any) -> float:
    """A loss as Megatron logs it: a tensor of one element, or of a sum and the number of tokens it is over."""
    values = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(values, (list, tuple)):
        return float(values[0]) / float(values[1]) if len(values) == 2 else float(values[0])
    return float(values)


def stop_after(steps: int) -> int:
    """Make a training that is about to begin end after so many steps, without a checkpoint and without evaluation.

    Megatron then takes its own way out, that of `--exit-interval`. Returns how many steps there will be: the command
    may train for fewer.
    """
    from megatron.training import get_args

    args = get_args()
    args.exit_interval = int(args.iteration) + steps
    args.exit_duration_in_mins = None
    args.save = None
    args.do_valid = False
    return int(min(steps, args.train_iters - args.iteration))


def leave_no_trace(args: Any) -> None:
    """Before validation: no TensorBoard, no Weights & Biases, so that a benchmark adds nothing to a user's records."""
    for name in ("tensorboard_dir", "wandb_project", "wandb_exp_name"):
        if getattr(args, name, None):
            setattr(args, name, None if name == "tensorboard_dir" else "")


def in_float32(args: Any) -> None:
    """Before validation: the same training without 16-bit numbers."""
    args.bf16 = args.fp16 = False


def precision(args: Any) -> str:
    """The dtype that the arguments ask for."""
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"


def model() -> dict[str, Any]:
    """What is trained, in the words of the report (see docs/bench-report.md); once training has begun."""
    from megatron.training import get_args
    from megatron.training.training import num_floating_point_operations

    args = get_args()
    batch = args.global_batch_size
    return {
        "layers": args.num_layers,
        "hidden": args.hidden_size,
        "ffn": args.ffn_hidden_size,
        "heads": args.num_attention_heads,
        "sequence": args.seq_length,
        "vocabulary": getattr(args, "padded_vocab_size", None),
        "experts": args.num_experts,
        "micro_batch": args.micro_batch_size,
        "global_batch": batch,
        "dtype": precision(args),
        "parallel": {
            "data": args.data_parallel_size,
            "tensor": args.tensor_model_parallel_size,
            "sequence": bool(args.sequence_parallel),
            "pipeline": args.pipeline_model_parallel_size,
            "virtual pipeline": getattr(args, "virtual_pipeline_model_parallel_size", None),
            "context": args.context_parallel_size,
            "expert": args.expert_model_parallel_size,
        },
        "tokens_per_step": batch * args.seq_length,
        "flops_per_step": float(num_floating_point_operations(args, batch)),
    }


__all__ = ["in_float32", "install", "leave_no_trace", "model", "precision", "stop_after"]
