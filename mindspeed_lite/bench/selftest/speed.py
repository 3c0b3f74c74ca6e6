"""Times every operator against plain PyTorch.

A cold look, not a benchmark: few rounds, in bf16, the shapes of bench-ops for this device (on a CPU its quick ones,
for the others take minutes). Slower than plain is reported and is no failure; results that differ are one.
"""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

import torch

from mindspeed_lite.bench import ceiling, operators, timing
from mindspeed_lite.bench.operators import OURS, TORCH, BoundCase, equivalence, run
from mindspeed_lite.bench.selftest.check import FAILED, OK, SLOWER, Check, Outcome
from mindspeed_lite.ops.discovery import OPERATORS, cases

_DTYPE = torch.bfloat16
_EFFORT = timing.Effort(sample_seconds=0.005, rounds=(7, 20), seconds=0.5, warmup=2)
_ONCE = timing.Effort(sample_seconds=0.0, rounds=(3, 3), seconds=0.0, warmup=1)
_NEGLIGIBLE = 0.03
_measured: dict[str, Any] = {}


def checks(device: str, quick: bool) -> list[Check]:
    """A check for each case."""
    found = []
    for name in OPERATORS:
        declared = cases(name)
        for text in declared.tiny[:1] if quick else declared.shapes(device, device == "cpu"):
            case = operators.case(name, text, device, _DTYPE).only(OURS, TORCH)
            found.append(Check("speed", f"{name} {case.name}", functools.partial(judge, case, quick)))
    return found


def reached() -> dict[str, Any] | None:
    """The ceiling, if one was measured."""
    return _measured or None


def judge(case: BoundCase, quick: bool) -> Outcome:
    """Race ours against plain in both directions."""
    if not quick and not _measured:
        _measured.update(asdict(ceiling.measure(case.device, case.dtype)))
    rows = run.measure(case, _ONCE if quick else _EFFORT)
    texts, status = [], OK
    for row in rows:
        if not quick:
            run.relate(row, _measured)
        contenders = {each["name"]: each for each in row["contenders"]}
        ours, plain = contenders[OURS], contenders[TORCH]
        if ours["error"] is not None or (plain["error"] or "").startswith(equivalence.DISAGREES):
            return Outcome(f"{row['direction']}: {ours['error'] or plain['error']}", FAILED, rows)
        texts.append(_text(row["direction"], ours, plain))
        if plain["ratio"] is not None and plain["ratio"] < 1 - _NEGLIGIBLE and plain["ratio_high"] < 1 and not quick:
            status = SLOWER
    return Outcome("; ".join(texts), status, rows)


def _text(direction: str, ours: dict[str, Any], plain: dict[str, Any]) -> str:
    text = f"{direction} {_time(ours['seconds'])}"
    if plain["error"] is not None:
        return f"{text} (plain did not run: {plain['error']})"
    if ours["of_ceiling"] is not None:
        text += f", {ours['of_ceiling']:.0%} of the ceiling"
    return f"{text}, {plain['ratio']:.2f}x as fast as plain"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
