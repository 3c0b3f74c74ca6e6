"""Trains with `--moe-record-load` and compares its file with what reached the experts, layer by layer and step by step.

Run by `training_server` as a script, `expert_load.py OUT LAYOUT...` on two ranks; rank 0 writes OUT/faults.json. The
definition does not know the router: a hook on each layer's experts reads how many tokens the dispatcher brought them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mindspeed_lite
from mindspeed_lite.parallel.balance import record
from tests.harness import core_loop

STEPS, INTERVAL = 3, 2
_EP2: dict[str, Any] = {"ep": 2, "experts": 4}
_RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_DROPPED = {"moe_expert_capacity_factor": 0.75}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": _EP2,
    "allgather": {**_EP2, "moe": {"moe_token_dispatcher_type": "allgather"}},
    "dp2": {"experts": 4},
    "tp2_sp": {"experts": 4, "tp": 2, "sp": True},
    "tp2_etp1_ep2": {**_EP2, "tp": 2, "sp": True, "etp": 1},
    # Megatron's table of auxiliary losses has room for as many layers as the first model of the process.
    "pp2_vpp2": {"experts": 4, "pp": 2, "vpp": 2, "layers": 4, "moe": {"moe_router_load_balancing_type": "none"}},
    "first layer dense": {**_EP2, "moe": {"moe_layer_freq": [0, 1]}},
    "recomputed": {**_EP2, "config": _RECOMPUTED},
    "recomputed experts": {**_EP2, "config": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}},
    "dropped": {**_EP2, "moe": _DROPPED},
    "padded": {**_EP2, "moe": {**_DROPPED, "moe_pad_expert_input_to_capacity": True}},
    "combined schedule": {**_EP2, "no_sync": True, "config": {"overlap_moe_expert_parallel_comm": True}},
}
# What a run of a few seconds trains.
FEW = ("tp2_sp", "recomputed", "dropped")


class Received:
    """Tokens that the experts of this rank were given, by step, layer and expert."""

    def __init__(self, training: Any, layout: str) -> None:
        self.steps: list[dict[int, list[int]]] = []
        # A layer that is computed again had its tokens the first time, without a graph.
        self._first_pass_has_graph = not layout.startswith("recomputed")
        self._is_padded = layout == "padded"
        for model in training.models:
            for module in model.modules():
                if type(module).__name__ == "MoELayer":
                    module.experts.register_forward_pre_hook(self._hook(module.layer_number))

    def _hook(self, layer: int) -> Any:
        def read(experts: Any, given: Any) -> None:
            if experts.training and torch.is_grad_enabled() == self._first_pass_has_graph:
                _, tokens_per_expert, probs = given
                counts = tokens_per_expert.tolist()
                if self._is_padded:
                    counts = [int((each != 0).sum()) for each in probs.split(counts)]
                seen = self.steps[-1].setdefault(layer, [0] * len(counts))
                self.steps[-1][layer] = [a + b for a, b in zip(seen, counts, strict=True)]

        return read


def train(layout: str) -> tuple[list[Any], list[dict[int, list[int]]]]:
    """Losses, and what the experts received; with an evaluation after each step."""
    from megatron.core import parallel_state as ps

    if ps.model_parallel_is_initialized():
        ps.destroy_model_parallel()
    training = core_loop.Training(LAYOUTS[layout])
    received = Received(training, layout)
    losses = []
    for _ in range(STEPS):
        received.steps.append({})
        losses.append(training.step())
        if LAYOUTS[layout].get("pp", 1) == 1:
            for model in training.models:
                model.eval()
                with torch.no_grad():
                    training.forward_step(training.iterators[0], model)
                model.train()
    return losses, received.steps


def faults_of(layout: str, out: Path) -> list[str]:
    """What did not hold, on every rank; rank 0 has read the file."""
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer.moe.router import TopKRouter

    file = out / f"{layout}.jsonl"
    codes = TopKRouter.forward.__code__, finalize_model_grads.__code__
    plain, _ = train(layout)
    # The last of the odd number of steps is the last one for Megatron's arguments too.
    args = {"num_experts": 4, "train_iters": STEPS}
    flags = {"moe_record_load": str(file), "moe_record_load_interval": INTERVAL, "strict": True}
    with mindspeed_lite.enabled(host_args=args, **flags):
        recorded, received = train(layout)
    found = []
    if plain != recorded:
        found.append(f"{plain} off, {recorded} on")
    if codes != (TopKRouter.forward.__code__, finalize_model_grads.__code__):
        found.append("a hook is left")
    mine = {
        "ep": ps.get_expert_model_parallel_rank(),
        "replica": ps.get_expert_data_parallel_rank(),
        "etp": ps.get_expert_tensor_parallel_rank(),
        "steps": received,
    }
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    if dist.get_rank() == 0:
        ep, replicas = ps.get_expert_model_parallel_world_size(), ps.get_expert_data_parallel_world_size()
        tokens = (
            core_loop.MICRO_BATCH * core_loop.SEQUENCE * core_loop.MICRO_BATCHES * ps.get_data_parallel_world_size()
        )
        found += _compare(record.read(file), parts, ep, replicas, tokens, layout)
    return found


def _compare(read: record.LoadRecord, parts: list[Any], ep: int, replicas: int, tokens: int, layout: str) -> list[str]:
    found = []
    layers = sorted({layer for part in parts for layer in part["steps"][0]})
    dense = LAYOUTS[layout].get("moe", {}).get("moe_layer_freq")
    if len(layers) != (sum(dense) if dense else LAYOUTS[layout].get("layers", 2)):
        found.append(f"the definition has seen layers {layers}")
    header = record.LoadHeader(4, 2, ep, replicas, LAYOUTS[layout].get("layers", 2), tuple(layers))
    if read.header != header:
        found.append(f"{read.header} is not {header}")
    if [each.step for each in read.steps] != [*range(1, STEPS + 1)]:
        found.append(f"steps {[each.step for each in read.steps]}")
    for number, step in enumerate(read.steps):
        experts = [[0] * 4 for _ in layers]
        ranks = [[0] * (ep * replicas) for _ in layers]
        for part in parts:
            # The ranks that share each expert all have its tokens.
            for layer, counts in part["steps"][number].items() if part["etp"] == 0 else ():
                row = layers.index(layer)
                ranks[row][part["replica"] * ep + part["ep"]] += sum(counts)
                for place, count in enumerate(counts):
                    experts[row][part["ep"] * len(counts) + place] += count
        for what, ours, theirs in (
            ("experts", step.experts, experts),
            ("ranks", step.ranks, ranks),
            ("tokens", step.tokens, [tokens] * len(layers)),
        ):
            if [*ours] != theirs:
                found.append(f"step {step.step}: {what} {ours}, and the experts received {theirs}")
        chosen = 2 * tokens * len(layers)
        is_dropping = "moe_expert_capacity_factor" in LAYOUTS[layout].get("moe", {})
        if (sum(map(sum, experts)) < chosen) != is_dropping:
            found.append(f"{sum(map(sum, experts))} of {chosen} choices reached an expert")
    return found


def main() -> None:
    out, *layouts = sys.argv[1:]
    dist.init_process_group("nccl")
    found = {each: faults_of(each, Path(out)) for each in layouts}
    Path(out, f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
