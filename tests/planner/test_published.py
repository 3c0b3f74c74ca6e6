"""The predicted step of published trainings on clusters, within bounds."""

from __future__ import annotations

import json
import statistics

import pytest

from benchmarks import published_times
from benchmarks.published_times import Published
from mindspeed_lite.planner import arguments, devices, ranks


@pytest.fixture(scope="module")
def found() -> list[Published]:
    return published_times.read()


@pytest.mark.parametrize(("group", "most"), [("all", 0.08), ("dense", 0.06), ("mixtures of experts", 0.12)])
def test_the_mean_error_is_small(found: list[Published], group: str, most: float) -> None:
    members = published_times.groups(found)[group]
    assert published_times.mean(members) <= most
    # Neither too fast nor too slow in the mean.
    assert abs(statistics.mean(each.error for each in members)) < most / 2


def test_no_device_is_worse_than_a_tenth(found: list[Published]) -> None:
    for device in ("h100", "a100", "ascend-910b"):
        assert published_times.mean([each for each in found if each.row["device"] == device]) < 0.1


def test_a_dispatcher_that_sends_rows_once_explains_what_flags_do_not_say(found: list[Published]) -> None:
    """A training ran with HybridEP and CUDA graphs by its note, and with neither by its flags."""
    row = next(each.row for each in found if each.row.get("note", "").startswith("HybridEP"))
    words = row["flags"].replace("alltoall", "flex") + " --enable-cuda-graph"
    assert abs(published_times.predict(row | {"flags": words}).error) < 0.1 < published_times.predict(row).error


@pytest.mark.parametrize("name", devices.FIGURES)
def test_every_device_says_where_its_figures_come_from(name: str) -> None:
    figures = devices.FIGURES[name]
    assert len(figures.source) > 40
    shares = ("product", "grouped", "attention", "attention_backward", "bandwidth", "scatter", "links", "networks")
    assert all(0 < getattr(figures, share) <= 1 for share in shares)
    assert figures.memory >= 60e9 and figures.node >= 8


def test_published_memory() -> None:
    """Peaks of torch's allocator, with the fullest rank's tensors as predicted."""
    rows = [json.loads(line) for line in published_times.DATA.read_text().splitlines()]
    # What the recipe of Megatron-Bridge sets, and the flags do not say.
    recipe = "--use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
    errors = dict[str, float]()
    for row in rows:
        if row.get("memory_bytes"):
            more = recipe.split() if row["model"].startswith("Moonlight") else []
            training = arguments.read([*published_times._words(row), *more], row["devices"], "cuda")
            errors[row["model"]] = max(each.total for each in ranks(training)) / row["memory_bytes"] - 1
    # Moonlight's routing, of a router that has hardly trained, is uneven.
    assert abs(errors["Qwen3-30B-A3B"]) < 0.06 and -0.16 < errors["Moonlight-16B-A3B"] < 0, errors
