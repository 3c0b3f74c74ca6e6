"""The measure of Triton kernels without a GPU: it compiles, tells kernels apart, and says what does not compile."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl

from tests.ops.triton_compile import CompileError, compile_sm90

KERNELS = __name__
SCALED = {"x": "*fp32", "y": "*fp32", "factor": "fp32", "n": "i32"}


@triton.jit
def scaled(x, y, factor, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)


@triton.jit
def wrong(x, n, BLOCK: tl.constexpr):
    tl.store(x, tl.arange(0, BLOCK) + tl.arange(0, 2 * BLOCK))


def test_more_work_per_thread_takes_more_registers_and_at_last_spills() -> None:
    few, many, too_many = (
        compile_sm90(f"{KERNELS}:scaled", SCALED, {"BLOCK": block}, num_warps=1) for block in (1024, 4096, 8192)
    )
    assert few.registers < many.registers
    assert few.spills == 0 and too_many.spills > 0


@pytest.mark.parametrize(
    ("kernel", "signature", "words"),
    [
        ("wrong", {"x": "*i32", "n": "i32"}, "incompatible"),
        ("scaled", {"x": "*fp32", "y": "*fp32", "n": "i32"}, "no type for"),
        ("scaled", {**SCALED, "z": "i32"}, "no argument"),
    ],
)
def test_what_does_not_compile_is_said(kernel: str, signature: dict[str, str], words: str) -> None:
    with pytest.raises(CompileError, match=words):
        compile_sm90(f"{KERNELS}:{kernel}", signature, {"BLOCK": 64})
