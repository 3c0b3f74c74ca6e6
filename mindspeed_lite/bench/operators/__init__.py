"""What there is to race: a file per operator, and the vocabulary they share.

An operator's file holds

    shapes(device, quick) -> list[str]            the cases measured unless the user names some, as --shapes texts
    case(text, device, dtype) -> Case             what such a text means; ValueError says what is wrong with it

and `OPERATORS` names it. Nothing here imports torch, so that help is instant.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

OURS = "mindspeed_lite"
TORCH = "torch"
COMPILED = "torch.compile"


class Entry(NamedTuple):
    """Where an operator's file is, and how its shapes are written."""

    module: str
    shapes: str
    example: str


# A literal, as in mindspeed_lite.ops.dispatch: no import order decides what is measured.
OPERATORS: Mapping[str, Entry] = {
    "accumulate_wgrad": Entry("mindspeed_lite.bench.operators.accumulate_wgrad", "ROWSxINPUTxOUTPUT", "1024x1024x3072"),
    "activation": Entry(
        "mindspeed_lite.bench.operators.activation",
        "ROWSxWIDTH and, if wanted in this order, kind=KIND (swiglu), bias=1, weights=1",
        "1024x5632",
    ),
    "adamw": Entry("mindspeed_lite.bench.operators.adamw", "TENSORSxELEMENTS", "8x1048576"),
    "attention": Entry(
        "mindspeed_lite.bench.operators.attention",
        "s=SEQUENCE,n=HEADS,d=SIZE and, if wanted, b=BATCH (1), g=KEY HEADS (n), w=WINDOW (none), causal=0|1 (1)",
        "s=1024,b=1,n=16,g=16,d=64",
    ),
    "bias_dropout_add": Entry(
        "mindspeed_lite.bench.operators.bias_dropout_add", "ROWSxWIDTH and, if wanted, p=SHARE", "1024x1024,p=0.1"
    ),
    "cross_entropy": Entry("mindspeed_lite.bench.operators.cross_entropy", "ROWSxVOCABULARY", "1024x32768"),
    "grouped_matmul": Entry(
        "mindspeed_lite.bench.operators.grouped_matmul", "ROWSxINPUTxOUTPUTxEXPERTS", "4096x512x256x16"
    ),
    "l2norm": Entry("mindspeed_lite.bench.operators.l2norm", "TENSORSxELEMENTS", "8x1048576"),
    "layer_norm": Entry("mindspeed_lite.bench.operators.layer_norm", "ROWSxHIDDEN", "1024x4096"),
    "linear_cross_entropy": Entry(
        "mindspeed_lite.bench.operators.linear_cross_entropy", "ROWSxHIDDENxVOCABULARY", "1024x1024x32768"
    ),
    "masked_softmax": Entry(
        "mindspeed_lite.bench.operators.masked_softmax", "BxNxSQxSK and, if wanted, causal=0", "1x16x1024x1024"
    ),
    "moe_router": Entry(
        "mindspeed_lite.bench.operators.moe_router",
        "TOKENSxEXPERTS,k=TOPK and, if wanted in this order, scores=FUNCTION (softmax), pre=1, groups=NUMBER/CHOSEN, "
        "bias=1",
        "4096x64,k=6",
    ),
    "permute": Entry("mindspeed_lite.bench.operators.permute", "TOKENSxHIDDENxEXPERTSxTOPK", "4096x512x64x6"),
    "rms_norm": Entry("mindspeed_lite.bench.operators.rms_norm", "ROWSxHIDDEN", "1024x4096"),
    "rope": Entry(
        "mindspeed_lite.bench.operators.rope",
        "s=SEQUENCE,n=HEADS,d=SIZE and, if wanted, b=BATCH (1), r=ROTARY ELEMENTS (d), "
        "pairs=half|interleaved|regrouped (half)",
        "s=1024,b=1,n=16,d=64",
    ),
    "vocab_embedding": Entry(
        "mindspeed_lite.bench.operators.vocab_embedding",
        "IDSxHIDDENxROWS and, if wanted, main=1",
        "1024x1024x8192",
    ),
}


@dataclass(frozen=True)
class Work:
    """The least that must be moved and computed."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class Contender:
    """A way to compute the case.

    load: returns the function of the case's inputs. It may import a library, and it may raise; what it raises is
    reported in place of a time.
    """

    name: str
    load: Callable[[], Callable[..., torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """One problem to solve.

    name: shapes, dtype and options, unique within the operator. make: the inputs, all of which get a gradient, the
    same at every call. forward, both: the work of the direction. contenders: `OURS` first, then `TORCH`.

    An operator without gradients has None for `both`, and inputs that want none; it may write them. draws: results are
    random, each contender's in its own way, and are not compared.
    """

    operator: str
    name: str
    device: str
    dtype: torch.dtype
    make: Callable[[], tuple[torch.Tensor, ...]]
    forward: Work
    both: Work | None
    contenders: tuple[Contender, ...]
    draws: bool = False


def module(operator: str) -> ModuleType:
    """The file of an operator, imported."""
    return importlib.import_module(OPERATORS[operator].module)


def compiled(load_plain: Callable[[], Callable[..., torch.Tensor]]) -> Contender:
    """`torch.compile` of the plain path, for exactly these shapes."""

    def load() -> Callable[..., torch.Tensor]:
        import torch

        # Otherwise the second shape of a function is compiled for any shape, and the first has an advantage.
        torch.compiler.reset()
        function: Callable[..., torch.Tensor] = torch.compile(load_plain(), dynamic=False)
        return function

    return Contender(COMPILED, load)


def peers(device: str, *candidates: tuple[str, Contender]) -> tuple[Contender, ...]:
    """Those of the (package, contender) pairs whose package is installed, where there is a GPU to run them on."""
    return tuple(contender for package, contender in candidates if device == "cuda" and _is_installed(package))


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as --dtype spells it."""
    name = str(dtype).removeprefix("torch.")
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}.get(name, name)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # a parent that is broken, or a stub without a spec
        return False
