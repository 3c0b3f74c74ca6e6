"""Draws calls: sizes in the operators' own texts, and what stands around them."""

from __future__ import annotations

from hypothesis import strategies as st

from mindspeed_lite.ops.discovery import OPERATORS, cases
from tools.fuzz.call import LAYOUTS, MODES, VALUES, Call, numbers

# Powers of two and their neighbours, of vectors and of blocks.
_SIZES = st.one_of(st.integers(1, 9), st.sampled_from([15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 129, 257, 1000]))
_DTYPES = ("bf16", "fp32", "fp16")
# Compilations and processes take a while.
_MODES = st.sampled_from([*["here"] * 20, *MODES])
_VALUES = st.sampled_from(["normal"] * 6 + list(VALUES))


@st.composite
def calls(draw: st.DrawFn, threads: int, only: tuple[str, ...] = tuple(OPERATORS)) -> Call:
    """A call of one of the operators `only`, by at most `threads` threads."""
    operator = draw(st.sampled_from(only))
    declared = cases(operator)
    text = draw(st.sampled_from(declared.correctness))
    dtype = draw(st.sampled_from(_DTYPES))
    for place in reversed(numbers(text)):
        if draw(st.booleans()):
            text = f"{text[: place.start()]}{draw(_SIZES)}{text[place.end() :]}"
    empty = draw(st.integers(-12, len(numbers(text)) - 1))
    mode = draw(_MODES)
    return Call(
        operator,
        text,
        dtype,
        max(empty, -1),
        tuple(draw(st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=3))),
        draw(_VALUES),
        1 if mode in ("forked", "fake") else draw(st.integers(1, threads)),
        mode,
        draw(st.integers(0, 999)),
    )
