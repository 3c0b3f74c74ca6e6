"""Hooks Megatron's train_step for the benchmark and describes the run.

Every supported release calls it once per iteration.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from mindspeed_lite.engine import Around, Session
from mindspeed_lite.platform import megatron

TRAINING = "megatron.training.training"

# Entries of the report's `model` -> Megatron's arguments.
_SIZES = {
    "layers": "num_layers", "hidden": "hidden_size", "ffn": "ffn_hidden_size", "heads": "num_attention_heads",
    "sequence": "seq_length", "vocabulary": "padded_vocab_size", "experts": "num_experts",
    "micro_batch": "micro_batch_size", "global_batch": "global_batch_size",
}  # fmt: skip
_PARALLEL = {
    "data": "data_parallel_size", "tensor": "tensor_model_parallel_size", "sequence": "sequence_parallel",
    "pipeline": "pipeline_model_parallel_size", "virtual pipeline": "virtual_pipeline_model_parallel_size",
    "context": "context_parallel_size", "expert": "expert_model_parallel_size",
}  # fmt: skip
# Indices in a step's result, in every supported release.
_LOSSES, _SKIPPED, _GRAD_NORM = 0, 1, 5


def install(step: Callable[[list[Any], Any, Callable[[], Any]], Any]) -> Callable[[], None]:
    """Replace each training step by step(model, optimizer, run); returns an undo callable."""

    def around(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
        signature = inspect.signature(wrapped)

        def train_step(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            return step(given["model"], given["optimizer"], lambda: wrapped(*args, **kwargs))

        return train_step

    hook = megatron.without_flag("recording", "a benchmark records", Around(f"{TRAINING}:train_step", around))
    return megatron.ImportHook(hook).remove


def read(result: Any) -> tuple[dict[str, float], float | None]:
    """Losses and gradient norm; skipped steps and earlier pipeline stages have no losses."""
    losses = {} if result[_SKIPPED] else {name: _number(value) for name, value in result[_LOSSES].items()}
    norm = result[_GRAD_NORM]
    return losses, None if norm is None else _number(norm)


def _number(value: Any) -> float:
    values = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(values, (list, tuple)):
        return float(values[0]) / float(values[1]) if len(values) == 2 else float(values[0])
    return float(values)


def stop_after(steps: int) -> int:
    """Limit steps by `--exit-interval`, without saving and evaluation; return their number.

    The command may train for fewer.
    """
    from megatron.training import get_args

    args = get_args()
    args.exit_interval = int(args.iteration) + steps
    args.exit_duration_in_mins = None
    args.save = None
    args.do_valid = False
    return int(min(steps, args.train_iters - args.iteration))


def leave_no_trace(args: Any) -> None:
    """Before validation: disable TensorBoard and Weights & Biases."""
    for name, empty in (("tensorboard_dir", None), ("wandb_project", ""), ("wandb_exp_name", "")):
        if getattr(args, name, None):
            setattr(args, name, empty)


def precision(args: Any) -> str:
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"


def model() -> dict[str, Any]:
    """The report's `model` (docs/bench-report.md), once training has begun."""
    from megatron.training import get_args
    from megatron.training.training import num_floating_point_operations

    args = get_args()
    batch = args.global_batch_size
    return {
        **{name: getattr(args, argument, None) for name, argument in _SIZES.items()},
        "dtype": precision(args),
        "parallel": {name: getattr(args, argument, None) for name, argument in _PARALLEL.items()},
        "tokens_per_step": batch * args.seq_length,
        "flops_per_step": float(num_floating_point_operations(args, batch)),
    }


__all__ = ["install", "leave_no_trace", "model", "precision", "read", "stop_after"]
