"""What the campaign on a GPU measures: its parts, each a command of `mindspeed-lite` with a limit of time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.configurations import CONFIGURATIONS, Configuration
from mindspeed_lite.ops import discovery

OPERATORS = "operators"

# By group of operators: seconds at most, and the shapes. Sizes of models of 7 to 70 billion parameters, far beyond a
# GPU's cache, and no larger than that: making inputs and comparing results takes time, too.
_GROUPS: Mapping[str, tuple[float, Mapping[str, tuple[str, ...]]]] = {
    "layers": (
        150,
        {
            "rms_norm": ("8192x8192",),
            "layer_norm": ("8192x8192",),
            "activation": ("8192x28672", "8192x28672,kind=geglu"),
            "rope": ("s=4096,b=2,n=32,d=128",),
            "bias_dropout_add": ("8192x4096",),
        },
    ),
    "loss": (
        110,
        {
            "cross_entropy": ("4096x128256",),
            "linear_cross_entropy": ("8192x4096x128256",),
            "masked_softmax": ("4x16x2048x2048",),
            "vocab_embedding": ("8192x4096x128256,main=1",),
        },
    ),
    "attention": (50, {"attention": ("s=8192,n=32,g=8,d=128",)}),
    "experts": (
        80,
        {
            "grouped_matmul": ("65536x2048x1536x128",),
            "moe_router": ("32768x256,k=8,scores=sigmoid,groups=8/4,bias=1",),
            "permute": ("8192x7168x256x8",),
        },
    ),
    "optimizer": (
        70,
        {
            "adamw": ("4x67108864",),
            "l2norm": ("8x67108864",),
            "accumulate_wgrad": ("8192x4096x28672",),
        },
    ),
}
# Whether the campaign runs.
_TINY_GROUPS: Mapping[str, tuple[float, Mapping[str, tuple[str, ...]]]] = {
    "layers": (120, {"activation": ("64x64", "64x64,kind=geglu")}),
}
_LIMITS = {"dense": 240.0, "moe": 200.0, "long": 200.0}


@dataclass(frozen=True)
class Part:
    """One command.

    command: arguments of `mindspeed-lite`, without --out. program: what stands behind `--`, to be run by Python.
    seconds: when it is stopped. cases: the names of the operators' cases, empty for a training.
    """

    name: str
    about: str
    seconds: float
    command: tuple[str, ...]
    program: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()


def parts(device: str, tiny: bool) -> list[Part]:
    """All parts in their order."""
    groups = _TINY_GROUPS if tiny else _GROUPS
    found = [_operators(name, seconds, shapes, device, tiny) for name, (seconds, shapes) in groups.items()]
    return [*found, *(_training(each, tiny) for each in CONFIGURATIONS["tiny" if tiny else "gpu"])]


def _operators(name: str, seconds: float, shapes: Mapping[str, tuple[str, ...]], device: str, tiny: bool) -> Part:
    texts = [f"{operator}:{text}" for operator, own in shapes.items() for text in own]
    cases = [
        f"{operator} {discovery.cases(operator).case(text, device, 'bf16').name}"
        for operator, own in shapes.items()
        for text in own
    ]
    command = ["bench-ops", "--device", device, *(["--quick"] if tiny else []), "--shapes", *texts]
    return Part(f"{OPERATORS}-{name}", ", ".join(shapes), seconds, tuple(command), cases=tuple(cases))


def _training(configuration: Configuration, tiny: bool) -> Part:
    return Part(
        configuration.name,
        configuration.about,
        300.0 if tiny else _LIMITS[configuration.name],
        ("bench", *configuration.bench.split(), "--title", configuration.name),
        tuple(configuration.command()[1:]),
    )
