"""Trains live models before, during and after features, and says in what they differ from one that never had any.

Run by `training_server` as a script, `live_undo.py OUT LAYOUT FEATURE...`; each rank writes OUT/<rank>.json, the faults
found by feature. Nothing but the device layer has ever been on when the reference is built. It is given the state of a
model that had a feature, both are trained on, and everything about them is compared.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import json
import os
import pickle
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import mindspeed_lite
from mindspeed_lite import runtime
from mindspeed_lite.engine import Context, Feature, Option, OptionError, Settings, swaps
from mindspeed_lite.patches import moe_fb_overlap
from mindspeed_lite.platform.megatron import HOST
from tests.harness import core_loop, places, simulated

_EXPERTS: dict[str, Any] = {"experts": 4, "moe": {"moe_layer_freq": [0, 1]}}
_GATHERED, _SHARED = {"moe_token_dispatcher_type": "allgather"}, {"moe_shared_expert_intermediate_size": 64}
_DISTRIBUTED = {"distributed_optimizer": True}
_OVERLAPPED = {**_DISTRIBUTED, "overlap_grad_reduce": True, "overlap_param_gather": True, "no_sync": True}
# Ranks, options of `core_loop`, and what a script's arguments would say beside.
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "plain": (1, {}, {}),
    "LayerNorm": (1, {**_DISTRIBUTED, "qk_l2_norm": True, "config": {"normalization": "LayerNorm"}}, {}),
    "experts": (1, {**_DISTRIBUTED, **_EXPERTS}, {}),
    "delayed": (
        1,
        {**_EXPERTS, "overlap_grad_reduce": True, "ddp_delay_wgrad_compute": True, "no_sync": True},
        {"overlap_moe_expert_parallel_comm": True},
    ),
    "tensor": (2, {**_DISTRIBUTED, **_EXPERTS, "tp": 2, "sp": True, "ep": 2, "etp": 1}, {}),
    "overlapped": (2, {**_OVERLAPPED, **_EXPERTS, "ep": 2}, {}),
    "gathered": (
        2,
        {**_OVERLAPPED, **_EXPERTS, "ep": 2, "moe": {**_EXPERTS["moe"], **_GATHERED, **_SHARED}},
        {**_GATHERED, **_SHARED},
    ),
}
# The same for `on_and_off`: a step of a pipeline cannot be cut in pieces here, and Megatron's own attention takes no
# part of a context.
_BY_NAME: dict[str, Any] = {"by_name": True, "layers": 4, "lr": 1e-3}
_RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3}
TRAINED_ALONE: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "biases": (1, {"bias": True, "config": {"bias_dropout_fusion": True}}, {}),
    "context": (2, {"cp": 2, **_BY_NAME}, {}),
    "pipeline": (2, {"pp": 2, **_DISTRIBUTED}, {}),
    "V": (2, {"pp": 2, "vpp": 2, **_BY_NAME}, {}),
    "shared experts": (1, {**_EXPERTS, "moe": {**_EXPERTS["moe"], **_SHARED}}, _SHARED),
    "router in fp32": (1, {**_DISTRIBUTED, **_EXPERTS, "moe": {**_EXPERTS["moe"], "moe_router_dtype": "fp32"}}, {}),
    "recomputed": (2, {"pp": 2, "vpp": 2, "layers": 8, "config": _RECOMPUTED}, _RECOMPUTED),
}
# Where Megatron's dispatcher puts an index, as its configuration said when it was built; it may stand anywhere.
_DERIVED = ".token_dispatcher.permute_idx_device"
# Of options that take a text.
_VALUES = {"FILE": os.devnull, "ORDER": "1f1b"}
# What one process asks for beside a feature.
_BESIDE = {"moe_hierarchical_alltoallv": {"moe_node_size": 1}, "adaptive_memory": {"memory_budget": 1.0}}
# Why a feature is not undone here, though it can be trained.
COMBINED = "Megatron's combined schedule, which it turns on, leaves its own marks in a model"
CUTS = ("between forward and backward pass", "between backward pass and step", "between clipping and update")


def host_args(layout: str) -> types.SimpleNamespace:
    """What Megatron's arguments would be for a training in this layout."""
    _, options, more = {**LAYOUTS, **TRAINED_ALONE}[layout]
    config = options.get("config", {})
    values = {
        "transformer_impl": "local",
        "normalization": config.get("normalization", "RMSNorm"),
        "tensor_model_parallel_size": options.get("tp", 1),
        "pipeline_model_parallel_size": options.get("pp", 1),
        "virtual_pipeline_model_parallel_size": options.get("vpp"),
        "context_parallel_size": options.get("cp", 1),
        "expert_model_parallel_size": options.get("ep", 1),
        "expert_tensor_parallel_size": options.get("etp"),
        "sequence_parallel": options.get("sp", False),
        "num_experts": options.get("experts"),
        "moe_token_dispatcher_type": "alltoall",
        "use_distributed_optimizer": options.get("distributed_optimizer", False),
        "overlap_param_gather": options.get("overlap_param_gather", False),
        "overlap_grad_reduce": options.get("overlap_grad_reduce", False),
        "seq_length": core_loop.SEQUENCE,
        "bf16": True,
        "swiglu": True,
        "qk_l2_norm": options.get("qk_l2_norm", False),
        "add_bias_linear": options.get("bias", False),
        "optimizer": "adam",
        **more,
    }
    return types.SimpleNamespace(**values)


