"""The search: its bounds are bounds, its best is the best, and its flags are read as what it meant."""

from __future__ import annotations

import argparse
import dataclasses
from itertools import pairwise

import pytest

from mindspeed_lite.planner import (
    ArgumentError,
    arguments,
    candidates,
    devices,
    estimate,
    layers,
    orders,
    search,
    step_time,
    why,
)
from mindspeed_lite.planner.candidates import LayoutCandidate
from mindspeed_lite.planner.published import PublishedDevice
from mindspeed_lite.planner.search import Search
from mindspeed_lite.planner.step_time import Pricer
from mindspeed_lite.planner.training import TrainingConfig
from tests.harness.processes import forked

DENSE = (
    "--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 1 "
    "--global-batch-size 16 --bf16 --swiglu --disable-bias-linear --normalization RMSNorm "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 32000 --hidden-dropout 0 "
    "--attention-dropout 0 --use-flash-attn --use-fused-adamw"
)
EXPERTS = (
    f"{DENSE} --num-layers 7 --seq-length 512 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1024 "
    "--moe-token-dispatcher-type alltoall --mtp-num-layers 1"
)


def made(words: str, devices_: int = 8, budget: float = 40e9) -> Search:
    name, figures = devices.named("a100")
    kept = candidates.without_chosen(words.split())

    def base(tp: int) -> arguments.TrainingConfig:
        extra = ["--tensor-model-parallel-size", str(tp), "--micro-batch-size", "1"]
        return arguments.describe([*kept, *extra], devices_)

    return Search(base, devices_, budget, Pricer(PublishedDevice(name, figures)))


def key_of(candidate: LayoutCandidate) -> LayoutCandidate:
    return candidates.replace(candidate, recompute="none", states="kept", layout="")


@pytest.mark.parametrize("words", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_the_best_is_that_of_looking_at_everything(words: str) -> None:
    """And nothing that was left out by its bound is faster than its bound."""
    found = made(words, 4, 12e9)
    every, fewer = [], made(words, 4, 12e9)
    for candidate in fewer.space():
        try:
            each = fewer.evaluate(candidate)
        except ArgumentError:
            continue
        assert fewer.bound(each.candidate, each.training) <= each.seconds * (1 + 1e-9), candidate
        quick, size = fewer.quick(candidate)
        assert quick <= each.seconds * (1 + 1e-9), candidate
        assert fewer.least_bytes(each.candidate, each.training) <= each.bytes, candidate
        if candidate.states == "swapped":
            assert size <= each.bytes * (1 + 1e-6), candidate
        if each.bytes <= found.budget:
            every.append(each)
    # An option that saves memory without need is none.
    options = dict[LayoutCandidate, list[LayoutCandidate]]()
    for each in every:
        options.setdefault(key_of(each.candidate), []).append(each.candidate)
    every = [
        each
        for each in every
        if not any(
            other != each.candidate and candidates.costs_less(other, each.candidate)
            for other in options[key_of(each.candidate)]
        )
    ]
    result = found.run(5, lambda candidate: True)
    assert result.simulated < len(every), "bounds leave nothing out"
    assert result.best[0].seconds == pytest.approx(min(each.seconds for each in every))
    # One for each layout.
    layouts: dict[LayoutCandidate, float] = {}
    for each in every:
        key = key_of(each.candidate)
        layouts[key] = min(layouts.get(key, each.seconds), each.seconds)
    assert [each.seconds for each in result.best] == pytest.approx(sorted(layouts.values())[:5])
    assert result.considered == sum(1 for _ in fewer.space())


def test_less_memory_is_never_faster_and_too_little_fits_nothing() -> None:
    times = [made(DENSE, budget=budget).run(1).best[0].seconds for budget in (80e9, 6e9, 2.5e9)]
    assert times == sorted(times) and times[0] < times[-1]
    nothing = made(DENSE, budget=1e8).run(1)
    assert not nothing.best and nothing.least_bytes > 1e8 and nothing.too_large


def test_the_front_has_no_one_that_another_beats() -> None:
    front = made(DENSE).run(10).front
    for one, other in pairwise(front):
        assert one.seconds <= other.seconds and one.bytes > other.bytes


@pytest.mark.parametrize("words", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_flags_are_read_as_the_training_that_was_meant(words: str) -> None:
    """In place of those of a command that chooses something else, and with as much memory."""
    command = [*words.split(), "--tensor-model-parallel-size", "4", "--recompute-granularity=selective"]
    found, seen = made(words, 4), set()
    for number, candidate in enumerate(found.space()):
        if number % 17:
            continue
        try:
            full, training = found.training(candidate)
        except ArgumentError:
            continue
        pasted = [*candidates.without_chosen(command), *full.flags(found.base(full.tp))]
        read = arguments.read(pasted, 4)
        assert estimate.ranks(read) == estimate.ranks(training), full
        assert step_time.step(read, found.pricer).seconds == pytest.approx(
            step_time.step(training, found.pricer).seconds
        )
        seen |= {full.recompute, full.states, bool(full.layout), full.cp > 1}
    assert seen >= {"none", "parts", "full", "kept", "shared", "swapped", True}


@forked("megatron")
def test_flags_are_in_megatrons_parser() -> None:
    from megatron.training.arguments import add_megatron_arguments

    from mindspeed_lite import runtime

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    ours = {option.flag: option for option in runtime.catalogue().options()}
    for option in ours.values():
        if option.flag not in known:
            switch = {} if option.type or option.choices else {"action": "store_true"}
            parser.add_argument(option.flag, **switch)
    # What a search may write is read without a word left over.
    base = made(EXPERTS).base(2)
    for each in (
        LayoutCandidate(tp=2, pp=2, vpp=2, ep=4, micro_batch=2, recompute="full", states="swapped"),
        LayoutCandidate(
            tp=2, pp=2, cp=2, cp_algo="ulysses_cp_algo", recompute="parts", states="shared", layout="Et|tL"
        ),
    ):
        _, left = parser.parse_known_args(each.flags(base))
        assert left == [], left
    assert set(candidates.CHOSEN_VALUES) | set(candidates.CHOSEN_SWITCHES) <= known | set(ours)


def test_why_a_layout_is_not_better() -> None:
    found = made(DENSE, budget=20e9)
    best = found.run(1).best[0]
    slower = why.ask(found, "PP4 MBS1")
    assert slower.result.best[0].candidate.pp == 4 and slower.result.best[0].seconds > best.seconds
    large = why.ask(made(DENSE, budget=3e9), "TP1 PP1")
    assert not large.result.best and large.smallest is not None and large.smallest.bytes > 3e9
    assert why.ask(made(DENSE), "states swapped").result.considered
    with pytest.raises(ArgumentError, match="'XP4' is none of TPN"):
        why.question("XP4")


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("PP3", "8 devices have no PP3: PP divides the devices"),
        ("TP8 PP2", "8 devices have no TP8 with PP2: TP divides 16 heads"),
        ("VPP2 PP1", "no VPP2 with PP1: VPP needs PP above 1"),
        ("MBS3", "no MBS3: MBS is 1, 2, 4, 8 or 16"),
        ("CP8", "no CP8: CP is a power of 2 that leaves a rank 512 tokens"),
        ("EP2", "no EP2: EP divides 0 experts"),
        ("VPP5", ""),
    ],
)
def test_why_there_is_no_such_layout(asked: str, reason: str) -> None:
    assert reason in why.ask(made(DENSE), asked).excluded


