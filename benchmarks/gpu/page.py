"""The page of a campaign, from its JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import markdown
from lab import stamps
from mindspeed_lite.bench import output, wording
from mindspeed_lite.bench.operators.equivalence import DISAGREES

Json = Mapping[str, Any]
OURS, OFF, ON, DENSE, LIGER = "mindspeed_lite", "off", "all", "dense", "dense with Liger-Kernel's patch"
SCHEMA_VERSION = 3


def blank(tiny: bool) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, "kind": "campaign", "created": "", "tiny": tiny, "notes": [], "steps": {}}


def newest(files: Iterable[Path]) -> dict[str, Any] | None:
    """The newest of the records that can be read."""
    found = []
    for file in files:
        if file.is_file():
            record = json.loads(file.read_text(encoding="utf-8"))
            found += [record] if record["schema_version"] == SCHEMA_VERSION else []
    return max(found, key=lambda record: str(record["created"]), default=None)


def write(found: Json, name: str, folders: Iterable[Path]) -> None:
    """Replace page and JSON, each in one step."""
    found = output.finite(found)
    for folder in folders:
        output.write_file(folder / f"{name}.json", output.dumps(dict(found)))
        try:
            text = render(found, f"{name}.json")
        except Exception as error:  # the JSON has every figure, and what is not measured yet is worth more than a page
            text = f"# {name}\n\nThe page could not be rendered: {type(error).__name__}: {error}. See the JSON.\n"
        output.write_file(folder / f"{name}.md", text)


def render(found: Json, data: str) -> str:
    """Markdown; `data` is the name of the JSON."""
    steps, kernels = found["steps"], found["steps"].get("kernels", {})
    machine = kernels.get("machine") or {}
    versions = ", ".join(f"{name} {version}" for name, version in (machine.get("versions") or {}).items())
    lines = [
        f"# One GPU: {machine.get('device') or 'not measured yet'}", "",
        f"`make bench-gpu{' TINY=1' if found['tiny'] else ''}`, {found['created']}; {versions or 'versions unknown'}.",
        f"Every figure: [{data}]({data}). {_older(steps)}", "",
    ]  # fmt: skip
    if found["tiny"]:
        lines += ["The sizes are tiny: no figure here says how fast anything is.", ""]
    lines += [*(f"- {note}" for note in found["notes"]), *([""] if found["notes"] else [])]
    rows = [
        (name, each["about"], ": ".join(filter(None, [each["state"], _cell(each.get("reason", ""))])),
         f"{each['seconds']:.0f} s" if "seconds" in each else "-")
        for name, each in steps.items()
    ]  # fmt: skip
    lines += [*markdown(("Step", "Measures", "State", "Took"), rows), "", "## Machine", ""]
    reached = kernels.get("ceilings")
    lines += [f"- ceilings: {_ceilings(reached)}" if reached else "- not measured", "", "## Correctness", ""]
    states = [*steps.get("tests", {}).get("tests", {}).values()]
    lines += [f"- {states.count(each)} tests {each}" for each in dict.fromkeys(states)] or ["- nothing was run"]
    lines += ["", "## Operators", "", *_operators(kernels.get("operators", {}))]
    for name in ("dense", "experts"):
        lines += [f"## Training: {name}", "", *_training(steps, name, reached)]
    return "\n".join(lines).rstrip() + "\n"


def _older(steps: Json) -> str:
    operators = steps.get("kernels", {}).get("operators", {})
    found = [name for name, each in operators.items() if each.get("stamp", "") != stamps.of_operator(name)]
    others = [name for name, each in steps.items() if each.get("stamp") not in (None, stamps.of_all())]
    older = [*found, *(f"step {name}" for name in others if name != "kernels")]
    return f"Our figures older than the kernels: {', '.join(older) or 'none'}."


def _ceilings(reached: Json) -> str:
    rates = wording.rate(reached["flops_per_second"], "FLOP"), wording.rate(reached["bytes_per_second"], "B")
    return f"{rates[0]}, {rates[1]} ({reached['source']})"


def _operators(found: Json) -> list[str]:
    rows, notes = [], []
    for name, each in found.items():
        notes += [f"- {name}: {_cell(note)}" for note in each.get("notes", ())]
        if "rows" not in each:
            rows.append((name, OURS, _cell(each["failed"])[:120], "", "", "", ""))
            continue
        forward, last = each["rows"][0], each["rows"][-1]
        for first, both in zip(forward["contenders"], last["contenders"], strict=True):
            case, who = f"{name} {last['case'].removesuffix(' bf16')}", first["name"]
            if error := first["error"] or both["error"]:
                if who == OURS or error.startswith(DISAGREES):
                    rows.append((case, who, _cell(error)[:120], "", "", "", ""))
                else:
                    notes.append(f"- {name}: {who} did not run")
                continue
            backward = wording.seconds(both["seconds"] - first["seconds"]) if last is not forward else "-"
            over = f"{both['ratio']:.2f}" if who != OURS and both["ratio"] is not None else ""
            times = wording.seconds(first["seconds"]), backward, wording.seconds(both["seconds"])
            rows.append((case, who, *times, over, wording.percent(both["of_ceiling"])))
    if not rows:
        return ["Nothing was measured.", ""]
    text = [
        "Time of a call in bf16, of the host where it takes longer. Backward is both less forward. Over ours: above 1,",
        "ours is faster. Of the ceiling: both, of a large copy or matrix product in PyTorch, whichever bounds it.", "",
    ]  # fmt: skip
    header = ("Case", "Contender", "Forward", "Backward", "Both", "Over ours", "Of the ceiling")
    return [*text, *markdown(header, rows), "", *notes, *([""] if notes else [])]


class Comparison(NamedTuple):
    """A training on against off: cells of the page and of README."""

    seconds: tuple[float, float]
    bytes: tuple[int, int]
    speed: str
    loss: str


def compare(step: Json) -> Comparison | None:
    """None where an arm has not run."""
    off, on = (step.get("arms", {}).get(arm) for arm in (OFF, ON))
    if not (off and on and off["steps"] and on["steps"]):
        return None
    seconds = statistics.mean(off["steps"]), statistics.mean(on["steps"])
    apart = step["loss_apart"]
    loss = "not compared" if apart is None else f"{float(apart):.0e} apart"
    return Comparison(seconds, (off["peak_memory_bytes"], on["peak_memory_bytes"]), _speed(off, on), loss)


def _speed(off: Json, on: Json) -> str:
    """The mean ratio, and that of each pair of runs."""
    ratios = [a / b for a, b in zip(off["steps"], on["steps"], strict=False)]
    return f"{statistics.geometric_mean(ratios):.2f}x ({', '.join(f'{each:.2f}' for each in ratios)})"


def _training(steps: Json, name: str, reached: Json | None) -> list[str]:
    step = steps.get(name, {})
    found = {arm: each for arm, each in step.get("arms", {}).items() if each["steps"]}
    if OFF not in found:
        return ["No run of off finished.", ""]
    flops, rows = step["flops_per_step"], []
    runs = [each for each in steps.get(LIGER, {}).get("arms", {}).values() if each["steps"] and name == DENSE]
    liger = {
        "steps": [seconds for each in runs for seconds in each["steps"]],
        "peak_memory_bytes": max((each["peak_memory_bytes"] for each in runs), default=0),
    }
    for arm, each in (found | ({"Liger-Kernel's patch": liger} if runs else {})).items():
        rate = flops / statistics.mean(each["steps"]) if flops else 0.0
        share = wording.percent(rate / reached["flops_per_second"]) if reached else ""
        speed = "" if arm == OFF else _speed(found[OFF], each)
        times = ", ".join(map(wording.seconds, each["steps"]))
        rows.append((arm, times, speed, share, wording.size(each["peak_memory_bytes"])))
    lines = [*markdown(("Arm", "Step of each run", "Speed (of each pair)", "Of the ceiling", "Peak memory"), rows), ""]
    if (compared := compare(step)) is not None:
        lines += [f"- {ON}: {', '.join(found[ON]['features']) or '-'}; losses {compared.loss}"]
        lines += [*(f"- fallback: {_cell(text)}" for text in found[ON]["fallbacks"]), ""]
    return lines


def _cell(text: str) -> str:
    """Text that stays within a cell."""
    return " ".join(str(text).split()).replace("|", "\\|")


if __name__ == "__main__":
    for file in (Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "gpu").glob("*.json"):
        write(json.loads(file.read_text(encoding="utf-8")), file.stem, [file.parent])
