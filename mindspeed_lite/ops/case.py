"""What an operator's `cases.py` is written with: one benchmark case as data, without torch.

`cases.py` stands in the operator's folder and defines `CASES`, a `Cases`: what bench-ops times, what the self-test
judges against float64, what the NPU emulation and the NPU contract run. Importing it imports neither torch nor triton,
so that `--help` is instant; functions of tensors are named in it, and loaded by `mindspeed_lite.bench.operators`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

OURS = "mindspeed_lite"
TORCH = "torch"
COMPILED = "torch.compile"

# A dtype as --dtype spells it -> its name in torch, and the bytes of an element.
DTYPES: Mapping[str, tuple[str, int]] = {
    "bf16": ("bfloat16", 2),
    "fp16": ("float16", 2),
    "fp32": ("float32", 4),
    "fp64": ("float64", 8),
}


@dataclass(frozen=True)
class Work:
    """The least that must be moved and computed: bytes, and floating-point operations."""

    bytes: int
    flops: int

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True)
class Input:
    """One input tensor: `offset` + `scale` * random numbers, from a generator that all inputs of a case share.

    uniform: numbers of [0, 1) in place of normal ones. wide: at least fp32, whatever the case's dtype.
    """

    shape: tuple[int, ...]
    scale: float = 1.0
    offset: float = 0.0
    uniform: bool = False
    wide: bool = False
    gradient: bool = True


@dataclass(frozen=True)
class Contender:
    """A way to compute a case, by the name of its code.

    path: `module:function`; a module without a dot is a file of the operator's folder.
    options: the function is called with the case's inputs and these keyword arguments.
    from_case: `path` is called with the case instead, and returns the function of the inputs.
    package: a peer, listed on a GPU where this package is installed. What it makes of a case may be an `OwnLayout`.
    compiled: under torch.compile.
    """

    name: str
    path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    from_case: bool = False
    package: str = ""
    compiled: bool = False


@dataclass(frozen=True)
class Case:
    """One problem to solve.

    name: shapes, options and dtype, unique within the operator. shape: what the operator's own functions read.
    dtype: a key of `DTYPES`. inputs: empty where `inputs(case)` of the operator's bench.py makes them; they are the
    same at every call. forward, both: the work of the direction. contenders: `OURS` first, then `TORCH`.

    An operator without gradients has None for `both` and inputs that want none, which it may write. is_random: every
    contender draws random numbers in its own way, and results are not compared.
    """

    operator: str
    name: str
    shape: Any
    device: str
    dtype: str
    inputs: tuple[Input, ...]
    forward: Work
    both: Work | None
    contenders: tuple[Contender, ...]
    is_random: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's own."""
        import torch

        found: torch.dtype = getattr(torch, DTYPES[self.dtype][0])
        return found


def _no_variants(device: str, dtype: str) -> tuple[Case, ...]:
    return ()


@dataclass(frozen=True)
class Cases:
    """Every standing case of an operator, as texts that `case` reads; the same texts are what --shapes takes.

    syntax, example: how such a text is written, for --help.
    case: (text, device, dtype) -> Case; ValueError says what is wrong with the text.
    cpu, accelerator: timed by bench-ops on the device. quick: the same under --quick.
    tiny: a millisecond on any machine: contenders must agree on every one, and the first is timed by the quick
        self-test.
    numerics: compared with float64 by the self-test and on the NPU emulation; chosen for the ways through a backend,
        not for size. Default: `quick`.
    numerics_bf16: compared in bf16 only, since they take a while.
    variants: (device, dtype) -> compared as well; cases that no text describes.
    """

    syntax: str
    example: str
    case: Callable[[str, str, str], Case]
    cpu: tuple[str, ...]
    accelerator: tuple[str, ...]
    quick: tuple[str, ...]
    tiny: tuple[str, ...]
    numerics: tuple[str, ...] = ()
    numerics_bf16: tuple[str, ...] = ()
    variants: Callable[[str, str], tuple[Case, ...]] = _no_variants

    def shapes(self, device: str, quick: bool) -> tuple[str, ...]:
        """The texts of what bench-ops times on `device`."""
        return self.quick if quick else self.cpu if device == "cpu" else self.accelerator


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    return DTYPES[dtype][1]


def wide_itemsize(dtype: str) -> int:
    """Bytes of an element in fp32, or in float64 where the dtype is that."""
    return max(4, itemsize(dtype))


def sizes(text: str, syntax: str, example: str) -> tuple[int, ...]:
    """The numbers of `1024x4096`, as many as `syntax` (`ROWSxHIDDEN`) has, each at least 1.

    Raises:
        ValueError: the text is none of that form.
    """
    count = syntax.count("x") + 1
    match = re.fullmatch("[xX]".join([r"([1-9]\d*)"] * count), text)
    if match is None:
        raise ValueError(f"want {syntax} with {'both' if count == 2 else 'all'} at least 1, for example {example}")
    return tuple(map(int, match.groups()))


@dataclass(frozen=True)
class OwnLayout:
    """A function of a case's inputs by a library that wants them in another layout, or writes over them.

    arrange: the case's inputs -> its own, as copies; not timed, as a model made for the library has them so.
    call: these -> a tensor, or several; timed. restore: what `call` gives -> the case's output; not timed.
    note: what is left out of its time, for the report.
    """

    arrange: Callable[..., tuple[torch.Tensor, ...]]
    call: Callable[..., Any]
    note: str
    restore: Callable[[Any], torch.Tensor] = lambda output: output

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.restore(self.call(*self.arrange(*inputs)))


def contenders(ours: Contender, plain: Contender, *others: Contender) -> tuple[Contender, ...]:
    """Ours, plain PyTorch, the same compiled, then `others`."""
    return ours, plain, replace(plain, name=COMPILED, compiled=True), *others


def by_case(name: str, function: str, package: str = "") -> Contender:
    """A contender that `function` of the operator's bench.py makes from the case."""
    return Contender(name, f"bench:{function}", from_case=True, package=package)


def generator(case: Case) -> torch.Generator:
    """What draws a case's inputs: on a GPU the GPU, since the host takes seconds for large ones."""
    import torch

    return torch.Generator("cuda" if case.device == "cuda" else "cpu").manual_seed(1)


def movable(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """`tensor` as a function of another one, on whose device it comes; copied when that device changes."""

    def on_device_of(like: torch.Tensor) -> torch.Tensor:
        nonlocal tensor
        if tensor.device != like.device:
            tensor = tensor.to(like.device)
        return tensor

    return on_device_of
