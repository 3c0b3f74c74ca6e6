"""rope: against the composition that Megatron's local implementation makes for queries or keys.

x is a part of a fused projection, as there: its last dimension is contiguous, the others are not. The angles are given;
ours has cos and sin of them from the call before, as in every layer but the first, the composition computes them.

Counted as bytes: forward reads x, cos and sin (fp32) and writes y, backward does it once more. Counted as operations:
3 on each element turned, in each direction. None of them is a matmul's, so memory is the bound on every device.
"""

from __future__ import annotations

from typing import NamedTuple

from mindspeed_lite.ops.case import OURS, TORCH, Case, Cases, Work, by_case, contenders, itemsize

_EXAMPLE = "for example s=1024,b=1,n=16,d=64"
# How the elements of a head pair up, as in the operator.
_PAIRS = ("half", "interleaved", "regrouped")


class Shape(NamedTuple):
    """Sequence, batch, heads, head size, rotary elements of a head; how they pair up."""

    s: int
    b: int
    n: int
    d: int
    r: int
    pairs: str


def parse(text: str) -> Shape:
    """The shape of `s=1024,n=16,d=64`.

    Raises:
        ValueError: what is wrong with the text.
    """
    given: dict[str, int] = {}
    pairs = "half"
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if key not in Shape._fields:
            raise ValueError(f"{key!r} is none of {', '.join(Shape._fields)}; {_EXAMPLE}")
        if key in given:
            raise ValueError(f"{key} is given twice")
        if key == "pairs":
            if value not in _PAIRS:
                raise ValueError(f"pairs is one of {', '.join(_PAIRS)}, not {value!r}")
            pairs = value
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


def case(text: str, device: str, dtype: str) -> Case:
    """The case of such a text."""
    shape = parse(text)
    s, b, n, d, r, pairs = shape
    work = Work(2 * s * b * n * d * itemsize(dtype) + 2 * s * r * 4, 3 * s * b * n * r)
    options = ("" if r == d else f" r={r}") + ("" if pairs == "half" else f" {pairs}")
    peers = [] if pairs == "regrouped" else [by_case("transformer_engine", "engine", package="transformer_engine")]
    if pairs == "half" and n > 1:  # it turns queries and keys: some of the heads each
        peers.insert(0, by_case("liger", "liger", package="liger_kernel"))
    return Case(
        operator="rope",
        name=f"s={s} b={b} n={n} d={d}{options} {dtype}",
        shape=shape,
        device=device,
        dtype=dtype,
        inputs=(),
        forward=work,
        both=work + work,
        contenders=contenders(by_case(OURS, "ours"), by_case(TORCH, "plain"), *peers),
    )


# The model of CPU runs, Llama 8B's queries and keys, multi-latent attention's positions.
_CPU = ("s=1024,n=16,d=64", "s=4096,n=32,d=128", "s=4096,n=8,d=128", "s=4096,n=16,d=64,pairs=regrouped")

CASES = Cases(
    syntax="s=SEQUENCE,n=HEADS,d=SIZE and, if wanted, b=BATCH (1), r=ROTARY ELEMENTS (d), "
    "pairs=half|interleaved|regrouped (half)",
    example="s=1024,b=1,n=16,d=64",
    case=case,
    cpu=_CPU,
    accelerator=(*_CPU, "s=8192,b=2,n=64,d=128", "s=4096,n=32,d=128,pairs=interleaved"),
    quick=("s=1024,n=16,d=64",),
    tiny=(
        "s=64,n=2,d=32",
        "s=12,n=2,d=8",
        "s=12,b=2,n=2,d=8,r=4,pairs=interleaved",
        "s=12,n=2,d=8,r=6,pairs=regrouped",
    ),
    numerics=(
        "s=128,n=4,d=64",
        "s=100,b=2,n=3,d=80,r=40",
        "s=96,n=4,d=64,pairs=interleaved",
        "s=96,n=4,d=64,pairs=regrouped",
    ),
)