def test_every_number_of_virtual_stages_that_divides_is_searched() -> None:
    of_60 = DENSE.replace("--num-layers 8", "--num-layers 60")
    found = {each.vpp for each in made(of_60).layouts() if each.pp == 2}
    assert found >= {1, 2, 3, 5, 6, 10, 15, 30} and not found & {4, 7, 8}


def test_an_option_that_takes_time_is_used_where_it_makes_it_fit() -> None:
    for budget, used in ((40e9, {"none", "kept"}), (7e9, {"parts", "full", "shared"})):
        found = made(DENSE, budget=budget).run(10).best
        assert {each.candidate.recompute for each in found} | {each.candidate.states for each in found} & used
        if budget == 40e9:
            assert all((each.candidate.recompute, each.candidate.states) == ("none", "kept") for each in found)
        assert all(each.candidate.states != "swapped" for each in found)


def test_the_command_keeps_what_is_not_chosen() -> None:
    words = (
        "a.py --lr 1 --tensor-model-parallel-size 4 --sequence-parallel --cp-comm-type a2a p2p --bf16 --recompute-norm"
    )
    assert candidates.without_chosen([*words.split(), "--micro-batch-size=2"]) == "a.py --lr 1 --bf16".split()


def test_front_of_nothing_is_nothing() -> None:
    assert search.front([]) == []


@pytest.mark.parametrize("words", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_what_is_kept_by_fields_depends_on_no_others(words: str) -> None:
    """Each reads no field of a training but those that it names."""
    read = set[str]()

    class Recorded(TrainingConfig):
        def __getattribute__(self, name: str) -> object:
            read.add(name)
            return super().__getattribute__(name)

    fields = {each.name for each in dataclasses.fields(TrainingConfig)}
    compared, found, kept = 0, made(words, 4), (orders.chunks_of_ranks, layers.kinds_in, layers.counts_in)
    for number, candidate in enumerate(found.space()):
        if number % 41:
            continue
        try:
            training = found.training(candidate)[1]
        except ArgumentError:
            continue
        compared += 1
        own = Recorded(**{name: getattr(training, name) for name in fields})
        chunks = orders.chunks_of_ranks(training)
        for each in kept:
            read.clear()
            each.__wrapped__(own, *((chunks[0][0].layers, 0) if each is not orders.chunks_of_ranks else ()))
            assert read & fields <= set(each.names), each.__name__
    assert compared > 3
