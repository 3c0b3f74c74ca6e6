"""One run of the user's command as data: the harness writes it, the worker in each process reads it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

# The environment variable that names a plan's file to the processes of a run.
VARIABLE = "MINDSPEED_LITE_BENCH"


@dataclass(frozen=True)
class Arm:
    """One side of a comparison.

    Attributes:
        choice: features that are on: `off`: none; `given`: those the command turns on itself; `all`: every one that
            applies; `only`: those in `features`.
        arithmetic: of a rounding baseline, float32 or another order of summation.
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
class Plan:
    """One run of one arm.

    Attributes:
        records: folder for what every process measures.
        warmup: first steps that are not measured; `steps` measured ones follow.
        profile: one step more, under the profiler.
        trace: folder for Chrome traces of that step, or empty.
        allocator: `keep` or `system` for processes on the CPU; empty leaves it as the command has it.
        package_root: folder to import mindspeed_lite from where the command's Python has none.
        memory: count bytes by what they are for, which slows steps down.
        beside: features that are on in every arm, off too.
    """

    arm: Arm
    records: str
    warmup: int
    steps: int
    profile: bool = False
    trace: str = ""
    allocator: str = ""
    package_root: str = ""
    memory: bool = False
    beside: tuple[str, ...] = ()

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: str) -> Plan:
        data: dict[str, Any] = json.loads(Path(path).read_text())
        arm = data.pop("arm")
        return cls(Arm(**arm | {"features": tuple(arm["features"])}), **data | {"beside": tuple(data["beside"])})
