"""Files of recompute and offload choices for later runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindspeed_lite import json_file
from mindspeed_lite.platform import cache

from .recompute_choice import gib

# : Recomputed and offloaded parts of a layer.
Parts = tuple[frozenset[str], frozenset[str]]
# : Pipeline stage -> parts of each layer.
Choice = dict[int, list[Parts]]


def _parts(value: Any) -> Parts:
    again, swapped = json_file.rows(json_file.rows(json_file.text("a part of a layer")), count=2)(value)
    return frozenset(again), frozenset(swapped)


FIELDS = json_file.fields({"layers": json_file.table(json_file.rows(_parts), r"\d{1,6}", "the number of a stage")})


class KeptChoices:
    def __init__(self, training: str, budget: int, log: Callable[[str], object]) -> None:
        self._training, self._log = training, log
        self.name = f"{training}-{budget}.json"

    def read(self, name: str = "") -> Choice | None:
        """Stored choice; None if missing, or damaged (logged)."""
        try:
            file = cache.folder() / (name or self.name)
            if not file.is_file():
                return None
            stages = json_file.read(file, FIELDS)["layers"]
        except cache.NoCache:
            return None
        except json_file.JsonFileError as error:
            self._log(f"recorded again: {error}")
            return None
        return {int(stage): layers for stage, layers in stages.items()}

    def read_other(self) -> tuple[str, Choice]:
        with contextlib.suppress(OSError, cache.NoCache, ValueError):
            files = [each for each in cache.folder().glob(f"{self._training}-*.json") if each.name != self.name]
            if files:
                file = max(files, key=lambda each: each.stat().st_mtime)
                return f"the choice within {gib(int(file.stem.rpartition('-')[2]))}", self.read(file.name) or {}
        return "", {}

    def write(self, choice: Mapping[int, Sequence[Parts]]) -> None:
        """Writes this budget's choice. Raises OSError or NoCache."""
        layers = {
            stage: [(sorted(again), sorted(swapped)) for again, swapped in each] for stage, each in choice.items()
        }
        (cache.folder() / self.name).write_text(json.dumps({"layers": layers}, indent=1))