def flags_of(feature: Feature) -> dict[str, Any]:
    """Flags that turn a feature on, with those of the features it requires or works with alone."""
    return _flags(_company(feature.name))


def _flags(features: Sequence[Feature]) -> dict[str, Any]:
    """Flags that turn all of them on; one that another's flag turns on needs none."""
    found: dict[str, Any] = {}
    for each in reversed(features):
        if not each.is_enabled(_settings(found)):
            found[each.options[0].dest] = _value(each.options[0])
            found.update(_BESIDE.get(each.name, {}))
    return found


def _settings(flags: dict[str, Any]) -> Settings:
    return Settings.of((*runtime.GENERAL, *runtime.catalogue().options()), flags)


def _value(option: Option) -> Any:
    """What turns a feature on that has it as its first option."""
    if option.choices is not None:
        return option.choices[-1]
    if option.nargs is not None:
        return ["all"]
    if option.metavar in _VALUES:
        return _VALUES[option.metavar]
    return option.default + 1 if isinstance(option.default, int) and not option.is_switch else True


@functools.cache
def _company(name: str) -> list[Feature]:
    """The feature behind those it requires, and one more where its condition asks for that in every layout."""
    features = runtime.catalogue()
    required = [*(features[each.feature] for each in features[name].requires), features[name]]
    others = [[]] + [[each] for each in features if each.options[0].is_switch and each not in required]
    found = ([*more, *required] for more in others if any(not _reasons([*more, *required], each) for each in LAYOUTS))
    return next(found, required)


def _reasons(features: list[Feature], layout: str, release: str = "") -> list[str]:
    given = host_args(layout)
    context = Context(_settings(_flags(features)), "cpu", {HOST: release} if release else {}, given)
    reasons: list[str] = []
    for each in features:
        reasons += each.conflict_reasons(lambda name: getattr(given, name, None))
        with _devices():
            try:
                reasons += each.condition(context) if each.condition is not None else ()
            except OptionError as error:
                reasons.append(str(error))
        # Arguments that a script's parser sets: there is nothing to undo.
        reasons += [] if each.patches else ["it swaps nothing"]
        if moe_fb_overlap.ARGUMENT in (each.arguments(context) if each.arguments is not None else {}):
            reasons.append(COMBINED)
    return reasons


def why_not(feature: Feature, layout: str, release: str = "") -> list[str]:
    """Why a feature cannot be had in a layout, of that release if one is named; [] if it can."""
    return _reasons(_company(feature.name), layout, release)


