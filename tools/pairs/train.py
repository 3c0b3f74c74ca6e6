"""Trains rows, each training once, and says what does not hold."""

from __future__ import annotations

import json
import math
import pickle
import re
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_lite import runtime
from tests.harness.on_and_off import DEVIATION
from tests.harness.training import DRIFT, FIRST_NORM, NORM_DRIFT, Result, Trainer
from tools.pairs.rows import DRAWS, LAYOUTS, MOVES, SCRIPT, STEPS, Row, name_of

# Seconds after which a training hangs; those that the other ranks have once one has failed.
TIMEOUT, GRACE = 180, 3
# Relative distances that rounding makes in three steps in bf16, by `harness.training`; the first loss is of the same
# weights. Other types have more bits; float32 keeps room for sums in another order and for what Adam makes of small
# gradients.
BOUNDS = {
    "the first loss": 2.0**-10,
    "the first gradient norm": FIRST_NORM,
    "a later loss": DRIFT,
    "a later gradient norm": NORM_DRIFT,
}
SCALES = {"fp32": 2.0**-8, "fp16": 2.0**-1}
# What another draw of dropout's masks, or of weights, makes of a tiny model.
ANOTHER_DRAW = {what: 2.0**-2 if "norm" in what else 2.0**-5 for what in BOUNDS}
# Where that is not enough, so many times what the sums of all products from the other end change.
ROUNDINGS = 4.0


@dataclass
class Run:
    """One training: losses and gradient norm of each step, or how it ended."""

    steps: list[dict[str, str]] = field(default_factory=list)
    kind: str = ""  # "", "refused", "hangs", "crashes"
    error: str = ""
    applied: frozenset[str] = frozenset()
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass
class Verdict:
    """What became of a row: `kind` is "" if all is as the features promise, "off" if nothing can be compared."""

    kind: str = ""
    text: str = ""
    applied: frozenset[str] = frozenset()


def _draws_in_another_order(row: Row) -> bool:
    return "dropout" in row.options and bool({"pipeline_schedule", "schedules_method"} & {*map(name_of, row.features)})


def _moves_norms(row: Row) -> bool:
    """True if a recomputed layer leaves its norms out of `recompute_norm`, whose page says what that moves in fp32."""
    rounds = "fp32" in row.options and not {"layernorm", "use_fused_rmsnorm"} & row.tokens
    return rounds and {"recompute_norm", "recompute_in_bubble"} <= {*map(name_of, row.features)}


class Bench:
    """Trains rows on one release and judges them; the same training once."""

    def __init__(self, trainer: Trainer, plant: str = "") -> None:
        self.trainer, self.plant = trainer, plant
        self.version = trainer.version.partition("+")[0]
        self.trained = 0
        self._done: dict[tuple[Row, bool], Run] = {}

    def run(self, row: Row, is_reversed: bool = False) -> Run:
        if (row, is_reversed) not in self._done:
            while len(self._done) > 50:
                del self._done[next(iter(self._done))]
            self._done[row, is_reversed] = self._run(row, is_reversed)
        return self._done[row, is_reversed]

    def _run(self, row: Row, is_reversed: bool) -> Run:
        self.trained += 1
        report, arguments = (self.trainer.scratch / name for name in ("report.json", "arguments.pickle"))
        for path in (report, arguments):
            path.unlink(missing_ok=True)
        variants = dict(each.split("=") for each in row.options if "=" in each)
        model = {name: variants.get(name) for name in ("frozen", "lora")}
        told = {**model, "by_name": "by_name" in row.options, "reversed": is_reversed, "arguments": str(arguments)}
        result = self.trainer.run(
            entry="script",
            arm="adaptor",
            nproc=LAYOUTS[row.layout][0],
            argv=[SCRIPT, *row.arguments, "--mindspeed-lite-report", str(report)],
            env={"PAIRED": json.dumps(told)},
            timeout=TIMEOUT,
            grace=GRACE,
            **({"before": self.plant} if self.plant else {}),
        )
        try:
            return self._read(result, report, arguments)
        finally:
            shutil.rmtree(result.out)

    def _read(self, result: Result, report: Path, arguments: Path) -> Run:
        found = Run()
        if report.exists():
            entries = json.loads(report.read_text())["entries"]
            applied = (each["feature"] for each in entries if each["status"] == "applied")
            found.applied = frozenset(each for each in applied if each in runtime.catalogue())
        if any(result.codes):
            found.kind, found.error = _ending(result)
            return found
        histories = [result.history(rank) for rank in range(len(result.codes))]
        found.steps = next((each for each in reversed(histories) if any("lm loss" in step for step in each)), [])
        found.arguments = pickle.loads(arguments.read_bytes())
        if len(found.steps) < STEPS:
            found.kind, found.error = "crashes", f"{len(found.steps)} of {STEPS} steps were trained"
        return found

    def judge(self, row: Row) -> Verdict:
        """Without features, with those that round in another way, with all: what does not hold."""
        rounding = [each for each in row.features if runtime.catalogue()[name_of(each)].numerics != "bitwise"]
        off, near, on = row.having(row.always), row.having(rounding), row
        compared = [(off, near, False), (near, on, not (_moves_norms(row) or _draws_in_another_order(row)))]
        if row.layout == "cp2" and not {"dropout", "experts"} & set(row.options):
            one = Row("single", row.options, row.features)
            compared.insert(0, (one.having(one.always), off, False))
        applied: frozenset[str] = frozenset()
        for before, after, is_bitwise in compared:
            first = self.run(before)
            if first.kind:
                return Verdict("off", f"{first.kind}: {first.error}")
            if before == after:
                continue
            second = self.run(after)
            applied |= second.applied
            text = second.error or (_unlike(first, second) if is_bitwise else self._far(before, after))
            if text:
                which = "" if before == off and after == row else f" (with {after} beside {before})"
                return Verdict(second.kind or "differs", text + which, second.applied)
        return Verdict("", "", applied)

    def _far(self, before: Row, after: Row) -> str:
        """What is further apart than rounding explains."""
        first, second = self.run(before), self.run(after)
        scale = next((SCALES[each] for each in after.options if each in SCALES), 1.0)
        bounds = {what: scale * bound for what, bound in BOUNDS.items()}
        if any(runtime.catalogue()[name_of(each)].numerics == "deviation" for each in after.features):
            bounds = {what: max(bound, DEVIATION) for what, bound in bounds.items()}
        if MOVES in after.features or ("dropout" in after.options and DRAWS & {*map(name_of, after.features)}):
            bounds = ANOTHER_DRAW
        apart = _apart(first, second)
        if any(distance > bounds[what] for what, distance in apart.items()):
            other = self.run(before, True)
            if not other.kind:
                bounds = {what: max(bounds[what], ROUNDINGS * each) for what, each in _apart(first, other).items()}
        far = [what for what in bounds if apart[what] > bounds[what]]
        return "; ".join(f"{what} is {apart[what]:.2g} off, and {bounds[what]:.2g} is allowed" for what in far)


