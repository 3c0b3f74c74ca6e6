"""Prices work from `mindspeed-lite calibrate` measurements, interpolated between shapes.

Interpolates rates (flops or bytes per second) over log shape: rates vary slowly, times over several powers of ten.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from mindspeed_lite import json_file

from .training import ArgumentError
from .work import Collective, CollectiveCall, Direction, Product, Scores, Vector

FORMAT = 2
# Key, shape, units of work and seconds of a call.
Sample = tuple[tuple[str, ...], Sequence[float], float, float]


@dataclass(frozen=True)
class Surface:
    points: Sequence[tuple[tuple[float, ...], float]]

    def rate(self, *where: float) -> float:
        target = [math.log(max(each, 1e-12)) for each in where]
        total = weighted = 0.0
        for point, rate in self.points:
            distance = sum((a - b) ** 2 for a, b in zip(point, target, strict=True))
            weight = 1 / (distance + 1e-6) ** 2
            total += weight
            weighted += weight * math.log(rate)
        return math.exp(weighted / total)


def surface(samples: Sequence[tuple[Sequence[float], float, float]]) -> Surface:
    return Surface([(tuple(math.log(each) for each in shape), work / seconds) for shape, work, seconds in samples])


@dataclass(frozen=True)
class CalibratedDevice:
    """Device priced from measurements.

    Attributes:
        overlap: share of a message that overlaps with computation; 0 if a rank has one core.
        overheads: host seconds per layer, per micro-batch and chunk, and per step outside operators; a third of the
            first two in the forward pass.
    """

    name: str
    kind: str
    cores: int
    ranks_per_node: int
    overlap: float
    surfaces: Mapping[tuple[str, ...], Surface]
    messages: Mapping[tuple[str, int, int], Sequence[tuple[float, float]]]
    overheads: tuple[float, ...]
    memory: float = 0.0

    def product(self, work: Product, direction: Direction, width: int) -> float:
        if work.experts > 1:
            found = self._surface("grouped", direction, str(width)) or self._surface("product", direction, str(width))
            return work.flops / found.rate(work.rows / work.experts, work.inner, work.columns)
        found = self._surface("product", direction, str(width))
        return work.flops / found.rate(work.rows, work.inner, work.columns)

    def scores(self, work: Scores, is_backward: bool, width: int) -> float:
        kind = "flash" if work.is_flash else "scores"
        found = self._surface(kind, _pass(is_backward), str(width))
        return work.flops / work.share / found.rate(work.keys, work.query_size)

    def vector(self, work: Vector, is_backward: bool, width: int) -> float:
        key = "fused" if work.is_fused else "plain"
        found = self.surfaces.get((work.name, key, _pass(is_backward), str(width)))
        if found is None:
            found = self.surfaces.get((work.name, "plain", _pass(is_backward), str(width)))
        return 0.0 if found is None else work.numbers / found.rate(work.numbers)

    def message(self, work: CollectiveCall) -> float:
        """Interpolated over bytes; unmeasured group sizes scale by message count."""
        size = work.group.size
        if size == 1:
            return 0.0
        widths = sorted({width for kind, _, width in self.messages if kind == work.kind})
        width = work.width if work.width in widths else widths[-1] if widths else 0
        measured = sorted(each for kind, each, wide in self.messages if (kind, wide) == (work.kind, width))
        if not measured:
            raise ArgumentError(f"the calibration holds no {work.kind}: run `mindspeed-lite calibrate` with two cores")
        near = min(measured, key=lambda each: (abs(math.log(each / size)), each))
        seconds = _interpolated(self.messages[work.kind, near, width], work.bytes)
        return seconds if work.kind == "send" else seconds * (1 - 1 / size) / (1 - 1 / near)

    def optimizer(self, parameters: float, is_fused: bool) -> float:
        found = self._surface("optimizer", "fused" if is_fused else "plain")
        return parameters / found.rate(parameters)

    def host_copy(self, size: float) -> float:
        return size / 1e10

    def host(self, launches: float) -> float:
        return 0.0

    def layer_overhead(self, is_backward: bool) -> float:
        return self.overheads[0] * (2 if is_backward else 1) / 3

    def pass_overhead(self, is_backward: bool) -> float:
        return self.overheads[1] * (2 if is_backward else 1) / 3

    def step_overhead(self) -> float:
        return self.overheads[2]

    def shared(self, busy: float, makespan: float, ranks: int) -> float:
        """Ranks that share cores are together no faster than the cores."""
        return max(makespan, busy / self.cores) if ranks > self.cores else makespan

    def _surface(self, *key: str) -> Surface:
        if key not in self.surfaces:
            raise ArgumentError(f"the calibration holds no {' '.join(key)}: run `mindspeed-lite calibrate` again")
        return self.surfaces[key]


def read(path: Path, ranks: int = 1) -> CalibratedDevice:
    """Load a device for `ranks` processes; raises ArgumentError for other files."""
    try:
        return _device(json_file.read(path, _FILE), ranks)
    except json_file.JsonFileError as error:
        raise ArgumentError(f"{error}: run `mindspeed-lite calibrate` again") from None


def _sample(key: Sequence[str], shape: Sequence[float], work: float, seconds: float) -> Sample:
    if len(shape) != _SIZES.get(key[0], 1):
        raise ValueError(f"want a shape of {_SIZES.get(key[0], 1)} numbers for {key[0]}, not of {len(shape)}")
    return tuple(key), shape, work, seconds


# Dimensions of a shape; 1 for other operators.
_SIZES = {"product": 3, "grouped": 3, "scores": 2, "flash": 2}
_OVERHEADS = ("layer", "microbatch", "step")
_COUNT = r"[1-9]\d{0,6}"
# Keeps rates and their logarithms finite.
_SECONDS = json_file.number("seconds", 1e-12, 1e6)
_SIZE = json_file.number("a size", 1, 1e18)
_FILE = json_file.fields(
    {
        "format": json_file.one_of(FORMAT),
        "device": json_file.text("a device's name"),
        "kind": json_file.one_of("cpu", "cuda", "npu"),
        "cores": json_file.whole("a number of cores", 1),
        "ranks_per_node": json_file.whole("a number of processes", 1),
        "overlap": json_file.number("a share", most=1.0),
        "operators": json_file.table(
            json_file.rows(
                json_file.fields(
                    {
                        "key": json_file.rows(json_file.text("a name"), least=1),
                        "shape": json_file.rows(_SIZE, least=1),
                        "work": json_file.number("units of work", 1),
                        "seconds": _SECONDS,
                    },
                    make=_sample,
                )
            ),
            _COUNT,
            "a number of processes",
            least=1,
        ),
        "collectives": json_file.rows(
            json_file.fields(
                {
                    "kind": json_file.one_of(*get_args(Collective)),
                    "ranks": json_file.whole("a number of processes", 2),
                    "bytes": _SIZE,
                    "seconds": _SECONDS,
                    "width": json_file.whole("bytes of an element", 1),
                }
            )
        ),
        "overheads": json_file.fields(dict.fromkeys(_OVERHEADS, json_file.number("seconds", most=1e6))),
    },
    others=True,
)


def _device(data: Mapping[str, Any], ranks: int) -> CalibratedDevice:
    counts = sorted(map(int, data["operators"]))
    together = max((each for each in counts if each <= max(1, ranks)), default=counts[0])
    grouped: dict[tuple[str, ...], list[tuple[Sequence[float], float, float]]] = {}
    for key, shape, work, seconds in data["operators"][str(together)]:
        grouped.setdefault(key, []).append((shape, work, seconds))
    messages: dict[tuple[str, int, int], dict[float, float]] = {}
    for each in data["collectives"]:
        messages.setdefault((each["kind"], each["ranks"], each["width"]), {})[each["bytes"]] = each["seconds"]
    return CalibratedDevice(
        **{name: data[name] for name in ("kind", "cores", "ranks_per_node", "overlap")},
        name=data["device"],
        surfaces={key: surface(samples) for key, samples in grouped.items()},
        messages={key: sorted(points.items()) for key, points in messages.items()},
        overheads=tuple(data["overheads"][name] for name in _OVERHEADS),
    )


def _pass(is_backward: bool) -> str:
    return "backward" if is_backward else "forward"


def _interpolated(points: Sequence[tuple[float, float]], size: float) -> float:
    """Linear between measured sizes, at the last rate beyond."""
    if len(points) == 1 or size <= points[0][0]:
        return points[0][1]
    for (small, fast), (large, slow) in itertools.pairwise(points):
        if size <= large:
            return fast + (slow - fast) * (size - small) / (large - small)
    (small, fast), (large, slow) = points[-2:]
    return slow + max(0.0, slow - fast) * (size - large) / (large - small)
