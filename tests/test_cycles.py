"""Features on and off in random order, with a failure at any step: after each call all of it is in force, or nothing.

At the end Megatron is what it was, attribute by attribute, and nothing of ours is left.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import random
import sys
import threading

import pytest

import mindspeed_lite
from mindspeed_lite import platform, runtime
from mindspeed_lite.engine import EngineError, Option, Session, swaps
from mindspeed_lite.engine.report import Report
from mindspeed_lite.ops import dispatch
from mindspeed_lite.platform import megatron
from tests.harness import places
from tests.harness.matrix import whole
from tests.harness.processes import forked

CYCLES = 60
VALUES = {"quant_states": "bf16", "virtual_optimizer": ("all",)}
# With some arguments these features apply and with others those.
HOSTS = (
    None,
    argparse.Namespace(num_experts=8, tensor_model_parallel_size=2, sequence_parallel=True, swiglu=True, bf16=True),
    argparse.Namespace(use_distributed_optimizer=True, overlap_param_gather=True, bf16=True, normalization="RMSNorm"),
)


class Marked:
    """Something of the host's that features mark."""


class Injected(Exception):
    """A failure at a step of applying or undoing."""


class Faults:
    """Lets the n-th step that is watched fail, once; `n` is set before each call."""

    def __init__(self):
        self.left = None
        self.raised = 0

    def step(self):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                self.raised += 1
                raise Injected

    def watch(self, owner, name, after=True):
        original = getattr(owner, name)

        @functools.wraps(original)
        def watched(*args, **kwargs):
            self.step()
            found = original(*args, **kwargs)
            if after:
                self.step()
            return found

        setattr(owner, name, watched)


def everything():
    """What Megatron and torch are, by place."""
    return places.snapshot(("torch", "torch.cuda", "torch.distributed"))


def different(before, after):
    return sorted(places.changed(before, after))


def left_over():
    """What of ours there is besides swapped attributes: sites, waiting hooks, listeners, threads, device."""
    return {
        "sites": len(swaps._SITES),
        "listeners": len(dispatch._subscribers),
        "threads": threading.active_count(),
        "device": platform.current(),
        "assumptions": len(megatron._applied),
        "modules": sorted(name for name in sys.modules if name.startswith("fused_weight_gradient")),
    }


def assert_consistent():
    """What is in force is what the session says, symbol by symbol, and what the report says."""
    found, report = runtime.current(), mindspeed_lite.report()
    own = {feature.name for feature in megatron.ASSUMPTIONS}
    here = [swap for swap in swaps.in_force() if swap.feature not in own]
    for site in swaps._SITES.values():
        assert site.placed is not swaps.MISSING and not site.is_foreign(), site.where
    assert platform.current() is not None or not swaps._SITES
    if found is None:
        assert report is None and here == []
        return
    wanted = [swap for each in found.swaps.values() for swap in each]
    assert {id(swap) for swap in here} <= {id(swap) for swap in wanted}
    absent = [swap for swap in wanted if all(swap is not each for each in here)]
    assert all(swap.patch.kind == "provide" for swap in absent)
    applied = {entry.feature for entry in report.entries if entry.status == "applied"} - own
    assert applied == set(found.swaps) == {each.feature.name for each in found.plan.applied}
    assert len(dispatch._subscribers) == 1 and platform.current() is not None


def choice(feature):
    """The flag of a feature and a value that turns it on."""
    option: Option = feature.options[0]
    return option.dest, VALUES.get(feature.name, True)


def applicable():
    """The features that some of the arguments above let apply here, each found by turning it on alone."""
    found = []
    for feature in runtime.catalogue():
        for host in HOSTS:
            with contextlib.suppress(EngineError):
                needed = {choice(runtime.catalogue()[each.feature]) for each in feature.requires}
                report = mindspeed_lite.enable(host_args=host, **dict([choice(feature), *needed]))
                if any(each.feature == feature.name and each.status == "applied" for each in report.entries):
                    found.append(feature)
                    break
        mindspeed_lite.disable()
    return found


