"""In a training process: turns features off or on as the plan says, and records its steps."""

from __future__ import annotations

import faulthandler
import signal
from typing import Any

from mindspeed_lite.bench.memory import MemoryRecorder
from mindspeed_lite.bench.plan import Plan
from mindspeed_lite.bench.recorder import Recorder

_recorder: Recorder | None = None


def start(path: str) -> None:
    """Put the adaptor and the recording in place, before Megatron is imported; `path` is the plan's file."""
    global _recorder
    if _recorder is not None:
        return
    plan = Plan.read(path)
    import mindspeed_lite.megatron_adaptor  # noqa: F401
    from mindspeed_lite import platform
    from mindspeed_lite.bench.probes import memory, train_step
    from mindspeed_lite.patches._shared import arguments
    from mindspeed_lite.platform import allocator

    current = platform.current()
    if plan.allocator == allocator.KEEP and current is not None and current.name == "cpu":
        allocator.keep_freed_memory()
    _recorder = MemoryRecorder(plan) if plan.memory else Recorder(plan)
    if hasattr(signal, "SIGUSR2") and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        # The harness asks a process that hangs where it stands.
        faulthandler.register(signal.SIGUSR2, all_threads=True)
    arguments.before_validation(lambda args: _prepare(args, plan))
    if isinstance(_recorder, MemoryRecorder):
        memory.install(_recorder.around)
    train_step.install(_recorder)


def _prepare(args: Any, plan: Plan) -> None:
    from mindspeed_lite.bench.probes import train_step

    assert _recorder is not None
    _recorder.arguments_are_final(train_step.precision(args), given=_choose(args, plan))
    train_step.leave_no_trace(args)
    if plan.arm.arithmetic == "float32":
        train_step.in_float32(args)


def _choose(args: Any, plan: Plan) -> list[str]:
    """Turn features off and on in the parsed arguments; returns those that the command itself turns on."""
    from mindspeed_lite import runtime
    from mindspeed_lite.engine import Settings

    catalogue = runtime.catalogue()
    settings = Settings.of(catalogue.options(), args)
    given = [feature.name for feature in catalogue if feature.is_enabled(settings)]
    arm = plan.arm
    if arm.choice != "given":
        setattr(args, runtime.AUTO.dest, arm.choice == "all")
    chosen = {"only": arm.features, "given": given}.get(arm.choice, ())
    for feature in catalogue:
        wanted = feature.name in arm.beside or feature.name in chosen
        if wanted and feature.name not in given:
            switch = feature.options[0] if feature.options else None
            if switch is None or not switch.is_switch:
                raise SystemExit(
                    f"mindspeed-lite bench: feature `{feature.name}` needs a value that only you can choose: "
                    f"give its flag in the command."
                )
            setattr(args, switch.dest, True)
        elif not wanted and feature.name in given and arm.choice != "all":
            for option in feature.options:
                setattr(args, option.dest, option.default)
    return given
