"""Kernels compiled without a GPU: their counts are read right, and none takes more than the committed table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

from lab import stamps
from lab.gpu_static import KEPT, PAGE, SHAPES, median_error, page, rounding
from lab.launches import Launch
from lab.sass import count_sass, passes
from tests.harness import matrix
from tests.harness.checkouts import ROOT

LOOP = """
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_0:
        /*0010*/                   LDG.E.64 R4, desc[UR4][R2.64] ;
        /*0020*/                   MUFU.EX2 R4, R4 ;
        /*0030*/              @!P0 BRA `(.L_x_0) ;
        /*0040*/                   EXIT ;
.L_x_1:
        /*0050*/                   BRA `(.L_x_1) ;
"""


def test_a_loop_is_told_from_what_runs_once() -> None:
    once, loops, inner = count_sass(LOOP)
    assert (once.issued, once.special, once.bytes) == (6, 1, 32 * 24)
    assert (loops.issued, loops.special, loops.bytes) == (3, 1, 32 * 8) and not inner.issued


def test_each_loop_reads_a_tensor_anew() -> None:
    ttir = """
  tt.func public @kernel(%x: !tt.ptr<f32>, %y: !tt.ptr<f32>) {
    %one = tt.load %x : !tt.ptr<f32>
    scf.for %i = %a to %b step %c : i32 {
      %at = tt.addptr %x, %i : !tt.ptr<f32>, i32
      %value = tt.load %at : !tt.ptr<f32>
    }
    scf.for %i = %a to %b step %c : i32 {
      %there = tt.addptr %x, %i : !tt.ptr<f32>, i32
      %again = tt.load %there : !tt.ptr<f32>
      tt.store %y, %again : !tt.ptr<f32>
    }
"""
    assert passes(ttir) == {"x": 2, "y": 1}


@pytest.mark.parametrize(
    ("constants", "computed"),
    # Of 100 and 30 rows, two tiles of 64 and one; three tiles in two waves of two programs; slices of 8 rows.
    [({"TRANSPOSED": True, "ROWS": 64}, 4 * 64 / 130), ({"DEPTH": 8}, (104 + 32) / 130)],
)
def test_partial_tiles_and_waves_are_computed_whole(constants: dict[str, Any], computed: float) -> None:
    launch = Launch(None, {}, {"N": 32, "WIDTH": 32, **constants}, (), {}, 2, {})
    assert rounding(launch, [100, 30]) == pytest.approx(computed)


def worse(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        name
        for name, most in (("registers", 1.1), ("spills", 1.0), ("code", 1.1), ("instructions", 1.1), ("bytes", 1.01))
        if before[name] is not None and (now[name] is None or now[name] > most * before[name])
    ]


def test_a_spill_and_more_instructions_are_worse() -> None:
    row = {"registers": 40, "spills": 0, "code": 100, "instructions": 3.0, "bytes": 1000}
    assert worse(row, row) == []
    assert worse(row, {**row, "spills": 8, "instructions": 3.5}) == ["spills", "instructions"]


def table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PAGE.with_suffix(".json").read_text())
    return found


def check(operators: list[str]) -> None:
    """After a change meant to stay: `python -m lab.gpu_static`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    output = subprocess.run(
        [sys.executable, "-m", "lab.gpu_static", "--check", *operators],
        check=True, capture_output=True, text=True, cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT)},
    ).stdout  # fmt: skip
    now, rows = json.loads(output), [row for row in table()["ours"] if row["operator"] in operators]
    assert [row["kernel"] for row in now] == [row["kernel"] for row in rows]
    found = [
        (row["kernel"], row["arch"], reasons)
        for before, row in zip(rows, now, strict=True)
        if (reasons := worse(before, row))
    ]
    assert not found


def test_no_kernel_whose_sources_changed_takes_more_than_in_the_table() -> None:
    assert table()["sources"].keys() == SHAPES.keys()
    if changed := [name for name, stamp in table()["sources"].items() if stamp != stamps.of_sources(name)]:
        check(changed)


@matrix.whole
def test_no_kernel_takes_more_than_in_the_table() -> None:
    check([*SHAPES])


def test_predictions_are_near_what_was_measured_and_nothing_is_behind_liger() -> None:
    assert PAGE.read_text() == page(table())
    assert median_error(table()) < 0.1
    assert not [row for row in table()["ours"] if row["spills"]]
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.endswith(" |")]
    least = {row[0].removeprefix("| "): row[-2] for row in rows if len(row) == 9 and row[-2] not in ("Least", "---")}
    assert "Liger's" not in least.values()
    assert {name for name, each in least.items() if each != "ours"} == KEPT.keys()
