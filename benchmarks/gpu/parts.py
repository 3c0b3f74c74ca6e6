"""The parts of the campaign in the order of their worth, each with its time."""

from __future__ import annotations

from dataclasses import dataclass

# For everything; a command on a lent GPU ends after 600 s.
SECONDS = 570.0


@dataclass(frozen=True)
class Part:
    """Units of one module, measured in processes of their own.

    Attributes:
        module: its `units(part, device, tiny)` lists what is measured for the part of that name.
        seconds: when the part is stopped; slack of earlier parts is added.
        least: with less time left the part does not start.
        unit_seconds: a unit that takes longer has hung.
        workers: processes that share the units.
        repeats: measured again in every call, since another machine may answer.
    """

    name: str
    about: str
    module: str
    seconds: float
    least: float
    unit_seconds: float
    workers: int = 1
    repeats: bool = False


PARTS = (
    Part("machine", "versions, ceilings", "benchmarks.gpu.machine", 15, 5, 15, repeats=True),
    Part("numerics", "every operator against float64", "benchmarks.gpu.numerics", 50, 10, 20, workers=8),
    Part("tests", "the tests of CUDA kernels", "benchmarks.gpu.cuda_tests", 40, 15, 120),
    Part("decisions", "kernels of which one is to be chosen", "benchmarks.gpu.decisions", 50, 15, 30),
    Part("dense", "4 layers, hidden 4096, sequence 4096, vocabulary 128,256", "benchmarks.gpu.training", 220, 75, 90),
    Part("experts", "8 layers, hidden 2048, 8 experts, top 2, sequence 4096", "benchmarks.gpu.training", 80, 40, 60),
    Part("operators", "the remaining operators", "benchmarks.gpu.operators", 25, 10, 20),
    Part("machine again", "ceilings after everything else", "benchmarks.gpu.machine", 10, 5, 15, repeats=True),
)
