"""One run of the user's command as data, for harness and worker."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

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
class Plan:
    """One run of one arm.

    Attributes:
        records: folder for measurements.
        warmup: unmeasured first steps.
        profile: one extra profiled step.
        trace: folder for its Chrome traces, or empty.
        allocator: `keep`, `system`, or empty for the command's.
        package_root: import folder where the command's Python lacks mindspeed_lite.
        beside: features that are on in every arm.
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
