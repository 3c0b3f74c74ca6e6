"""Words that no parser knows: one line each, with what may be meant."""

from __future__ import annotations

import pytest

from mindspeed_lite import runtime
from mindspeed_lite.migration import unrecognized

KNOWN = ["-h", "--num-layers", "--hidden-size", "--bf16", *(option.flag for option in runtime.catalogue().options())]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--use-flas-attn", "--use-flash-attn"),
        ("--use_flash_attn", "--use-flash-attn"),
        ("--Use-Flash-Attn=1", "--use-flash-attn"),
        ("-num-layers", "--num-layers"),
        ("--num-layer", "--num-layers"),
        ("--hiden-size", "--hidden-size"),
        ("--use-fused-rms-norm", "--use-fused-rmsnorm"),
        ("--context-paralel-algo", "--context-parallel-algo"),
        ("--gemm-gradient-accumulation", "--gemm-gradient-accumulation-fusion"),
    ],
)
def test_what_resembles_a_flag_is_named(word, meant):
    assert unrecognized([word], KNOWN) == [f"unrecognized argument {word.partition('=')[0]}: did you mean {meant}?"]


def test_all_at_once_each_once_and_values_are_not_flags():
    words = ["stray", "--use-flas-attn", "3", "-1", "x", "--nothing-like-it-here", "--use-flas-attn"]
    assert unrecognized(words, KNOWN) == [
        "unrecognized argument 'stray': it belongs to no flag",
        "unrecognized argument --use-flas-attn: did you mean --use-flash-attn?",
        "unrecognized argument --nothing-like-it-here",
    ]