def layout_of(feature: Feature) -> str | None:
    """The first layout in which a feature can be had."""
    return next((each for each in LAYOUTS if not why_not(feature, each)), None)


@contextlib.contextmanager
def _devices() -> Iterator[None]:
    """As if the device had what `simulate` puts in its place; nothing of it stays."""
    asked = {
        "swap_optimizer": "_no_copy_engine",
        "swap_attention": "_why_not_here",
        "moe_wgrad_side_stream": "_why_not_here",
    }
    with contextlib.ExitStack() as stack:
        for patch, name in asked.items():
            stack.enter_context(mock.patch(f"mindspeed_lite.patches.{patch}.{name}", lambda device: []))
        yield


def simulate() -> None:
    """Lanes in the place of a device's streams."""
    simulated.swap_optimizer()
    simulated.swap_attention()
    simulated.moe_wgrad_side_stream()


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


def rewind(training: Any) -> None:
    from megatron.core import parallel_state as ps

    training.iterators = [core_loop._batches(7, ps.get_data_parallel_rank()) for _ in training.models]


# ---------------------------------------------------------------------------------------------------------------------
# Copies


def squared_relu_config() -> Any:
    from megatron.core.activations import squared_relu
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, activation_func=squared_relu)


def copies(training: Any) -> dict[str, str]:
    """How copies and pickles of configuration and layer turn out, as text that is the same for the same outcome."""
    layer = training.models[-1].module.module.decoder.layers[-1]
    things = {"configuration": training.config, "configuration with a patched function": squared_relu_config()}
    found = {}
    for what, thing in {**things, "layer": layer}.items():
        for how in (_pickled, _copied):
            try:
                other = how(thing)
            except Exception:
                found[f"{how.__name__} {what}"] = "fails"
                continue
            mine: dict[str, str] = {}
            theirs: dict[str, str] = {}
            _describe(thing, "", mine, set())
            _describe(other, "", theirs, set())
            differing = {key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key)}
            # A copied parameter is one, and not the main gradient's or a buffer's owner.
            lost = sorted(key for key in differing if "_parameters" not in key)
            found[f"{how.__name__} {what}"] = f"equal but for {lost[:4]}" if lost else "equal"
    return found


def _copied(thing: Any) -> Any:
    return copy.deepcopy(thing, {id(group): group for group in _all_groups()})


def _all_groups() -> list[Any]:
    return list(dist.distributed_c10d._world.pg_map)


def _pickled(thing: Any) -> Any:
    groups = _all_groups()

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return next((place for place, group in enumerate(groups) if group is obj), None)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, place: Any) -> Any:
            return groups[place]

    stream = io.BytesIO()
    Pickler(stream).dump(thing)
    stream.seek(0)
    return Unpickler(stream).load()


# ---------------------------------------------------------------------------------------------------------------------
# Scenarios


