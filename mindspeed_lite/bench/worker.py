"""Applies the plan's features in a training process and records its steps."""

from __future__ import annotations

import faulthandler
import functools
import signal
from typing import Any

from mindspeed_lite.bench.plan import Plan


@functools.cache
def start(path: str) -> None:
    """Install adaptor and recorder before Megatron is imported; `path`: plan file."""
    import mindspeed_lite.megatron_adaptor  # noqa: F401
    from mindspeed_lite import platform, startup
    from mindspeed_lite.bench.probes import memory, train_step
    from mindspeed_lite.bench.recorder import Recorder
    from mindspeed_lite.platform import allocator

    plan = Plan.read(path)
    current = platform.current()
    if plan.allocator == allocator.KEEP and current is not None and current.name == "cpu":
        allocator.keep_freed_memory()
    if hasattr(signal, "SIGUSR2") and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        faulthandler.register(signal.SIGUSR2, all_threads=True)
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


def choose_features(args: Any, plan: Plan) -> list[str]:
    """Turn features off and on; return those of the command itself."""
    from mindspeed_lite import runtime
    from mindspeed_lite.engine import Settings

    catalogue = runtime.catalogue()
    settings = Settings.of(catalogue.options(), args)
    given = [feature.name for feature in catalogue if feature.is_enabled(settings)]
    arm = plan.arm
    if arm.choice != "given":
        setattr(args, runtime.AUTO.dest, arm.choice == "all")
    chosen = {*plan.beside, *{"only": arm.features, "given": given}.get(arm.choice, ())}
    for feature in catalogue:
        if feature.name in chosen and feature.name not in given:
            switch = feature.options[0] if feature.options else None
            if switch is None or not switch.is_switch:
                raise SystemExit(
                    f"mindspeed-lite bench: feature `{feature.name}` needs a value that only you can choose: "
                    f"give its flag in the command."
                )
            setattr(args, switch.dest, True)
        elif feature.name in given and feature.name not in chosen and arm.choice != "all":
            for option in feature.options:
                setattr(args, option.dest, option.default)
    return given
