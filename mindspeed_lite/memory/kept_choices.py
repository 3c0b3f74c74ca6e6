"""Files of recompute and offload choices for later runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindspeed_lite import json_file
from mindspeed_lite.platform import cache

# : Recomputed and offloaded parts of a layer.
Parts = tuple[frozenset[str], frozenset[str]]
# : Pipeline stage -> parts of each layer.
Choice = dict[int, list[Parts]]


def _parts(value: Any) -> Parts:
    again, swapped = json_file.rows(json_file.rows(json_file.text("a part of a layer")), count=2)(value)
    return frozenset(again), frozenset(swapped)


FIELDS = json_file.fields({"layers": json_file.table(json_file.rows(_parts), r"\d{1,6}", "the number of a stage")})


def read(name: str, log: Callable[[str], object]) -> Choice | None:
    """Choice in a file of the cache folder; None if missing, or damaged (logged)."""
    try:
        file = cache.folder() / name
        stages = json_file.read(file, FIELDS)["layers"] if file.is_file() else None
    except cache.NoCache:
        return None
    except json_file.JsonFileError as error:
        log(f"recorded again: {error}")
        return None
    return None if stages is None else {int(stage): layers for stage, layers in stages.items()}


def write(name: str, choice: Mapping[int, Sequence[Parts]]) -> None:
    """Raises OSError or NoCache."""
    layers = {stage: [tuple(map(sorted, parts)) for parts in each] for stage, each in choice.items()}
    (cache.folder() / name).write_text(json.dumps({"layers": layers}, indent=1))