class Cycles:
    """Random calls, and the judgement on each."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.features = applicable()
        self.blocks = []
        self.marked = Marked()
        self.ended = []
        self.begun = 0
        self.faults = Faults()
        self.entering = False
        self.failed = 0

    def watch(self):
        for owner, name in (
            (swaps._Function, "put"),
            (swaps._Attribute, "put"),
            (swaps, "write"),
            (swaps.Swap, "compose"),
            (swaps, "_site_of"),
            (Session, "of"),
            (Report, "record"),
            (runtime, "full_report"),
            (runtime, "_complete_report"),
            (runtime, "plan_requests"),
            (megatron, "attach"),
        ):
            self.faults.watch(owner, name)
        # What these return is all by which it can be undone.
        for owner, name in ((megatron.ImportHook, "apply"), (Session, "renew")):
            self.faults.watch(owner, name, after=False)

    def call(self):
        """One random call, and what it is."""
        kind = self.random.choice(("enable", "enable", "enabled", "leave", "leave", "disable"))
        self.entering = kind == "enabled"
        chosen = self.random.sample(self.features, self.random.randint(1, 4))
        flags = dict(map(choice, chosen))
        flags |= {name: False for name in flags if self.random.random() < 0.15 and name not in VALUES}
        host = self.random.choice(HOSTS)
        if kind == "enable":
            mindspeed_lite.enable(host_args=host, **flags)
        elif kind == "enabled":
            block = mindspeed_lite.enabled(host_args=host, **flags)
            block.__enter__()
            self.blocks.append(block)
        elif kind == "leave" and self.blocks:
            # Also in the wrong order.
            self.blocks.pop(self.random.randrange(len(self.blocks))).__exit__(None, None, None)
        elif kind == "disable":
            mindspeed_lite.disable()

    def keep(self):
        """Have a feature in force keep and mark something, and ask to be told of its end, which may fail."""
        found = runtime.current()
        if found is None or not any(found.swaps.values()):
            return
        view = self.random.choice([swap.session for each in found.swaps.values() for swap in each])
        number, self.begun = self.begun, self.begun + 1
        view.mark(self.marked, f"mark{number}", object())
        view.state(f"state{number}", object)
        view.on_end(lambda: self.ended.append(number))
        view.on_end(self.faults.step)

    def step(self):
        before, asked, device = everything(), runtime.requests(), platform.current()
        in_force = sorted((swap.feature, swap.patch.target) for swap in swaps.in_force())
        if self.random.random() < 0.6:
            self.faults.left = int(self.random.expovariate(1 / 60))
        raised = None
        try:
            self.call()
        except (Injected, EngineError) as error:
            raised = error
        self.faults.left = None
        assert_consistent()
        if raised is not None:
            self.failed += 1
            if runtime.requests() == asked:
                assert sorted((swap.feature, swap.patch.target) for swap in swaps.in_force()) == in_force, raised
                assert platform.current() is device, raised
                moved = different(before, everything())
                if self.entering:
                    # The block was in force and could not say so: what its flags replaced has been made anew.
                    again = {site.where for site in swaps._SITES.values()}
                    moved = [each for each in moved if each not in again and not each.endswith(swaps._SLOT)]
                assert moved == [], (moved, raised)
        self.keep()


def run(seed, cycles):
    warm = Cycles(seed)
    platform.deactivate()
    base, nothing = everything(), left_over()
    warm.watch()
    sizes = []
    for number in range(cycles):
        warm.step()
        if number % (cycles // 4) == cycles // 4 - 1:
            warm.blocks.clear()
            mindspeed_lite.disable()
            platform.deactivate()
            assert_consistent()
            moved = different(base, everything())
            assert moved == [] and left_over() == nothing, (moved, left_over(), nothing)
            assert sorted(warm.ended) == list(range(warm.begun)) and vars(warm.marked) == {}
            places.forget()
            gc.collect()
            sizes.append(len(gc.get_objects()))
    assert warm.faults.raised > cycles / 10 and warm.failed < cycles * 0.9
    assert len(warm.features) >= 20
    # What is remembered per feature is remembered after the first rounds.
    assert sizes[-1] - sizes[-2] < cycles / 4, sizes


@pytest.mark.parametrize("seed", range(2))
@forked("megatron")
def test_each_call_is_in_force_whole_or_not_at_all_whatever_fails(seed):
    run(seed, CYCLES)


# A thousand calls in all: one process may take five minutes.
@whole
@pytest.mark.parametrize("seed", range(2, 7))
@forked("megatron")
def test_a_thousand_calls(seed):
    run(seed, 200)
