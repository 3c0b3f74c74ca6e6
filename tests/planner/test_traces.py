"""Committed traces are what Megatron's layers save, and a micro-batch of one stands for larger ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mindspeed_lite.planner import traces
from tests.harness import matrix
from tests.harness.traces import FILE

COMMITTED: dict[str, Any] = json.loads(FILE.read_text())


def chosen(*words: str) -> str:
    return next(each for each in COMMITTED if all(f'"{word}"' in each for word in words) and "--mtp" not in each)


def total(answer: dict[str, Any]) -> int:
    return sum(size for part in answer["kept"].values() for _, size in part.values())


def test_they_are_those_of_megatron_and_grow_with_the_micro_batch() -> None:
    dense, experts = chosen("cuda", "--swiglu", "--sequence-parallel"), chosen("--num-experts", "--sequence-parallel")
    larger = json.loads(dense)
    for flag in ("--micro-batch-size", "--global-batch-size"):
        place = larger["words"].index(flag) + 1
        larger["words"][place] = str(2 * int(larger["words"][place]))
    *found, twice = traces._server().ask([dense, experts, json.dumps(larger)])
    assert found == [COMMITTED[dense], COMMITTED[experts]]
    assert (
        total(twice) == pytest.approx(2 * total(found[0]), rel=0.015) and twice["parameters"] == found[0]["parameters"]
    )


@matrix.whole
def test_all_are() -> None:
    fresh = traces._server().ask([*COMMITTED])
    assert not [text for text, answer in zip(COMMITTED, fresh, strict=True) if answer != COMMITTED[text]]


def test_what_megatron_refuses_is_an_error() -> None:
    assert not [each for each in COMMITTED.values() if "error" in each]
    alone = json.loads(chosen("cuda", "--context-parallel-size")) | {"world_size": 1}
    (found,) = traces._server().ask([json.dumps(alone)])
    assert set(found) == {"error"} and "needs" in found["error"] and "processes" in found["error"]
