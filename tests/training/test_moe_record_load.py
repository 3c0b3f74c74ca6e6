"""`--moe-record-load` in real training: the counts against what the experts received, and the script's own steps.

As a script of `tests.harness.jobs` on two ranks, `test_moe_record_load.py OUT LAYOUT...`, it compares the file with
what reached the experts. The definition does not know the router: a hook on each layer's experts reads how many tokens
the dispatcher brought them. Each rank writes OUT/<rank>.json, the faults by layout.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mindspeed_lite
from mindspeed_lite.parallel.balance import record
from tests.harness import checkouts, core_loop, matrix, rows
from tests.harness.training import LAYOUTS, NO_DROPOUT, Trainer

STEPS = 3
WORDS = [
    "ep2", "ep2 allgather", "dp2", "tp2 sp", "ep2 tp2 sp etp1",
    # Megatron's table of auxiliary losses has room for as many layers as the first model of the process.
    "pp2 vpp2 layers4 unbalanced", "ep2 first_dense", "ep2 full", "ep2 again_experts", "ep2 dropped_more",
    "ep2 padded_more", "ep2 no_sync combined",
]  # fmt: skip
FEW = ["tp2 sp", "ep2 full", "ep2 dropped_more"]


@pytest.mark.parametrize(
    ("release", "layouts"),
    matrix.only([("0.19.2", FEW)], [("0.19.2", FEW), *((release, WORDS) for release in checkouts.ALL)]),
)
def test_the_file_holds_what_the_experts_received(
    trainer: Callable[[str], Trainer], release: str, layouts: list[str], tmp_path: Path
) -> None:
    argv = [__file__, str(tmp_path), *layouts]
    trainer(release).run(entry="script", arm="device", nproc=2, argv=argv, timeout=300).check()
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == {layout: [] for layout in layouts}


@pytest.mark.parametrize(
    ("release", "resumes"),
    matrix.only([("0.19.2", False)], [("0.19.2", False), *((each, True) for each in checkouts.WITH_TRAINING)]),
)
def test_a_script_writes_its_own_steps_and_goes_on_where_it_resumes(
    trainer: Callable[[str], Trainer], release: str, resumes: bool, tmp_path: Path
) -> None:
    ranks, layout = LAYOUTS["ep2"]
    layout += " --context-parallel-size 2 --context-parallel-algo megatron_cp_algo --mtp-num-layers 1 --eval-interval 2"
    file, saved = tmp_path / "load.jsonl", str(tmp_path / "saved")
    given = [*NO_DROPOUT, *layout.split(), "--moe-record-load", str(file), "--moe-record-load-interval", "2"]
    if resumes:
        given += ["--save", saved, "--save-interval", "2", "--override-opt-param-scheduler"]
    trainer(release).script(ranks, given, 3).check()
    # The odd step was written although no two steps had been counted.
    assert [each.step for each in record.read(file).steps] == [1, 2, 3]
    if resumes:
        trainer(release).script(ranks, [*given, "--load", saved], 4).check()
    read = record.read(file)
    assert [each.step for each in read.steps] == [*range(1, 5 if resumes else 4)]
    assert read.header == record.LoadHeader(4, 2, 2, 1, 2, (1, 2, 3)) and read.label(3) == "mtp 1"
    for step in read.steps:
        assert step.tokens == [8 * 64] * 3
        assert [sum(each) for each in step.experts] == [sum(each) for each in step.ranks] == [2 * 8 * 64] * 3


# ---------------------------------------------------------------------------------------------------------------------
# On a rank


def options_of(layout: str) -> dict[str, Any]:
    more = {"moe_expert_capacity_factor": 0.75}
    found = rows.options_of(f"experts4 {layout.replace('_more', '')}")
    return {**found, "moe": {**found.get("moe", {}), **(more if "_more" in layout else {})}}


class Received:
    """Tokens that the experts of this rank were given, by step, layer and expert."""

    def __init__(self, training: Any, layout: str) -> None:
        self.steps: list[dict[int, list[int]]] = []
        # A layer that is computed again had its tokens the first time, without a graph.
        self._first_pass_has_graph = not {"full", "again_experts"} & {*layout.split()}
        self._is_padded = "padded" in layout
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
    training = core_loop.Training(options_of(layout))
    received = Received(training, layout)
    losses = []
    for _ in range(STEPS):
        received.steps.append({})
        losses.append(training.step())
        if "pp" not in training.options:
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

    file = out / f"{layout.replace(' ', '_')}.jsonl"
    codes = TopKRouter.forward.__code__, finalize_model_grads.__code__
    plain, _ = train(layout)
    # The last of the odd number of steps is the last one for Megatron's arguments too.
    args = {"num_experts": 4, "train_iters": STEPS}
    flags = {"moe_record_load": str(file), "moe_record_load_interval": 2, "strict": True}
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
        rows = core_loop.MICRO_BATCH * core_loop.micro_batches(options_of(layout)) * ps.get_data_parallel_world_size()
        tokens = core_loop.SEQUENCE * rows
        found += compare(record.read(file), parts, ep, replicas, tokens, layout)
    return found


def compare(read: record.LoadRecord, parts: list[Any], ep: int, replicas: int, tokens: int, layout: str) -> list[str]:
    found = []
    options = options_of(layout)
    layers = sorted({layer for part in parts for layer in part["steps"][0]})
    dense = options["moe"].get("moe_layer_freq")
    if len(layers) != (sum(dense) if dense else options.get("layers", 2)):
        found.append(f"the definition has seen layers {layers}")
    header = record.LoadHeader(4, 2, ep, replicas, options.get("layers", 2), tuple(layers))
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
        if (sum(map(sum, experts)) < chosen) != ("_more" in layout):
            found.append(f"{sum(map(sum, experts))} of {chosen} choices reached an expert")
    return found


def main() -> None:
    out, *layouts = sys.argv[1:]
    dist.init_process_group("nccl")
    found = {each: faults_of(each, Path(out)) for each in layouts}
    Path(out, f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
