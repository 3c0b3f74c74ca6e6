"""Committed traces are what Megatron's layers save, and a micro-batch of one stands for larger ones."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_lite import planner
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


def test_a_refusal_is_not_kept_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    server = SimpleNamespace(ask=lambda texts: [{"error": "no memory"} if "broken" in each else {} for each in texts])
    monkeypatch.setattr(traces, "_server", lambda: server)
    monkeypatch.setattr(traces, "known", {})
    monkeypatch.setattr(traces, "_read", lambda text: False)
    monkeypatch.setattr(traces, "_write", lambda text, answer: written.append(text))
    assert traces.answers([{"words": "broken"}, {"words": "whole"}]) == [{"error": "no memory"}, {}]
    assert written == ['{"words": "whole"}']


def test_experts_of_a_rank_are_traced_few_and_counted_all() -> None:
    words = (
        "pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --bf16 --swiglu "
        "--disable-bias-linear "
        "--vocab-size 255 --micro-batch-size 1 --num-experts 16 --moe-token-dispatcher-type alltoall "
        "--use-distributed-optimizer"
    ).split()
    halves, eighths = (planner.read([*words, "--expert-model-parallel-size", str(parts)], 8) for parts in (2, 8))
    assert traces.request(halves) == traces.request(eighths)
    moved = halves.replace(swap_attention=True)
    assert traces.request(moved) != traces.request(eighths.replace(swap_attention=True))
    one, other = (planner.ranks(each)[0].parameters.experts for each in (halves, eighths))
    assert one == 4 * other > 0
