"""Translates MindSpeed's layer placement flags to Megatron's layout."""

from __future__ import annotations

import re
from typing import Any

from mindspeed_lite import json_file

from .command_line import CommandLine, FlagUse, Refusal

_VIRTUAL = "--num-layers-per-virtual-pipeline-stage"
_TABLE = "--pipeline-num-transformer-layers"
_CHUNKS = "--num-virtual-stages-per-pipeline-rank"
_LAYOUT = "--pipeline-model-parallel-layout"


def virtual_stages(line: CommandLine) -> int:
    stages = line.number(_CHUNKS, 0)
    for flag in (_VIRTUAL, _VIRTUAL[:-1]):
        if line.has(flag):
            stages = line.number("--num-layers", 0) // line.number("--pipeline-model-parallel-size", 1)
            stages //= max(1, line.number(flag, 1))
    return max(1, stages)


def noop_layers_of(line: CommandLine) -> list[int]:
    if not line.is_foreign("--noop-layers"):
        return []
    text = line.value("--noop-layers").strip("'\"")
    try:
        return sorted({int(each) for each in text.split(",") if each.strip()})
    except ValueError:
        raise Refusal(f"--noop-layers takes layers, separated by commas, not {text!r}") from None


def _num_layers(use: FlagUse, line: CommandLine) -> tuple[str, str] | None:
    noop = noop_layers_of(line)
    if not noop:
        return None
    layers = line.number("--num-layers", 0)
    if noop[0] < 0 or noop[-1] >= layers:
        raise Refusal(f"--noop-layers {','.join(map(str, noop))}: --num-layers {layers} has layers 0 to {layers - 1}")
    return f"--num-layers {layers - len(noop)}", f"without {len(noop)} empty layers"


def _noop_layers(use: FlagUse, line: CommandLine) -> str | tuple[str, str]:
    noop, layers = noop_layers_of(line), line.number("--num-layers", 0)
    if noop and line.has(_CHUNKS):
        raise Refusal(f"--noop-layers with {_CHUNKS}. Instead: {_LAYOUT} in the place of both")
    stages = line.number("--pipeline-model-parallel-size", 1) * virtual_stages(line)
    if stages == 1 or not noop:
        return "layers are counted without the empty ones, and one stage needs no layout"
    if layers % stages:
        raise Refusal(f"--noop-layers: {layers} layers cannot be divided by {stages} pipeline stages")
    each = layers // stages
    counts = [sum(layer not in noop for layer in range(first, first + each)) for first in range(0, layers, each)]
    why = "the same layers on the same stages; layer indices in checkpoints of MindSpeed count the empty ones"
    return _layout(counts, line), why


def _layers_of_stages(use: FlagUse, line: CommandLine) -> str | tuple[str, str]:
    """Layers per stage; MindSpeed's table has a row per rank with its virtual stages, a list a number."""
    stages, layers, flag = line.number("--pipeline-model-parallel-size", 1), line.number("--num-layers", 0), use.flag
    if stages == 1:
        return "one stage needs no layout"
    text = line.values_of(use)[0].strip("'\"")
    try:
        table = json_file.decode(
            _repeated(text if flag == _TABLE else f"[{text}]"), flag, json_file.rows(_row, least=1)
        )
    except json_file.JsonFileError:
        table = []
    if len({len(row) for row in table}) != 1:
        form = "a table [[1,2],[2,1]], a row for each rank" if flag == _TABLE else "layer counts such as 6,8,8,6"
        raise Refusal(f"{flag} takes {form}, not {text!r}")
    if len(table) != stages:
        raise Refusal(f"{flag} has {len(table)} rows for {stages} pipeline ranks")
    if sum(map(sum, table)) != layers:
        raise Refusal(f"{flag} has {sum(map(sum, table))} layers, and --num-layers {layers}")
    for other in ("--noop-layers", _CHUNKS):
        if line.has(other):
            raise Refusal(f"{flag} with {other}. Instead: leave {other} out")
    return _layout([row[chunk] for chunk in range(len(table[0])) for row in table], line), "layers of each stage"


def _row(value: Any) -> list[int]:
    return json_file.rows(json_file.whole("a number of layers"), least=1)(value if isinstance(value, list) else [value])


def _repeated(text: str) -> str:
    """Expand N repetitions of what precedes *N in MindSpeed's table."""
    for each in (r"\d+", r"\[[\d\s,]*\]"):
        text = re.sub(rf"({each})\s*\*\s*(\d{{1,3}})(?!\d)", lambda found: ",".join([found[1]] * int(found[2])), text)
    return text


def _layers_of_virtual_stage(use: FlagUse, line: CommandLine) -> str | tuple[tuple[str, ...], str] | None:
    if line.is_foreign(_TABLE):
        return f"the layout in the place of {_TABLE} says it"
    if noop_layers_of(line):
        return "the layout in the place of --noop-layers says it, and Megatron takes one of the two"
    if use.flag == _VIRTUAL:
        return None
    line.values_of(use)
    return (_VIRTUAL, *use.values), "the whole name"


def _layout(counts: list[int], line: CommandLine) -> str:
    predictors = line.number("--mtp-num-layers", 0)
    parts = [f"t*{count}" if count else "" for count in counts]
    parts[0] = "E" + parts[0]
    parts[-1] += f"{',' if parts[-1] and predictors else ''}{'m' * predictors}L"
    return f"{_LAYOUT} {'|'.join(parts)}"


RULES = {
    "--num-layers": _num_layers,
    "--noop-layers": _noop_layers,
    "--num-layer-list": _layers_of_stages,
    _TABLE: _layers_of_stages,
    _VIRTUAL: _layers_of_virtual_stage,
    _VIRTUAL[:-1]: _layers_of_virtual_stage,
}
