"""Trains live models before, during and after features, and says in what they differ from one that never had any.

A script of `tests.harness.jobs`: `live_undo.py OUT LAYOUT CUTS FEATURE...`, with indices of `CUTS`; each rank writes
OUT/<rank>.json, the faults by feature. Nothing but the device layer has ever been on when the reference is built. It is
given the state of a model that had a feature, both are trained on, and everything about them is compared.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mindspeed_lite
from mindspeed_lite import runtime
from mindspeed_lite.engine import Feature, swaps
from tests.harness import core_loop, places, simulated
from tests.harness.feature_layouts import UNDONE, company, flags_of, host_args
from tests.harness.rows import options_of

# Where Megatron's dispatcher puts an index, as its configuration said when it was built; it may stand anywhere.
_DERIVED = ".token_dispatcher.permute_idx_device"
CUTS = ("between forward and backward pass", "between backward pass and step", "between clipping and update")


# ---------------------------------------------------------------------------------------------------------------------
# What Megatron is


def changed(before: places.Snapshot, after: places.Snapshot) -> set[str]:
    """Attributes that differ, of modules that were loaded before; a package has a module once that is imported.

    The device layer's wrapper in a function is made anew with each set of features.
    """
    modules = {owner.partition(":")[0] for owner in before}
    return {
        place
        for place in places.changed(before, after)
        if place.partition(":")[0] in modules
        and not place.endswith(swaps._SLOT)
        and not any(isinstance(places.held(each, place), types.ModuleType) for each in (before, after))
    }


# ---------------------------------------------------------------------------------------------------------------------
# What a model is


def described(training: Any) -> dict[str, str]:
    """Every attribute of model, parameters, configuration, DDP and optimizer: its value if plain, else what it is."""
    found: dict[str, str] = {}
    _describe(training.config, "config", found, set())
    for place, model in enumerate(training.models):
        _describe(model, f"model{place}", found, set())
    _describe(training.optimizer, "optimizer", found, set())
    return found


def _describe(value: Any, path: str, found: dict[str, str], seen: set[int]) -> None:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size)):
        found[path] = repr(value)
        return
    if isinstance(value, types.FunctionType):
        found[path] = f"function {value.__module__}.{value.__qualname__} {value.__code__.co_name}"
        return
    if isinstance(value, type):
        found[path] = f"class {value.__module__}.{value.__qualname__}"
        return
    # A tuple is equal wherever it stands; anything else is described once.
    if kind is not tuple:
        if id(value) in seen:
            return
        seen.add(id(value))
    found[path] = name
    if isinstance(value, torch.Tensor):
        found[path] += f" {value.dtype} {tuple(value.shape)} {value.requires_grad}"
        _describe(value._backward_hooks, f"{path}._backward_hooks", found, seen)
    if isinstance(value, dict):
        for place, (key, each) in enumerate(value.items()):
            label = repr(key) if isinstance(key, (str, int, tuple)) and "0x" not in repr(key) else f"#{place}"
            # Hooks are numbered through the whole process.
            hooks = "hooks" in path.rpartition(".")[2]
            _describe(each, f"{path}[{f'#{place}' if hooks else label}]", found, seen)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for place, each in enumerate(value):
            _describe(each, f"{path}[{place}]", found, seen)
    if name.startswith(("megatron.", "mindspeed_lite.", "torch.nn.", "torch.optim.")) and hasattr(value, "__dict__"):
        for key, each in vars(value).items():
            if key not in ("__weakref__", "__orig_class__"):
                _describe(each, f"{path}.{key}", found, seen)


def inner_optimizers(training: Any) -> list[Any]:
    return [each.optimizer for each in training.optimizer.chained_optimizers if each.optimizer is not None]


def states(training: Any) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """The optimizers' parameters with what there is of them."""
    for optimizer in inner_optimizers(training):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, optimizer.state[parameter]


@torch.no_grad()
def give(source: Any, target: Any) -> None:
    """Let `target` go on from where `source` is, and both from the first batch."""
    for one, other in zip(source.models, target.models, strict=True):
        for (name, mine), (same, theirs) in zip(one.named_parameters(), other.named_parameters(), strict=True):
            assert name == same, f"{name} is {same} in a model that never had it"
            theirs.copy_(mine)
    for (mine, state), (theirs, place) in zip(states(source), states(target), strict=True):
        theirs.copy_(mine)
        assert state.keys() == place.keys(), f"the optimizer keeps {[*state]} instead of {[*place]}"
        for key, value in state.items():
            assert value.dtype == place[key].dtype and value.shape == place[key].shape, f"{key} is {value.dtype}"
            place[key].copy_(value)
    for each in (source, target):
        rewind(each)


