"""Trainings that the GPU bounds: off, dense with Liger-Kernel's patch of Megatron, on; in turns."""

from __future__ import annotations

import functools
import importlib.util
import statistics
from pathlib import Path

from benchmarks.configurations import CONFIGURATIONS, Configuration
from benchmarks.gpu.units import Figures, SkippedError, Unit
from mindspeed_lite.bench import harness
from mindspeed_lite.bench.plan import Arm

ROOT = Path(__file__).resolve().parents[2]
OFF, ON, LIGER = "off", "on", "liger"
_ARMS = {OFF: Arm("off", "off"), ON: Arm("on", "all"), LIGER: Arm("off", "off")}
_LIGER_SCRIPT = "benchmarks/gpu/liger_pretrain_gpt.py"


def units(part: str, device: str, tiny: bool) -> list[Unit]:
    """Two runs of each arm, in turns. Liger's kernels are Triton's, which need a GPU."""
    configuration = next(each for each in CONFIGURATIONS["tiny" if tiny else "gpu"] if each.name == part)
    arms = (OFF, LIGER, ON) if part == "dense" else (OFF, ON)
    return [
        Unit(f"{arm} {repeat}", functools.partial(_train, configuration, arm, repeat, device, tiny))
        for repeat in (1, 2)
        for arm in arms
    ]


def _train(configuration: Configuration, arm: str, repeat: int, device: str, tiny: bool) -> Figures:
    command = configuration.command()
    if arm == LIGER:
        if importlib.util.find_spec("liger_kernel") is None:
            raise SkippedError("liger_kernel is not installed")
        if device == "cpu":
            raise SkippedError("Liger-Kernel's kernels need a GPU")
        command = [_LIGER_SCRIPT if word == "examples/pretrain_gpt.py" else word for word in command]
    folder = ROOT / ".bench" / f"gpu{'-tiny' if tiny else ''}" / configuration.name / arm
    job = harness.Job(tuple(command), folder, warmup=1 if tiny else 3, steps=2 if tiny else 8, timeout=85.0)
    outcome = harness.run(job, _ARMS[arm], repeat)
    figures: Figures = {"command": command, "seconds": outcome.seconds}
    steps = [step for step in outcome.steps if step["measured"]]
    if steps:
        run = next((process.run for process in outcome.processes if process.run), None) or {}
        report = run.get("report") or {}
        figures |= {
            "step_seconds": statistics.median(step["seconds"] for step in steps),
            "steps": [step["seconds"] for step in steps],
            "losses": [step["loss"].get("lm loss") for step in outcome.steps],
            "grad_norms": [step["grad_norm"] for step in outcome.steps],
            "peak_memory_bytes": max(process.steps[-1]["peak_memory_bytes"] for process in outcome.processes),
            "flops_per_step": (run.get("model") or {}).get("flops_per_step"),
            "features": [
                each["feature"] for each in report.get("entries", ()) if each["status"] == "applied" and each["flags"]
            ],
            "fallbacks": [text for process in outcome.processes if process.end for text in process.end["fallbacks"]],
        }
    if outcome.status != "ok":
        end = " | ".join(line.strip() for line in outcome.log_tail if line.strip())[-300:]
        figures["failed"] = f"{outcome.status}: {outcome.reason}: {end}"
    return figures
