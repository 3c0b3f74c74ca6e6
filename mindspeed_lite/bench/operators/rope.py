"""rope: against the composition that Megatron's local implementation makes for queries or keys.

x is a part of a fused projection, as there: its last dimension is contiguous, the others are not. The angles are given;
ours has cos and sin of them from the call before, as in every layer but the first, the composition computes them.

Counted as bytes: forward reads x, cos and sin (fp32) and writes y, backward does it once more. Counted as operations:
3 on each element turned, in each direction. None of them is a matmul's, so memory is the bound on every device.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mindspeed_lite.bench.operators import OURS, TORCH, Case, Contender, Work, compiled, dtype_name, peers
from mindspeed_lite.ops.rope import PAIRS, Pairs, rope
from mindspeed_lite.ops.rope.angles import cos_sin

_EXAMPLE = "for example s=1024,b=1,n=16,d=64"


class Shape(NamedTuple):
    """Sequence, batch, heads, head size, rotary elements of a head; how they pair up."""

    s: int
    b: int
    n: int
    d: int
    r: int
    pairs: Pairs


def shapes(device: str, quick: bool) -> list[str]:
    """The model of this project's CPU runs, Llama 8B's queries and keys, multi-latent attention's positions."""
    if quick:
        return ["s=1024,n=16,d=64"]
    chosen = ["s=1024,n=16,d=64", "s=4096,n=32,d=128", "s=4096,n=8,d=128", "s=4096,n=16,d=64,pairs=regrouped"]
    return chosen if device == "cpu" else [*chosen, "s=8192,b=2,n=64,d=128", "s=4096,n=32,d=128,pairs=interleaved"]


def parse(text: str) -> Shape:
    """The shape of `s=1024,n=16,d=64`.

    Raises:
        ValueError: what is wrong with the text.
    """
    given: dict[str, int] = {}
    pairs: Pairs = "half"
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if key not in Shape._fields:
            raise ValueError(f"{key!r} is none of {', '.join(Shape._fields)}; {_EXAMPLE}")
        if key in given:
            raise ValueError(f"{key} is given twice")
        if key == "pairs":
            if value not in PAIRS:
                raise ValueError(f"pairs is one of {', '.join(PAIRS)}, not {value!r}")
            pairs = next(each for each in PAIRS if each == value)
        elif not equals or not value.isdecimal() or int(value) < 1:
            raise ValueError(f"{key} needs a whole number of at least 1")
        else:
            given[key] = int(value)
    missing = [key for key in ("s", "n", "d") if key not in given]
    if missing:
        raise ValueError(f"{' and '.join(missing)} missing; {_EXAMPLE}")
    shape = Shape(**{"b": 1, "r": given["d"], **given}, pairs=pairs)
    if shape.r % 2 or shape.r > shape.d:
        raise ValueError(f"r={shape.r} rotary elements: want an even number within d={shape.d}")
    return shape


def case(text: str, device: str, dtype: torch.dtype) -> Case:
    """The case of such a text."""
    shape = parse(text)
    s, b, n, d, r, pairs = shape

    def make() -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        mixed = torch.randn(s, b, n, 3, d, generator=generator).to(device, dtype)
        return (mixed[..., 1, :].requires_grad_(),)

    work = Work(2 * s * b * n * d * dtype.itemsize + 2 * s * r * 4, 3 * s * b * n * r)
    options = ("" if r == d else f" r={r}") + ("" if pairs == "half" else f" {pairs}")
    return Case(
        operator="rope",
        name=f"s={s} b={b} n={n} d={d}{options} {dtype_name(dtype)}",
        device=device,
        dtype=dtype,
        make=make,
        forward=work,
        both=Work(2 * work.bytes, 2 * work.flops),
        contenders=(
            Contender(OURS, lambda: functools.partial(_ours, shape)),
            Contender(TORCH, lambda: plain(shape, device)),
            compiled(lambda: plain(shape, device)),
            *(() if pairs == "regrouped" else peers(device, ("transformer_engine", _engine(shape)))),
        ),
    )


@functools.lru_cache(4)
def _angles(shape: Shape, device: str) -> torch.Tensor:
    """[s, 1, 1, r], those of a pair equal; made once, as in a model."""
    angles = torch.arange(shape.s).float()[:, None] * 1e4 ** -(torch.arange(0, shape.r, 2).float() / shape.r)
    interleaved = shape.pairs == "interleaved"
    both = torch.stack((angles, angles), -1).flatten(-2) if interleaved else torch.cat((angles, angles), -1)
    return both[:, None, None].to(device)


def _ours(shape: Shape, x: torch.Tensor) -> torch.Tensor:
    return rope(x, *cos_sin(_angles(shape, x.device.type)), pairs=shape.pairs)


def plain(shape: Shape, device: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """What Megatron's local implementation computes, as whole-tensor operations in x's dtype."""
    angles, pairs, width = _angles(shape, device), shape.pairs, shape.r

    def run(x: torch.Tensor) -> torch.Tensor:
        turned, rest = x[..., :width], x[..., width:]
        if pairs == "regrouped":
            turned = torch.cat((turned[..., 0::2], turned[..., 1::2]), -1)
        if pairs == "interleaved":
            other = torch.stack((-turned[..., 1::2], turned[..., 0::2]), -1).flatten(-2)
        else:
            other = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), -1)
        y = turned * angles.cos().to(x.dtype) + other * angles.sin().to(x.dtype)
        return torch.cat((y, rest), -1)

    return run


def _engine(shape: Shape) -> Contender:
    def load() -> Callable[..., torch.Tensor]:
        function: Any = importlib.import_module("transformer_engine.pytorch.attention.rope").apply_rotary_pos_emb
        how = {"tensor_format": "sbhd", "fused": True, "interleaved": shape.pairs == "interleaved"}
        return lambda x: function(x, _angles(shape, x.device.type), **how)

    return Contender("transformer_engine", load)
