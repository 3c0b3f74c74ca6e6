"""What one run of the user's command is to do, as data: the harness writes it, the worker in each process reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

# The environment variable that names a plan's file to the processes of a run.
VARIABLE = "MINDSPEED_LITE_BENCH"

Choice = Literal["off", "given", "all", "only"]
Arithmetic = Literal["as given", "float32", "other order"]


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: which features are on, and in which arithmetic.

    Attributes:
        name: as the report calls it.
        choice: `off`: none; `given`: those the command turns on itself; `all`: every one that applies; `only`:
            those in `features` and no other.
        beside: features that are on whatever the choice: in every arm, off too.
        arithmetic: `as given`, or for the rounding baseline off in float32 or with sums in another order.
    """

    name: str
    choice: Choice
    features: tuple[str, ...] = ()
    arithmetic: Arithmetic = "as given"
    beside: tuple[str, ...] = ()

    @property
    def role(self) -> str:
        if self.arithmetic != "as given":
            return "rounding_baseline"
        return "off" if self.name == "off" else "on"


@dataclass(frozen=True)
class Plan:
    """One run of one arm.

    Attributes:
        records: folder into which every process writes what it measures.
        warmup: first steps that are not measured.
        steps: measured steps after them.
        profile: one step more, under the profiler.
        trace: folder for Chrome traces of that step, or empty.
        allocator: `keep` or `system` for processes on the CPU; empty leaves it as the command has it.
        launched: time.time() at which the command was started.
        package_root: folder to import mindspeed_lite from where the command's Python has none.
        memory: count bytes by what they are for; the steps are slower then.
    """

    arm: Arm
    records: str
    warmup: int
    steps: int
    profile: bool
    trace: str
    allocator: str
    launched: float
    package_root: str
    memory: bool = False

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: str) -> Plan:
        data: dict[str, Any] = json.loads(Path(path).read_text())
        arm = data.pop("arm")
        arm |= {name: tuple(arm[name]) for name in ("features", "beside")}
        return cls(arm=Arm(**arm), **data)


def arms_for(mode: str, features: Sequence[str]) -> list[Arm]:
    """The arms beside off: `features`: these together, or what the command turns on; `all`; `noise`: off again.

    `each` is `features` one by one, then all of them together.
    """
    if mode == "noise":
        return [Arm("off again", "off")]
    if mode == "all":
        return [Arm("all", "all")]
    if mode == "each":
        single = [Arm(name, "only", (name,)) for name in features]
        return [*single, Arm("all", "only", tuple(features))] if len(features) > 1 else single
    if features:
        return [Arm("+".join(features), "only", tuple(features))]
    return [Arm("as given", "given")]