def finish_gathers(training: Any) -> None:
    """Complete the weights that a gather still brings."""
    for model in training.models if training.options.get("overlap_param_gather") else ():
        model.start_param_sync(force_sync=True)


def held(training: Any, weights: bool = True) -> list[bytes]:
    """The bits of weights, main parameters and states; without weights where a gather may still bring them."""
    tensors = [each for model in training.models for each in model.parameters()] if weights else []
    for main, state in states(training):
        tensors += [main, *(each for each in state.values() if torch.is_tensor(each))]
    return [
        each.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()
        for each in tensors
    ]


def rewind(training: Any) -> None:
    from megatron.core import parallel_state as ps

    training.iterators = [core_loop._batches(7, ps.get_data_parallel_rank()) for _ in training.models]


# ---------------------------------------------------------------------------------------------------------------------
# Scenarios


class Bench:
    """The reference of one layout, and what is compared with it."""

    def __init__(self, layout: str) -> None:
        self.layout = layout
        self.options = {**options_of(UNDONE[layout]), "micro_batches": 2}
        self.plain = core_loop.Training(self.options)
        self.second = second = core_loop.Training(self.options)
        before = places.snapshot()
        for each in (self.plain, second):
            each.step()
        after = places.snapshot()
        #: What training changes anyway.
        self.restless = changed(before, after)
        self.with_device = after
        give(second, self.plain)
        assert self.plain.step() == second.step()
        one, other = described(self.plain), described(second)
        self.noise = {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}
        self.faults: list[str] = []

    def expect(self, holds: bool, text: str) -> None:
        if not holds:
            self.faults.append(text)

    def build(self, feature: Feature) -> Any:
        """A model whose configuration asks for what the features in force set for a script."""
        return core_loop.Training({**self.options, "requested": feature.name})

    def enable(self, feature: Feature, **more: Any) -> None:
        mindspeed_lite.enable(host_args=host_args(self.layout), **flags_of(feature), **more)

    def during(self, where: str) -> None:
        """What is to hold while features are on: only their places differ."""
        functions, swapped = set(), set()
        for site in swaps._SITES.values():
            swapped.add(site.where)
            functions.add(id(getattr(site, "function", None)))
        now = places.snapshot()
        for each in changed(self.with_device, now) - self.restless:
            value = places.held(now, each)
            name = each.partition(" ")[0].replace(":", ".")
            known = id(getattr(value, "__func__", value)) in functions
            self.expect(known or name in {place.replace(":", ".") for place in swapped}, f"{where}: {each} has changed")

    def take_back(self, where: str) -> None:
        """`disable()`, and Megatron as it was."""
        for each in mindspeed_lite.disable():
            self.faults.append(f"{where}: {each}")
        left = changed(self.with_device, places.snapshot()) - self.restless
        self.expect(not left, f"{where}: left in Megatron: {sorted(left)}")

    def after(self, where: str, training: Any) -> None:
        """State, losses and attributes against the reference."""
        give(training, self.plain)
        mine, theirs = (each.step() for each in (training, self.plain))
        self.expect(mine == theirs, f"{where}: losses and gradient norms {mine}, and never patched {theirs}")
        updated = held(training, weights=False) == held(self.plain, weights=False)
        self.expect(updated, f"{where}: its update is not that of a model never patched")
        one, other = described(training), described(self.plain)
        for key in sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key)):
            # What the user has asked of Megatron, and trains without the feature, stays his.
            name = key.rpartition("config.")[2]
            his = name in training.asked and one.get(key) == repr(training.asked[name])
            if key not in self.noise and not his and not key.endswith(_DERIVED):
                self.faults.append(f"{where}: {key} is {one.get(key)}, and never patched {other.get(key)}")
        chained = (each.optimizer.chained_optimizers for each in (training, self.second))
        for mine, theirs in zip(*chained, strict=True):
            theirs.load_state_dict(copy.deepcopy(mine.state_dict()))

    def built_under(self, feature: Feature) -> None:
        self.enable(feature)
        training = self.build(feature)
        for _ in range(2):
            training.step()
        self.during("built under it")
        self.take_back("built under it")
        self.after("built under it", training)

    def on_again(self, feature: Feature) -> None:
        """A model that was built under a feature has all of it again, with the bits of one that never lost it."""
        found = []
        for is_switched in (False, True):
            self.enable(feature)
            training = self.build(feature)
            losses = [training.step()]
            if is_switched:
                mindspeed_lite.disable()
                self.enable(feature)
            rewind(training)
            # Some learn an order in the first step.
            losses += [training.step(), training.step()]
            finish_gathers(training)
            found.append((losses, held(training), described(training)))
        (losses, state, one), (losses_again, state_again, other) = found
        self.expect(losses_again == losses, f"on again: losses and norms {losses_again}, and never off {losses}")
        self.expect(state_again == state, "on again: weights or states have other bits")
        for key in sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key)):
            if key not in self.noise and not key.endswith("_profile_name"):
                self.faults.append(f"on again: {key} is {other.get(key)}, and never off {one.get(key)}")
        mindspeed_lite.disable()

    def built_plain(self, feature: Feature) -> None:
        training = core_loop.Training(self.options)
        training.step()
        self.enable(feature)
        for _ in range(2):
            training.step()
        self.take_back("built plain")
        self.after("built plain", training)
        self.enable(feature)
        training.step()
        self.take_back("built plain, on again")
        self.after("built plain, on again", training)

    def more_on_top(self, feature: Feature) -> None:
        self.enable(feature)
        training = self.build(feature)
        training.step()
        self.enable(feature, auto=True)
        training.step()
        self.during("more on top")
        self.take_back("more on top")
        self.after("more on top", training)

    def cut_short(self, feature: Feature, cut: str) -> None:
        """`disable()` within a step, against the same step of the reference."""
        self.enable(feature)
        training = self.build(feature)
        training.step()
        with torch.no_grad():
            for mine, theirs in zip(training.models[0].parameters(), self.plain.models[0].parameters(), strict=True):
                theirs.copy_(mine)
        reached: list[str] = []

        def end(now: str) -> None:
            if now == cut:
                reached.append(now)
                for each in mindspeed_lite.disable():
                    self.faults.append(f"{cut}: {each}")

        gradients = self._step(training, end)
        self.expect(bool(reached), f"{cut}: it was not reached")
        expected = self._step(self.plain, lambda now: None)
        rounding = any(each.numerics != "bitwise" for each in company(feature.name))
        # Half of it would be missing if that of one micro-batch were.
        allowed = 0.3 if rounding else 0.0
        for name, gradient in expected.items():
            scale = gradient.norm() + 1e-6
            apart = float((gradients[name] - gradient).norm() / scale)
            self.expect(apart <= allowed, f"{cut}: the gradient of {name} is off by {apart:.2g}")
        give(training, self.plain)
        mine, theirs = training.step(), self.plain.step()
        self.expect(mine == theirs, f"{cut}: losses and gradient norms {mine}, and never patched {theirs}")

    def run(self, feature: Feature, cuts: list[str], tops: bool) -> list[str]:
        """Every scenario of one feature; what did not hold. `tops`: also with all that applies on top."""
        self.faults = []
        scenarios: list[tuple[str, Callable[[], None]]] = [
            ("built under it", lambda: self.built_under(feature)),
            ("built plain", lambda: self.built_plain(feature)),
            ("on again", lambda: self.on_again(feature)),
            *([("more on top", lambda: self.more_on_top(feature))] if tops else []),
            *((cut, functools.partial(self.cut_short, feature, cut)) for cut in cuts),
        ]
        for what, scenario in scenarios:
            try:
                scenario()
            except Exception:
                self.faults.append(f"{what}: {traceback.format_exc()}")
            mindspeed_lite.disable()
        return self.faults

    def _step(self, training: Any, end: Callable[[str], None]) -> dict[str, torch.Tensor]:
        """A step of two micro-batches in pieces; gradients after their reduction."""
        from megatron.core.distributed import finalize_model_grads

        rewind(training)
        training.zero()
        (model,) = training.models
        for micro_batch in range(2):
            with contextlib.nullcontext() if micro_batch else model.no_sync():
                output, loss_of = training.forward_step(training.iterators[0], model)
                loss, _ = loss_of(output)
                if micro_batch:
                    end(CUTS[0])
                (loss / 2).backward()
        end(CUTS[1])
        finalize_model_grads([model])
        found = {name: parameter.main_grad.float().clone() for name, parameter in model.named_parameters()}
        first = training.optimizer.chained_optimizers[0]

        def update() -> Any:
            del first.step_with_ready_grads
            end(CUTS[2])
            return first.step_with_ready_grads()

        first.step_with_ready_grads = update
        training.optimizer.step()
        return found


def main() -> None:
    out, layout, indices, *names = sys.argv[1:]
    simulated.streams()
    dist.init_process_group("nccl")
    bench = Bench(layout)
    found: dict[str, list[str]] = {}
    cuts = [CUTS[int(each)] for each in indices]
    for name in names:
        # What applies on top is the same for every feature of the layout.
        found[name] = bench.run(runtime.catalogue()[name], cuts, tops=name == names[0])
        Path(out, f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