class Bench:
    """The reference of one layout, and what is compared with it."""

    def __init__(self, layout: str) -> None:
        self.layout = layout
        self.options = {**LAYOUTS[layout][1], "micro_batches": 2}
        self.plain = core_loop.Training(self.options)
        self.second = second = core_loop.Training(self.options)
        before = places.snapshot()
        for each in (self.plain, second):
            each.step()
            copies(each)
        after = places.snapshot()
        #: What training changes anyway.
        self.restless = changed(before, after)
        self.with_device = after
        give(second, self.plain)
        assert self.plain.step() == second.step()
        self.copies = copies(self.plain)
        one, other = described(self.plain), described(second)
        self.noise = {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}
        self.faults: list[str] = []

    def expect(self, holds: bool, text: str) -> None:
        if not holds:
            self.faults.append(text)

    def build(self, feature: Feature) -> Any:
        """A model whose configuration asks for what the features in force set for a script."""
        from megatron.core.transformer import TransformerConfig

        found = runtime.current()
        assert found is not None
        fields = {each.name for each in dataclasses.fields(TransformerConfig)}
        applied = [each for each in found.plan.applied if each.feature.patches]
        asked = {name: value for each in applied for name, value in each.arguments.items() if name in fields}
        # Megatron's own flags, which its configuration may refuse for want of what this machine has not.
        late = {
            option.dest: True
            for each in applied
            for option in each.feature.options
            if option.dest in fields and option.upstream and option.is_switch and option.dest not in asked
        }
        self.asked = {**asked, **late}
        config = {**self.options.get("config", {}), **asked}
        return core_loop.Training({**self.options, "config": config, "unchecked": late})

    def enable(self, feature: Feature, **more: Any) -> None:
        mindspeed_lite.enable(host_args=host_args(self.layout), **flags_of(feature), **more)
        found = runtime.current()
        assert found is not None
        outcome = found.plan.outcome(feature.name)
        assert outcome.status == "applied", outcome.reasons

    def during(self, where: str, training: Any) -> None:
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
        self.expect_copies(where, training)

    def expect_copies(self, where: str, training: Any) -> None:
        found = copies(training)
        for what, outcome in self.copies.items():
            self.expect(found[what] == outcome, f"{where}: {what}: {found[what]}, and without it: {outcome}")

    def take_back(self, where: str) -> None:
        """`disable()`, and Megatron as it was."""
        for each in mindspeed_lite.disable():
            self.faults.append(f"{where}: {each}")
        left = changed(self.with_device, places.snapshot()) - self.restless
        self.expect(not left, f"{where}: left in Megatron: {sorted(left)}")

    def after(self, where: str, training: Any) -> None:
        """State, losses and attributes against the reference."""
        give(training, self.plain)
        mine, theirs = ([each.step() for _ in range(2)] for each in (training, self.plain))
        self.expect(mine == theirs, f"{where}: losses and gradient norms {mine}, and never patched {theirs}")
        one, other = described(training), described(self.plain)
        for key in sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key)):
            # What the user has asked of Megatron, and trains without the feature, stays his.
            name = key.rpartition("config.")[2]
            his = name in self.asked and one.get(key) == repr(self.asked[name])
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
        self.during("built under it, during", training)
        self.take_back("built under it")
        self.after("built under it", training)

    def built_plain(self, feature: Feature) -> None:
        training = core_loop.Training(self.options)
        self.asked = {}
        for _ in range(2):
            training.step()
        self.enable(feature)
        for _ in range(2):
            training.step()
        self.during("built plain, during", training)
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
        self.during("more on top, during", training)
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
        rounding = any(each.numerics != "bitwise" for each in _company(feature.name))
        # Half of it would be missing if that of one micro-batch were.
        allowed = 0.3 if rounding else 0.0
        for name, gradient in expected.items():
            scale = gradient.norm() + 1e-6
            apart = float((gradients[name] - gradient).norm() / scale)
            self.expect(apart <= allowed, f"{cut}: the gradient of {name} is off by {apart:.2g}")
        give(training, self.plain)
        mine, theirs = training.step(), self.plain.step()
        self.expect(mine == theirs, f"{cut}: losses and gradient norms {mine}, and never patched {theirs}")

    def run(self, feature: Feature) -> list[str]:
        """Every scenario of one feature; what did not hold."""
        self.faults = []
        scenarios: list[tuple[str, Callable[[], None]]] = [
            ("built under it", lambda: self.built_under(feature)),
            ("built plain", lambda: self.built_plain(feature)),
            ("more on top", lambda: self.more_on_top(feature)),
            *((cut, functools.partial(self.cut_short, feature, cut)) for cut in CUTS),
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
    out, layout, *names = sys.argv[1:]
    simulate()
    dist.init_process_group("nccl")
    bench = Bench(layout)
    found: dict[str, list[str]] = {}
    for name in names:
        found[name] = bench.run(runtime.catalogue()[name])
        Path(out, f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
