"""AdamW's kernel compiled for an H100 in all its forms: nothing spills, and enough programs fit on a multiprocessor.

Other kernels, and this one's plain form, are in `lab/gpu_static.py`'s table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("triton")

from mindspeed_lite.ops.adamw import cuda as adamw
from tests.harness import matrix
from tests.ops.triton_compile import Resources, compile_sm90

# Kernel, types of its arguments, constants, warps; most registers of a thread. A multiprocessor has 65536.
Row = tuple[str, str, dict[str, Any], int, int]


def adamw_steps() -> Iterator[Row]:
    types = "addresses=*i64 pieces=*i32 scale_tensor=*fp32 scale=fp32 keep=fp32 l2=fp32 beta1_rest=fp32 beta2=fp32 "
    types += "beta2_rest=fp32 rate=fp32 root=fp32 eps=fp32 seed=i32"
    fixed = {"L2": False, "ALIGNED": True, "BLOCK": adamw._BLOCK}
    for grad in ("fp32", "bf16"):
        for out, halves, moments in (
            (None, False, "fp32"), ("bf16", False, "fp32"), (None, True, "fp32"), (None, True, "bf16"),
            (None, True, "uint8"),
        ):  # fmt: skip
            how = {"GRAD": grad, "OUT": out, "HALVES": halves, "MOMENTS": moments, **fixed}
            # Three programs share a processor; two, where beside the numbers stand the bits to encode.
            yield "adamw.kernel:step", types, how, adamw._WARPS, 128 if moments == "uint8" else 80


def compiled(row: Row) -> Resources:
    kernel, types, constants, warps, _ = row
    signature = dict(each.split("=") for each in types.split())
    return compile_sm90(f"mindspeed_lite.ops.{kernel}", signature, constants, num_warps=warps)


ROWS = [(row,) for row in adamw_steps()]


# The form with most registers, and the plain one; all in `make test-whole`.
@pytest.mark.parametrize(("row",), matrix.only([ROWS[0], ROWS[-1]], ROWS))
def test_it_stays_in_registers(row: Row) -> None:
    found = compiled(row)
    assert found.spills == 0 and found.registers <= row[-1], found
    # Shared memory turns fp32's order of elements into that of 16 bit, where there is any.
    only_fp32 = row[2]["GRAD"] == "fp32" and row[2]["OUT"] is None and not row[2]["HALVES"]
    assert found.shared <= (0 if only_fp32 else 4 * adamw._BLOCK)
