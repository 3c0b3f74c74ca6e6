"""Trains with experts that change places, and compares with the same training without: losses, states, checkpoints.

Run by `training_server` as a script, `placed_experts.py OUT STEPS CASE...`; each rank writes OUT/<rank>.json, the
faults by case. Two rows of a token add up to the same bits in any order, and gradients are not clipped: what is left
has the same bits wherever experts are. A case with a `mutation` breaks the feature, and must have a fault.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import mindspeed_lite
from mindspeed_lite import platform, runtime
from mindspeed_lite.memory import host_mapped_moments
from mindspeed_lite.parallel.balance import placement, placer, record
from mindspeed_lite.patches import enable_expert_placement as patch
from mindspeed_lite.patches._shared.optimizer_state import leaves, main_params
from tests.harness import core_loop, simulated, skewed_router
from tests.harness.expert_load import Received

_EP2: dict[str, Any] = {"ep": 2, "experts": 8}
_FP32: dict[str, Any] = {**_EP2, "fp32": True}
_DISTRIBUTED = {"distributed_optimizer": True}
_OVERLAPPED = {**_DISTRIBUTED, "overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 4096}
_FUSED = {"use_fused_adamw": True}
# Options, flags.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": (_FP32, {}),
    "fp32, distributed": ({**_FP32, **_DISTRIBUTED}, {}),
    "bf16": (_EP2, {}),
    "distributed": ({**_EP2, **_DISTRIBUTED}, {}),
    "overlapped": ({**_EP2, **_OVERLAPPED}, {}),
    "overlapped, order of use": ({**_EP2, **_OVERLAPPED}, {"reset_bucket_group_order": True}),
    "gathered once": ({**_EP2, **_DISTRIBUTED}, {"param_gather_once": True}),
    "fused": ({**_EP2, **_DISTRIBUTED}, _FUSED),
    "split parameters": ({**_EP2, **_DISTRIBUTED}, {**_FUSED, "reuse_fp32_param": True}),
    "split parameters, plain optimizer": (_EP2, {**_FUSED, "reuse_fp32_param": True}),
    "moments in bf16": ({**_EP2, **_DISTRIBUTED}, {**_FUSED, "quant_states": "bf16"}),
    "moments in fp8": ({**_EP2, **_DISTRIBUTED}, {**_FUSED, "quant_states": "fp8"}),
    "both": ({**_EP2, **_OVERLAPPED}, {**_FUSED, "quant_states": "fp8", "reuse_fp32_param": True}),
    "virtual optimizer": ({**_EP2, **_DISTRIBUTED}, {**_FUSED, "virtual_optimizer": ["all"]}),
    "swapped optimizer": ({**_EP2, **_DISTRIBUTED}, {**_FUSED, "swap_optimizer": True}),
    "biases": ({**_EP2, "bias": True}, {}),
    "grouped": (_EP2, {"moe_grouped_gemm": True}),
    "allgather": ({**_FP32, "moe": {"moe_token_dispatcher_type": "allgather"}}, {}),
    "shared": ({**_EP2, "moe": {"moe_shared_expert_intermediate_size": 64}}, {}),
    "dropped": ({**_EP2, "moe": {"moe_expert_capacity_factor": 1.0}}, {}),
    "bias of experts": (
        {**_EP2, "moe": {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid",
                         "moe_router_load_balancing_type": "none"}}, {}),
    "further tokens": (
        {**_EP2, "moe": {"moe_router_load_balancing_type": "none"}, "config": {"mtp_num_layers": 1}}, {}),
    "recompute": ({**_EP2, "config": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}}, {}),
    "recompute full": ({**_EP2, "config": {"recompute_granularity": "full", "recompute_method": "uniform",
                                           "recompute_num_layers": 1}}, {}),
    "combined schedule": (
        {**_EP2, "wgrad_fusion": True, "overlap_grad_reduce": True, "ddp_delay_wgrad_compute": True, "no_sync": True,
         "config": {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}},
        {"moe_grouped_gemm": True, "use_gradient_accumulation_fusion": True, "delay_wgrad_compute": True,
         "moe_fb_overlap": True}),
    "two levels": (_EP2, {"moe_grouped_gemm": True, "moe_permute_fusion": True, "moe_hierarchical_alltoallv": True,
                          "moe_node_size": 1}),
    "released": (_EP2, {"moe_grouped_gemm": True, "moe_permute_fusion": True, "moe_zero_memory": "level1"}),
    "copies": (_FP32, {"moe_grouped_gemm": True, "balanced_moe_experts": True, "balanced_moe_break_even": 0.0}),
    "tp2_etp1_ep2": ({**_EP2, "tp": 2, "sp": True, "etp": 1}, {}),
    # Four ranks.
    "ep4": ({"ep": 4, "experts": 8}, {}),
    "ep4, distributed": ({"ep": 4, "experts": 8, **_DISTRIBUTED}, {}),
    "tp2_ep2": ({**_EP2, "tp": 2, "sp": True}, {}),
    "tp2_ep2, distributed": ({**_EP2, "tp": 2, "sp": True, **_OVERLAPPED}, {}),
    "tp2_etp1_ep4": ({"ep": 4, "experts": 8, "tp": 2, "sp": True, "etp": 1}, {}),
    "pp2_ep2": ({**_EP2, "pp": 2}, {}),
    "pp2_ep2, distributed": ({**_EP2, "pp": 2, **_DISTRIBUTED}, {}),
    "ep2_dp2, distributed": ({**_EP2, **_OVERLAPPED}, {}),
    "ep2_dp2, both": ({**_EP2, **_OVERLAPPED}, {**_FUSED, "quant_states": "fp8", "reuse_fp32_param": True}),
}  # fmt: skip
# Another order of sums: a token's rows are added within a rank first, or an expert's rows by copies.
ROUNDED = {"allgather", "copies"}
INTERVAL = 2


def _without_states(parameters: Any, mains: Any) -> Any:
    return contextlib.nullcontext([*parameters])


def _without_moments(own: Any) -> Any:
    @contextlib.contextmanager
    def training_state(parameters: Any, mains: Any) -> Iterator[list[torch.Tensor]]:
        with own(parameters, mains) as found:
            yield [each for each in found if not any(each is state for state in _states(mains))]

    return training_state


def _states(mains: Any) -> list[torch.Tensor]:
    return [
        each for inner, main in mains.values() for name, each in inner.state.get(main, {}).items() if name != "step"
    ]


MUTATIONS: dict[str, Any] = {
    "main parameters and moments stay": lambda: mock.patch.object(patch, "training_state", _without_states),
    "moments stay": lambda: mock.patch.object(patch, "training_state", _without_moments(patch.training_state)),
    "the map is not applied": lambda: mock.patch.object(
        placer.PlacedExperts, "by_place", lambda self, columns: columns
    ),
    "probabilities keep their order": lambda: mock.patch.object(
        placer.PlacedExperts,
        "by_place",
        lambda self, columns, own=placer.PlacedExperts.by_place: (
            own(self, columns) if columns.dtype == torch.bool else columns
        ),
    ),
    "checkpoints in the order of places": lambda: mock.patch.object(patch._Placements, "go_home", lambda self: None),
}


def _begin() -> None:
    from megatron.core import parallel_state as ps

    if ps.model_parallel_is_initialized():
        ps.destroy_model_parallel()


def _configured(options: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """With what a user of Megatron-core sets for these features himself."""
    fused = {name: True for name in ("moe_permute_fusion",) if name in flags}
    moe = {"moe_router_dtype": "fp32", **fused, **options.get("moe", {})}
    return {**options, "moe": moe, "clip_grad": 1e9}


def _checkpoint(training: Any) -> str:
    """All bits that a distributed checkpoint of this rank has."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    def held(nested: Any, label: str) -> list[tuple[str, torch.Tensor]]:
        return [
            (f"{label} {each.key} {getattr(each, 'global_offset', '')}", each.data)
            for each in nested_values(nested)
            if isinstance(each, (ShardedTensor, ShardedTensorFactory))
        ]

    weights = [each.sharded_state_dict() for each in training.models]
    tensors = [pair for number, each in enumerate(weights) for pair in held(each, str(number))]
    if not training.options.get("distributed_optimizer"):
        tensors += held(training.optimizer.sharded_state_dict(weights[0]), "optimizer")
    return _digest(tensors)


