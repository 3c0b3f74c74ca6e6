"""Is it worth it: every operator against the plain path, timed as by bench-ops.

A cold look, not a benchmark: few rounds, in bf16, the shapes of bench-ops for this device (on a CPU its quick ones,
for the others take minutes). Slower than plain is said and is no failure; results that differ are one.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, replace
from typing import Any

import torch

from mindspeed_lite.bench import ceiling, operators, timing
from mindspeed_lite.bench.operators import OPERATORS, OURS, TORCH, Case, agreement, run
from mindspeed_lite.bench.selftest.check import FAILED, OK, SLOWER, Check, Outcome

_DTYPE = torch.bfloat16
_EFFORT = timing.Effort(sample_seconds=0.005, rounds=(7, 20), seconds=0.5, warmup=2)
_ONCE = timing.Effort(sample_seconds=0.0, rounds=(3, 3), seconds=0.0, warmup=1)
_NEGLIGIBLE = 0.03
# For --quick: what no machine is slow at.
_TINY = {
    "accumulate_wgrad": "64x128x192",
    "activation": "32x64",
    "attention": "s=64,n=2,d=32",
    "grouped_matmul": "64x32x16x4",
    "moe_router": "64x16,k=2,pre=1",
    "permute": "32x64x4x2",
    "rms_norm": "32x64",
    "rope": "s=64,n=2,d=32",
}

_measured: dict[str, Any] = {}


def checks(device: str, quick: bool) -> list[Check]:
    """A check for each case."""
    found = []
    for name in OPERATORS:
        file = operators.module(name)
        texts = [_TINY[name]] if quick and name in _TINY else file.shapes(device, quick or device == "cpu")
        for text in texts:
            case = _plain_only(file.case(text, device, _DTYPE))
            found.append(Check("speed", f"{name} {case.name}", functools.partial(judge, case, quick)))
    return found


def reached() -> dict[str, Any] | None:
    """The ceiling, if one was measured."""
    return _measured or None


def judge(case: Case, quick: bool) -> Outcome:
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
        if ours["error"] is not None or (plain["error"] or "").startswith(agreement.DISAGREES):
            return Outcome(f"{row['direction']}: {ours['error'] or plain['error']}", FAILED, rows)
        texts.append(_text(row["direction"], ours, plain))
        if plain["ratio"] is not None and plain["ratio"] < 1 - _NEGLIGIBLE and plain["ratio_high"] < 1 and not quick:
            status = SLOWER
    return Outcome("; ".join(texts), status, rows)


def _plain_only(case: Case) -> Case:
    return replace(case, contenders=tuple(each for each in case.contenders if each.name in (OURS, TORCH)))


def _text(direction: str, ours: dict[str, Any], plain: dict[str, Any]) -> str:
    text = f"{direction} {_time(ours['seconds'])}"
    if plain["error"] is not None:
        return f"{text} (plain did not run: {plain['error']})"
    if ours["of_ceiling"] is not None:
        text += f", {ours['of_ceiling']:.0%} of the ceiling"
    return f"{text}, {plain['ratio']:.2f}x as fast as plain"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
