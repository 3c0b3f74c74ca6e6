"""Translates MindSpeed's layer placement flags to Megatron's layout."""

from __future__ import annotations

import re
from typing import Any

from mindspeed_lite import json_file

from .command_line import CommandLine, FlagUse, Refusal


def virtual_stages(line: CommandLine) -> int:
    stages = line.number("--num-virtual-stages-per-pipeline-rank", 0)
    for flag in ("--num-layers-per-virtual-pipeline-stage", "--num-layers-per-virtual-pipeline-stag"):
        if line.has(flag):
            stages = line.number("--num-layers", 0) // line.number("--pipeline-model-parallel-size", 1)
            stages //= max(1, line.number(flag, 1))
    return max(1, stages)


def noop_layers_of(line: CommandLine) -> tuple[int, ...]:
    if not line.is_foreign("--noop-layers"):
        return ()
    text = line.value("--noop-layers").strip("'\"")
    try:
        return tuple(sorted({int(each) for each in text.split(",") if each.strip()}))
    except ValueError:
        raise Refusal(f"--noop-layers takes numbers of layers, parted by commas, not {text!r}") from None


def num_layers(use: FlagUse, line: CommandLine) -> str | tuple[str, str] | None:
    noop = noop_layers_of(line)
    if not noop:
        return None
    layers = line.number("--num-layers", 0)
    if noop[0] < 0 or noop[-1] >= layers:
        raise Refusal(f"--noop-layers {','.join(map(str, noop))}: --num-layers {layers} has layers 0 to {layers - 1}")
    return f"--num-layers {layers - len(noop)}", f"without {len(noop)} empty layers"


def noop_layers(use: FlagUse, line: CommandLine) -> str | tuple[str, str]:
    noop, layers = noop_layers_of(line), line.number("--num-layers", 0)
    if noop and line.has("--num-virtual-stages-per-pipeline-rank"):
        raise Refusal(
            "--noop-layers beside --num-virtual-stages-per-pipeline-rank. Instead: "
            "--pipeline-model-parallel-layout in the place of both"
        )
    stages = line.number("--pipeline-model-parallel-size", 1) * virtual_stages(line)
    if stages == 1 or not noop:
        return "layers are counted without the empty ones, and one stage needs no layout"
    if layers % stages:
        raise Refusal(f"--noop-layers: {layers} layers cannot be divided by {stages} pipeline stages")
    each = layers // stages
    counts = [sum(layer not in noop for layer in range(first, first + each)) for first in range(0, layers, each)]
    why = "the same layers on the same stages; layer numbers in checkpoints of MindSpeed count the empty ones"
    return f"--pipeline-model-parallel-layout {_layout(counts, line)}", why


def layers_of_stages(use: FlagUse, line: CommandLine) -> str | tuple[str, str]:
    """Layers per stage; MindSpeed's table has a row per rank with its virtual stages."""
    stages, layers = line.number("--pipeline-model-parallel-size", 1), line.number("--num-layers", 0)
    if stages == 1:
        return "one stage needs no layout"
    text = line.values_of(use)[0].strip("'\"")
    wanted = Refusal(
        f"--pipeline-num-transformer-layers takes a table [[1,2],[2,1]], a row for each rank, not {text!r}"
    )
    try:
        table = json_file.decode(_repeated(text), use.flag, json_file.rows(_row, least=1))
    except json_file.JsonFileError:
        raise wanted from None
    if any(len(row) != len(table[0]) for row in table):
        raise wanted
    if len(table) != stages:
        raise Refusal(f"--pipeline-num-transformer-layers has {len(table)} rows for {stages} pipeline ranks")
    if sum(map(sum, table)) != layers:
        raise Refusal(f"--pipeline-num-transformer-layers has {sum(map(sum, table))} layers, and --num-layers {layers}")
    for other in ("--noop-layers", "--num-virtual-stages-per-pipeline-rank"):
        if line.has(other):
            raise Refusal(f"--pipeline-num-transformer-layers beside {other}. Instead: leave {other} out")
    counts = [row[chunk] for chunk in range(len(table[0])) for row in table]
    return f"--pipeline-model-parallel-layout {_layout(counts, line)}", "layers of each stage"


def _row(value: Any) -> list[int]:
    return json_file.rows(json_file.whole("a number of layers"), least=1)(value if isinstance(value, list) else [value])


def _repeated(text: str) -> str:
    """Expand N repetitions of what precedes *N in MindSpeed's table."""
    for each in (r"\d+", r"\[[\d\s,]*\]"):
        text = re.sub(rf"({each})\s*\*\s*(\d{{1,3}})(?!\d)", lambda found: ",".join([found[1]] * int(found[2])), text)
    return text


def layers_of_virtual_stage(use: FlagUse, line: CommandLine) -> str | tuple[tuple[str, ...], str] | None:
    if line.is_foreign("--pipeline-num-transformer-layers"):
        return "the layout in the place of --pipeline-num-transformer-layers says it"
    if noop_layers_of(line):
        return "the layout in the place of --noop-layers says it, and Megatron takes one of the two"
    if "shared" in use.row.idle:
        return None
    line.values_of(use)
    return ("--num-layers-per-virtual-pipeline-stage", *use.values), "the whole name"


def _layout(counts: list[int], line: CommandLine) -> str:
    predictors = line.number("--mtp-num-layers", 0)
    parts = [f"t*{count}" if count else "" for count in counts]
    parts[0] = "E" + parts[0]
    parts[-1] += f"{',' if parts[-1] and predictors else ''}{'m' * predictors}L"
    return "|".join(parts)


def num_layer_list(use: FlagUse, line: CommandLine) -> str | tuple[str, str]:
    text = line.values_of(use)[0].strip("'\"")
    try:
        counts = [int(each) for each in text.split(",")]
    except ValueError:
        raise Refusal(f"--num-layer-list takes numbers parted by commas, not {text!r}") from None
    stages = line.number("--pipeline-model-parallel-size", 1)
    if len(counts) != stages:
        raise Refusal(f"--num-layer-list {text} has {len(counts)} entries for {stages} pipeline stages")
    return f"--pipeline-model-parallel-layout {_layout(counts, line)}", "layers of each stage"


RULES = {
    "--num-layers": num_layers,
    "--noop-layers": noop_layers,
    "--num-layer-list": num_layer_list,
    "--pipeline-num-transformer-layers": layers_of_stages,
    "--num-layers-per-virtual-pipeline-stage": layers_of_virtual_stage,
    "--num-layers-per-virtual-pipeline-stag": layers_of_virtual_stage,
}
