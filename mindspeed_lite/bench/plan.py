"""One run of the user's command as data, for harness and worker."""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

# Environment variable with the plan file's path.
VARIABLE = "MINDSPEED_LITE_BENCH"


@dataclass(frozen=True)
class Arm:
    """One side of a comparison.

    Attributes:
        choice: features on: `off`: none; `given`: the command's; `all`: all applicable; `only`: `features`.
        arithmetic: of a rounding baseline: float32 or other summation order.
    """

    name: str
    choice: Literal["off", "given", "all", "only"]
    features: tuple[str, ...] = ()
    arithmetic: Literal["as given", "float32", "other order"] = "as given"

    @property
    def role(self) -> str:
        if self.arithmetic != "as given":
            return "rounding_baseline"
        return "off" if self.name == "off" else "on"


@dataclass(frozen=True)
class Job:
    """The user's command and how to run it.

    Attributes:
        warmup: unmeasured first steps.
        timeout: seconds without a step after which a run is hung.
        allocator: `keep`, `system`, or empty for the command's.
        memory: count bytes by category.
        beside: features that are on in every arm.
    """

    command: tuple[str, ...]
    folder: Path
    warmup: int
    steps: int
    timeout: float
    allocator: str = ""
    memory: bool = False
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunPlan:
    """One run of one arm.

    Attributes:
        records: folder for measurements.
        profile: one extra profiled step.
        trace: folder for its Chrome traces.
        launched: time of the start, in seconds since the epoch.
    """

    job: Job
    arm: Arm
    records: Path
    profile: bool = False
    trace: Path | None = None
    launched: float = field(default_factory=time.time)

    def write(self, path: Path) -> None:
        path.write_bytes(pickle.dumps(self))

    @classmethod
    def read(cls, path: str) -> RunPlan:
        found: RunPlan = pickle.loads(Path(path).read_bytes())
        return found
