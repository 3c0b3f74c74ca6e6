"""Applies the plan's features in a training process and records its steps."""

from __future__ import annotations

import functools
from typing import Any

from mindspeed_lite.bench.plan import RunPlan


@functools.cache
def start(path: str) -> None:
    """Install adaptor and recorder before Megatron is imported; `path`: plan file."""
    import mindspeed_lite.megatron_adaptor  # noqa: F401
    from mindspeed_lite import platform, startup
    from mindspeed_lite.bench.probes import memory, train_step
    from mindspeed_lite.bench.recorder import Recorder
    from mindspeed_lite.platform import allocator

    plan = RunPlan.read(path)
    current = platform.current()
    if plan.job.allocator == allocator.KEEP and current is not None and current.name == "cpu":
        allocator.keep_freed_memory()
    recorder = Recorder(plan)

    def prepare(args: Any) -> None:
        recorder.arguments_are_final(train_step.precision(args), given=choose_features(args, plan))
        train_step.leave_no_trace(args)
        if plan.arm.arithmetic == "float32":
            args.bf16 = args.fp16 = False

    startup.before_validation(prepare)
    if recorder.memory is not None:
        memory.install(recorder.memory.around)
    train_step.install(recorder.step)


def choose_features(args: Any, plan: RunPlan) -> list[str]:
    """Set the flags of this arm's features in `args`; return the features that the command enables."""
    from mindspeed_lite import runtime
    from mindspeed_lite.engine import Settings

    catalogue, arm = runtime.catalogue(), plan.arm
    settings = Settings.of(catalogue.options(), args)
    given = [feature.name for feature in catalogue if feature.is_enabled(settings)]
    if arm.choice != "given":
        setattr(args, runtime.AUTO.dest, arm.choice == "all")
    chosen = {*plan.job.beside, *(given if arm.choice in ("given", "all") else arm.features)}
    for feature in catalogue:
        if feature.name in given and feature.name not in chosen:
            for option in feature.options:
                setattr(args, option.dest, option.default)
        elif feature.name in chosen and feature.name not in given:
            if not feature.options or not feature.options[0].is_switch:
                raise SystemExit(
                    f"mindspeed-lite bench: feature `{feature.name}` needs a value that only you can choose: "
                    f"give its flag in the command."
                )
            setattr(args, feature.options[0].dest, True)
    return given