def _unlike(first: Run, second: Run) -> str:
    """The first number that has not the same bits."""
    for step, (a, b) in enumerate(zip(first.steps, second.steps, strict=True)):
        for name in sorted(a.keys() | b.keys()):
            if a.get(name) != b.get(name):
                x, y = (float.fromhex(each[name]) if name in each else None for each in (a, b))
                return f"step {step}: {name} {x!r} without, {y!r} with: not the same bits"
    return ""


def _apart(first: Run, second: Run) -> dict[str, float]:
    """The largest relative distances."""
    found = dict.fromkeys(BOUNDS, 0.0)
    for step, (a, b) in enumerate(zip(first.steps, second.steps, strict=True)):
        for name, what in (("lm loss", "loss"), ("grad norm", "gradient norm")):
            if a.get(name) != b.get(name):
                x, y = (float.fromhex(each.get(name, "nan")) for each in (a, b))
                finite = math.isfinite(x) and math.isfinite(y) and x != 0
                key = f"{'a later' if step else 'the first'} {what}"
                found[key] = max(found[key], abs(x - y) / abs(x) if finite else math.inf)
    return found


_REFUSAL = "mindspeed_lite: error"
# What the other ranks say once one has ended.
_CONSEQUENCES = ("Connection", "gloo", "Gloo", "another rank", "Broken pipe", "store")


def _ending(result: Result) -> tuple[str, str]:
    """The kind of an ending, and the line that says most."""
    logs = [re.sub(r"^\[rank\d+\]: ?", "", result.log(rank), flags=re.M) for rank in range(len(result.codes))]
    signals = [-code for code in result.codes if code < 0 and code != -signal.SIGKILL]
    lines = [line for log in logs for line in log.splitlines()]
    # A refusal is a line of this package; argparse's begins with the script's name.
    refusals = [line for line in lines if _REFUSAL in line and "ended" not in line]
    errors = [_last_error(log) for log in logs]
    causes = [each for each in errors if each and not any(word in each for word in _CONSEQUENCES)]
    if signals:
        return "crashes", f"a rank ended with {signal.Signals(signals[0]).name}"
    if causes:
        return "crashes", causes[0]
    if refusals:
        return "refused", re.sub(rf".*{_REFUSAL}( on rank \d+)?: ", "", refusals[0])
    if result.seconds >= TIMEOUT:
        return "hangs", f"not ended after {TIMEOUT} seconds"
    usage = [line for line in lines if "error:" in line]
    if usage:
        return "refused", usage[-1]
    return "crashes", next(filter(None, errors), f"ranks ended with {result.codes}: {lines[-1] if lines else ''}")


def _last_error(log: str) -> str:
    """The exception of the last traceback, with the file and line that raised it."""
    _, found, trace = log.rpartition("Traceback (most recent call last):")
    lines = trace.splitlines()[1:] if found else []
    places = [line.strip() for line in lines if line.startswith("  File ")]
    text = next((line for line in lines if line and not line.startswith(" ")), "")
    return f"{text[:300]} [{places[-1] if places else ''}]" if found else ""
