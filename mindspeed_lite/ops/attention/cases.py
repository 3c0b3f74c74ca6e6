"""attention: against what Megatron's local DotProductAttention computes, and against PyTorch's fused function.

`torch` writes every score to memory, as Megatron does without us: baddbmm, a mask, softmax, bmm. `torch sdpa` is
`scaled_dot_product_attention` as a user would call it, with the layout changed there and back.

Counted as operations: two for each multiply-add of the matrix products, over the pairs of query and key that the
mask leaves, 2 products forward and 4 backward (computing the scores again, as flash kernels do, is their choice and
not counted). Counted as bytes: forward reads q, k and v and writes the output; backward reads these four and the
output's gradient and writes three gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from mindspeed_lite.ops.case import OURS, TORCH, Case, Cases, Input, Work, by_case, itemsize
from mindspeed_lite.ops.case import contenders as together

_EXAMPLE = "for example s=1024,b=1,n=16,g=16,d=64"
# Ends of the sequences of the packed variant.
PACKED_ENDS = (0, 40, 45, 128)


class Shape(NamedTuple):
    """Sequence, batch, query heads, key heads, head size; keys before the query's own, or -1; causal order."""

    s: int
    b: int
    n: int
    g: int
    d: int
    w: int
    causal: bool


def parse(text: str) -> Shape:
    """The shape of `s=1024,n=16,d=64`.

    Raises:
        ValueError: what is wrong with the text.
    """
    given: dict[str, int] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if key not in Shape._fields:
            raise ValueError(f"{key!r} is none of {', '.join(Shape._fields)}; {_EXAMPLE}")
        if key in given:
            raise ValueError(f"{key} is given twice")
        if not equals or not value.isdecimal() or (key != "causal" and int(value) < (0 if key == "w" else 1)):
            raise ValueError(f"{key} needs a whole number{'' if key in ('w', 'causal') else ' of at least 1'}")
        given[key] = int(value)
    missing = [key for key in ("s", "n", "d") if key not in given]
    if missing:
        raise ValueError(f"{' and '.join(missing)} missing; {_EXAMPLE}")
    causal = given.pop("causal", 1)
    if causal not in (0, 1):
        raise ValueError(f"causal is 0 or 1, not {causal}")
    shape = Shape(**{"b": 1, "g": given["n"], "w": -1, **given}, causal=bool(causal))
    if shape.n % shape.g:
        raise ValueError(f"g={shape.g} key heads do not divide n={shape.n} heads")
    return shape


def visible_pairs(shape: Shape) -> int:
    """How many pairs of query and key one head computes."""
    before = shape.s - 1 if shape.w < 0 else min(shape.w, shape.s - 1)
    # Query i sees min(i, before) keys before its own.
    earlier = before * (before + 1) // 2 + (shape.s - 1 - before) * before
    return shape.s + (earlier if shape.causal else 2 * earlier)


def case(text: str, device: str, dtype: str) -> Case:
    """The case of such a text."""
    shape = parse(text)
    s, b, n, g, d, w, causal = shape
    queries, keys = s * b * n * d * itemsize(dtype), s * b * g * d * itemsize(dtype)
    product = 2 * b * n * d * visible_pairs(shape)
    options = ("" if causal else " full") + ("" if w < 0 else f" w={w}")
    ours, plain, compiled = together(by_case(OURS, "ours"), by_case(TORCH, "plain"))
    return Case(
        operator="attention",
        name=f"s={s} b={b} n={n} g={g} d={d}{options} {dtype}",
        shape=shape,
        device=device,
        dtype=dtype,
        inputs=(Input((s, b, n, d)), Input((s, b, g, d)), Input((s, b, g, d))),
        forward=Work(2 * queries + 2 * keys, 2 * product),
        both=Work(6 * queries + 6 * keys, 6 * product),
        contenders=(
            ours,
            plain,
            by_case("torch sdpa", "sdpa"),
            compiled,
            by_case("flash_attn", "flash_attn", package="flash_attn"),
            by_case("transformer_engine", "transformer_engine", package="transformer_engine"),
        ),
    )


def _variants(device: str, dtype: str) -> tuple[Case, ...]:
    """A mask of its own for each sequence; one more logit per head, our own call of a backend's backward; a pack."""
    square = case("s=96,b=2,n=4,d=64", device, dtype)
    pack = case(f"s={PACKED_ENDS[-1]},n=4,d=64", device, dtype)
    return (
        replace(
            square,
            name=f"mask [2, 1, 96, 96] n=4 d=64 {dtype}",
            contenders=(by_case(OURS, "masked_ours"), by_case(TORCH, "masked_plain")),
        ),
        replace(
            square,
            name=f"softmax offset s=96 b=2 n=4 d=64 {dtype}",
            inputs=(),
            contenders=(by_case(OURS, "offset_ours"), by_case(TORCH, "offset_plain")),
        ),
        replace(
            pack,
            name=f"pack of {PACKED_ENDS[-1]} n=4 d=64 {dtype}",
            inputs=(Input((PACKED_ENDS[-1], 4, 64)),) * 3,
            contenders=(by_case(OURS, "packed_ours"), by_case(TORCH, "packed_plain")),
        ),
    )


# The model of CPU runs short and long, grouped heads (Llama 8B), a window (Mistral's idea).
_CPU = ("s=1024,n=16,d=64", "s=4096,n=16,d=64", "s=2048,n=32,g=8,d=128", "s=4096,n=16,d=64,w=1024")

CASES = Cases(
    syntax="s=SEQUENCE,n=HEADS,d=SIZE and, if wanted, b=BATCH (1), g=KEY HEADS (n), w=WINDOW (none), causal=0|1 (1)",
    example="s=1024,b=1,n=16,g=16,d=64",
    case=case,
    cpu=_CPU,
    accelerator=(*_CPU, "s=8192,n=32,g=8,d=128"),
    quick=("s=256,n=16,d=64",),
    tiny=(
        "s=64,n=2,d=32",
        "s=12,n=4,d=8",
        "s=12,b=2,n=4,g=2,d=8",
        "s=12,n=2,d=8,w=3",
        "s=12,n=2,d=8,w=3,causal=0",
        "s=12,n=2,d=8,causal=0",
    ),
    # Causal, no mask, a window on one side and on both, one key head for several heads and for all, lengths that are no
    # power of two.
    numerics=(
        "s=128,n=4,d=64",
        "s=100,b=2,n=8,g=2,d=80",
        "s=192,n=4,d=64,w=32",
        "s=130,n=4,g=1,d=128,causal=0",
        "s=130,n=2,d=64,w=20,causal=0",
    ),
    # Beyond the 2048 x 2048 triangle that stands for every causal mask on an NPU.
    numerics_bf16=("s=2080,n=1,d=64",),
    variants=_variants,
)
