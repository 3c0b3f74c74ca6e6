"""examples/pretrain_gpt.py as a row of `tools.pairs` has it: some weights frozen, adapters, weights by name.

PAIRED in the environment is JSON: `frozen` and `lora` name what is, `by_name` lets weights follow from their names,
`reversed` sums products from the other end, and `arguments` is a file that Megatron's arguments are pickled to.
Stand-ins of the harness take the place of a device's streams and operators.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import runpy
import sys
from pathlib import Path
from typing import Any

from mindspeed_lite.bench.rounding_baseline import ReversedReductionOrder
from tests.harness import core_loop, frozen, simulated
from tests.harness.training import SCRIPT

# The kinds of `tests.harness.frozen` by the options of a row.
KINDS = {
    "frozen": {
        "embedding": "frozen embedding",
        "first_layer": "frozen first layer",
        "all_but_norms": "only norms",
        "all_but_fc2": "only linear_fc2",
        "all_but_output": "only output layer",
    },
    "lora": {"qkv": "LoRA on qkv", "all": "LoRA"},
}


def _prepare(model: Any, row: dict[str, Any]) -> Any:
    if row.get("by_name"):
        experts, ranks = model.config.num_moe_experts or 0, model.config.expert_model_parallel_size
        core_loop.weigh_by_name([model], experts // ranks)
    for option, kinds in KINDS.items():
        if row.get(option):
            frozen.freeze(model, kinds[row[option]])
    return model


def _divide_by_tokens_of_all_ranks() -> None:
    """Let context-parallel ranks divide their MTP losses by one count of tokens, as a single rank does.

    Megatron divides each rank's sum by the rank's own count. The last position of the sequence has no label, so the
    counts differ, and so do gradients: by 1 / sequence length.
    """
    import torch.distributed as dist
    from megatron.core.transformer import multi_token_prediction

    roll_tensor = multi_token_prediction.roll_tensor

    def roll(tensor: Any, *args: Any, cp_group: Any = None, **kwargs: Any) -> Any:
        rolled, total = roll_tensor(tensor, *args, cp_group=cp_group, **kwargs)
        if cp_group is not None and cp_group.size() > 1:
            total = total.float() / cp_group.size()
            dist.all_reduce(total, group=cp_group)
        return rolled, total

    multi_token_prediction.roll_tensor = roll


def _keep_arguments(path: Path) -> None:
    """What of Megatron's arguments can be pickled."""
    from megatron.training import get_args

    kept = {}
    for name, value in vars(get_args()).items():
        with contextlib.suppress(Exception):
            pickle.dumps(value)
            kept[name] = value
    path.write_bytes(pickle.dumps(kept))


def main() -> None:
    row = json.loads(os.environ["PAIRED"])
    simulated.streams()
    simulated.alltoall_mc2()
    sys.argv[0] = SCRIPT
    script = runpy.run_path(SCRIPT)["main"].__globals__
    provider = script["model_provider"]
    _divide_by_tokens_of_all_ranks()
    script["model_provider"] = lambda *args, **kwargs: _prepare(provider(*args, **kwargs), row)
    reversed_order: Any = ReversedReductionOrder
    with reversed_order() if row.get("reversed") else contextlib.nullcontext():
        script["main"]()
    if row.get("arguments") and os.environ["RANK"] == "0":
        _keep_arguments(Path(row["arguments"]))


if __name__ == "__main__":
    main()
