"""Current and last step of Megatron's training loop."""

from __future__ import annotations

from mindspeed_lite.engine import Context


def current_step(context: Context) -> int | None:
    """The step that runs or has just ended, from 1; None outside of Megatron's loop."""
    before = context.arg("curr_iteration", None)
    return before + 1 if isinstance(before, int) else None


def is_last_step(context: Context, step: int | None) -> bool:
    every = context.arg("exit_interval", None)
    return step is not None and (step == context.arg("train_iters", None) or bool(every and step % every == 0))