def _states_of(training: Any) -> str:
    """All bits of weights, main parameters and optimizer states of this rank, once no feature stores them."""
    mains = main_params(leaves(training.optimizer))
    tensors = []
    for number, model in enumerate(training.models):
        for name, parameter in model.named_parameters():
            tensors.append((f"{number} {name}", parameter))
            if parameter in mains:
                inner, main = mains[parameter]
                held = {"main": main, **inner.state[main]}
                tensors += [(f"{number} {name} {what}", each) for what, each in held.items() if what != "step"]
    return _digest(tensors)


def _digest(tensors: list[tuple[str, torch.Tensor]]) -> str:
    found = hashlib.sha256()
    for name, each in sorted(tensors, key=lambda pair: pair[0]):
        found.update(name.encode() + each.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _train(options: dict[str, Any], steps: int, flags: dict[str, Any] | None = None) -> tuple[list[Any], list[str]]:
    """Losses and norms, and digests of checkpoints: in the middle, and at the end without features."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    _begin()
    found, checkpoints = [], []
    with contextlib.ExitStack() as stack:
        if flags is not None:
            stack.enter_context(mindspeed_lite.enabled(**flags))
        training = core_loop.Training(options)
        for number in range(steps):
            found += training.step()
            if number == steps // 2:
                if options.get("overlap_param_gather"):
                    for model in training.models:
                        model.start_param_sync(force_sync=True)
                checkpoints.append(_checkpoint(training))
        placed = getattr(runtime.current(), "session", None)
        state = placed.find(patch.NAME) if placed is not None else None
        if state is not None and all(each.is_home for each in state.layers.values()):
            checkpoints.append("experts were at home at the end")
        if options.get("overlap_param_gather"):
            for model in training.models:
                model.start_param_sync(force_sync=True)
    checkpoints += [_checkpoint(training), _states_of(training)]
    # Before Megatron 0.17 no layer of its own delays weight gradients.
    if not options.get("config", {}).get("delay_wgrad_compute") or hasattr(RowParallelLinear, "backward_dw"):
        for _ in range(2):
            found += training.step()
    return found, checkpoints


def faults_of(case: str, steps: int) -> list[str]:
    """What did not hold on this rank."""
    name, _, mutation = case.partition(" | ")
    options, flags = CASES[name]
    options = _configured(options, flags)
    off, saved = _train(options, steps, flags or None)
    placed = {"enable_expert_placement": True, "expert_placement_freq": INTERVAL, "expert_placement_break_even": 0.0}
    own, exchanged = placer.exchange, []

    def exchange(*args: Any) -> int:
        exchanged.append(own(*args))
        return exchanged[-1]

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(placer, "exchange", exchange))
        stack.enter_context(mock.patch.object(placement, "chosen", simulated.drawn(7)))
        if mutation:
            stack.enter_context(MUTATIONS[mutation]())
        on, saved_on = _train(options, steps, {**flags, **placed, "strict": True})
    found = []
    if not sum(exchanged):
        found.append("nothing was exchanged")
    for number, ((loss, norm), (other, other_norm)) in enumerate(zip(off, on, strict=True)):
        a, b, c, d = (float.fromhex(each) for each in (loss, other, norm, other_norm))
        if (abs(a - b) > 1e-5 * abs(a)) if name in ROUNDED else loss != other:
            found.append(f"step {number + 1}: loss {a} off, {b} on")
        # Of the squares of all ranks, in another order.
        if abs(c - d) > 1e-5 * abs(c):
            found.append(f"step {number + 1}: norm {c} off, {d} on")
    if name not in ROUNDED and saved != saved_on:
        found.append(f"checkpoints {saved} off, {saved_on} on")
    return found


def _predicted(out: Path) -> list[str]:
    """A router of skew 4 to 1: what ranks received after the placement, against the prediction and the record."""
    steps, file = 4, out / "load.jsonl"
    chosen, own = [], placer.PlacedExperts.chosen

    def choose(self: Any, loads: Any, price: float) -> Any:
        found = own(self, loads, price)
        chosen.append(found)
        return found

    undo = skewed_router.install(4.0)
    flags = {"enable_expert_placement": True, "expert_placement_freq": INTERVAL, "expert_placement_break_even": 0.0,
             "moe_record_load": str(file), "moe_record_load_interval": steps}  # fmt: skip
    _begin()
    args = {"num_experts": 8, "train_iters": steps, "expert_model_parallel_size": 2}
    with (
        mock.patch.object(placer.PlacedExperts, "chosen", choose),
        mindspeed_lite.enabled(host_args=args, strict=True, **flags),
    ):
        training = core_loop.Training(_FP32)
        received = Received(training, "ep2")
        for _ in range(steps):
            received.steps.append({})
            training.step()
    undo()
    layers = sorted(received.steps[0])
    mine = torch.tensor([[sum(step[layer]) for layer in layers] for step in received.steps])
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    ranks = torch.stack(parts, -1).double()
    imbalance = ranks.max(-1).values / ranks.mean(-1)
    found = []
    for row, (_, before, after) in enumerate(chosen[: len(layers)]):
        for step, expected in ((0, before), (1, before), (2, after), (3, after)):
            if abs(float(imbalance[step, row]) - expected) > 0.05 * expected:
                found.append(f"step {step + 1}: fullest over mean {float(imbalance[step, row])}, predicted {expected}")
        if before < 1.5 or after > 1.05:
            found.append(f"predicted {before} before and {after} after; 1.6 and 1.0 are known")
    if dist.get_rank() == 0:
        written = [each.ranks for each in record.read(file).steps]
        if written != ranks.long().tolist():
            found.append(f"the record has {written}, and ranks received {ranks.tolist()}")
    return found


def _refused() -> list[str]:
    """What may not be asked for while experts are elsewhere, and experts that stay where they are."""
    found = []
    flags = {"enable_expert_placement": True, "expert_placement_freq": 1, "expert_placement_break_even": 0.0}
    _begin()
    with mock.patch.object(placement, "chosen", simulated.drawn(3)), mindspeed_lite.enabled(**flags):
        training = core_loop.Training(_FP32)
        training.step()
        for what, ask in (
            ("the model's state", training.models[0].state_dict),
            ("the optimizer's state", training.optimizer.state_dict),
        ):
            try:
                ask()
                found.append(f"{what} was given")
            except RuntimeError as error:
                if "other places than their names say" not in str(error):
                    found.append(f"{what}: {error}")
        training.models[0].sharded_state_dict()
        training.models[0].state_dict()
        training.step()
        training.forward_backward()
        (text,) = mindspeed_lite.disable() or ("nothing",)
        platform.activate()
        if "within a step" not in text:
            found.append(f"ended within a step: {text}")
    _begin()
    with mock.patch.object(placement, "chosen", simulated.drawn(3)), mindspeed_lite.enabled(**flags):
        training = core_loop.Training(_FP32)
        experts = [each.experts for each in training.models[0].modules() if type(each).__name__ == "MoELayer"]
        if dist.get_rank() == 0:
            next(experts[0].local_experts[1].parameters()).requires_grad_(False)
        for _ in range(2):
            training.forward_step(training.iterators[0], training.models[0])
            runtime.current().session.find(patch.NAME).end_step_of(training.optimizer)
        layers = [*runtime.current().session.find(patch.NAME).layers.values()]
        if not layers[0].is_home or layers[1].is_home:
            found.append("a layer with a frozen expert on one rank moved, or the other did not")
        reasons = [each.reason for each in mindspeed_lite.report().fallbacks]
        if len(reasons) != 1 or "differ in shape, or in what is trained" not in reasons[0]:
            found.append(f"reasons {reasons}")
    return found


def main() -> None:
    out, steps, *cases = sys.argv[1:]
    simulated.swap_optimizer()
    host_mapped_moments._SMALLEST = 64
    dist.init_process_group("nccl")
    found: dict[str, list[str]] = {}
    for case in cases:
        if case == "predicted":
            found[case] = _predicted(Path(out))
        elif case == "refused":
            found[case] = _refused()
        else:
            found[case] = faults_of(case, int(steps))
        print(case, found[case], flush=True)
        Path(out, f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
