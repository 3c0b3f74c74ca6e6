"""Expert load record: JSON lines, a header and a line per step.

Later lines for a step win (resumed trainings). An unfinished line is skipped if it is the last or a header follows.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from mindspeed_lite import json_file
from mindspeed_lite.json_file import Description, JsonFileError

FORMAT, VERSION = "mindspeed_lite expert load", 1


@dataclass(frozen=True)
class LoadHeader:
    """Header of a training.

    experts: per layer. expert_parallel: ranks that share them. replicas: groups of ranks with the same experts.
    decoder_layers: MTP layers are numbered after them. layers: numbers of MoE layers, from 1.
    """

    experts: int
    topk: int
    expert_parallel: int
    replicas: int
    decoder_layers: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class LoadStep:
    """One step, numbered from 1; rows in the order of `LoadHeader.layers`.

    tokens: [layers], routed. experts: [layers][experts], over all replicas.
    ranks: [layers][replicas * expert_parallel]; ranks of a replica are adjacent.
    """

    step: int
    tokens: Sequence[int]
    experts: Sequence[Sequence[int]]
    ranks: Sequence[Sequence[int]]


@dataclass(frozen=True)
class LayerBalance:
    """Load statistics of one layer, averaged over steps.

    imbalance, rank_imbalance: max / mean over experts, ranks; 1 is even.
    worst: largest max / mean of any step.
    variation: coefficient of variation over experts.
    idle: experts without a token in all steps.
    dropped: share of choices dropped by capacity.
    """

    layer: int
    imbalance: float
    worst: float
    variation: float
    idle: int
    rank_imbalance: float
    dropped: float


@dataclass(frozen=True)
class LoadRecord:
    header: LoadHeader
    steps: tuple[LoadStep, ...]

    def last(self, steps: int) -> LoadRecord:
        return LoadRecord(self.header, self.steps[-steps:])

    def label(self, layer: int) -> str:
        beyond = layer - self.header.decoder_layers
        return f"mtp {beyond}" if beyond > 0 else str(layer)

    def totals(self) -> list[list[int]]:
        rows = range(len(self.header.layers))
        by_row = (zip(*(each.experts[row] for each in self.steps), strict=True) for row in rows)
        return [[sum(column) for column in columns] for columns in by_row]

    def balance(self) -> list[LayerBalance]:
        found = []
        for row, (layer, totals) in enumerate(zip(self.header.layers, self.totals(), strict=True)):
            uneven = [imbalance(each.experts[row]) for each in self.steps]
            chosen = self.header.topk * sum(each.tokens[row] for each in self.steps)
            found.append(
                LayerBalance(
                    layer,
                    imbalance=fmean(uneven),
                    worst=max(uneven),
                    variation=fmean(variation(each.experts[row]) for each in self.steps),
                    idle=totals.count(0),
                    rank_imbalance=fmean(imbalance(each.ranks[row]) for each in self.steps),
                    dropped=1 - sum(totals) / chosen if chosen else 0.0,
                )
            )
        return found


def imbalance(loads: Sequence[int]) -> float:
    """max / mean; 1 without tokens."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def variation(loads: Sequence[int]) -> float:
    mean = fmean(loads)
    return math.sqrt(fmean((each - mean) ** 2 for each in loads)) / mean if mean else 0.0


def why_not_writable(path: str | Path) -> str | None:
    place = Path(path)
    folder = place.absolute().parent
    if place.is_dir() or not folder.is_dir() or not os.access(place if place.exists() else folder, os.W_OK):
        return "it cannot be written there; give a file in a folder that exists"
    if place.is_file() and place.stat().st_size and not _starts_with_header(place):
        return "it holds something else; name another file"
    return None


def append(path: str | Path, steps: Sequence[LoadStep], header: LoadHeader | None) -> None:
    entries = [{"format": FORMAT, "version": VERSION, **asdict(header)}] if header is not None else []
    entries += [asdict(each) for each in steps]
    lines = "".join(json.dumps(each, separators=(",", ":")) + "\n" for each in entries)
    with open(path, "a", encoding="utf-8") as file:
        # Ends a line left unfinished by a killed run.
        file.write(f"\n{lines}" if header is not None and file.tell() else lines)


def read(path: str | Path) -> LoadRecord:
    """Raises JsonFileError: unreadable, no record or step, or records of different models."""
    header, steps, cut = None, {}, None
    for place, text in json_file.lines(path):
        try:
            entry = json_file.decode(text, place, _entry(header))
        except json_file.NotJson as error:
            # Only another training's header may follow an unfinished line.
            cut = cut or error
            continue
        if isinstance(entry, LoadStep):
            if cut is not None:
                raise cut
            steps[entry.step] = entry
            continue
        if header is not None and (header.experts, header.layers) != (entry.experts, entry.layers):
            raise JsonFileError(f"{place}: is of another model: give each training a file of its own")
        header, cut = entry, None
    if header is None and cut is not None:
        raise cut
    if header is None or not steps:
        raise JsonFileError(f"{path}: holds no step")
    return LoadRecord(header, tuple(steps[number] for number in sorted(steps)))


def _entry(header: LoadHeader | None) -> Description[LoadHeader | LoadStep]:
    def check(value: Any) -> LoadHeader | LoadStep:
        is_header = isinstance(value, dict) and "format" in value
        if header is None and not is_header:
            raise json_file.Mismatch("want the header of a record of expert load, which --moe-record-load writes first")
        return _HEADER(value) if header is None or is_header else _step(header)(value)  # type: ignore[no-any-return]

    return check


def _made_header(format: str, version: int, **given: Any) -> LoadHeader:
    header = LoadHeader(**{**given, "layers": tuple(given["layers"])})
    if header.topk > header.experts or header.experts % header.expert_parallel:
        raise ValueError(
            f"topk {header.topk} and expert_parallel {header.expert_parallel} do not go with {header.experts} experts"
        )
    return header


_HEADER = json_file.fields(
    {
        "format": json_file.one_of(FORMAT),
        "version": json_file.one_of(VERSION),
        "experts": json_file.whole("a number of experts", 1),
        "topk": json_file.whole("a number of experts", 1),
        "expert_parallel": json_file.whole("a number of ranks", 1),
        "replicas": json_file.whole("a number of groups", 1),
        "decoder_layers": json_file.whole("a number of layers"),
        "layers": json_file.rows(json_file.whole("the number of a layer", 1), least=1),
    },
    make=_made_header,
)


@functools.lru_cache(maxsize=1)
def _step(header: LoadHeader) -> Description[LoadStep]:
    tokens, layers = json_file.whole("a number of tokens"), len(header.layers)

    def by_layer(count: int) -> Description[list[list[int]]]:
        return json_file.rows(json_file.rows(tokens, count=count), count=layers)

    return json_file.fields(
        {
            "step": json_file.whole("the number of a step"),
            "tokens": json_file.rows(tokens, count=layers),
            "experts": by_layer(header.experts),
            "ranks": by_layer(header.replicas * header.expert_parallel),
        },
        make=LoadStep,
    )


def _starts_with_header(place: Path) -> bool:
    with place.open(encoding="utf-8", errors="replace") as file:
        return file.readline(200).startswith(f'{{"format":"{FORMAT}"')
